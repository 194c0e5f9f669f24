"""What a request asks of the form of its answer, as plain data: `SamplingParams` carries it to the worker.

`constrain/` makes masks of it; who writes one (a server's `response_format`, `--json-schema`, a tool that must be called)
needs nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nanovllm_cli.errors import UsageError

ConstraintKind = Literal["json_object", "json_schema", "regex", "choice", "lark", "gbnf"]

MAX_CONSTRAINT_CHARS = 1 << 18
MAX_TAG_CHARS = 64
MAX_BANS = 4096


@dataclass(frozen=True, slots=True)
class Constraint:
    """The whole answer must match; behind its reasoning, where it reasons.

    kind and text: a JSON schema as JSON text; a regular expression; choices as a JSON list of strings; a grammar in llguidance's
    Lark or in GBNF; "" for json_object.
    """

    kind: ConstraintKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise UsageError(
                f"unknown kind of constraint {self.kind!r}", f"known: {', '.join(get_args(ConstraintKind))}"
            )
        if not isinstance(self.text, str) or len(self.text) > MAX_CONSTRAINT_CHARS:
            raise UsageError(f"a constraint has at most {MAX_CONSTRAINT_CHARS} characters")


@dataclass(frozen=True, slots=True)
class TranscriptRules:
    """That an answer is what a Whisper writes down, by the rules of OpenAI's decoding (Radford et al. 2022).

    bans: tokens that are never drawn; first_bans: nor as an answer's first. end: the token that ends one, in front of which all
    are text. first_time: of the tokens that are times, to the end of the vocabulary, the first; None: it has none. With times an
    answer begins with one, of the first `latest` + 1 if that is given; they come in pairs, the end of a passage and the beginning
    of the next, and one alone before the end; none is earlier than those before. Where all times together are likelier than any
    other token, one of them is drawn.
    """

    end: int
    bans: tuple[int, ...] = ()
    first_bans: tuple[int, ...] = ()
    first_time: int | None = None
    latest: int | None = None

    def __post_init__(self) -> None:
        ids = (self.end, *self.bans, *self.first_bans, *(each for each in (self.first_time, self.latest) if each is not None))
        if len(ids) > MAX_BANS or any(type(each) is not int or not 0 <= each < 2**31 for each in ids):
            raise UsageError(f"rules of a transcript are token ids, {MAX_BANS} at most")
        if self.first_time is not None and self.first_time <= self.end:
            raise UsageError("a transcript's times are tokens behind the one that ends it")


@dataclass(frozen=True, slots=True)
class ReasoningPhase:
    """That an answer may begin with reasoning, which a constraint leaves alone.

    open, close: its tags. starts_inside: the prompt has opened it. budget: most tokens of reasoning before `close` is forced;
    None sets no limit.
    """

    open: str
    close: str
    starts_inside: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        for tag in (self.open, self.close):
            if not isinstance(tag, str) or not 1 <= len(tag) <= MAX_TAG_CHARS:
                raise UsageError(f"a tag of reasoning has 1 to {MAX_TAG_CHARS} characters")
        if self.budget is not None and not (type(self.budget) is int and 0 <= self.budget < 2**31):
            raise UsageError(f"a budget for reasoning is a number of tokens, not {self.budget!r}")
