"""Spans: in memory, and as a collector gets them over HTTP."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server import tracing as tracing_module
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.messages import Output, Piece
from nanovllm_cli.server.ports import Caller
from nanovllm_cli.server.tracing import Tracing, tracing
from otlp_collector import Collected, otlp_collector

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"  # the example of W3C Trace Context
NOT_RECORDED = f"00-{TRACE}-00f067aa0ba902b7-00"
SECRET = "SECRET-STOP"
CALLER = Caller("req-7", "tenant", PARENT, "congo=t61rcWkgMzE")
PARAMS = SamplingParams(temperature=0.5, top_p=0.9, top_k=3, max_tokens=12, seed=2**64 - 1, stop=(SECRET,), n=2)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    return InMemorySpanExporter()


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    observer = Tracing(exporter)
    yield observer
    observer.close()


def run(observer: Tracing, caller: Caller | None, error: ApiError | None = None) -> None:
    watch = observer.accepted("tiny", "chat", 40, PARAMS, caller)
    watch.output(Output(1, [Piece(1, SECRET, [4, 5], finish_reason="length")], False, 32, 1, times=(0.25, 0.5, None)))
    watch.output(Output(1, [Piece(0, SECRET, [6], finish_reason="stop")], True, 32, 2, times=(0.25, 0.5, 0.75)))
    watch.end(error)


def only(observer: Tracing, exporter: InMemorySpanExporter) -> ReadableSpan:
    assert observer.flush()
    (span,) = exporter.get_finished_spans()
    return span


def test_a_request_is_a_span_of_the_callers_trace(traced: Tracing, exporter: InMemorySpanExporter) -> None:
    run(traced, CALLER)
    span = only(traced, exporter)
    attributes = dict(span.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") >= 0  # type: ignore[operator]
    assert attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "nanovllm", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.request.id": "req-7", "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 32, "nanovllm.preemptions": 2,
        "gen_ai.response.finish_reasons": ("stop", "length"), "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.9, "gen_ai.request.top_k": 3,
        "gen_ai.request.max_tokens": 12, "gen_ai.request.frequency_penalty": 0.0, "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.choice.count": 2,
    }  # fmt: skip
    assert span.name == "llm_request"
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert span.context.trace_state.get("congo") == "t61rcWkgMzE"
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "nanovllm"
    assert SECRET not in span.to_json()


@pytest.mark.parametrize("traceparent", [None, "", "nonsense", PARENT[:-1], "ff" + PARENT[2:], PARENT + "x" * 10000, "é" * 55])
def test_a_bad_traceparent_begins_a_trace(traced: Tracing, exporter: InMemorySpanExporter, traceparent: str | None) -> None:
    run(traced, Caller("r", None, traceparent, "=" * 5000))
    span = only(traced, exporter)
    assert span.parent is None
    assert dict(span.attributes or {})["gen_ai.usage.output_tokens"] == 3


def test_what_the_caller_does_not_record_is_not_recorded(traced: Tracing, exporter: InMemorySpanExporter) -> None:
    run(traced, Caller("r", None, NOT_RECORDED))
    assert traced.flush()
    assert exporter.get_finished_spans() == ()


def test_a_failed_request_is_an_error_without_its_text(traced: Tracing, exporter: InMemorySpanExporter) -> None:
    run(traced, None, ApiError(503, f"{SECRET} died", code="engine_died"))
    span = only(traced, exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "engine_died"
    assert SECRET not in span.to_json()


def test_an_answer_that_its_clients_rules_cut_has_stopped(traced: Tracing, exporter: InMemorySpanExporter) -> None:
    watch = traced.accepted("tiny", "text_completion", 40, PARAMS, None)
    watch.output(Output(1, [Piece(1, "", [4, 5], finish_reason="length"), Piece(0, "", [6])], False, 32))
    watch.cut()
    watch.end()
    assert (only(traced, exporter).attributes or {})["gen_ai.response.finish_reasons"] == ("stop", "length")


def test_embeddings_have_no_sampling(traced: Tracing, exporter: InMemorySpanExporter) -> None:
    traced.accepted("tiny", "embeddings", 9, None, None).end()
    attributes = dict(only(traced, exporter).attributes or {})
    assert attributes["gen_ai.operation.name"] == "embeddings"
    assert not [name for name in attributes if "temperature" in name]


@pytest.fixture
def collector() -> Iterator[Collected]:
    with otlp_collector() as collected:
        yield collected


@pytest.mark.parametrize(("suffix", "path"), [("", "/v1/traces"), ("/", "/v1/traces"), ("/own/traces", "/own/traces")])
def test_a_collector_gets_the_span(collector: Collected, suffix: str, path: str) -> None:
    observer = tracing(collector.url + suffix, {})
    assert observer is not None
    run(observer, CALLER)
    observer.close()
    ((sent_to, body),) = collector.got
    assert sent_to == path
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert span.name == "llm_request"
    assert span.trace_id.hex() == TRACE
    numbers = {each.key: each.value.int_value for each in span.attributes}
    assert (numbers["gen_ai.usage.input_tokens"], numbers["gen_ai.usage.output_tokens"]) == (40, 3)
    assert span.start_time_unix_nano <= span.end_time_unix_nano
    assert SECRET.encode() not in body


def test_the_environment_asks_for_it_too(collector: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    observer = tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url})
    assert observer is not None
    run(observer, None)
    observer.close()
    ((_, body),) = collector.got
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert "my-service" in {each.value.string_value for each in resource.resource.attributes if each.key == "service.name"}


def test_a_dead_collector_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # for good: it goes on in the background
    monkeypatch.setattr(tracing_module, "CLOSING_SECONDS", 0.2)
    observer = tracing("http://127.0.0.1:9", {})
    assert observer is not None
    run(observer, CALLER)
    observer.close()


def test_nobody_asks_for_it() -> None:
    assert tracing(None, {}) is None
    assert tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "", "http://x:0", "http://x:99999", "http://[::1"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="otlp-endpoint"):
        tracing(endpoint, {})


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UnsupportedError) as raised:
        tracing("http://localhost:4318", {})
    assert raised.value.hint == "pip install 'nanovllm-cli[otel]'"
    with caplog.at_level(logging.WARNING):
        assert tracing(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}) is None
    assert "nanovllm-cli[otel]" in caplog.text
