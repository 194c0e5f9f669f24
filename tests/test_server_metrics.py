"""What `/metrics` and `/status.json` say, of requests whose times are written down here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.app import create_app
from nanovllm_cli.server.context import ServerContext
from nanovllm_cli.server.exposition import Exposition
from nanovllm_cli.server.messages import Output, Piece
from nanovllm_cli.server.metrics import Histogram, Metrics
from nanovllm_cli.server.observer import Observer, Observers, Watch
from nanovllm_cli.server.ports import EngineState
from nanovllm_cli.server.routes_metrics import status
from nanovllm_cli.server.settings import ServeSettings
from server_fakes import FakeEngine, FakeGenerates, FakeModels, FakePool

DOCS = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
NAME = "nanovllm:"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(clock)


def drawn(num_tokens: int, index: int = 0, finish: str | None = None) -> Piece:
    return Piece(index, "x" * num_tokens, [7] * num_tokens, finish_reason=finish)  # type: ignore[arg-type]


def samples(metrics: Metrics, models: FakeModels | None = None) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Everything as another program reads it: by name and labels."""
    text = Exposition(metrics, (models or FakeModels("a")).engines).text().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, models: FakeModels | None = None, **labels: str) -> float:
    return samples(metrics, models)[NAME + name, frozenset(({"model_name": "a"} | labels).items())]


def test_a_request_is_told_as_it_went(metrics: Metrics, clock: Clock) -> None:
    watch = metrics.accepted("a", "chat", 40, SamplingParams(), None)
    clock.now += 0.03
    watch.output(Output(1, [], False, 32))  # a chunk of the prompt
    clock.now += 0.05
    watch.output(Output(1, [drawn(1)], False, 32, times=(0.02, 0.07, None)))
    clock.now += 0.3
    watch.output(Output(1, [drawn(3)], False, 32, 1, 8, 2, times=(0.02, 0.07, None)))  # three tokens, which were joined
    clock.now += 0.02
    watch.output(Output(1, [drawn(1, finish="length")], True, 32, 2, 12, 3, times=(0.02, 0.07, 0.39)))
    watch.end()
    expected = {
        "prompt_tokens_total": 40, "generation_tokens_total": 5, "prefix_cache_queries_total": 40, "prefix_cache_hits_total": 32,
        "num_preemptions_total": 2, "spec_decode_num_draft_tokens_total": 12, "spec_decode_num_accepted_tokens_total": 3,
        "time_to_first_token_seconds_count": 1, "time_to_first_token_seconds_sum": 0.08,
        "inter_token_latency_seconds_count": 4, "inter_token_latency_seconds_sum": 0.32, "e2e_request_latency_seconds_sum": 0.4,
        "request_queue_time_seconds_sum": 0.02, "request_prefill_time_seconds_sum": 0.05,
        "request_decode_time_seconds_sum": 0.32, "request_prompt_tokens_sum": 40, "request_generation_tokens_sum": 5,
    }  # fmt: skip
    for name, number in expected.items():
        assert value(metrics, name) == pytest.approx(number), name
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.075") == 1  # the last one alone
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.1") == 4


