"""How a model writes its answers: reasoning, content and tool calls, told apart while they stream.

    known = answer_format(template.source, special_tokens=special_tokens(tokenizer))
    parser = known.parser(end_of_the_prompt, tools_of(tools))
    for text in pieces:
        reasoning, content, calls = parser.push(text)
    reasoning, content, calls = parser.finish()

Which format it is follows from the chat template. Without tools in the request, what looks like a call is content. Calls
inside reasoning are reasoning. Nothing here knows of HTTP, of ids or of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.reasoning import ASR, FORMATS, ReasoningFormat, prompt_opens_reasoning, reasoning_format
from nanovllm_cli.text.reasoning_harmony import HarmonyParser, HarmonyPiece, MuseParser
from nanovllm_cli.text.reasoning_parsers import ReasoningDelta, ReasoningSplitter
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.tool_calls import Tool, ToolCallDelta, ToolChoice, joined_calls, placed
from nanovllm_cli.text.tool_format import ToolFormat, read_plain
from nanovllm_cli.text.tool_formats import tool_format, tool_format_named
from nanovllm_cli.text.tool_grammar import Bound, Writer, content
from nanovllm_cli.text.tool_harmony import HarmonyCalls
from nanovllm_cli.text.tool_stream import CallStream


class AnswerDelta(NamedTuple):
    """What one piece of text decided."""

    reasoning: str
    content: str
    calls: tuple[ToolCallDelta, ...]


class AnswerParser(Protocol):
    """One answer, taken apart while it comes."""

    def push(self, text: str) -> AnswerDelta: ...

    def finish(self) -> AnswerDelta:
        """What was held back. A call that was cut off stays as far as it came."""

    @property
    def saw_calls(self) -> bool: ...

    @property
    def broke_off(self) -> bool:
        """Whether the text ended within the arguments of a call; known once it is finished."""

    @property
    def num_held(self) -> int:
        """Characters at the end of what was pushed that are not decided: half a tag, white space that may be the end's."""


