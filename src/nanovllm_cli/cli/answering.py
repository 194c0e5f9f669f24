"""What `run` and `chat` see of whoever answers: a model in this process (`local.py`), or a server (`remote.py`).

An `Answerer` is asked a `Question` and gives an `Answering`: pieces while they come, then a `Result`. What a side does not know
is None, and is left out of what is shown. Nothing here knows an engine or a connection.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from nanovllm_cli.errors import RequestError, UnmeetableError

if TYPE_CHECKING:
    from nanovllm_cli.cli.question import Question
    from nanovllm_cli.cli.records import Record, Statistics
    from nanovllm_cli.sampling_params import SamplingParams
    from nanovllm_cli.text.tool_calls import ToolCallDelta

Given = Mapping[str, Any]
"""Fields of SamplingParams that were asked for, and "reasoning_budget": most tokens of reasoning, -1 for no limit. The rest is
the model's own."""


class Settled(NamedTuple):
    """What answers are drawn with. known: fields of it that are certain, where a server may have defaults of its own for the
    rest; None: all."""

    params: SamplingParams
    known: Collection[str] | None = None


@dataclass(slots=True)
class Answer:
    """One of the answers to a question, as far as it has come.

    logprobs: records of its tokens, None where they were not asked for. segments: of a transcript, records of its passages;
    language: of what is said in it, its code. calls: of tools, each whole.
    error: what failed, with finish_reason "error". unmeetable: it is what was asked for, and fails again.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    num_tokens: int | None = None
    logprobs: list[Record] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    unmeetable: bool = False
    segments: list[Record] | None = None
    language: str | None = None
    calls: list[ToolCallDelta] = field(default_factory=list)

    def check(self, hint: str | None = None) -> None:
        """Raises what failed, if anything did. hint: where it may not fail again."""
        if self.error is not None:
            what = f"the answer failed: {self.error}"
            raise UnmeetableError(what) if self.unmeetable else RequestError(what, hint)


class Piece(NamedTuple):
    """What one step added to one answer. logprobs: of these tokens. segments: of a transcript, records of these passages."""

    answer: Answer
    reasoning: str
    content: str
    token_ids: tuple[int, ...] | None
    logprobs: list[Record] | None
    segments: list[Record] | None = None


class Usage(NamedTuple):
    """Tokens of one question and all its answers."""

    prompt_tokens: int | None
    cached_tokens: int | None
    answer_tokens: int | None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a question. splits: reasoning is told apart from content, where there is any. prompt_logprobs: records of the
    prompt's tokens, None for the first; None where they were not asked for."""

    answers: list[Answer]
    usage: Usage
    splits: bool
    prompt_logprobs: list[Record | None] | None = None


@dataclass
class Answers:
    """Answers that grow: the part of an `Answering` that both sides share."""

    all: dict[int, Answer] = field(default_factory=dict)

    def at(self, index: int) -> Answer:
        return self.all.setdefault(index, Answer(index))

    @property
    def first(self) -> Answer:
        """The one that is on the screen."""
        return self.at(0)

    def in_order(self) -> list[Answer]:
        return [self.all[index] for index in sorted(self.all)]


Results = Generator[tuple[int, "Result | Exception"], None, None]


class Answering(Protocol):
    """A question on its way. Iterate over it: pieces, step by step; none in a step where something else happened, or where
    nothing did for a while. Close it in any case, which breaks off what is not finished. Iterating raises NanovllmError."""

    answers: Answers

    @property
    def began(self) -> bool:
        """The first token is there."""

    @property
    def finished(self) -> bool: ...

    @property
    def prompt_len(self) -> int | None:
        """Tokens of the prompt."""
        return None

    @property
    def num_read(self) -> int:
        """How many of them have been read."""
        return 0

    @property
    def result(self) -> Result:
        """As far as it has come."""

    def __iter__(self) -> Iterator[list[Piece]]:
        return self

    def __next__(self) -> list[Piece]: ...

    def flush(self) -> str:
        """Content of the first answer that was held back: no more comes, so it is text."""
        return ""

    def statistics(self, now: float) -> Statistics:
        """now: of time.monotonic's clock."""

    def close(self) -> None: ...


class Answerer(Protocol):
    """Who is asked. Methods raise NanovllmError."""

    @property
    def name(self) -> str: ...

    @property
    def chats(self) -> bool:
        """It takes conversations; else plain text."""

    @property
    def dictates(self) -> bool:
        """It writes down what is said in a sound, and takes nothing else."""

    @property
    def reads_alone(self) -> bool:
        """An encoder reads each prompt, and nothing of those before."""

    def asked_for_words(self, question: Question) -> Question:
        """A question about a sound, with `wishes`, as this one is asked for what is said in it. UsageError where it can't be."""

    def look(self, url: str) -> None:
        """Whether it can be shown this data URL, as a tool's result. Raises NanovllmError where it cannot."""

    @property
    def identity(self) -> list[str]:
        """What an answer depends on besides the question: results of another one are other results."""

    @property
    def adapters(self) -> list[tuple[str, float]]:
        """Of a model in this process: absolute paths, and scales."""

    @property
    def changes(self) -> dict[str, Any]:
        """What else makes it another model than its files say, as JSON, by the names of EngineConfig's fields for it: control
        vectors, rotary positions, overrides. Empty without any."""

    def settled(self, given: Given) -> Settled: ...

    def ask(self, question: Question, given: Given) -> Answering: ...

    def ask_all(self, questions: Iterable[tuple[int, Question, Given]]) -> Results:
        """Results in the order in which they come, each under the key of its question; questions are taken as room appears. What
        is wrong with one of them is its result. Closing the iterator breaks off what is not finished."""

    def limit(self, given: Given) -> str:
        """Where an answer ended that had reached a limit that nobody gave."""

    def close(self) -> None:
        """What is held for answers that may still be asked for."""
