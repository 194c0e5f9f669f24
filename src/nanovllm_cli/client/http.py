"""HTTP/1.1 as far as a client of a model's server needs it: one request on one connection, its answer in pieces with their times.

Not a general client: no redirects, no proxies, no compression, no reuse of connections. It exists because a benchmark's client
that costs little disturbs little: a piece takes a third of the time that a general client spends on it, and its time is taken
where the event loop hands the bytes over, before anything looks at them. It is imported in half of the time, too.
`ResponseReader` (RFC 9112) is pure: bytes in, body out; sizes are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from nanovllm_cli.errors import UsageError

MAX_HEAD_BYTES = 64 << 10
MAX_CHUNK_BYTES = 64 << 20

_HEX = frozenset(b"0123456789abcdefABCDEF")


class HttpError(Exception):
    """An answer that is not HTTP, or that ended too early. The message is one line."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where an OpenAI-compatible server is. path: before the endpoint's own, such as /v1. socket: a file, in place of host and
    port."""

    scheme: str
    host: str
    port: int
    path: str
    socket: str | None = None

    @property
    def url(self) -> str:
        if self.socket is not None:
            return f"unix://{self.socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    @classmethod
    def at(cls, url: str) -> Server:
        """http://host:port, with or without /v1; or unix:///path/of/a/socket. Raises UsageError."""
        example = "for example: --url http://127.0.0.1:8080"
        if url.startswith("unix:"):
            path = url.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/") or "\0" in path:
                raise UsageError(f"{url!r} names no socket", "for example: --url unix:///run/nanovllm.sock")
            return cls("http", "localhost", 80, "/v1", path)
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as failure:
            raise UsageError(f"{url!r} is no URL: {failure}", example) from failure
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no URL of a server", example)
        if "@" in parts.netloc:
            raise UsageError("a URL with a name or a password in it", "give the key by --api-key or OPENAI_API_KEY")
        if parts.query or parts.fragment or not all("!" <= c <= "~" for c in parts.path + parts.hostname):
            raise UsageError(f"{url!r} is more than a server's address", example)
        path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        return cls(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80), path)


