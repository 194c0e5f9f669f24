"""Messages to a prompt: chat templates, and their tokenization that a user's text cannot break out of.

`ChatTemplate` renders as transformers' `apply_chat_template` does, in the sandbox of `template_sandbox.py`.
`encode_chat` also tokenizes: control tokens count where the template writes them and are plain characters where they
come from a message, a tool description or a tool's answer. Templates for models that bring none are in
`builtin_templates.py`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any, NamedTuple

import jinja2

from nanovllm_cli.errors import TemplateError, UsageError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.text.image_tokens import Marks, Sent, asked_words, in_template, with_images, with_marks
from nanovllm_cli.text.own_text import OwnText
from nanovllm_cli.text.template_budget import Budget, LimitExceeded
from nanovllm_cli.text.template_sandbox import TemplateEnvironment, spending
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import TokenIds

Message = Mapping[str, Any]

MAX_SOURCE_CHARS = 1 << 17  # the largest known template has a fifth of it; compiling this much takes seconds at worst
MAX_SECONDS = 1.0
_OWN_CHARS = 1 << 22  # what a template may build out of nothing
_CHARS_PER_INPUT_CHAR = 64  # and out of what it is given: a few copies of everything
_MAX_DEPTH = 64
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PRIVATE_USE = range(0xE000, 0xF8FF)


class ChatPrompt(NamedTuple):
    """A rendered conversation and its ids."""

    text: str
    ids: TokenIds


class ChatTemplate:
    """One compiled template. Immutable, safe to share between threads. with_tools: the model's other one, if it has that."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """`max_seconds`: CPU time of one rendering. Raises TemplateError where the source does not compile."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE_CHARS}")
        self.source = source
        self.with_tools: ChatTemplate | None = None
        self._variables = {"bos_token": bos_token, "eos_token": eos_token}
        self._max_seconds = max_seconds
        self._wants_text = {"functions", "tools"}.intersection(_WORD.findall(source)) == {"functions"}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template does not compile: {error.message} (line {error.lineno})", _HINT
            ) from None
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, TypeError) as error:
            raise TemplateError(f"the chat template does not compile: {_reason(error)}", _HINT) from None

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> ChatTemplate:
        """The tokenizer's templates, or `source`, with the tokenizer's BOS and EOS."""
        chosen = source if source is not None else tokenizer.chat_templates.get("default")
        if chosen is None:
            raise TemplateError("the model has no chat template", _HINT)
        template = cls(chosen, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        if source is None and (other := tokenizer.chat_templates.get("tool_use")) is not None:
            template.with_tools = cls(other, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        return template

    def for_tools(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """The one that a request with these tools goes through."""
        return self.with_tools if tools and self.with_tools is not None else self

    @property
    def sources(self) -> str:
        """Everything that tells how its model answers."""
        return self.source if self.with_tools is None else f"{self.source}\n{self.with_tools.source}"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: datetime | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt. Further keywords (`enable_thinking=False`) are variables of the template.

        `continue_final_message`: the prompt ends inside the last message, for the model to go on with. `now`: the date
        that the template may write. Raises TemplateError where the template refuses the messages, fails or exceeds its
        limits, UsageError for messages that are not plain JSON data. Where the template loses texts and writes parts, texts are
        parts for it.
        """
        plain = [_with_reasoning(message) for message in _plain_messages(messages)]
        shaped = _plain(list(tools)) if tools is not None else None
        values = {
            **self._variables,
            **(_told_as_text(shaped or [], now) if self._wants_text else {}),
            "messages": plain,
            "tools": shaped,
            "documents": _plain(list(documents)) if documents is not None else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            **{name: _plain(value) for name, value in kwargs.items()},
        }
        if continue_final_message:
            _mark_end(plain)
        if self._reads_parts_alone:
            values["messages"] = [_in_parts(message) for message in plain]
        text = self._run(values, now)
        return _cut_at_mark(text) if continue_final_message else text

    @cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether of a message that is a text nothing is written, as by those of many models that see: tried out."""

        def is_written(message: Message) -> bool:
            given = {"messages": [message], "tools": None, "documents": None, "add_generation_prompt": True}
            try:
                return "needle" in self._run(self._variables | given, None)
            except TemplateError:
                return False

        asked = {"role": "user", "content": "needle"}
        return not is_written(asked) and is_written(_in_parts(asked))

    def _run(self, values: dict[str, Any], now: datetime | None) -> str:
        given = sum(map(len, strings(values)))
        budget = Budget(self._max_seconds, _OWN_CHARS + _CHARS_PER_INPUT_CHAR * given, now)
        try:
            return spending(budget, lambda: self._template.generate(values))
        except LimitExceeded as error:
            raise TemplateError(f"the chat template was stopped: {error}", _HINT) from None
        except RecursionError:
            raise TemplateError("the chat template was stopped: it calls itself too deeply", _HINT) from None
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses the messages: {_reason(error)}", _HINT) from None
        except TypeError as error:
            if values["tools"] is None:  # Hermes' tool_use goes through them without a look whether there are any
                return self._run({**values, "tools": []}, now)
            raise TemplateError(f"the chat template failed: {_reason(error)}", _HINT) from None
        except Exception as error:  # whatever else an expression of the template may raise
            raise TemplateError(f"the chat template failed: {_reason(error)}", _HINT) from None


def prepare_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    now: datetime | None = None,
    most_tokens: int | None = None,
    images: Sequence[Sent] = (),
    senses: Senses | None = None,
    **kwargs: Any,
) -> ChatPrompt:
    """Renders and tokenizes. No string of the caller can become a control token, also not in pieces.

    Every control token begins with one of few characters. In the caller's strings those are replaced, one for one, by
    private-use characters before rendering, and put back afterwards; a control token that begins at such a place is
    text. Tags that the template looks for in messages (`</think>`) keep their first character, so that it still finds
    them. What is this program's own (`OwnText`) stays as it is, and what is `asked` of an image. most_tokens: a text that has
    far more is not read to its end, see `Tokenizer.check_fits`. images: those of the messages' parts, and sounds, in their
    order; senses: of the model that sees and hears them.
    """
    told = _plain_messages(messages)
    marks: Marks = {}
    if senses is not None and images:
        told, marks = in_template(told, template.source, senses, images)
    inputs = _plain({"messages": told, "tools": tools, "documents": documents, "kwargs": kwargs})
    veil = _Veil(tokenizer, template.source, inputs, {tokens.marker for tokens in marks.values()}, asked_words(senses))
    veiled = {name: veil.over(value) for name, value in inputs.items()}
    text = template.render(
        veiled["messages"],
        tools=veiled["tools"],
        documents=veiled["documents"],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        now=now,
        **veiled["kwargs"],
    )
    text, plain_at = veil.lift(text)
    if marks:
        text, plain_at, images = with_marks(text, plain_at, marks, images)
    if most_tokens is not None:
        tokenizer.check_fits(text, most_tokens)
    ids = tokenizer.encode_guarded(text, plain_at)
    return ChatPrompt(text, with_images(ids, tokenizer, senses, images) if senses is not None and images else TokenIds(ids))


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> TokenIds:
    """The ids of `prepare_chat`. variables: of the template, from somebody who may ask for anything. Raises UsageError as well
    where they are not the template's own."""
    check_variables(variables or ())
    return prepare_chat(tokenizer, template, messages, **options, **(variables or {})).ids


def check_variables(names: Iterable[str]) -> None:
    """Raises UsageError where one is not the template's own variable, but what it is given in any case."""
    if taken := _GIVEN.intersection(names):
        raise UsageError(f"{min(taken)} is not a variable of the template to set")


_GIVEN = frozenset({"self", "bos_token", "eos_token", *inspect.signature(prepare_chat).parameters})


def strings(value: Any) -> Iterator[str]:
    """All of plain JSON data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


class _Veil:
    """Stand-ins for the characters that control tokens begin with. markers: what a template writes for an image or a sound, which
    need be no token. asked: tokens that are none of a message's own."""

    def __init__(
        self, tokenizer: Tokenizer, source: str, inputs: Any, markers: Collection[str] = (), asked: Collection[str] = ()
    ) -> None:
        controls = {*tokenizer.control_tokens, *(marker for marker in markers if marker in source)}
        firsts = sorted({token[0] for token in controls if token})
        words = sorted(token for token in tokenizer.control_tokens if token[:1].isalnum() or token[:1].isspace())
        used = set(source).union(*(text for text in strings(inputs) if not text.isascii()))
        escaped = source + "".join(text for text in strings(inputs) if "\\u" in text)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used and f"\\u{code:04x}" not in escaped)
        self._stand_in = dict(zip(firsts, free, strict=False))
        if len(self._stand_in) < len(firsts):
            raise UsageError("the messages use every private-use character there is")
        self._original = {stand_in: first for first, stand_in in self._stand_in.items()}
        tags = sorted({*asked, *(tag for tag in _TAG.findall(source) if tag not in controls)})
        # A token that begins like a word is veiled where it stands in full; its letter alone is in every message. Each choice
        # begins with a character as it is, which `re` finds fast: nobody else runs while it looks through megabytes.
        choices = [
            re.escape(first) + "".join(f"(?!{re.escape(tag[1:])})" for tag in tags if tag[0] == first)
            for first in firsts
            if not first.isalnum() and not first.isspace()
        ]
        choices += [f"{re.escape(word[0])}(?={re.escape(word[1:])})" for word in words]
        self._first = re.compile("|".join(choices) or r"(?!)")
        # A template may write JSON with escapes, which turns the stand-in into six characters.
        escapes = "|".join(rf"\\u{ord(stand_in):04x}" for stand_in in self._original)
        self._veiled = re.compile(f"[{''.join(self._original)}]|{escapes}" if firsts else r"(?!)")

    def over(self, value: Any) -> Any:
        """The same data with stand-ins in all strings, keys too."""
        if isinstance(value, OwnText):
            return "".join(text if is_own else self.over(text) for text, is_own in value.pieces)
        if isinstance(value, str):
            return self._first.sub(lambda match: self._stand_in[match.group()], value)
        if isinstance(value, dict):
            return {self.over(key): self.over(item) for key, item in value.items()}
        return [self.over(item) for item in value] if isinstance(value, list) else value

    def lift(self, text: str) -> tuple[str, set[int]]:
        """The text with its own characters, and where they came from the caller."""
        pieces: list[str] = []
        places: set[int] = set()
        length = start = 0
        for match in self._veiled.finditer(text):
            stand_in = match.group() if len(match.group()) == 1 else chr(int(match.group()[2:], 16))
            pieces += [text[start : match.start()], self._original[stand_in]]
            length += match.start() - start
            places.add(length)
            length += 1
            start = match.end()
        pieces.append(text[start:])
        return "".join(pieces), places


def _told_as_text(tools: Sequence[Any], now: datetime | None) -> dict[str, Any]:
    """The variables of a template that knows functions as JSON, and no tools (Firefunction). llama.cpp's date has no time either:
    a prompt is found again all day."""
    told = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    date = (now or datetime.now()).strftime("%b %d %Y")
    return {"functions": json.dumps(told, ensure_ascii=False, indent=4) if told else "", "datetime": date}


_WORD = re.compile(r"\w+")
_TAG = re.compile(r"</?[A-Za-z_][\w:-]*>|\[/?[A-Z_]+\]")
_HINT = "choose a built-in format with --chat-template, or send the text without a template"


@cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of objects")
    plain = [_plain(message) for message in messages]
    if not all(isinstance(message, dict) for message in plain):
        raise UsageError("each message must be an object with a role and a content")
    return plain


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of JSON's types only: what a template sees has no methods of its own to misuse."""
    if value is None or type(value) in (str, int, float, bool, OwnText):
        return value
    if depth > _MAX_DEPTH:
        raise UsageError(f"the messages are nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        return {_plain(key, depth + 1): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    for kind in (str, bool, int, float):  # enums and the like
        if isinstance(value, kind):
            return kind(value)
    raise UsageError(f"messages may hold JSON values only, not {type(value).__name__}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message's reasoning under each name that templates read it by."""
    given: Iterable[Any] = (message.get(name) for name in _REASONING_FIELDS)
    reasoning = next((value for value in given if value is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


# Ends in a space: whether that survives tells whether the template trims the message.
_END_MARK = "END-OF-THE-MESSAGE-TO-GO-ON-WITH "


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Puts the mark after the last message's text."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _END_MARK
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += _END_MARK
            return
    raise UsageError(
        "continue_final_message needs a last message with text", "give it a content, or leave the option out"
    )


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_END_MARK.rstrip())
    if at < 0:
        raise TemplateError("the chat template drops the end of the last message, so it can't be continued", _HINT)
    return text[:at] if text.startswith(_END_MARK, at) else text[:at].rstrip()


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:2000]
