"""A collector of OpenTelemetry's spans: what came by OTLP over HTTP, and a wait for what is to come."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

WAIT_SECONDS = 30.0


@dataclass
class Collected:
    """got: the path and body of each request."""

    url: str
    got: list[tuple[str, bytes]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def spans(self, wanted: Callable[[Any], bool]) -> list[Any]:
        """The spans that are wanted, as soon as there is one."""
        with self.changed:
            assert self.changed.wait_for(lambda: self._spans(wanted), WAIT_SECONDS), "no such span came"
            return self._spans(wanted)

    def _spans(self, wanted: Callable[[Any], bool]) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for _, body in self.got]
        scopes = [scope for each in requests for resource in each.resource_spans for scope in resource.scope_spans]
        return [span for scope in scopes for span in scope.spans if wanted(span)]


@contextlib.contextmanager
def otlp_collector() -> Iterator[Collected]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with collected.changed:
                collected.got.append((self.path, body))
                collected.changed.notify_all()
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    collected = Collected(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