class ResponseReader:
    """Bytes of a connection in, bytes of the answer's body out. status is 0 until the head is complete."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self.headers: dict[str, str] = {}
        self._buffer = bytearray()
        self._left: int | None = None  # bytes of the body, or of its current chunk, to come; None: until the end
        self._chunked = False
        self._in_trailer = False

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body. Raises HttpError."""
        self._buffer += data
        while not self.status:
            if not self._read_head():
                return b""
        if not self._chunked:
            return self._plain()
        body = bytearray()
        while (part := self._next_part()) is not None:
            body += part
        return bytes(body)

    def end(self) -> None:
        """The connection was closed. Raises HttpError where something is missing."""
        if not self.status:
            raise HttpError("the server closed the connection without an answer")
        if not self.complete and (self._chunked or self._left is not None):
            raise HttpError("the connection was lost in the middle of the answer")
        self.complete = True

    def _read_head(self) -> bool:
        """Whether there was one; where it is an interim answer's, the real one follows, and there is no status yet."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpError(f"a head of more than {MAX_HEAD_BYTES} bytes")
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not (words[1].isdecimal() and len(words[1]) == 3):
            raise HttpError(f"this is not HTTP: {first[:60]!r}")
        status = int(words[1])
        if 100 <= status < 200:
            return True
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status = status
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if length is not None and not self._chunked:
            if not (length.isdecimal() and len(length) < 16):
                raise HttpError(f"a content-length of {length[:30]!r}")
            self._left = int(length)
        elif self._chunked:
            self._left = 0
        return True

    def _plain(self) -> bytes:
        body = bytes(self._buffer if self._left is None else self._buffer[: self._left])
        self._buffer.clear()
        if self._left is not None:
            self._left -= len(body)
            self.complete = self._left == 0
        return body

    def _next_part(self) -> bytes | None:
        """More of the current chunk, or b"" after the line of a new one; None where more bytes are needed."""
        if self.complete:
            return None
        if self._left:
            if not self._buffer:
                return None
            part = bytes(self._buffer[: self._left])
            del self._buffer[: len(part)]
            self._left -= len(part)
            return part
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpError("the line before a chunk has no end")
            return None
        line = bytes(self._buffer[:end]).strip()
        del self._buffer[: end + 1]
        if self._in_trailer:
            self.complete = not line
        elif line:  # an empty one ends the chunk before
            self._begin_chunk(line.split(b";")[0].strip())
        return b""

    def _begin_chunk(self, size: bytes) -> None:
        if not size or len(size) > 8 or not _HEX.issuperset(size) or int(size, 16) > MAX_CHUNK_BYTES:
            raise HttpError(f"a chunk of size {size[:30]!r}")
        self._left = int(size, 16)
        self._in_trailer = self._left == 0


class Piece(NamedTuple):
    """Bytes of a body, and when they came (time.perf_counter)."""

    time: float
    data: bytes


class Exchange:
    """One answer under way."""

    def __init__(self, inbox: _Inbox) -> None:
        self._inbox = inbox
        self._reader = ResponseReader()
        self._first = b""
        self._first_time = 0.0

    @property
    def headers(self) -> Mapping[str, str]:
        return self._reader.headers

    async def status(self) -> int:
        """Waits for the head. Raises HttpError, OSError."""
        while not self._reader.status:
            self._first_time, data = await self._next()
            self._first = self._reader.feed(data)
        return self._reader.status

    async def piece(self) -> Piece | None:
        """More of the body, as it comes; None at its end. Raises HttpError, OSError."""
        await self.status()
        body, self._first = self._first, b""
        moment = self._first_time
        while not body and not self._reader.complete:
            moment, data = await self._next()
            body = self._reader.feed(data)
        return Piece(moment, body) if body else None

    async def read(self, limit: int) -> bytes:
        """The body, at most `limit` bytes of it. Raises HttpError, OSError."""
        content = bytearray()
        while len(content) < limit and (piece := await self.piece()) is not None:
            content += piece.data
        return bytes(content[:limit])

    async def _next(self) -> tuple[float, bytes]:
        arrived = await self._inbox.next()
        if arrived is None:
            self._reader.end()
            return time.perf_counter(), b""
        return arrived


@contextlib.asynccontextmanager
async def exchange(
    server: Server,
    method: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    connect_seconds: float | None = None,
) -> AsyncIterator[Exchange]:
    """Connects, sends one request, and closes the connection at the end. `path` goes behind the server's own.

    Raises HttpError, OSError (no connection, or lost; ssl.SSLError is one).
    """
    context = _certificates() if server.scheme == "https" else None
    loop = asyncio.get_running_loop()
    transport: asyncio.Transport
    try:
        async with asyncio.timeout(connect_seconds):
            if server.socket is not None:
                transport, inbox = await loop.create_unix_connection(_Inbox, server.socket)
            else:
                transport, inbox = await loop.create_connection(_Inbox, server.host, server.port, ssl=context)
    except TimeoutError as failure:
        raise ConnectionError(failure.strerror or f"no connection within {connect_seconds:g} s") from failure
    try:
        default = server.port == (443 if context else 80)
        host = f"[{server.host}]" if ":" in server.host else server.host
        head = {"Host": host if default else f"{host}:{server.port}", "Connection": "close", **headers}
        if body:
            head |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {server.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        yield Exchange(inbox)
    finally:
        transport.abort()


def lost(failure: OSError) -> str:
    """An error of the connection, in one line and few words."""
    if isinstance(failure, ConnectionRefusedError):
        return "connection refused"
    return " ".join((failure.strerror or str(failure) or type(failure).__name__).split())[:200].lower()


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Those that this machine trusts: reading them takes longer than a request may."""
    return ssl.create_default_context()


class _Inbox(asyncio.Protocol):
    """What came over a connection, with the times when it came."""

    def __init__(self) -> None:
        self._arrived: deque[tuple[float, bytes]] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._closed = False
        self._error: Exception | None = None

    def data_received(self, data: bytes) -> None:
        self._arrived.append((time.perf_counter(), data))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed, self._error = True, exc
        self._wake()

    async def next(self) -> tuple[float, bytes] | None:
        """What came next; None at the end. Raises OSError."""
        while not self._arrived:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._arrived.popleft()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