def test_each_answer_of_a_request_has_its_own_gaps_and_end(metrics: Metrics, clock: Clock) -> None:
    watch = metrics.accepted("a", "chat", 5, SamplingParams(n=3), None)
    watch.output(Output(1, [drawn(1, 0), drawn(1, 1)], False, 0))
    clock.now += 1
    watch.output(Output(1, [drawn(1, 0, "stop"), drawn(1, 2)], False, 0))  # answer 2 starts: no gap before its first token
    clock.now += 1
    watch.output(Output(1, [drawn(1, 1, "length")], False, 0))
    watch.end()
    assert value(metrics, "inter_token_latency_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(1 + 2)
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    ended = [value(metrics, "request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort", "error")]
    assert ended == [1, 1, 1, 0]
    assert value(metrics, "e2e_request_latency_seconds_count") == 0


@pytest.mark.parametrize(("error", "reason"), [(None, "abort"), (ApiError(503, "the engine died"), "error")])
def test_a_request_without_an_end_is_an_abort_or_an_error(metrics: Metrics, error: ApiError | None, reason: str) -> None:
    watch = metrics.accepted("a", "chat", 5, SamplingParams(n=2), None)
    watch.end(error)
    assert value(metrics, "request_success_total", finished_reason=reason) == 2
    assert value(metrics, "prompt_tokens_total") == 0


def test_what_its_engine_does_not_take_is_no_answer_that_failed(metrics: Metrics) -> None:
    error = ApiError(400, "priorities mean nothing")
    error.by_engine = True
    metrics.accepted("a", "chat", 5, SamplingParams(n=2), None).end(error)
    ended = [value(metrics, "request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort", "error")]
    assert ended == [0, 0, 0, 0]


def test_answers_that_their_clients_rules_cut_have_stopped(metrics: Metrics) -> None:
    watch = metrics.accepted("a", "text_completion", 5, SamplingParams(n=2), None)
    watch.output(Output(1, [drawn(1, 0, "length"), drawn(1, 1)], False, 0))
    watch.cut()
    watch.end()
    ended = [value(metrics, "request_success_total", finished_reason=reason) for reason in ("stop", "length", "abort")]
    assert ended == [1, 1, 0]


def test_embeddings_count_their_prompts(metrics: Metrics) -> None:
    read = metrics.accepted("a", "embeddings", 17, None, None)
    read.embedded()
    read.end()
    metrics.accepted("a", "embeddings", 23, None, None).end()  # its client left
    metrics.accepted("a", "embeddings", 19, None, None).end(ApiError(503, "no"))
    assert value(metrics, "prompt_tokens_total") == 17
    assert [value(metrics, "request_success_total", finished_reason=how) for how in ("stop", "abort", "error")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ApiError(429, "full", retry_after=1), "overloaded"),
        (ApiError(503, "loading"), "unavailable"),
        (ApiError(400, "long", code="context_length_exceeded"), "context_length"),
        (ApiError(400, "bad"), "invalid"),
        (ApiError(404, "no such model"), "invalid"),
    ],
)
def test_refusals_have_few_reasons(metrics: Metrics, error: ApiError, reason: str) -> None:
    metrics.refused("a", error)
    metrics.refused(None, error)
    assert value(metrics, "requests_refused_total", reason=reason) == 1
    assert value(metrics, "requests_refused_total", reason=reason, model_name="") == 1


def test_what_an_engine_forgets_when_it_dies_the_server_remembers(metrics: Metrics) -> None:
    models = FakeModels("a")
    engine = models.served["a"].engine
    assert isinstance(engine, FakeEngine)
    engine.stats = EngineStats(3, 4, 10, 20, 10, 5, 6, 7, 8, 9)
    watch = metrics.accepted("a", "chat", 5, SamplingParams(), None)
    watch.output(Output(1, [drawn(2)], False, 0, 6))
    assert value(metrics, "num_requests_running", models) == 3
    assert value(metrics, "num_requests_waiting", models) == 4
    assert value(metrics, "kv_cache_usage_perc", models) == 0.5
    assert [value(metrics, "kv_cache_blocks", models, state=state) for state in ("used", "cached", "free")] == [20, 10, 10]
    engine.stats, engine.state = None, EngineState.RESTARTING
    watch.end(ApiError(503, "the engine died"))
    metrics.engine_restarted("a")
    assert (NAME + "num_requests_running", frozenset({("model_name", "a")})) not in samples(metrics, models)
    assert value(metrics, "engine_state", models, state="restarting") == 1
    assert value(metrics, "engine_state", models, state="ready") == 0
    engine.stats = EngineStats(0, 0, 40, 0, 0, 0, 0, 0, 0, 0)
    assert value(metrics, "generation_tokens_total", models) == 2
    assert value(metrics, "num_preemptions_total", models) == 6
    assert value(metrics, "engine_restarts_total", models) == 1


