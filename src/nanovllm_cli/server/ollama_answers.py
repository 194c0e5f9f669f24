"""Ollama's answers: what a generation says, as lines of a stream or as one object, which is its last line with all of it.

Times are nanoseconds. total_duration counts from the request's arrival, load_duration is how long it waited for the model to be
there. prompt_eval_count is the whole prompt, as there; prompt_eval_duration is what was computed of it, less where its beginning
was in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from msgspec import Raw

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.function_tools import arguments_of
from nanovllm_cli.server.logprobs import TextTokens, chat_form
from nanovllm_cli.server.ports import Event, Generation
from nanovllm_cli.text.tool_calls import ToolCallDelta, joined_calls


@dataclass(slots=True)
class Said:
    """Part of an answer, or all of it."""

    content: str = ""
    thinking: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    logprobs: list[Raw] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)


class Took(NamedTuple):
    """started: time.monotonic() of the request's arrival."""

    started: float
    load_seconds: float

    def fields(self) -> dict[str, int]:
        """As of now."""
        return {
            "total_duration": _nanoseconds(time.monotonic() - self.started),
            "load_duration": _nanoseconds(self.load_seconds),
        }


class AnswerWriter:
    """take() the events of each step, then last(). name: the model's, as the request has it. chats: a message is answered, not a
    text. tells_context: the tokens of both, for the next request."""

    def __init__(
        self, name: str, params: SamplingParams, generation: Generation, took: Took, *, chats: bool, tells_context: bool
    ) -> None:
        self._name, self._params, self._generation, self._took = name, params, generation, took
        self._chats, self._tells_context = chats, tells_context
        self._tokens = TextTokens(generation.model.tokenizer, params, generation.model.visible_ids)
        self._token_ids: list[int] = []
        self._reason = "stop"

    def take(self, step: Sequence[Event]) -> Said:
        logprobs: list[Raw] = []
        for event in step:
            self._token_ids += event.token_ids
            if self._params.logprobs is not None:
                entries = self._tokens.take(event)
                logprobs += chat_form(self._generation.model.tokenizer, entries, self._params.logprobs)
            if event.finish_reason in ("length", "repetition"):
                self._reason = "length"
        return Said(
            "".join(event.content for event in step),
            "".join(event.reasoning for event in step),
            [call for event in step for call in event.calls],
            logprobs,
        )

    def line(self, said: Said, *, done: bool = False) -> dict[str, Any]:
        head = {"model": self._name, "created_at": now()}
        tail: dict[str, Any] = {"done": done} | ({"logprobs": said.logprobs} if said.logprobs else {})
        thinking = {"thinking": said.thinking} if said.thinking else {}
        calls = {"tool_calls": [_call(call) for call in joined_calls(said.calls)]} if said.calls else {}
        if self._chats:
            return head | {"message": {"role": "assistant", "content": said.content, **thinking, **calls}} | tail
        return head | {"response": said.content} | thinking | tail

    def last(self, said: Said) -> dict[str, Any]:
        """The line that ends the answer, with what it is to say besides: nothing in a stream, all of it otherwise."""
        usage, timings = self._generation.usage, self._generation.timings
        line = self.line(said, done=True) | {
            "done_reason": self._reason,
            **self._took.fields(),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timings.prompt),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timings.answer),
        }
        if self._tells_context:
            line["context"] = [*self._generation.prompt_ids, *self._token_ids]
        return line


def joined(parts: Sequence[Said]) -> Said:
    """All of them as one."""
    return Said(
        "".join(part.content for part in parts),
        "".join(part.thinking for part in parts),
        [call for part in parts for call in part.calls],
        [each for part in parts for each in part.logprobs],
    )


def nothing_said(name: str, reason: str, *, chats: bool) -> dict[str, Any]:
    """The answer to a request without a prompt. reason: load, or unload."""
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chats else {"response": ""}
    return {"model": name, "created_at": now(), **said, "done": True, "done_reason": reason}


def now() -> str:
    return timestamp(time.time())


def timestamp(seconds: float) -> str:
    """RFC 3339. Unix seconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _call(call: ToolCallDelta) -> dict[str, Any]:
    function = {"index": call.index, "name": call.name, "arguments": arguments_of(call.arguments)}
    return {"id": call.id, "function": function}
