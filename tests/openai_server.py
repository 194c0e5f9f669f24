"""Not tests: a server that speaks HTTP/1.1 and says what a test tells it to, and when; it writes down when it did so.

A test gives it a coroutine for each request. The server has a thread and an event loop of its own, and time.perf_counter's clock,
which the client shares.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any


@dataclass
class Request:
    """index: which one it is. came: when its head and body were there."""

    index: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    came: float


@dataclass
class Reply:
    """An answer under way. told: when each piece of it was handed to the system, and its text."""

    request: Request
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    told: list[tuple[float, str]] = field(default_factory=list)

    async def raw(self, content: bytes) -> None:
        self.writer.write(content)
        await self.writer.drain()

    async def begin(self, status: str = "200 OK", kind: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n"
        await self.raw(head.encode())

    async def chunk(self, content: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(content), content))

    async def event(self, value: Any) -> None:
        await self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    async def piece(self, text: str, finish: str | None = None) -> None:
        """A piece of an answer, of whichever endpoint was asked."""
        chat = self.request.path.endswith("/chat/completions")
        choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        if text:
            self.told.append((time.perf_counter(), text))
        await self.event({"choices": [{"index": 0, "finish_reason": finish, **choice}]})

    async def usage(self, prompt: int, completion: int) -> None:
        await self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})

    async def done(self) -> None:
        await self.chunk(b"data: [DONE]\n\n")
        await self.raw(b"0\r\n\r\n")

    async def whole(self, status: str, value: Any, *headers: str) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", ""]
        await self.raw("\r\n".join(lines).encode() + content)

    async def gone(self) -> None:
        """Returns when the client has closed the connection."""
        with contextlib.suppress(OSError):
            await self.reader.read()


Script = Callable[[Reply, Request], Awaitable[None]]


class OpenAIServer:
    """`with OpenAIServer(script) as server`: at server.url until the end. replies: all of them, in the order of their requests;
    listed: those to a GET.

    A GET of /v1/models lists `models`; everything else is the script's. socket: a file to listen at, in place of a port.
    """

    def __init__(
        self,
        script: Script,
        models: tuple[str, ...] = ("fake",),
        context: ssl.SSLContext | None = None,
        socket: Path | None = None,
    ) -> None:
        self.replies: list[Reply] = []
        self.listed: list[Reply] = []
        self.most_at_once = 0
        self._running = 0
        self._script = script
        self._models = models
        self._context = context
        self._socket = socket
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> OpenAIServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._stop)
        except asyncio.CancelledError:
            pass
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0.01))  # connections that were closed are gone by then
            self._loop.close()

    async def _serve(self) -> None:
        server: asyncio.Server
        if self._socket is not None:
            server = await asyncio.start_unix_server(self._answer, self._socket)
            self.url = f"unix://{self._socket}"
        else:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=1000, ssl=self._context)
            scheme = "http" if self._context is None else "https"
            self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            method, path, _ = first.split(" ")
            if method == "GET":
                reply = Reply(Request(-1, method, path, headers, None, time.perf_counter()), writer, reader)
                self.listed.append(reply)
                await reply.whole("200 OK", {"object": "list", "data": [{"id": name} for name in self._models]})
                return
            request = Request(len(self.replies), method, path, headers, json.loads(body), time.perf_counter())
            self.replies.append(Reply(request, writer, reader))
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            try:
                await self._script(self.replies[-1], request)
            finally:
                self._running -= 1
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is gone, or the test is over
        finally:
            writer.close()