def test_labels_of_http_are_few_whatever_clients_send(metrics: Metrics) -> None:
    metrics.http_started()
    for i in range(100):
        metrics.http_started()
        metrics.http_ended(f"BREW{i}", None, 404, 0.001)
    metrics.http_started()
    metrics.http_ended("GET", "/v1/models/{model}", 200, 0.5)
    of_http = {key: number for key, number in samples(metrics).items() if key[0] == NAME + "http_requests_total"}
    others = frozenset({("method", "other"), ("handler", "none"), ("status", "404")})
    known = frozenset({("method", "GET"), ("handler", "/v1/models/{model}"), ("status", "200")})
    assert of_http == {(NAME + "http_requests_total", others): 100, (NAME + "http_requests_total", known): 1}
    assert samples(metrics)[NAME + "http_requests_in_flight", frozenset()] == 1


def test_names_in_labels_are_escaped(metrics: Metrics) -> None:
    name = 'a"}\n\\ evil 1'
    metrics.accepted(name, "chat", 3, SamplingParams(), None).end()
    assert value(metrics, "request_success_total", FakeModels(name), model_name=name, finished_reason="abort") == 1


def test_buckets_hold_what_numpy_counts() -> None:
    bounds = (0.1, 0.5, 1.0, 7.5)
    values = [0.0, 0.1, 0.100001, 0.5, 0.9, 1.0, 7.5, 7.6, 1e9]
    histogram = Histogram(bounds)
    for number in values:
        histogram.observe(number)
    below = [int(np.count_nonzero(np.array(values) <= bound)) for bound in (*bounds, np.inf)]
    assert list(np.cumsum(histogram.counts)) == below
    assert histogram.total == pytest.approx(sum(values))


def test_docs_name_every_metric_and_nothing_else(metrics: Metrics) -> None:
    metrics.http_started()
    metrics.http_ended("GET", "/health", 200, 0.1)
    text = Exposition(metrics, FakeModels("a").engines).text().decode()
    told: dict[str, tuple[str, frozenset[str]]] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(NAME):
            labels = frozenset(family.samples[0].labels) - {"le"}
            told[family.name + ("_total" if family.type == "counter" else "")] = (family.type, labels)
    written: dict[str, tuple[str, frozenset[str]]] = {}
    for name, kind, labels in re.findall(r"^\| `(nanovllm:\w+)` \| (\w+) \| ([^|]*)\|", DOCS.read_text(), re.MULTILINE):
        model = [] if "no model" in labels else ["model_name"]
        written[name] = (kind, frozenset([*re.findall(r"`(\w+)`", labels), *model]))
    assert written == told


def test_several_observers_see_the_same(clock: Clock) -> None:
    one, two = Metrics(clock), Metrics(clock)
    both = Observers([one, two])
    watch = both.accepted("a", "chat", 5, SamplingParams(), None)
    watch.output(Output(1, [drawn(1, finish="stop")], True, 0))
    watch.end()
    both.refused(None, ApiError(429, "full"))
    both.engine_restarted("a")
    both.http_started()
    both.http_ended("GET", None, 401, 0.1)
    of_process = re.compile("process_")
    assert {k: v for k, v in samples(one).items() if not of_process.match(k[0])} == {
        k: v for k, v in samples(two).items() if not of_process.match(k[0])
    }
    assert value(two, "generation_tokens_total") == 1
    assert isinstance(Observer().accepted("a", "chat", 5, None, None), Watch)


