"""Counting what happens. exposition.py writes it down for Prometheus, routes_metrics.py for the status page.

Everything is counted in the server's process, so that counts survive an engine's restart; only what is true now (queue, blocks,
states) is read from engines, when somebody asks. One thread counts (the event loop's), in plain numbers: prometheus_client's own
counters and histograms take a lock and look labels up, and a token would need several (benchmarks/metrics_cost.py).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.messages import Output
from nanovllm_cli.server.observer import Observer, Operation, Watch
from nanovllm_cli.server.ports import Caller

FINISHED_REASONS = ("stop", "length", "repetition", "abort", "error")
REFUSALS = ("overloaded", "unavailable", "context_length", "invalid")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE")
NUM_RECENT = 256

FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0
)  # fmt: skip
NEXT_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
REQUEST_SECONDS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0,
)  # fmt: skip
HTTP_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Histogram:
    """How many values lay in each bucket. bounds: the buckets' upper ends, which belong to them; one without end follows."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times



class Latencies(NamedTuple):
    """Seconds of one request. next_token: between tokens, on average; None with less than two."""

    queue: float | None
    first_token: float
    next_token: float | None
    whole: float


class ModelCounts:
    """What has happened with one model since the server started."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.queried_tokens = self.cached_tokens = 0
        self.preemptions = self.restarts = self.guessed_tokens = self.held_tokens = 0
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.next_token = Histogram(NEXT_TOKEN_SECONDS)
        self.whole, self.queue, self.prefill, self.decode = (Histogram(REQUEST_SECONDS) for _ in range(4))
        self.prompt_sizes, self.answer_sizes = Histogram(TOKENS), Histogram(TOKENS)
        self.recent: deque[Latencies] = deque(maxlen=NUM_RECENT)


class Metrics(Observer):
    """Counts, by what they are of. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.models: dict[str, ModelCounts] = {}
        self.refused_unnamed = dict.fromkeys(REFUSALS, 0)
        self.http_in_flight = 0
        self.http_requests: dict[tuple[str, str, int], int] = {}
        self.http_seconds: dict[str, Histogram] = {}
        self.started = clock()
        self._clock = clock

    @property
    def seconds(self) -> float:
        """Since it began to count."""
        return self._clock() - self.started

    def of(self, model: str) -> ModelCounts:
        """A model's counts, from 0 where it had none."""
        counts = self.models.get(model)
        if counts is None:
            counts = self.models[model] = ModelCounts()
        return counts

    def accepted(
        self, model: str, operation: Operation, prompt_len: int, params: SamplingParams | None, caller: Caller | None
    ) -> Watch:
        return _Watch(self.of(model), prompt_len, params, self._clock)

    def refused(self, model: str | None, error: ApiError) -> None:
        refused = self.refused_unnamed if model is None else self.of(model).refused
        refused[_refusal(error)] += 1

    def engine_restarted(self, model: str) -> None:
        self.of(model).restarts += 1

    def http_started(self) -> None:
        self.http_in_flight += 1

    def http_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        self.http_in_flight -= 1
        handler = route or "none"
        key = (method if method in METHODS else "other", handler, status)
        self.http_requests[key] = self.http_requests.get(key, 0) + 1
        histogram = self.http_seconds.get(handler)
        if histogram is None:
            histogram = self.http_seconds[handler] = Histogram(HTTP_SECONDS)
        histogram.observe(seconds)


class _Watch(Watch):
    """Times are those at which the server read an output: what a client sees, but for the network and its own pace."""

    def __init__(self, counts: ModelCounts, prompt_len: int, params: SamplingParams | None, clock: Callable[[], float]) -> None:
        self._counts = counts
        self._prompt_len = prompt_len
        self._params = params
        self._clock = clock
        self._start = clock()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._num_left = 1 if params is None else params.n
        self._num_tokens = 0
        self._so_far = (0, 0, 0)

    def output(self, output: Output) -> None:
        counts, last, now = self._counts, self._last, self._clock()
        for piece in output.pieces:
            num_tokens = len(piece.token_ids)
            if num_tokens:
                before = last.get(piece.index)
                if before is not None:
                    counts.next_token.observe((now - before) / num_tokens, num_tokens)
                elif not last:
                    self._begin(output, now)
                last[piece.index] = now
                counts.generated_tokens += num_tokens
                self._num_tokens += num_tokens
            if piece.finish_reason is not None:
                counts.finished[piece.finish_reason] += 1
                self._num_left -= 1
        so_far = (output.num_preemptions, output.num_guessed_tokens, output.num_held_tokens)
        if so_far != self._so_far:
            preemptions, guessed, held = (now - before for now, before in zip(so_far, self._so_far, strict=True))
            counts.preemptions += preemptions
            counts.guessed_tokens += guessed
            counts.held_tokens += held
            self._so_far = so_far
        if output.finished and self._first is not None:
            self._complete(output, self._first, now)

    def embedded(self) -> None:
        self._counts.finished["stop"] += 1
        self._counts.prompt_tokens += self._prompt_len
        self._num_left = 0

    def cut(self) -> None:
        self._counts.finished["stop"] += self._num_left
        self._num_left = 0

    def end(self, error: ApiError | None = None) -> None:
        if error is None or not error.by_engine:  # who was refused is counted as that
            self._counts.finished["abort" if error is None else "error"] += self._num_left
        self._num_left = 0

    def _begin(self, output: Output, now: float) -> None:
        """The prompt is read, and the first token there."""
        counts = self._counts
        self._first = now - self._start
        counts.first_token.observe(self._first)
        counts.prompt_tokens += self._prompt_len
        counts.queried_tokens += self._prompt_len
        counts.cached_tokens += output.num_cached_tokens
        counts.prompt_sizes.observe(self._prompt_len)
        scheduled, first, _ = output.times
        if scheduled is not None:
            counts.queue.observe(scheduled)
            if first is not None:
                counts.prefill.observe(first - scheduled)

    def _complete(self, output: Output, first: float, now: float) -> None:
        counts, whole = self._counts, now - self._start
        counts.whole.observe(whole)
        counts.answer_sizes.observe(self._num_tokens)
        queue, engine_first, engine_end = output.times
        if engine_first is not None and engine_end is not None:
            counts.decode.observe(engine_end - engine_first)
        num_next = self._num_tokens - len(self._last)
        next_token = (whole - first) * len(self._last) / num_next if num_next else None
        counts.recent.append(Latencies(queue, first, next_token, whole))


def _refusal(error: ApiError) -> str:
    if error.status == 429:
        return "overloaded"
    if error.status >= 500:
        return "unavailable"
    return "context_length" if error.code == "context_length_exceeded" else "invalid"