@dataclass(frozen=True)
class AnswerFormat:
    """One model's way to answer. reasoning: None for a model that does not reason aloud.

    special_tokens: the tokenizer's special tokens and their ids. Those among the tags stay in the text of an answer for the
    parser, which leaves them out of the content where they turn out not to belong to a call.
    """

    reasoning: ReasoningFormat | None
    tools: ToolFormat
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.tools.name

    @property
    def thinks(self) -> bool:
        """Whether its reasoning is such, and not what a Qwen3-ASR says of the language."""
        return self.reasoning not in (None, ASR)

    @property
    def visible(self) -> tuple[str, ...]:
        """Special tokens that the detokenizer must leave in the text."""
        return (*(self.reasoning.visible if self.reasoning is not None else ()), *self.tools.tags)

    def visible_ids(self, *, calls: bool) -> list[int]:
        """Their ids. calls: False leaves out those of tool calls, for a reader that looks for reasoning only."""
        tags = self.visible if calls else self.reasoning.visible if self.reasoning is not None else ()
        return [self.special_tokens[tag] for tag in tags if tag in self.special_tokens]

    def parser(
        self,
        prompt_tail: str,
        tools: Sequence[Tool] = (),
        *,
        parallel: bool = True,
        splits_reasoning: bool = True,
        whole_calls: bool = False,
    ) -> AnswerParser:
        """A parser for one answer to a prompt that ends in `prompt_tail`.

        parallel: False drops all calls but the first. splits_reasoning: False leaves reasoning in the content, tags and all.
        whole_calls: a call comes out when it is complete, and is content where it turns out broken; otherwise its arguments
        stream, and what follows the place where they break is content.
        """
        if self.tools.body is not None and tools:
            calls = HarmonyCalls(self.tools.body, tools, whole=whole_calls, single=not parallel)
            messages = MuseParser if self.tools.name == "muse" else HarmonyParser
            return HarmonyAnswerParser(messages.of(prompt_tail), calls, splits_reasoning)
        known = self.reasoning
        wrap = () if known is None or known.wrap is None else (*known.wrap.opens, known.wrap.close)
        hidden = tuple(tag for tag in (*self.tools.tags, *wrap) if tag in self.special_tokens)
        kept = (known.open, known.close) if known is not None and not splits_reasoning else None
        if tools or self.tools.opened:
            inside = known is not None and prompt_opens_reasoning(prompt_tail, known)
            is_open = self.tools.opened != "" and prompt_tail.endswith(self.tools.opened)
            read = self.tools.reader(tools, hidden, kept, starts_kept=inside, is_open=is_open)
        else:
            read = read_plain(hidden)
        openers, within = (self.tools.openers, self.tools.in_reasoning) if tools else ((), "")
        return SplittingParser(
            known.parser(prompt_tail, calls=openers, ends=within) if known is not None and splits_reasoning else None,
            CallStream(read, whole=whole_calls, single=not parallel, hidden=hidden, id_chars=self.tools.id_chars),
        )

    def constraint(
        self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True, form: Constraint | None = None
    ) -> Constraint | None:
        """What an answer must match behind its reasoning, so that `choice` and strict tools hold; None where anything will do.

        required: calls, and nothing else; a name: one call of that tool; auto with a strict tool: any text, in which a call that
        has begun is one of the tools', and a strict tool's arguments match its schema. form: of an answer that is no call, where
        it may be none. Raises UsageError where no tool can answer the choice, UnsupportedError for a strict tool that this format
        can't be held to, and for forms that calls of this model can't be told from: see tool_grammar.
        """
        if choice == "none" or (choice == "auto" and not tools):
            return form
        if choice == "auto" and form is None and not any(tool.strict for tool in tools):
            return None
        if not tools:
            raise UsageError(f"tool_choice is {choice!r}, and there are no tools")
        if choice not in ("auto", "required"):
            tools, parallel = [tool for tool in tools if tool.name == choice], False
            if not tools:
                raise UsageError(f"tool_choice names {choice!r}, which is not among the tools")
        grammar, writer = self.tools.grammar, Writer(self.special_tokens, [tool.name for tool in tools])
        calls = writer.rule(" | ".join(grammar.call(writer, Bound.of(tool, choice)) for tool in tools))
        if choice == "auto" and form is None:
            start = grammar.free(writer, calls, self.tools.openers, parallel=parallel)
        else:
            start = grammar.demanded(writer, calls, parallel=parallel, reasons=self.reasoning is not None)
        if choice == "auto" and form is not None:
            start += f" | {content(writer, form, grammar)}"
        return Constraint("lark", "\n".join(["%llguidance {}", f"start: {start}", *writer.rules]))


class SplittingParser:
    """First the reasoning is split off, then calls are found in the rest."""

    def __init__(self, splitter: ReasoningSplitter | None, stream: CallStream) -> None:
        self._splitter, self._stream = splitter, stream

    @property
    def saw_calls(self) -> bool:
        return self._stream.saw_calls

    @property
    def broke_off(self) -> bool:
        return self._stream.broke_off

    @property
    def num_held(self) -> int:
        return self._stream.num_held + (self._splitter.num_held if self._splitter is not None else 0)

    def push(self, text: str) -> AnswerDelta:
        if self._splitter is None:
            return AnswerDelta("", *self._stream.push(text))
        reasoning, content = self._splitter.push(text)
        return AnswerDelta(reasoning, *self._stream.push(content))

    def finish(self) -> AnswerDelta:
        reasoning, content = self._splitter.finish() if self._splitter is not None else ("", "")
        return _joined(AnswerDelta(reasoning, *self._stream.push(content)), AnswerDelta("", *self._stream.finish()))


