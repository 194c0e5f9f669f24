"""GuardedProtocol: uvicorn's HTTP over httptools, with the limits that it leaves to a proxy in front.

    the head        its bytes (431) and how long it takes (408), on new and on idle connections; an offer to change to another
                    protocol (h2c, from Java's own client with every request) is left out of it, as HTTP allows
    the body        what chunks cost beside their content, trailers, and what still comes when the answer is already out
    the answer      a client that leaves while more of its requests wait, or stops reading the end of it; its head and what
                    comes with it are one packet; to HTTP/1.0, whose clients know no chunks, its end is the connection's

How long a body may take and how large it may be is known where it is read (routing.py).
"""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.errors import openai_form
from nanovllm_cli.server.middleware import REFUSED, new_id
from nanovllm_cli.server.settings import ServeSettings
from nanovllm_cli.server.sse import ABORT

LINGER_SECONDS, LINGER_BYTES = 2.0, 1 << 20
"""How long, and how far, a refused client is listened to, so that it reads why before its connection is reset."""

_CHUNK_ALLOWANCE = 16
_OTHER_FILES = 32
"""Open files that are no connections: to start an engine takes some, too."""


def protocol_for(settings: ServeSettings) -> type[GuardedProtocol]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = settings.max_connections
    if files != resource.RLIM_INFINITY:
        most = min(most, max(1, files - _OTHER_FILES))
    return type("Protocol", (GuardedProtocol,), {"settings": settings, "max_connections": most})


class GuardedProtocol(HttpToolsProtocol):
    settings: ServeSettings
    max_connections: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.settings.idle_seconds  # type: ignore[assignment]
        self._timer: asyncio.TimerHandle | None = None
        self._overhead = 0
        self._in_head = False
        self._refused = False
        self._unsent: int | None = None
        self._answering: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(self.settings.header_seconds, self._head_is_late)
        if len(self.connections) > self.max_connections:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._unset_keepalive_if_required()
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # uvicorn tells the last request of the connection, which may still wait
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._overhead += len(data)
        if self._refused:
            if self._overhead > LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._overhead > self.settings.max_header_bytes and not self._refused and not self.transport.is_closing():
            self._refuse(self._too_large() if self._in_head else ApiError(400, "the body is mostly not its content"))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # the parser takes what is behind the head for the other protocol
                if self.parser.get_method() == b"CONNECT":
                    self.send_400_response("")
                    return
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # the other one has ended where the head says that it is the last
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._overhead, self._in_head = 0, True
        if self._timer is None:
            self._set_timer(self.settings.header_seconds, self._head_is_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            raise ValueError("trailers")  # the parser makes a 400 of it
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it comes again, without the offer
        self._set_timer(None)
        self._overhead, self._in_head = 0, False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.settings.max_header_bytes:
            cast(dict[str, Any], self.scope)[REFUSED] = self._too_large()
        cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, Together(self.transport, self.loop))
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, UntilClosed()

    def on_body(self, body: bytes) -> None:
        self._overhead -= len(body) + _CHUNK_ALLOWANCE
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._overhead = 0
        if self.cycle.response_complete:
            self._set_timer(None)
            self._wait_idle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._set_timer(LINGER_SECONDS, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and (self._unsent is None or left < self._unsent):
            self._unsent = left
            self._wait_idle()
        elif left:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP as the server knows it", code="invalid_http"))

    def _wait_idle(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.settings.idle_seconds, self.timeout_keep_alive_handler)

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_timer(self.settings.header_seconds, self._head_is_late)
        elif self._in_head:
            self._refuse(ApiError(408, f"the head did not arrive within {self.settings.header_seconds:g} seconds"))
        else:
            self.transport.close()

    def _too_large(self) -> ApiError:
        return ApiError(431, f"the headers have more than {self.settings.max_header_bytes} bytes", code="headers_too_large")

    def _refuse(self, error: ApiError) -> None:
        """Answers from below ASGI, where no request has come to be; then only listens until the client is gone."""
        self._refused, self._overhead = True, 0
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started or self.pipeline or self._in_head:
                self.transport.abort()  # another answer is on its way
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        request_id = new_id()
        body = msgspec.json.encode(openai_form(error))
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(LINGER_SECONDS, self.transport.abort)

    def _set_timer(self, seconds: float | None, then: Any = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, then)


class UntilClosed(int):
    """How many bytes of an answer are still to come, where nobody says: never too few, and at the end none."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> UntilClosed:
        return self


class Together:
    """What uvicorn writes an answer to. The first piece, its head, waits for the next one of the same round of the event loop:
    much of what a short answer costs is the system's `send`."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = None
        self.write = self._hold

    def _hold(self, data: bytes) -> None:
        self._head, self.write = data, self._join
        self._loop.call_soon(self._flush)

    def _join(self, data: bytes) -> None:
        head, self._head, self.write = self._head, None, self._transport.write
        self._transport.write(data if head is None else head + data)

    def _flush(self) -> None:
        if self._head is not None and not self._transport.is_closing():
            self._join(b"")

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()
