"""From options to a loaded model, and from words to the prompt that it is given."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from nanovllm_cli.cli import parsers, signals
from nanovllm_cli.cli.command import is_typed
from nanovllm_cli.cli.history import Message
from nanovllm_cli.cli.inputs import read_text
from nanovllm_cli.cli.options import ModelOptions, SourceOptions
from nanovllm_cli.cli.output import Console
from nanovllm_cli.cli.progress_line import ProgressLine
from nanovllm_cli.cli.question import Question, kind_of, said, with_system
from nanovllm_cli.cli.settings import Settings
from nanovllm_cli.cli.shared_options import Choice
from nanovllm_cli.collector import keep_loaded
from nanovllm_cli.errors import NanovllmError, TemplateError, UnsupportedError, UsageError
from nanovllm_cli.text.content_parts import SOUNDS

if TYPE_CHECKING:
    from nanovllm_cli.cli.answering import Given
    from nanovllm_cli.config import EngineConfig
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.sampling_params import SamplingParams
    from nanovllm_cli.text.answer_format import AnswerParser
    from nanovllm_cli.text.reasoning import ReasoningFormat
    from nanovllm_cli.text.reasoning_parsers import ReasoningSplitter

Splitter: TypeAlias = "ReasoningSplitter | AnswerParser"
MakeSplitter = Callable[[], Splitter]
"""What tells reasoning and calls of tools from content: a new one for each answer."""
KWARGS_EXAMPLE = "write it as '{\"name\": true}'"


def named_models(settings: object, names: Sequence[str], example: str) -> list[str]:
    """`names`, with what aliases of the settings files stand for. Raises UsageError where there are none."""
    if not names:
        raise UsageError("no model was named", example)
    return [settings.resolve(name) for name in names] if isinstance(settings, Settings) else list(names)


def named_model(settings: object, name: str | None, example: str) -> str:
    """The same for a command that takes one model."""
    return named_models(settings, [name] if name else [], example)[0]


def name_and_words(source: SourceOptions, first: str | None, rest: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model's name, if there is one, and the words of the prompt: with -m, the first argument is a word like the others."""
    if source.model:
        return source.model, [word for word in (first, *rest) if word is not None]
    return first, list(rest)


class Loaded(NamedTuple):
    llm: LLM
    seconds: float


def load(name: str, options: SourceOptions, config: EngineConfig, console: Console) -> Loaded:
    """The model, ready. The first thing that this does is to show that something is happening."""
    return find(name, options, config, console)()


def find(
    name: str, options: SourceOptions, config: EngineConfig, console: Console, *, shows_calls: bool = False
) -> Callable[[], Loaded]:
    """What loads the model, once that is on this machine: what is wrong with its name, or with a template's, is raised here.
    shows_calls: see LLM."""
    console.announce(f"loading {name}")
    began = time.monotonic()
    template = chat_template(options.chat_template) if isinstance(options, ModelOptions) else None
    with signals.insisting():
        from nanovllm_cli.llm import LLM
        from nanovllm_cli.weights.source import find_parts
    progress = ProgressLine(console)
    found = LLM.find(name, config=config, offline=options.offline, revision=options.revision, progress=progress)
    config = find_parts(config, offline=options.offline, progress=progress)
    signals.check()
    seconds = time.monotonic() - began

    def load_found() -> Loaded:
        console.status(f"loading {name}")
        began = time.monotonic()
        llm = LLM(found, config=config, chat_template=template, progress=progress, shows_calls=shows_calls)
        signals.check()
        keep_loaded()  # libraries and model stay; going through them again took a fifth of a step's Python
        console.say(llm.resolved.told_as(name), "dim")
        say_parts(config, console)
        return Loaded(llm, seconds + time.monotonic() - began)

    return load_found


def say_parts(config: EngineConfig, console: Console) -> None:
    """What a model has beside it."""
    for adapter in config.lora:
        console.say(f"with the adapter {adapter}", "dim")
    for name, path in config.lora_modules:
        console.say(f"with the adapter {path} for requests that choose {name}", "dim")
    for vector in config.control_vectors:
        console.say(f"led by the control vector {vector}", "dim")
    if config.draft_model is not None:
        console.say(f"with guesses by {config.draft_model}", "dim")
    if config.mmproj is not None:
        console.say(f"with images or sounds by {Path(config.mmproj).name}", "dim")
    if config.mtp:
        console.say("with guesses by its own layer for further tokens", "dim")