def test_status_has_the_numbers_of_metrics_and_percentiles_of_recent_requests(metrics: Metrics, clock: Clock) -> None:
    models = FakeModels("a", "b")
    rng = np.random.default_rng(5)
    waits, gaps = rng.exponential(0.2, 300), rng.exponential(0.05, 300)
    for wait, gap in zip(waits, gaps, strict=True):
        watch = metrics.accepted("a", "chat", 5, SamplingParams(), None)
        clock.now += float(wait)
        watch.output(Output(1, [drawn(1)], False, 3, times=(float(wait) / 2, float(wait), None)))
        clock.now += float(gap) * 4
        watch.output(Output(1, [drawn(4, finish="stop")], True, 3, times=(float(wait) / 2, float(wait), float(wait + 4 * gap))))
        watch.end()
    shown = status(metrics, models)
    assert [model["id"] for model in shown["models"]] == ["a", "b"]
    a, b = shown["models"]
    assert a["generation_tokens"] == value(metrics, "generation_tokens_total", models) == 1500
    assert a["prefix_cache"] == {"queries": 1500, "hits": 900}
    assert a["finished"] == {"stop": 300, "length": 0, "repetition": 0, "abort": 0, "error": 0}
    assert a["latencies"]["of"] == 256
    recent = {"first_token": waits, "next_token": gaps, "queue": waits / 2, "whole": waits + 4 * gaps}
    for name, numbers in recent.items():
        for percent in (50, 95):
            expected = np.percentile(numbers[-256:], percent, method="inverted_cdf")
            assert a["latencies"][name][f"p{percent}"] == pytest.approx(expected), name
    assert b["latencies"] == {"of": 0, "queue": None, "first_token": None, "next_token": None, "whole": None}
    assert shown["seconds"] == pytest.approx(clock.now - 100)


@pytest.fixture
def client(metrics: Metrics) -> Iterator[TestClient]:
    models = FakeModels("a")
    context = ServerContext(ServeSettings(max_requests=1), models, FakeGenerates(models=models), FakePool(), metrics, metrics)
    with TestClient(create_app(context), "http://localhost") as client:
        yield client


def test_routes_answer_as_prometheus_and_the_page_expect(client: TestClient, metrics: Metrics) -> None:
    metrics.accepted("a", "chat", 5, SamplingParams(), None).output(Output(1, [drawn(2)], False, 0))
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'nanovllm:generation_tokens_total{model_name="a"} 2.0' in answer.text
    shown = client.get("/status.json").json()
    assert shown["models"][0]["generation_tokens"] == 2
    assert shown["models"][0]["blocks"] == {"used": 0, "cached": 0, "free": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2}),
        ("/v1/completions", {"prompt": "hi", "suffix": "there"}),
        ("/v1/embeddings", {"input": "hi", "dimensions": 100_000}),
        ("/v1/responses", {"input": "hi", "text": {"verbosity": "low"}}),
    ],
)
def test_what_no_model_takes_is_counted(client: TestClient, metrics: Metrics, path: str, body: dict[str, Any]) -> None:
    assert client.post(path, json={**body, "model": "a"}).status_code == 400
    assert client.post(path, json={**body, "model": "stranger"}).status_code == 404
    for model in ("a", ""):
        assert value(metrics, "requests_refused_total", reason="invalid", model_name=model) == 1


def test_what_the_door_turns_away_is_counted_and_watching_goes_on(client: TestClient, metrics: Metrics) -> None:
    gate = client.app.state.gate  # type: ignore[attr-defined]
    with gate.passing():
        assert client.get("/v1/models").status_code == 429
        assert client.get("/metrics").status_code == 200
        assert client.get("/status.json").json()["http"]["in_flight"] == 1
    gate.draining = True
    assert client.get("/v1/models").status_code == 503
    gate.draining = False
    assert client.get("/v1/models/a%2f..%2f" + "b" * 50).status_code == 404
    assert value(metrics, "requests_refused_total", reason="overloaded", model_name="") == 1
    assert value(metrics, "requests_refused_total", reason="unavailable", model_name="") == 1
    handlers = {labels for name, labels in samples(metrics) if name == NAME + "http_requests_total"}
    assert {dict(labels)["handler"] for labels in handlers} == {"none", "/metrics", "/status.json", "/v1/models/{model:path}"}
