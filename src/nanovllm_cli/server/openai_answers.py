"""How OpenAI's answers are written, whole and as the frames of a stream: what all have in common, and chat.

Frames are bytes put together: what stays the same in a stream is encoded once. `ChatFrames` takes the events of a step and gives
the frames that they make. `gather` makes whole answers of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from nanovllm_cli import __version__
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.logprobs import TextTokens, chat_form, prompt_form
from nanovllm_cli.server.ports import Event, Generation, ServedModel, Usage
from nanovllm_cli.server.sse import DONE
from nanovllm_cli.text.tool_calls import ToolCallDelta, joined_calls

encode = msgspec.json.Encoder().encode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of one answer has in common."""

    id: str
    object: str
    created: int
    model: ServedModel

    @classmethod
    def new(cls, prefix: str, kind: str, model: ServedModel) -> Head:
        return cls(prefix + secrets.token_hex(12), kind, int(time.time()), model)

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model.id,
            "system_fingerprint": fingerprint(self.model),
        }

    def frame_start(self) -> bytes:
        """A frame up to the index of its choice."""
        return b"data: " + encode(self.fields())[:-1] + b',"choices":[{"index":'

    def usage_frame(self, usage: Usage, timings: dict[str, Any]) -> bytes:
        """The last frame of a stream whose client wants to know."""
        return b"data: " + encode({**self.fields(), "choices": [], "usage": usage_fields(usage), **timings}) + b"\n\n"


def fingerprint(model: ServedModel) -> str:
    """Equal where the same seed gives the same answer: this program's version, the model and how it computes."""
    facts = f"{__version__}/{model.id}/{model.created}/{model.facts.dtype}/{model.facts.device}"
    return "fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10]


