"""How the families mark their reasoning: a row for each, and what tells from a chat template which one it is.

`reasoning_parsers` has what reads them. Tool calls are another file's matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm_cli.constraint import ReasoningPhase
from nanovllm_cli.text.reasoning_harmony import TO_USER, HarmonyParser, MuseParser
from nanovllm_cli.text.reasoning_parsers import (
    BlockParser,
    ReasoningDelta,
    ReasoningParser,
    ReasoningSplitter,
    Wrap,
    WrappedParser,
)

if TYPE_CHECKING:
    from nanovllm_cli.text.tokenizer import Tokenizer

_SWITCHES = ("enable_thinking", "thinking")
_TAIL_TOKENS = 64


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags of one family. `visible`: special tokens that a detokenizer must leave in the text for the parser. `anywhere`:
    its blocks may stand anywhere in an answer, and not only first. `wrap`: tags around the content behind it. `signs`: a chat
    template with all of one of these is its; where there are none, one with either tag. `begins`: what begins the content, where
    the end of the reasoning does not. `messages`: what reads it where it is messages of their own, whose headers tell them
    apart."""

    name: str
    open: str
    close: str
    visible: tuple[str, ...]
    anywhere: bool = False
    wrap: Wrap | None = None
    signs: tuple[tuple[str, ...], ...] = ()
    begins: str = ""
    messages: type[HarmonyParser] | None = None

    def parser(
        self, prompt: str = "", *, is_inside: bool = False, calls: tuple[str, ...] = (), ends: str = ""
    ) -> ReasoningSplitter:
        """A parser for the answer to a rendered prompt. is_inside: the answer is known to begin with reasoning. calls, ends: see
        `ReasoningParser`."""
        if self.messages is not None:
            return self.messages.of(prompt)
        inside = is_inside or prompt_opens_reasoning(prompt, self)
        if self.anywhere:
            return BlockParser(self.open, self.close, marker=self.visible[0], starts_inside=inside)
        after = not inside and prompt.rstrip().endswith(self.close)
        parser = ReasoningParser(self.open, self.close, starts_inside=inside, starts_after=after, calls=calls, ends=ends)
        return parser if self.wrap is None else WrappedParser(parser, self.wrap)

    def is_of(self, template_source: str) -> bool:
        """Whether a chat template writes it."""
        signs = self.signs or ((self.open,), (self.close,))
        return any(all(sign in template_source for sign in each) for each in signs)

    def phase(self, prompt: str, budget: int | None = None, *, to_content: bool) -> ReasoningPhase | None:
        """What an answer to a rendered prompt may begin with, for whoever constrains it; None where the prompt is past it.

        budget: most tokens of reasoning. to_content: what follows is constrained as the content alone; in harmony everything is
        reasoning then, until the message to the user begins, and so it is in Solar's.
        """
        channel = "" if self.messages is None else self.messages.channel(prompt)
        if channel not in ("", "analysis"):
            return None
        if self.begins and to_content:
            return ReasoningPhase(self.open, self.begins, True, budget)
        if self.messages is None and prompt.rstrip().endswith(self.close):
            return None
        is_open = prompt_opens_reasoning(prompt, self) if self.messages is None else channel == "analysis"
        return ReasoningPhase(self.open, self.close, is_open, budget)


def _tags(
    name: str, opening: str, closing: str, wrap: Wrap | None = None, signs: tuple[tuple[str, ...], ...] = ()
) -> ReasoningFormat:
    around = () if wrap is None else (*wrap.opens, wrap.close)
    return ReasoningFormat(name, opening, closing, (opening, closing, *around), wrap=wrap, signs=signs)


