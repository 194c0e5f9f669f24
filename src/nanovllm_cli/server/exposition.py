"""Metrics, as Prometheus reads them. docs/metrics.md describes every name; a test holds it to this file.

Names, labels and buckets are vLLM's where it has them, behind our own prefix, so that its dashboards fit after renaming that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nanovllm_cli import __version__
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.server.metrics import Histogram, Metrics, ModelCounts
from nanovllm_cli.server.ports import EnginePort, EngineState

PREFIX = "nanovllm:"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MODEL = "model_name"


class Exposition:
    """Prometheus' text format 0.0.4 of metrics, of engines as they are now, and of this process (`process_*`)."""

    def __init__(self, metrics: Metrics, engines: Callable[[], Mapping[str, EnginePort]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Families(metrics, engines))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Count(NamedTuple):
    """A counter of a model. values: by what stands in `label`, or one under ""."""

    name: str
    about: str
    values: Callable[[ModelCounts], Mapping[str, float]]
    label: str | None = None


class _Values(NamedTuple):
    name: str
    about: str
    histogram: Callable[[ModelCounts], Histogram]


_COUNTERS = (
    _Count("prompt_tokens_total", "Tokens of prompts that were read, cached ones too", lambda c: {"": c.prompt_tokens}),
    _Count("generation_tokens_total", "Tokens that were drawn", lambda c: {"": c.generated_tokens}),
    _Count("prefix_cache_queries_total", "Tokens of prompts that were looked up", lambda c: {"": c.queried_tokens}),
    _Count("prefix_cache_hits_total", "Tokens of prompts that were found, not computed", lambda c: {"": c.cached_tokens}),
    _Count("request_success_total", "Answers that ended", lambda c: c.finished, "finished_reason"),
    _Count("num_preemptions_total", "Sequences that lost their blocks and were computed again", lambda c: {"": c.preemptions}),
    _Count("spec_decode_num_draft_tokens_total", "Tokens that were guessed ahead", lambda c: {"": c.guessed_tokens}),
    _Count("spec_decode_num_accepted_tokens_total", "Guesses that were right", lambda c: {"": c.held_tokens}),
    _Count("engine_restarts_total", "Engine processes that died and were replaced", lambda c: {"": c.restarts}),
)
_HISTOGRAMS = (
    _Values("time_to_first_token_seconds", "From a request to its first token", lambda c: c.first_token),
    _Values("inter_token_latency_seconds", "Between an answer's tokens", lambda c: c.next_token),
    _Values("e2e_request_latency_seconds", "From a request to the end of its last answer", lambda c: c.whole),
    _Values("request_queue_time_seconds", "Until a prompt first ran", lambda c: c.queue),
    _Values("request_prefill_time_seconds", "From then to the first token", lambda c: c.prefill),
    _Values("request_decode_time_seconds", "From the first token to the last", lambda c: c.decode),
    _Values("request_prompt_tokens", "Tokens of a prompt", lambda c: c.prompt_sizes),
    _Values("request_generation_tokens", "Tokens of all answers to a request", lambda c: c.answer_sizes),
)
_NOW: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("num_requests_running", "Sequences that take part in steps", lambda stats: stats.running),
    ("num_requests_waiting", "Sequences that wait for room", lambda stats: stats.waiting),
    ("kv_cache_usage_perc", "Share of the KV cache's blocks that requests hold, 0 to 1", lambda stats: _usage(stats)),
)


class _Families(Collector):
    def __init__(self, metrics: Metrics, engines: Callable[[], Mapping[str, EnginePort]]) -> None:
        self._metrics = metrics
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        yield from self._of_engines()
        yield from self._of_models()
        yield from self._of_http()

    def _of_engines(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(PREFIX + "build_info", "Always 1", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        engines = self._engines()
        state = GaugeMetricFamily(PREFIX + "engine_state", "1 for the state that the engine is in", labels=[MODEL, "state"])
        for model, engine in engines.items():
            for each in EngineState:
                state.add_metric([model, each.value], float(engine.state is each))
        yield state
        now = {model: engine.stats for model, engine in engines.items() if engine.stats is not None}
        for name, about, value in _NOW:
            gauge = GaugeMetricFamily(PREFIX + name, about, labels=[MODEL])
            for model, stats in now.items():
                gauge.add_metric([model], value(stats))
            yield gauge
        blocks = GaugeMetricFamily(PREFIX + "kv_cache_blocks", "Blocks of the KV cache by what they are", labels=[MODEL, "state"])
        for model, stats in now.items():
            for kind, count in (("used", stats.used_blocks), ("cached", stats.cached_blocks), ("free", stats.free_blocks)):
                blocks.add_metric([model, kind], count)
        yield blocks

    def _of_models(self) -> Iterator[Metric]:
        models = {model: self._metrics.of(model) for model in (*self._engines(), *self._metrics.models)}
        for each in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + each.name, each.about, labels=[MODEL, *([each.label] if each.label else [])])
            for model, counts in models.items():
                for value, count in each.values(counts).items():
                    counter.add_metric([model, *([value] if each.label else [])], count)
            yield counter
        about = "Requests that were not taken; model_name is empty where none of that name is served"
        refused = CounterMetricFamily(PREFIX + "requests_refused_total", about, labels=[MODEL, "reason"])
        by_model = {"": self._metrics.refused_unnamed} | {model: counts.refused for model, counts in models.items()}
        for model, reasons in by_model.items():
            for reason, count in reasons.items():
                refused.add_metric([model, reason], count)
        yield refused
        for values in _HISTOGRAMS:
            family = HistogramMetricFamily(PREFIX + values.name, values.about, labels=[MODEL])
            for model, counts in models.items():
                _add(family, [model], values.histogram(counts))
            yield family

    def _of_http(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield GaugeMetricFamily(PREFIX + "http_requests_in_flight", "HTTP requests under way", metrics.http_in_flight)
        labels = ["method", "handler", "status"]
        requests = CounterMetricFamily(PREFIX + "http_requests_total", "HTTP requests that ended", labels=labels)
        for (method, handler, status), count in metrics.http_requests.items():
            requests.add_metric([method, handler, str(status)], count)
        yield requests
        about = "From an HTTP request's head to the end of its answer"
        seconds = HistogramMetricFamily(PREFIX + "http_request_duration_seconds", about, labels=["handler"])
        for handler, histogram in metrics.http_seconds.items():
            _add(seconds, [handler], histogram)
        yield seconds


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    names = (*map(floatToGoString, histogram.bounds), "+Inf")
    family.add_metric(labels, list(zip(names, map(float, accumulate(histogram.counts)), strict=True)), histogram.total)


def _usage(stats: EngineStats) -> float:
    num_blocks = stats.used_blocks + stats.cached_blocks + stats.free_blocks
    return stats.used_blocks / num_blocks if num_blocks else 0.0
