"""`bench serve`: a workload sent to a server at one or more rates, and what came of it as results.

The load is `serve_client.py`, the figures are `metrics.py`. Requests that warm up are the workload's first, and are not asked
again: a server that caches prefixes has not seen what is measured.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nanovllm_cli import system
from nanovllm_cli.bench.machine import Machine
from nanovllm_cli.bench.metrics import PERCENTILES, Trace, latencies_of, summarize
from nanovllm_cli.bench.record import Summary
from nanovllm_cli.bench.serve_client import Load, Target, schedule
from nanovllm_cli.bench.workload import Workload
from nanovllm_cli.client.endpoint import Endpoint
from nanovllm_cli.errors import RequestError, UsageError

MAX_SAMPLES = 100_000  # numbers of one series that a result keeps
_OTHER_FILES = 256
"""Open files that are no connections."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. request_rate: requests a second, inf for all at once. max_concurrency: most at a time, None for any number.
    percentiles of each latency. goals: milliseconds that a good request keeps to, by latency."""

    request_rate: float
    max_concurrency: int | None = None
    burstiness: float = 1.0
    ramp_up: float = 0.0
    seed: int = 0
    percentiles: Sequence[float] = PERCENTILES
    goals: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"a concurrency of {self.max_concurrency}", "it is at least 1")
        if not self.percentiles or not all(0 <= p <= 100 for p in self.percentiles):
            raise UsageError("percentiles lie between 0 and 100")

    @property
    def settings(self) -> dict[str, object]:
        """As a result tells them; JSON has no infinity."""
        return {
            "request_rate": "inf" if self.request_rate == float("inf") else self.request_rate,
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
            "ramp_up": self.ramp_up,
            "seed": self.seed,
            "goodput": " ".join(f"{name}:{goal:g}" for name, goal in self.goals.items()),
        }


class Outcome(NamedTuple):
    """summary: the figures. remarks: what a reader must know about them, a line each. failures: each kind of failure, and how
    often; the most frequent first. interrupted: by a signal that is yet to be raised."""

    summary: Summary
    remarks: list[str]
    failures: list[tuple[str, int]]
    interrupted: BaseException | None


def warm_up(target: Target, workload: Workload, count: int) -> None:
    """Sends the first `count` requests, all at once. Raises RequestError where none of them succeeds."""
    if not count:
        return
    load = Load(target)
    asyncio.run(load.run(workload.requests[:count], [0.0] * count))
    if all(trace.error is not None for trace in load.traces):
        error = load.traces[0].error or ""
        hint = "is it still loading the model? GET /health says when it is ready" if error.startswith("HTTP 503") else None
        raise RequestError(f"the server answers none of the first {count} requests: {error}", hint)


def find_model(target: Target) -> str:
    """The first model that the server lists. Raises AccessRefusedError, ServerError."""
    endpoint = Endpoint(target.server, target.api_key, min(target.timeout, 30.0))
    return asyncio.run(endpoint.models())[0].id


def measure(
    target: Target, workload: Workload, plan: Plan, machine: Machine, *, skip: int = 0, tick: Callable[[int], None]
) -> Outcome:
    """Sends all of `workload` but its first `skip` requests. After an interrupt the outcome is what was done until then."""
    requests = workload.requests[skip:]
    moments = schedule(
        len(requests), plan.request_rate, burstiness=plan.burstiness, ramp_up=plan.ramp_up, seed=plan.seed
    )
    load = Load(target, plan.max_concurrency)
    system.allow_open_files((plan.max_concurrency or len(requests)) + _OTHER_FILES)
    interrupted: BaseException | None = None
    try:
        asyncio.run(load.run(requests, moments, tick))
    except Exception:
        raise
    except BaseException as signal:  # of the program's own, such as KeyboardInterrupt
        interrupted = signal
    traces = sorted(load.traces, key=lambda trace: trace.scheduled)
    settings = {
        "url": target.server.url,
        "endpoint": target.endpoint,
        "dataset": workload.name,
        "num_prompts": len(requests),
    }
    settings |= {name: value for name, value in workload.settings.items() if name != "seed"} | plan.settings
    metrics = summarize(traces, plan.percentiles, plan.goals)
    summary = Summary("serve", target.model, settings, metrics, _series(traces), machine)
    failures = Counter(trace.error for trace in traces if trace.error is not None).most_common()
    remarks = _remarks(load, summary)
    if interrupted is not None:
        remarks.insert(0, f"interrupted: {len(traces)} of {len(requests)} requests were done")
    return Outcome(summary, remarks, failures, interrupted)


def _series(traces: Sequence[Trace]) -> dict[str, list[float]]:
    """A number for each request that succeeded, in the order of the schedule, and each gap between pieces; milliseconds."""
    good = [trace for trace in traces if trace.error is None]
    series = {f"{name}_ms": [round(1e3 * value, 4) for value in _kept(values)] for name, values in latencies_of(good).items()}
    series["input_tokens"] = [trace.input_tokens for trace in good]
    series["output_tokens"] = [trace.output_tokens for trace in good]
    return series


def _kept(values: Sequence[float]) -> Sequence[float]:
    """All, or as many quantiles as a result may keep."""
    if len(values) <= MAX_SAMPLES:
        return values
    kept: list[float] = np.quantile(np.asarray(values), np.linspace(0.0, 1.0, MAX_SAMPLES)).tolist()
    return kept


def _remarks(load: Load, summary: Summary) -> list[str]:
    remarks = []
    if load.counted:
        remarks.append(f"{load.counted} answers came without usage: their pieces were counted as tokens")
    if load.estimated:
        remarks.append(f"{load.estimated} prompts came without usage: their tokens are estimated, four characters each")
    late = summary.metrics.get("mean_lateness_ms", 0.0)
    if late > 5.0 and summary.settings["request_rate"] != "inf":
        remarks.append(f"the client was late by {late:.1f} ms on average: it was too slow for this load")
    return remarks
