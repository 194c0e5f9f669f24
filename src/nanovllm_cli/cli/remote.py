"""A running server as `run` and `chat` see it (`--url`): questions become requests, streams of events become pieces. No torch."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from nanovllm_cli.cli import records, signals
from nanovllm_cli.cli.answering import Answering, Answers, Given, Piece, Result, Results, Settled, Usage
from nanovllm_cli.client.blocking import single, stepwise
from nanovllm_cli.client.endpoint import Endpoint
from nanovllm_cli.client.wire import CHAT, TEXT, AnswerStream, CallPiece, Delta, TokenLogprob, chat_body, text_body
from nanovllm_cli.errors import (
    AccessRefusedError,
    ModelNotFoundError,
    NanovllmError,
    ServerError,
    UnsupportedError,
    UsageError,
)
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.text.tool_calls import ToolCallDelta, new_call_id
from nanovllm_cli.together import together

if TYPE_CHECKING:
    from nanovllm_cli.cli.question import Question

T = TypeVar("T")
MOST_AT_A_TIME = 32
"""Requests of a batch that are under way together."""
NOT_SHOWN = "not shown: the model is a server's"
"""OpenAI's own takes no images of tools."""
MEASURABLE_SECONDS = 0.01
"""From an answer's first read to its last. What came in less time had been waiting, in the server or on the way."""


def interruptible(stream: AsyncGenerator[T, None]) -> Generator[T | None, None, None]:
    """Its items, and None now and then: signals take effect between two steps, within a tenth of a second."""
    steps = stepwise(stream)
    is_over = False
    try:
        while not is_over:
            with signals.held():
                try:
                    item = next(steps)
                except StopIteration:
                    is_over = True
            if not is_over:
                yield item
    finally:
        with signals.held():
            steps.close()


def waited_for(work: Coroutine[Any, Any, T]) -> T:
    """What it returns."""
    steps = interruptible(single(work))
    try:
        return next(item for item in steps if item is not None)
    finally:
        steps.close()


class RemoteAnswering(Answering):
    """One request to a server."""

    def __init__(self, endpoint: Endpoint, path: str, body: Mapping[str, Any]) -> None:
        self.answers = Answers()
        self._stream = AnswerStream()
        self._num_answers: int = body.get("n") or 1
        self._steps = interruptible(endpoint.stream(path, body, self._stream))
        self._asked = time.monotonic()
        self._first: float | None = None
        self._num_first = 0  # tokens that the first read with any of them brought
        self._last = self._asked
        self._end: float | None = None

    @property
    def began(self) -> bool:
        return self._first is not None

    @property
    def finished(self) -> bool:
        return self._end is not None

    @property
    def prompt_len(self) -> int | None:
        return self._stream.prompt_tokens

    @property
    def num_read(self) -> int:
        return self._stream.read_tokens or 0

    @property
    def result(self) -> Result:
        return _result(self.answers, self._stream)

    def __next__(self) -> list[Piece]:
        try:
            deltas = next(self._steps)
        except StopIteration:
            self._end = time.monotonic()
            _count(self.answers, self._stream, self._num_answers)
            raise
        pieces = [_grown(self.answers, delta) for delta in deltas or ()]
        brought = sum(len(piece.token_ids or " ") for piece in pieces if piece.content or piece.reasoning or piece.token_ids)
        brought += sum(len(delta.calls) for delta in deltas or () if not delta.token_ids)
        if brought:
            self._last = time.monotonic()
            if self._first is None:
                self._first, self._num_first = self._last, brought
        return [piece for piece in pieces if _says_something(piece)]

    def statistics(self, now: float) -> records.Statistics:
        end = self._end or now
        if (told := self._stream.timings) is not None:
            rates = (
                records.rate(told.prompt_tokens or 0, told.prompt_seconds),
                records.rate((told.answer_tokens or 0) - self._num_answers, told.answer_seconds),
            )
            guesses = told.guessed_tokens, told.held_tokens
            return records.Statistics.of_server(self.result.usage, rates, self._asked, self._first, end, guesses)
        seconds = None if self._first is None else self._last - self._first
        later = (self.result.usage.answer_tokens or 0) - self._num_first
        rate = records.rate(later, seconds if seconds is not None and seconds >= MEASURABLE_SECONDS else None)
        return records.Statistics.of_server(self.result.usage, (None, rate), self._asked, self._first, end)

    def close(self) -> None:
        self._steps.close()


