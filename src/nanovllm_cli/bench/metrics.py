"""What a benchmark of a server reports, from the times at which its client saw things happen.

Definitions are those of vLLM's `bench serve`, and so are the names in `ServeMetrics.record`, so that results can be held
against each other:

    TTFT   time to first token: from sending a request to the first piece of its answer
    TPOT   time per output token after the first: (last token - first token) / (tokens - 1)
    ITL    inter-token latency: the gaps between the pieces of an answer, all requests' gaps together
    E2EL   end to end: from sending a request to the last piece of its answer

Three differences, on purpose: a piece without any text (the role that opens a chat answer) is no token; the peak of tokens a
second counts all tokens of a piece; and requests that failed were under way, too, as far as concurrency goes. Nothing here knows
about HTTP.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm_cli.errors import UsageError

GOODPUT = ("ttft", "tpot", "e2el")
PERCENTILES = (90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True)
class Trace:
    """One request as its client saw it. Times are seconds of one monotonic clock, counts are tokens.

    scheduled: when it was to be sent. woken: when the client got to it. sent: when it was sent, later than woken where
    a limit of concurrency held it back. pieces: when each piece of the answer came, and its tokens. done: when the
    answer, or the failure, was complete. error: why it failed, in one line.
    """

    scheduled: float
    woken: float
    sent: float
    pieces: tuple[tuple[float, int], ...]
    done: float
    input_tokens: int
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.pieces)

    @property
    def ttft(self) -> float:
        return self.pieces[0][0] - self.sent

    @property
    def e2el(self) -> float:
        return self.pieces[-1][0] - self.sent

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token, which has no further one."""
        if self.output_tokens < 2:
            return None
        return (self.pieces[-1][0] - self.pieces[0][0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        times = [time for time, _ in self.pieces]
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    def meets(self, goals: Mapping[str, float]) -> bool:
        """Whether every latency is within its goal, in milliseconds. One token has a TPOT of 0, as in vLLM."""
        had = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "e2el": self.e2el}
        return all(1e3 * had[name] <= goal for name, goal in goals.items())


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one kind of latency, in milliseconds. percentiles: 99.0 -> value, linear between the two nearest samples;
    std is of the population (divided by n)."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> Latency | None:
        """None where there is no sample."""
        if not seconds:
            return None
        samples = np.asarray(seconds, dtype=np.float64) * 1e3
        values = np.percentile(samples, list(percentiles)).tolist()
        return cls(
            float(samples.mean()),
            float(np.median(samples)),
            float(samples.std()),
            dict(zip(percentiles, values, strict=True)),
        )

    def record(self, name: str) -> dict[str, float]:
        """mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms, …"""
        record = {f"mean_{name}_ms": self.mean, f"median_{name}_ms": self.median, f"std_{name}_ms": self.std}
        return record | {f"p{p:g}_{name}_ms": value for p, value in self.percentiles.items()}


@dataclass(frozen=True, slots=True)
class ServeMetrics:
    """Figures of a run. Rates are a second, over `duration` seconds: from the first request sent to the last one done."""

    completed: int
    failed: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    peak_output_tokens_per_s: float
    peak_concurrency: int
    latencies: Mapping[str, Latency | None]
    good: int | None
    lateness: Latency | None
    queueing: Latency | None

    def rate(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """vLLM's names; latencies as mean_ttft_ms, p99_ttft_ms, … and None where there was nothing to measure."""
        total = self.total_input_tokens + self.total_output_tokens
        record: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.rate(self.completed),
            "request_goodput": None if self.good is None else self.rate(self.good),
            "input_throughput": self.rate(self.total_input_tokens),
            "output_throughput": self.rate(self.total_output_tokens),
            "total_token_throughput": self.rate(total),
            "max_output_tokens_per_s": self.peak_output_tokens_per_s,
            "max_concurrent_requests": self.peak_concurrency,
        }
        for name, latency in (*self.latencies.items(), ("lateness", self.lateness), ("queueing", self.queueing)):
            if latency is not None:
                record |= latency.record(name)
        return record


def summarize(
    traces: Iterable[Trace], percentiles: Sequence[float] = PERCENTILES, goals: Mapping[str, float] | None = None
) -> ServeMetrics:
    """The figures of `traces`. Failed ones count as failed, and for the duration, and for nothing else.

    goals: latencies in milliseconds by GOODPUT's names; a request that meets all of them is good.
    """
    everything = list(traces)
    good_ones = [trace for trace in everything if trace.error is None]
    held_back = [trace.sent - trace.woken for trace in everything]
    return ServeMetrics(
        completed=len(good_ones),
        failed=len(everything) - len(good_ones),
        duration=max((t.done for t in everything), default=0.0) - min((t.sent for t in everything), default=0.0),
        total_input_tokens=sum(trace.input_tokens for trace in good_ones),
        total_output_tokens=sum(trace.output_tokens for trace in good_ones),
        peak_output_tokens_per_s=_peak_rate(good_ones),
        peak_concurrency=most_at_once((trace.sent, trace.done) for trace in everything),
        latencies={name: Latency.of(seconds, percentiles) for name, seconds in latencies_of(good_ones).items()},
        good=None if not goals else sum(trace.meets(goals) for trace in good_ones),
        lateness=Latency.of([trace.woken - trace.scheduled for trace in everything], percentiles),
        queueing=Latency.of(held_back, percentiles) if any(held_back) else None,
    )


def latencies_of(traces: Sequence[Trace]) -> dict[str, list[float]]:
    """Seconds of each kind, of requests that succeeded."""
    return {
        "ttft": [trace.ttft for trace in traces],
        "tpot": [tpot for trace in traces if (tpot := trace.tpot) is not None],
        "itl": [gap for trace in traces for gap in trace.itls],
        "e2el": [trace.e2el for trace in traces],
    }


def goals_of(words: Iterable[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as {"ttft": 200.0, "tpot": 50.0}, milliseconds. Raises UsageError."""
    goals: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            goal = float(value)
        except ValueError:
            goal = math.nan
        if name not in GOODPUT or not 0 <= goal < math.inf:
            raise UsageError(
                f"{word!r} is no goal for a latency", "goals in milliseconds: ttft:200, tpot:50, e2el:5000"
            )
        if name in goals:
            raise UsageError(f"two goals for {name}")
        goals[name] = goal
    return goals


def _peak_rate(traces: Sequence[Trace]) -> float:
    """The most tokens that came within one second, of the seconds counted from the first request sent."""
    begin = min((trace.sent for trace in traces), default=0.0)
    seconds: Counter[int] = Counter()
    for trace in traces:
        for time, tokens in trace.pieces:
            seconds[int(time - begin)] += tokens
    return float(max(seconds.values(), default=0))


def most_at_once(spans: Iterable[tuple[float, float]]) -> int:
    """The most spans that any moment lies in; one that ends makes room for one that begins at that moment."""
    events = sorted(event for begin, end in spans for event in ((begin, 1), (end, -1)))
    return max(itertools.accumulate(change for _, change in events), default=0)
