"""The load of `bench serve`: requests sent when a schedule says so, whatever became of those before them (an open loop).

The schedule is made before the first request and is absolute, so that a slow server, or a slow client, does not thin out
the load that it is measured by; how late the client was is part of the result. Greedy answers, streamed. Knows
OpenAI's two endpoints for text; what the figures mean is `metrics.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from nanovllm_cli.bench.metrics import Trace
from nanovllm_cli.bench.workload import Request, estimated_count
from nanovllm_cli.client.endpoint import checked_key
from nanovllm_cli.client.events import EventReader, StreamError, event_object, said, token_count
from nanovllm_cli.client.http import HttpError, Server, exchange, lost
from nanovllm_cli.errors import UsageError

EndpointName = Literal["chat", "completions"]

PATHS: dict[EndpointName, str] = {"chat": "/chat/completions", "completions": "/completions"}
MAX_ERROR_BYTES = 64 << 10
_TICK_SECONDS = 0.1
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask, and how. timeout: seconds for one request, from connecting to its end. extra_body: fields of each
    request's body in place of ours; None takes a field out. api_key is not shown."""

    server: Server
    endpoint: EndpointName = "completions"
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise UsageError(f"a timeout of {self.timeout} seconds")
        checked_key(self.api_key)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: Request) -> bytes:
        """What is posted for `request`, as JSON. Raises UsageError for token ids where only text can be said."""
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "completions":
            fields["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            raise UsageError("a chat's messages are text, and this workload is token ids", "use --endpoint completions")
        fields |= {
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        fields |= self.extra_body
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def schedule(count: int, rate: float, *, burstiness: float = 1.0, ramp_up: float = 0.0, seed: int = 0) -> list[float]:
    """When each of `count` requests is sent, in seconds after the first, which is at 0.

    rate: requests a second; inf sends all at once. The gaps are gamma distributed with shape `burstiness`, as in vLLM: 1
    is a Poisson process, less comes in bursts, more is even, and inf entirely. They are scaled so that the rate is kept exactly.
    ramp_up: over so many seconds the rate grows from nothing to `rate`, evenly.
    """
    for name, value in (("request rate", rate), ("burstiness", burstiness)):
        if not value > 0:
            raise UsageError(f"a {name} of {value:g}", "it must be above 0")
    if not 0 <= ramp_up < math.inf:
        raise UsageError(f"a ramp-up of {ramp_up:g} s")
    if math.isinf(rate) or count < 2:
        if ramp_up:
            raise UsageError("a ramp-up without a rate", "give --request-rate too")
        return [0.0] * count
    draw = np.random.default_rng(seed)
    gaps = np.ones(count - 1) if math.isinf(burstiness) else draw.gamma(burstiness, 1.0, count - 1)
    total = float(gaps.sum())
    steady = np.concatenate([[0.0], np.cumsum(gaps * ((count - 1) / rate / total if total > 0 else 0.0))])
    if ramp_up:
        # With rate(t) = rate t / ramp_up, as many have come by t as a steady rate brings by t^2 / (2 ramp_up).
        early = steady < ramp_up / 2
        steady = np.where(early, np.sqrt(2 * ramp_up * steady), steady + ramp_up / 2)
    return [float(moment) for moment in steady]


@dataclass(slots=True)
class Load:
    """A run, and what has come of it so far: `traces` are there also after an interrupt. counted: answers without
    `usage`, whose tokens are their pieces; estimated: prompts whose length nobody said."""

    target: Target
    max_concurrency: int | None = None
    traces: list[Trace] = field(default_factory=list)
    counted: int = 0
    estimated: int = 0

    async def run(
        self, requests: Sequence[Request], moments: Sequence[float], tick: Callable[[int], None] = lambda _: None
    ) -> None:
        """Sends each request at its moment. `tick` is called about ten times a second with what has been done since."""
        slots = asyncio.Semaphore(self.max_concurrency) if self.max_concurrency else None
        bodies = [self.target.body(request) for request in requests]
        begin = time.perf_counter()
        running = [
            asyncio.create_task(self._one(request, body, begin + moment, slots))
            for request, body, moment in zip(requests, bodies, moments, strict=True)
        ]
        told = len(self.traces)
        everything = asyncio.gather(*running)
        try:
            while not everything.done():
                await asyncio.wait([everything], timeout=_TICK_SECONDS)
                tick(len(self.traces) - told)
                told = len(self.traces)
            everything.result()
        finally:
            everything.cancel()
            await asyncio.gather(everything, return_exceptions=True)

    async def _one(self, request: Request, body: bytes, moment: float, slots: asyncio.Semaphore | None) -> None:
        await asyncio.sleep(max(moment - time.perf_counter(), 0.0))
        woken = time.perf_counter()
        if slots is None:
            self.traces.append(await self._send(request, body, moment, woken, woken))
        else:
            at_once = not slots.locked()
            async with slots:
                sent = woken if at_once else time.perf_counter()
                self.traces.append(await self._send(request, body, moment, woken, sent))

    async def _send(self, request: Request, body: bytes, moment: float, woken: float, sent: float) -> Trace:
        answer, times, error = AnswerReader(), [], None
        try:
            async with asyncio.timeout(self.target.timeout):
                async with exchange(
                    self.target.server, "POST", PATHS[self.target.endpoint], self.target.headers, body
                ) as reply:
                    status = await reply.status()
                    if status != 200:
                        raise StreamError(f"HTTP {status}: {said(await reply.read(MAX_ERROR_BYTES))}")
                    events = EventReader()
                    while not answer.done and (piece := await reply.piece()) is not None:
                        times += [piece.time for data in events.feed(piece.data) if answer.read(data)]
            if not (answer.done or answer.finished):
                raise StreamError("the answer ended before it was complete")
            if not times:
                raise StreamError("an answer without any text")
        except TimeoutError:
            error = f"no end within {self.target.timeout:g} s"
        except (StreamError, HttpError) as failure:
            error = str(failure)
        except OSError as failure:
            error = lost(failure)
        if error is None and answer.output_tokens is None:
            self.counted += 1
        input_tokens = answer.input_tokens
        if input_tokens is None:
            known = isinstance(request.prompt, list)
            self.estimated += error is None and not known
            input_tokens = len(request.prompt) if known else estimated_count(str(request.prompt))
        pieces = _share(times, answer.output_tokens)
        return Trace(moment, woken, sent, pieces, time.perf_counter(), input_tokens, error)


def _share(times: Sequence[float], output_tokens: int | None) -> tuple[tuple[float, int], ...]:
    """The pieces with their tokens: one each, or what the server counted, spread evenly over them."""
    count, total = len(times), len(times) if output_tokens is None else output_tokens
    return tuple((moment, total * (i + 1) // count - total * i // count) for i, moment in enumerate(times))


class AnswerReader:
    """The pieces of one streamed answer, from the data of its events.

    done: [DONE] came. finished: a choice gave the reason for its end. num_pieces: those with text.
    input_tokens, output_tokens: what the server's `usage` says, None while it says nothing.
    """

    def __init__(self) -> None:
        self.done = False
        self.finished = False
        self.num_pieces = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None

    def read(self, data: str) -> bool:
        """Whether this event brings a piece of the answer's text. Raises StreamError."""
        if data.strip() == "[DONE]":
            self.done = True
            return False
        chunk = event_object(data)
        self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        has_text = False
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                has_text = has_text or _has_text(choice)
                self.finished = self.finished or bool(choice.get("finish_reason"))
        self.num_pieces += has_text
        return has_text

    def _read_usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.input_tokens = token_count(usage.get("prompt_tokens"), self.input_tokens)
            self.output_tokens = token_count(usage.get("completion_tokens"), self.output_tokens)


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    return isinstance(delta, dict) and any(delta.get(name) for name in (*_TEXTS, "tool_calls"))