def chat_template(choice: str | None) -> str | None:
    """The source behind --chat-template: a file's text, that of a built-in template, or itself. Raises UsageError for none of
    them."""
    if choice is None or "{{" in choice:
        return choice
    if "/" in choice or os.path.exists(choice):
        source = read_text(choice)
        if "{{" not in source:
            raise UsageError(f"{choice} is no chat template: nothing of a conversation would be in the prompt")
        return source
    from nanovllm_cli.text.builtin_templates import builtin_template

    try:
        return builtin_template(choice)
    except TemplateError as failure:
        raise UsageError(failure.message, failure.hint) from failure


def template_kwargs(ctx: Any, text: str | None) -> dict[str, Any]:
    """--chat-template-kwargs. Raises UsageError for anything but a JSON object, and where --think was typed as well and both say
    whether the model reasons."""
    if text is None:
        return {}
    from nanovllm_cli.text.reasoning import thinking_variables

    kwargs = parsers.json_object("--chat-template-kwargs", text, KWARGS_EXAMPLE)
    twice = [name for name in thinking_variables(True) if name in kwargs]
    if twice and is_typed(ctx, "think") and is_typed(ctx, "chat_template_kwargs"):
        raise UsageError(f"--think and the {twice[0]} of --chat-template-kwargs say the same thing", "leave one of them out")
    return kwargs


def refuse_template_options(why: str, system: str | None, think: Choice | None, kwargs: Mapping[str, Any]) -> None:
    """Raises UsageError where something was asked for that only a template could give."""
    for flag, given in (("--system-prompt", system), ("--think", think), ("--chat-template-kwargs", kwargs)):
        if given:
            raise UsageError(f"{flag} has no meaning: {why}", "put it into the prompt, or choose a chat model")


