"""What a benchmark of a server reports, from the times at which its client saw things happen.

Definitions are those of vLLM's `bench serve`, and so are the names of figures, so that results can be held against each other:

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


def latency_figures(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """mean_ttft_ms, median_ttft_ms, std_ttft_ms, p99_ttft_ms, … of seconds; nothing where there are none. std is of the
    population (divided by n), percentiles are linear between the two nearest samples."""
    if not seconds:
        return {}
    samples = np.asarray(seconds, dtype=np.float64) * 1e3
    figures = {"mean": float(samples.mean()), "median": float(np.median(samples)), "std": float(samples.std())}
    values = np.percentile(samples, list(percentiles)).tolist()
    figures |= {f"p{p:g}": value for p, value in zip(percentiles, values, strict=True)}
    return {f"{kind}_{name}_ms": value for kind, value in figures.items()}


def summarize(
    traces: Iterable[Trace], percentiles: Sequence[float] = PERCENTILES, goals: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The figures of `traces`, by vLLM's names. Failed ones count as failed, for the duration, concurrency and lateness, and for
    nothing else. Rates are a second, over `duration` seconds: from the first request sent to the last one done.

    goals: latencies in milliseconds by GOODPUT's names; a request that meets all of them is good.
    """
    everything = list(traces)
    good = [trace for trace in everything if trace.error is None]
    held_back = [trace.sent - trace.woken for trace in everything]
    duration = max((t.done for t in everything), default=0.0) - min((t.sent for t in everything), default=0.0)
    inputs, outputs = sum(trace.input_tokens for trace in good), sum(trace.output_tokens for trace in good)

    def rate(count: int) -> float:
        return count / duration if duration > 0 else 0.0

    figures = {
        "duration": duration,
        "completed": len(good),
        "failed": len(everything) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": rate(len(good)),
        **({"request_goodput": rate(sum(trace.meets(goals) for trace in good))} if goals else {}),
        "input_throughput": rate(inputs),
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
        "max_output_tokens_per_s": _peak_rate(good),
        "max_concurrent_requests": most_at_once((trace.sent, trace.done) for trace in everything),
    }
    waits = {"lateness": [t.woken - t.scheduled for t in everything], "queueing": held_back if any(held_back) else []}
    for name, seconds in (latencies_of(good) | waits).items():
        figures |= latency_figures(name, seconds, percentiles)
    return figures


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
