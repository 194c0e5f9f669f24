"""OpenTelemetry: a span for each request to an engine, sent to a collector by OTLP over HTTP. Needs the extra `otel`.

A span is called llm_request. Its attributes are OpenTelemetry's for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/),
and vLLM's gen_ai.latency.time_in_queue. It belongs to the trace that the request's `traceparent` names. Nothing that a person
wrote is in it: no prompt, no answer, no stop string, no tool.

Besides the option, OpenTelemetry's own variables hold: OTEL_EXPORTER_OTLP_ENDPOINT, _HEADERS, _CERTIFICATE and so on,
OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_SDK_DISABLED.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from nanovllm_cli import __version__
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.messages import Output
from nanovllm_cli.server.observer import Observer, Operation, Watch
from nanovllm_cli.server.ports import Caller

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

SERVICE = "nanovllm"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
INSTALL = "pip install 'nanovllm-cli[otel]'"
CLOSING_SECONDS = 5.0
MAX_HEADER = 1024

Attribute = str | int | float

logger = logging.getLogger(__name__)


def tracing(endpoint: str | None, environ: Mapping[str, str]) -> Tracing | None:
    """Tracing, if `--otlp-endpoint` or the environment asks for it.

    endpoint: a collector's base address (http://localhost:4318, spans go to /v1/traces under it), or the whole address.
    Raises UsageError for what is no address, UnsupportedError where OpenTelemetry is not installed; where only the environment
    asked for it, which may speak to other programs, that is a warning.
    """
    if endpoint is None and not any(environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    address = None if endpoint is None else _traces_address(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        if address is None:
            logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but OpenTelemetry is not installed: %s", INSTALL)
            return None
        raise UnsupportedError("--otlp-endpoint needs OpenTelemetry, which is not installed", INSTALL) from None
    return Tracing(OTLPSpanExporter(endpoint=address))


class Tracing(Observer):
    """Spans, in batches, from a thread of its own; what the collector does not take in time is dropped. close() it."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {"service.name": SERVICE, "service.version": __version__} | dict(OTELResourceDetector().detect().attributes)
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE, __version__)
        self._propagator = TraceContextTextMapPropagator()

    def accepted(
        self, model: str, operation: Operation, prompt_len: int, params: SamplingParams | None, caller: Caller | None
    ) -> Watch:
        began = time.monotonic()  # the engine has it; a first span may take longer to make than its first token
        from opentelemetry.trace import SpanKind

        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": prompt_len,
        }
        carrier: dict[str, str] = {}
        if caller is not None:
            attributes["gen_ai.request.id"] = caller.request_id
            headers = {"traceparent": caller.traceparent, "tracestate": caller.tracestate}
            carrier = {name: value for name, value in headers.items() if value is not None and len(value) <= MAX_HEADER}
        if params is not None:
            attributes |= _sampling(params)
        context = self._propagator.extract(carrier)
        span = self._tracer.start_span("llm_request", context, SpanKind.SERVER, attributes)
        return _Watch(span, began, 1 if params is None else params.n) if span.is_recording() else Watch()

    def flush(self) -> bool:
        """Sends what is there now. False where that failed."""
        return self._provider.force_flush()

    def close(self) -> None:
        """Sends what is left, and waits a few seconds for that at the most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(CLOSING_SECONDS)


class _Watch(Watch):
    def __init__(self, span: Span, began: float, num_answers: int) -> None:
        self._span = span
        self._num_answers = num_answers
        self._start = began
        self._num_tokens = 0
        self._reasons: dict[int, str] = {}
        self._last: Output | None = None

    def output(self, output: Output) -> None:
        self._last = output
        for piece in output.pieces:
            if piece.token_ids and not self._num_tokens:
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._start)
            self._num_tokens += len(piece.token_ids)
            if piece.finish_reason is not None:
                self._reasons[piece.index] = piece.finish_reason

    def cut(self) -> None:
        self._reasons = {index: self._reasons.get(index, "stop") for index in range(self._num_answers)}

    def end(self, error: ApiError | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        span, last = self._span, self._last
        span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)
        span.set_attribute("gen_ai.response.finish_reasons", [self._reasons[index] for index in sorted(self._reasons)])
        if last is not None:
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", last.num_cached_tokens)
            span.set_attribute("nanovllm.preemptions", last.num_preemptions)
            if last.times[0] is not None:
                span.set_attribute("gen_ai.latency.time_in_queue", last.times[0])
        if error is not None:
            span.set_attribute("error.type", error.label)
            span.set_status(Status(StatusCode.ERROR))
        span.end()


def _sampling(params: SamplingParams) -> dict[str, Attribute]:
    values: dict[str, Attribute | None] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "max_tokens": params.max_tokens,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "seed": None if params.seed is None or params.seed >= 1 << 63 else params.seed,  # an attribute has 64 bits with a sign
        "choice.count": params.n,
    }
    return {f"gen_ai.request.{name}": value for name, value in values.items() if value is not None}


def _traces_address(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        well_formed = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        well_formed = False
    if not well_formed:
        raise UsageError(f"--otlp-endpoint {endpoint!r} is not an address", "for example http://localhost:4318")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