def template_variables(source: str, name: str, think: Choice | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What --think and --chat-template-kwargs give the template `source` of the model `name`. Raises UsageError where it has no
    switch."""
    if think is None:
        return dict(kwargs)
    from nanovllm_cli.text.reasoning import thinking_switch

    switch = thinking_switch(source)
    if switch is None:
        raise UsageError(f"--think has no meaning: the template of {name} has no such switch")
    return {switch: think == "on"} | dict(kwargs)


@dataclass(frozen=True, slots=True)
class Prompting:
    """How prompts become token ids: through the model's template or, raw, as they are. tools: that it may call, in OpenAI's form.

    Raises UsageError where something was asked for that only a template could give.
    """

    llm: LLM
    raw: bool = False
    system: str | None = None
    think: Choice | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        if not self.chats:
            why = "--raw leaves the chat template out" if self.raw else f"{self.llm.name} has no chat template"
            refuse_template_options(why, self.system, self.think, self.kwargs)

    @property
    def chats(self) -> bool:
        return self.llm.chat_template is not None and not self.raw

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, up to where the model's answer begins."""
        return self.llm.encode_chat(messages, tools=self.tools or None, chat_template_kwargs=self._template_kwargs() or None)

    def look(self, url: str) -> None:
        """Reads a conversation in which a tool gives this data URL. Raises UnsupportedError for what is wrong with it, and for
        what the model or its template lacks for it."""
        call = {"id": "000000000", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        result = said("", [url]) | {"role": "tool", "tool_call_id": call["id"], "name": "look"}
        try:
            self.encode([said("Look."), {"role": "assistant", "content": "", "tool_calls": [call]}, result])
        except NanovllmError as error:
            raise UnsupportedError(error.message.replace("messages[2].content[0]", "it")) from error

    def for_words(self, question: Question) -> Question:
        """What asks a model that chats for what is said in a sound, as its family is asked (`text/transcripts.py`)."""
        hearing, wishes = self.llm.hearing, question.wishes
        if hearing is None:
            flag = (wishes.flags or ["--language"])[0]
            translates = self.llm.tokenizer.languages is not None
            hint = "--target-language says into which to translate" if translates else "take a model that does"
            raise UsageError(f"{self.llm.name} hears nothing: {flag} has no meaning", hint)
        if flags := wishes.flags:
            raise UsageError(f"{flags[0]} is for Whispers, and {self.llm.name} is none", "leave it out, or take whisper:tiny")
        if len(question.sounds) != 1 or kind_of(question.sounds[0]) != SOUNDS:
            raise UsageError("--language has no meaning without one sound that is to be written down", "--audio FILE is one")
        from nanovllm_cli.text.transcripts import asks

        part = {"type": "audio_url", "audio_url": {"url": question.sounds[0]}}
        asked = asks(hearing.transcript, self.llm.tokenizer, part, wishes.language, question.text or None)
        return Question(with_system(asked.messages, self.system), begins=asked.begins, wishes=wishes)

    def encode_unfinished(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation whose last message is an answer to be continued: no turn ends after it."""
        *before, last = messages
        ids = self.encode(before)
        known = self.reasoning()
        if known is not None:
            from nanovllm_cli.text.reasoning import prompt_opens_reasoning

            if prompt_opens_reasoning(self.tail(ids), known):
                ids = ids + self.llm.tokenizer.encode(f"\n{known.close}\n\n", add_special_tokens=False)
        answer = str(last.get("content") or "")
        return ids + self.llm.tokenizer.encode(answer, add_special_tokens=False, parse_special=False)

    @property
    def thinking_switch(self) -> str | None:
        """The template's variable that turns reasoning on and off, if it has one."""
        from nanovllm_cli.text.reasoning import thinking_switch

        return thinking_switch(self.llm.chat_template.source) if self.llm.chat_template is not None else None

    def reasoning(self) -> ReasoningFormat | None:
        """How this model marks its reasoning, if it does."""
        if self.llm.chat_template is None or self.raw:
            return None
        from nanovllm_cli.text.reasoning import reasoning_format

        return reasoning_format(self.llm.chat_template.source, self.llm.tokenizer)

    def parser_for(self, ids: list[int]) -> MakeSplitter | None:
        """What splits an answer to `ids`: a new one for each answer."""
        if self.tools and self.chats and self.llm.answer_format is not None:
            from nanovllm_cli.text.tool_calls import tools_of

            return partial(self.llm.answer_format.parser, self.tail(ids), tools_of(self.tools), whole_calls=True)
        known = self.reasoning()
        if known is not None:
            return partial(known.parser, self.tail(ids))
        if self.llm.chat_template is None or self.raw:
            return None
        from nanovllm_cli.text.answer_format import ContentParser
        from nanovllm_cli.text.tool_formats import tool_format

        form = tool_format(self.llm.chat_template.source)
        return partial(ContentParser, form, self.tail(ids)) if form.opened else None

    def settled(self, given: Given) -> SamplingParams:
        """For no answer in particular: a budget for reasoning waits until there is a prompt."""
        fields = {name: value for name, value in given.items() if name != "reasoning_budget"}
        return self.llm.default_params.under(fields)

    @parsers.by_their_flags()
    def settled_for_all(self, given: Given) -> SamplingParams:
        """The same of what options ask of every answer. Raises UsageError for tokens that the model does not have."""
        params = self.settled(given)
        params.check_vocabulary(self.llm.spec.vocab_size)
        return params

    def params_for(self, ids: list[int], given: Given, *, goes_on: bool = False) -> SamplingParams:
        """For an answer to `ids`: the model's own settings under what was asked for. goes_on: `ids` end within an answer."""
        budget, params, known = given.get("reasoning_budget", -1), self.settled(given), self.reasoning()
        if budget >= 0 and known is None:
            raise UsageError(f"--reasoning-budget has no meaning: {self.llm.name} does not mark its reasoning")
        form = params.constraint is not None
        if form and self.tools and not goes_on and self.llm.answer_format is not None:  # an answer of this form, or calls
            from nanovllm_cli.text.tool_calls import tools_of

            held = self.llm.answer_format.constraint(tools_of(self.tools), "auto", form=params.constraint)
            params, form = dataclasses.replace(params, constraint=held), False
        if known is None or goes_on:
            return params
        most = None if budget < 0 else budget
        return dataclasses.replace(params, reasoning=known.phase(self.tail(ids), most, to_content=form))

    def tail(self, ids: list[int]) -> str:
        from nanovllm_cli.text.reasoning import prompt_tail

        return prompt_tail(self.llm.tokenizer, ids)

    def _template_kwargs(self) -> dict[str, Any]:
        template = self.llm.chat_template
        return template_variables("" if template is None else template.source, self.llm.name, self.think, self.kwargs)