def usage_fields(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_fields(generation: Generation, *, draws: bool = True) -> dict[str, Any]:
    """As llama-server has them. prompt_n: tokens that were computed; guesses ahead where there were any. draws: False leaves out
    what was drawn, where nobody asked for it."""
    usage, timings = generation.usage, generation.timings
    answer = {
        "cache_n": usage.cached_tokens,
        **_paced("prompt", usage.prompt_tokens - usage.cached_tokens, timings.prompt),
        **_paced("predicted", usage.completion_tokens if draws else 0, timings.answer if draws else 0.0),
    }
    if timings.num_guessed:
        answer |= {"draft_n": timings.num_guessed, "draft_n_accepted": timings.num_held}
    return {"timings": answer}


def reading_fields(generation: Generation) -> dict[str, Any]:
    """How far a prompt is read, as llama-server has it: `processed` tokens of `total`, of which `cache` were there already."""
    assert generation.reading is not None
    usage, (count, seconds) = generation.usage, generation.reading
    told = {"total": usage.prompt_tokens, "cache": usage.cached_tokens, "processed": count, "time_ms": seconds * 1000}
    return {"prompt_progress": told}


def _paced(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / count if count else None,
        f"{name}_per_second": count / seconds if seconds > 0 else None,
    }


def total(usages: Sequence[Usage]) -> Usage:
    return Usage(*(sum(column) for column in zip(*usages, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What an answer shows besides its text. params.logprobs: None for no log-probabilities at all. usage: behind a stream;
    usage_everywhere: on each of its frames. timings_everywhere: likewise, where only the last one has them otherwise. token_ids:
    of prompt and answer, as vLLM names them."""

    params: SamplingParams
    usage: bool = False
    usage_everywhere: bool = False
    timings_everywhere: bool = False
    token_ids: bool = False

    def tail(self, generation: Generation, *, is_last: bool = False, is_reading: bool = False) -> bytes:
        """The end of a frame, behind its choices. is_last: of this generation. is_reading: it tells of the prompt alone."""
        timings = b"," + encode(reading_fields(generation))[1:-1] if is_reading else b""
        if self.timings_everywhere or (is_last and not self.usage):
            timings += b"," + encode(timings_fields(generation))[1:-1]
        if self.usage_everywhere:
            return b',"usage":' + encode(usage_fields(generation.usage)) + timings + b"}\n\n"
        return (b',"usage":null' if self.usage else b"") + timings + b"}\n\n"


# ---- chat ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStyle(Style):
    """reasoning: show it."""

    reasoning: bool = True


class ChatFrames:
    """Events to frames. An answer's role comes first, alone; its finish reason last, alone."""

    def __init__(self, generation: Generation, style: ChatStyle) -> None:
        self._head = head = Head.new("chatcmpl-", "chat.completion.chunk", generation.model)
        self._generation, self._style = generation, style
        self._start = head.frame_start()
        self._counts: Counter[int] = Counter()
        self._num_ended = 0
        make = partial(TextTokens, generation.model.tokenizer, style.params, generation.model.visible_ids)
        self._tokens = defaultdict[int, TextTokens](make)

    def frames(self, events: Sequence[Event]) -> bytes:
        out: list[bytes] = []
        tail = self._style.tail(self._generation, is_reading=not events)
        if not events:
            return self._start + b'0,"delta":{},"logprobs":null,"finish_reason":null}]' + tail
        for event in events:
            start = self._start + b"%d" % event.index
            if event.index not in self._counts:
                out += [start, b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]']
                if self._style.token_ids and not self._counts:
                    out += [b',"prompt_token_ids":', encode(list(self._generation.prompt_ids))]
                out.append(tail)
            self._counts[event.index] += len(event.token_ids)
            ids = b',"token_ids":' + encode(event.token_ids) if self._style.token_ids and event.token_ids else b""
            logprobs = b"null" if self._style.params.logprobs is None else self._logprobs(event)
            delta = self._delta(event)
            if delta or logprobs != b"null" or ids:
                middle = (b',"delta":', delta or b"{}", b',"logprobs":', logprobs, b',"finish_reason":null', ids, b"}]")
                out += [start, *middle, tail]
            if event.finish_reason is not None:
                reason, end = encode(event.finish_reason), end_fields(event.stop_reason, self._counts[event.index])
                self._num_ended += 1
                last = self._style.tail(self._generation, is_last=self._num_ended == self._style.params.n)
                out += [start, b',"delta":{},"logprobs":null,"finish_reason":', reason, end, b"}]", last]
        return b"".join(out)

    def end(self) -> bytes:
        if not self._style.usage:
            return DONE
        return self._head.usage_frame(self._generation.usage, timings_fields(self._generation)) + DONE

    def _delta(self, event: Event) -> bytes | None:
        reasoning = event.reasoning if self._style.reasoning else ""
        if not event.calls and not reasoning:
            return b'{"content":' + encode(event.content) + b"}" if event.content else None
        delta: dict[str, Any] = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if event.content:
            delta["content"] = event.content
        if event.calls:
            delta["tool_calls"] = [_call_delta(call) for call in event.calls]
        return encode(delta)

    def _logprobs(self, event: Event) -> bytes:
        entries = self._tokens[event.index].take(event)
        if not entries:
            return b"null"
        form = chat_form(self._head.model.tokenizer, entries, self._style.params.logprobs or 0)
        return encode({"content": form, "refusal": None})


def end_fields(stop_reason: str | int | None, num_tokens: int) -> bytes:
    """Of a choice's last frame, behind its finish reason: what OpenAI does not tell of each choice."""
    return b',"stop_reason":%b,"completion_tokens":%d' % (encode(stop_reason), num_tokens)


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


@dataclass(slots=True)
class Answer:
    """One answer of a request, gathered from its events. tokens: None where no log-probabilities are wanted."""

    tokens: TextTokens | None
    text: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, event: Event) -> None:
        self.text.append(event.text)
        self.content.append(event.content)
        self.reasoning.append(event.reasoning)
        self.token_ids += event.token_ids
        self.calls += event.calls
        if self.tokens is not None:
            self.entries += self.tokens.take(event)
        if event.finish_reason is not None:
            self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason


async def gather(generation: Generation, params: SamplingParams) -> list[Answer]:
    """All answers of a request, in their order."""
    answers: dict[int, Answer] = {}
    async for events in generation:
        for event in events:
            if event.index not in answers:
                model = generation.model
                tokens = None if params.logprobs is None else TextTokens(model.tokenizer, params, model.visible_ids)
                answers[event.index] = Answer(tokens)
            answers[event.index].take(event)
    return [answers[index] for index in sorted(answers)]


async def chat_answer(generation: Generation, style: ChatStyle) -> dict[str, Any]:
    """The whole answer to a chat request."""
    answers = await gather(generation, style.params)
    return await off_loop(style.params, lambda: _chat_answer(generation, style, answers))


async def off_loop(params: SamplingParams, work: Callable[[], T]) -> T:
    """What `work` returns; in a thread where it has log-probabilities to write, of which there may be millions."""
    if params.logprobs is None and params.prompt_logprobs is None:
        return work()
    return await asyncio.to_thread(work)


def _chat_answer(generation: Generation, style: ChatStyle, answers: Sequence[Answer]) -> dict[str, Any]:
    head = Head.new("chatcmpl-", "chat.completion", generation.model)
    answer = {
        **head.fields(),
        "choices": [_chat_choice(head, style, index, answer) for index, answer in enumerate(answers)],
        "usage": usage_fields(generation.usage),
        **timings_fields(generation),
    }
    if style.token_ids:
        answer["prompt_token_ids"] = list(generation.prompt_ids)
    if generation.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_form(generation.model.tokenizer, generation.prompt_logprobs)
    return answer


def _chat_choice(head: Head, style: ChatStyle, index: int, answer: Answer) -> dict[str, Any]:
    content, reasoning = "".join(answer.content), "".join(answer.reasoning)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning and style.reasoning:
        message["reasoning_content"] = reasoning
    if answer.calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in joined_calls(answer.calls)
        ]
    logprobs = None
    if style.params.logprobs is not None:
        logprobs = {"content": chat_form(head.model.tokenizer, answer.entries, style.params.logprobs), "refusal": None}
    choice = {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "completion_tokens": len(answer.token_ids),
    }
    return {**choice, "token_ids": answer.token_ids} if style.token_ids else choice