class ContentParser:
    """The content of answers without tools, of models that write whom it is for (Functionary 3.2), and no reasoning."""

    def __init__(self, tools: ToolFormat, prompt_tail: str) -> None:
        self._parser = AnswerFormat(None, tools).parser(prompt_tail)

    @property
    def num_held(self) -> int:
        return self._parser.num_held

    def push(self, text: str) -> ReasoningDelta:
        return ReasoningDelta("", self._parser.push(text).content)

    def finish(self) -> ReasoningDelta:
        return ReasoningDelta("", self._parser.finish().content)


class HarmonyAnswerParser:
    """The channels of gpt-oss, or a Muse's messages. splits_reasoning: False makes analysis content; markers are never shown."""

    def __init__(self, messages: HarmonyParser, calls: HarmonyCalls, splits_reasoning: bool) -> None:
        self._messages, self._calls, self._splits_reasoning = messages, calls, splits_reasoning

    @property
    def saw_calls(self) -> bool:
        return self._calls.saw_calls

    @property
    def broke_off(self) -> bool:
        return self._calls.broke_off

    @property
    def num_held(self) -> int:
        return self._messages.num_held

    def push(self, text: str) -> AnswerDelta:
        return self._read(self._messages.pieces(text))

    def finish(self) -> AnswerDelta:
        return _joined(self._read(self._messages.last_pieces()), AnswerDelta("", *self._calls.finish()))

    def _read(self, pieces: list[HarmonyPiece]) -> AnswerDelta:
        if not self._splits_reasoning:
            pieces = [piece._replace(kind="content") if piece.kind == "analysis" else piece for piece in pieces]
        return AnswerDelta("".join(text for kind, text in pieces if kind == "analysis"), *self._calls.read(pieces))


def answer_format(
    template_source: str,
    *,
    tools: str | None = None,
    reasoning: str | None = None,
    special_tokens: Mapping[str, int] | None = None,
) -> AnswerFormat:
    """The format that a chat template asks for. tools, reasoning: names of formats that count instead; reasoning may be none.

    special_tokens: those of the vocabulary, see the function of that name. Raises UsageError for an unknown name.
    """
    return AnswerFormat(
        reasoning_format(template_source) if reasoning is None else _reasoning_named(reasoning),
        tool_format(template_source, special_tokens or ()) if tools is None else tool_format_named(tools),
        special_tokens or {},
    )


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens of a vocabulary that no plain text is made of, as they are written."""
    named = ((tokenizer.id_to_token(token_id), token_id) for token_id in sorted(tokenizer.control_ids))
    return {token: token_id for token, token_id in named if token is not None}


def model_format(
    tokenizer: Tokenizer, template: ChatTemplate | None, tools: str | None = None, reasoning: str | None = None
) -> AnswerFormat | None:
    """`answer_format` of a model; None for one that does not chat."""
    if template is None:
        return None
    if reasoning is None:
        known = reasoning_format(template.sources, tokenizer)
        reasoning = "none" if known is None else known.name
    return answer_format(template.sources, tools=tools, reasoning=reasoning, special_tokens=special_tokens(tokenizer))


# What vLLM calls them, where that is another name.
_ALIASES = {
    "cohere_command3": "cohere", "deepseek_r1": "think", "deepseek_v3": "think", "ernie45": "granite", "gemma4": "gemma",
    "glm45": "think", "hunyuan_a13b": "hunyuan", "kimi_k2": "think", "minimax_m2": "think", "nemotron_v3": "think",
    "olmo3": "think", "openai_gptoss": "harmony", "qwen3": "think", "seed_oss": "seed", "step3p5": "think",
}  # fmt: skip


def _reasoning_named(name: str) -> ReasoningFormat | None:
    known = {form.name: form for form in FORMATS}
    name = _ALIASES.get(name, name)
    if name != "none" and name not in known:
        raise UsageError(f"unknown reasoning format {name!r}", f"known: {', '.join((*known, 'none'))}")
    return known.get(name)


def _joined(first: AnswerDelta, second: AnswerDelta) -> AnswerDelta:
    calls = joined_calls([*first.calls, *placed(second.calls, len(first.content))])
    return AnswerDelta(first.reasoning + second.reasoning, first.content + second.content, calls)