@dataclass(frozen=True, slots=True)
class RemoteAnswerer:
    """A server's model. raw: prompts as they are, without the server's chat template. tells_reading: see ServedModel. tools:
    that it may call, in OpenAI's form."""

    endpoint: Endpoint
    name: str
    raw: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tells_reading: bool = False
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def chats(self) -> bool:
        return not self.raw

    @property
    def dictates(self) -> bool:
        return False

    @property
    def reads_alone(self) -> bool:
        return False  # the server knows

    def asked_for_words(self, question: Question) -> Question:
        hint = "curl URL/v1/audio/transcriptions -F file=@talk.wav -F language=en"
        raise UsageError(f"{(question.wishes.flags or ['--language'])[0]} is for a model in this process", hint)

    def look(self, url: str) -> None:
        raise UnsupportedError(NOT_SHOWN)

    @property
    def adapters(self) -> list[tuple[str, float]]:
        return []

    @property
    def changes(self) -> dict[str, Any]:
        return {}

    @property
    def identity(self) -> list[str]:
        return [self.endpoint.server.url, self.name]

    def settled(self, given: Given) -> Settled:
        return settled(given)

    def ask(self, question: Question, given: Given) -> Answering:
        return RemoteAnswering(self.endpoint, *self._request(question, given, tells_reading=self.tells_reading))

    def ask_all(self, questions: Iterable[tuple[int, Question, Given]]) -> Results:
        steps = interruptible(together((self._one(*each) for each in questions), MOST_AT_A_TIME))
        try:
            yield from (each for each in steps if each is not None)
        finally:
            steps.close()

    def limit(self, given: Given) -> str:
        return "the limit is the server's own, or its context is full; -n asks for more"

    def close(self) -> None:
        """Connections are closed with what was asked over them."""

    def _request(self, question: Question, given: Given, *, tells_reading: bool = False) -> tuple[str, dict[str, Any]]:
        if given.get("prompt_logprobs") is not None:
            raise UnsupportedError("prompt_logprobs are not read from a server", "leave them out")
        if question.messages is None:
            return TEXT, text_body(self.name, question.text, given, tells_reading=tells_reading)
        if self.raw:
            raise UsageError("messages need a chat template, and --raw leaves it out", "use prompt, or leave --raw out")
        return CHAT, chat_body(
            self.name, question.messages, given, template_kwargs=self.template_kwargs, tells_reading=tells_reading,
            tools=self.tools,
        )  # fmt: skip

    async def _one(self, key: int, question: Question, given: Given) -> tuple[int, Result | Exception]:
        """Raises what would be wrong with every other question as well."""
        answers, stream = Answers(), AnswerStream()
        try:
            path, body = self._request(question, given)
            async for deltas in self.endpoint.stream(path, body, stream):
                for delta in deltas:
                    _grown(answers, delta)
        except (AccessRefusedError, ModelNotFoundError, ServerError):
            raise
        except NanovllmError as failure:
            return key, failure
        _count(answers, stream, body.get("n") or 1)
        return key, _result(answers, stream)


def settled(given: Given) -> Settled:
    """What a server draws with, as far as it was told. Raises UsageError for settings that do not go together."""
    fields = {name: value for name, value in given.items() if name != "reasoning_budget"}
    return Settled(SamplingParams(**fields), tuple(fields))


def _grown(answers: Answers, delta: Delta) -> Piece:
    answer = answers.at(delta.index)
    answer.reasoning += delta.reasoning
    answer.content += delta.content
    if delta.num_tokens is not None:
        answer.num_tokens = delta.num_tokens
    elif delta.token_ids is not None:
        answer.num_tokens = (answer.num_tokens or 0) + len(delta.token_ids)
    for call in delta.calls:
        _join(answer.calls, call)
    answer.finish_reason = delta.finish_reason or answer.finish_reason
    answer.stop_reason = answer.stop_reason if delta.stop_reason is None else delta.stop_reason
    new = None
    if delta.logprobs is not None:
        new = _records(delta.logprobs)
        answer.logprobs = answer.logprobs or []
        answer.logprobs += new
    return Piece(answer, delta.reasoning, delta.content, delta.token_ids, new)


def _join(calls: list[ToolCallDelta], piece: CallPiece) -> None:
    """Some servers repeat id and name, or give no id, or the same to all."""
    for at, call in enumerate(calls):
        if call.index == piece.index:
            calls[at] = replace(call, name=call.name or piece.name, arguments=call.arguments + piece.arguments)
            return
    is_new = piece.id and piece.id not in [call.id for call in calls]
    calls.append(ToolCallDelta(piece.index, piece.id if is_new else new_call_id(), piece.name, piece.arguments))


def _says_something(piece: Piece) -> bool:
    return bool(piece.content or piece.reasoning or piece.token_ids or piece.logprobs or piece.answer.finish_reason)


def _count(answers: Answers, stream: AnswerStream, num_answers: int) -> None:
    """How many tokens each answer has: the server counts all together."""
    answers.at(0)
    if num_answers == 1 and answers.first.num_tokens is None:
        answers.first.num_tokens = stream.answer_tokens


def _result(answers: Answers, stream: AnswerStream) -> Result:
    usage = Usage(stream.prompt_tokens, stream.cached_tokens, stream.answer_tokens)
    return Result(answers.in_order(), usage, any(answer.reasoning for answer in answers.in_order()))


def _records(entries: Sequence[TokenLogprob]) -> list[records.Record]:
    """As a model's in this process, without the ids and ranks that servers do not tell."""
    return [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top": [{"token": token, "logprob": logprob} for token, logprob in entry.top],
        }
        for entry in entries
    ]