HARMONY = ReasoningFormat(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    signs=(("<|channel|>analysis",),),
    begins="<|channel|>final<|message|>",
    messages=HarmonyParser,
)
MUSE = ReasoningFormat(
    "muse",
    " to=self<|message|>",
    "<|eom|>",
    ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    signs=((" to=self<|message|>",),),
    begins=TO_USER,
    messages=MuseParser,
)
KIMI = ReasoningFormat(
    "kimi_k3",
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    ("<|open|>", "<|close|>", "<|sep|>"),
    wrap=Wrap(("<|open|>response<|sep|>", "<|close|>message<|sep|>"), "<|close|>response<|sep|>"),
    signs=(("<|open|>", "<|close|>", "<|end_of_msg|>"),),
    begins="<|open|>response<|sep|>",
)
"""The end of its message begins nothing, and is taken away like what does."""
THINK = _tags("think", "<think>", "</think>")
ASR = ReasoningFormat("asr", "language ", "<asr_text>", ("<asr_text>",))
"""Qwen3-ASR's: which language it hears, and then what is said. No template has a word of it."""
_COHERES = Wrap(("<|START_RESPONSE|>",), "<|END_RESPONSE|>"), Wrap(("<|START_TEXT|>",), "<|END_TEXT|>")
FORMATS: tuple[ReasoningFormat, ...] = (
    HARMONY,
    MUSE,
    _tags("mistral", "[THINK]", "[/THINK]"),
    _tags("cohere_text", "<|START_THINKING|>", "<|END_THINKING|>", _COHERES[1], (("<|START_THINKING|>", "<|START_TEXT|>"),)),
    _tags("cohere", "<|START_THINKING|>", "<|END_THINKING|>", _COHERES[0]),
    KIMI,
    _tags("seed", "<seed:think>", "</seed:think>"),
    ReasoningFormat("gemma", "<|channel>thought", "<channel|>", ("<|channel>", "<channel|>"), anywhere=True),
    _tags("hy3", "<think:opensource>", "</think:opensource>", signs=(("<think{}>", ":opensource"),)),
    _tags("minimax_m3", "<mm:think>", "</mm:think>"),
    _tags("exaone", "<thought>", "</thought>"),
    _tags("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ReasoningFormat(
        "solar",
        "<|think|>",
        "<|end|>",
        ("<|think|>", "<|end|>", "<|begin|>", "<|content|>"),
        wrap=Wrap(("<|begin|>assistant<|content|>", "<|begin|>assistant", "<|content|>"), "<|end|>"),
        signs=(("<|think|>", "<|content|>"),),
        begins="<|content|>",
    ),
    _tags(
        "apriel",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        Wrap((), "[END FINAL RESPONSE]"),
        (("[BEGIN FINAL RESPONSE]",),),
    ),
    _tags("hunyuan", "<think>", "</think>", Wrap(("<answer>",), "</answer>"), (("think>", "<answer>"),)),
    _tags(
        "granite",
        "<think>",
        "</think>",
        Wrap(("<response>",), "</response>"),
        (("<think></think>", "<response></response>"), ("</think>", r"<response>\n")),
    ),
    THINK,
    ASR,
)
"""Granite's is ERNIE's as well."""


def reasoning_format(template_source: str, tokenizer: Tokenizer | None = None) -> ReasoningFormat | None:
    """The format whose tags a chat template writes, or that its model's vocabulary has; None for a model that does not reason
    aloud."""
    for known in FORMATS:
        if known is not ASR and known.is_of(template_source):
            return known
    return ASR if tokenizer is not None and tokenizer.token_to_id(ASR.close) is not None else None


def prompt_opens_reasoning(prompt: str, known: ReasoningFormat = THINK) -> bool:
    """Whether a rendered prompt ends inside a reasoning block, so that the answer begins there.

    Only a block that nothing but white space follows counts: an opening tag in the middle of the conversation is text.
    """
    return prompt.rstrip().endswith(known.open)


def prompt_tail(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The end of a rendered prompt: where it shows whether the answer begins inside reasoning."""
    return tokenizer.decode(ids[-_TAIL_TOKENS:], skip_special_tokens=False)


def thinking_switch(template_source: str) -> str | None:
    """The template's variable that turns reasoning on and off, if it has one."""
    return next((name for name in _SWITCHES if re.search(rf"\b{name}\b", template_source)), None)


def thinking_variables(thinks: bool | None) -> dict[str, bool]:
    """The switches of all templates, for one that is not known; none where nothing was asked for."""
    return {} if thinks is None else dict.fromkeys(_SWITCHES, thinks)


def split(answer: str, known: ReasoningFormat = THINK, prompt: str = "") -> ReasoningDelta:
    """A whole answer's reasoning and content. What precedes a closing tag without an opening one is reasoning."""
    lone_close = known.close in answer and not answer.lstrip().startswith(known.open)
    may_lack = known is not HARMONY and not known.anywhere and not known.begins and not prompt.rstrip().endswith(known.close)
    parser = known.parser(prompt, is_inside=lone_close and may_lack)
    first, last = parser.push(answer), parser.finish()
    return ReasoningDelta(first.reasoning + last.reasoning, first.content + last.content)
