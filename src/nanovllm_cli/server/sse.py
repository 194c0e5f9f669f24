"""Answers that take a while: as a stream of events, or whole. In both the client's leaving is seen at once, and ends the work.

A stream's events are server-sent ones, or lines of JSON (Ollama's). It is an async generator of bytes, frames that are ready to
be sent. It does its work inside itself (`async with generation`), so that closing it is all the cleaning up there is, and what it
raises before its first frame is an HTTP error.

    async def frames() -> AsyncGenerator[bytes, None]:
        async with context.generation(model, asked, exchange) as generation:
            async for events in generation:
                yield b"".join(map(frame, events))

    return EventStream(frames(), ping_seconds=…, write_seconds=…)
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm_cli.server.api_error import ApiError, late
from nanovllm_cli.server.errors import as_api_error, openai_form
from nanovllm_cli.server.exchange import SCOPE_KEY, Exchange

logger = logging.getLogger(__name__)

ABORT = "nanovllm.abort"
"""In a scope: a function that resets the connection. Closing it would wait for the client to take what was written."""

LAST_WORDS_SECONDS = 5.0
"""For an error at the end of a stream whose time is over."""

DONE = b"data: [DONE]\n\n"
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Framing(NamedTuple):
    """How the pieces of a stream are told apart. ping: what may stand between two of them and means nothing."""

    content_type: bytes
    ping: bytes


EVENTS = Framing(b"text/event-stream; charset=utf-8", b": ping\n\n")
LINES = Framing(b"application/x-ndjson", b" ")
"""A blank at the beginning of a line of JSON is part of it to every reader; an empty line would be no JSON to most."""

Frames = AsyncGenerator[bytes, None]
T = TypeVar("T")


def data_frame(value: Any) -> bytes:
    """`data: …` with a value as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def line_frame(value: Any) -> bytes:
    """A value as a line of JSON."""
    return msgspec.json.encode(value) + b"\n"


def named_frame(name: str, value: Any) -> bytes:
    """The same behind `event: …`."""
    return b"event: " + name.encode() + b"\n" + data_frame(value)


async def named_frames(steps: AsyncGenerator[Sequence[Mapping[str, Any]], None]) -> AsyncGenerator[bytes, None]:
    """A frame for each event, by its type; those of a step together."""
    async with aclosing(steps):
        async for events in steps:
            yield b"".join([named_frame(event["type"], event) for event in events])


async def read_through(steps: AsyncGenerator[Any, None]) -> None:
    """To the end, for who wants only what comes of it."""
    async with aclosing(steps):
        async for _ in steps:
            pass


def openai_error_frames(error: ApiError) -> bytes:
    return data_frame(openai_form(error)) + DONE


class EventStream(Response):
    """Sends frames as they come. Status 200 is said with the first one, or with the first ping; an exception before that is
    raised to the caller, one behind it is sent as `error_frames`, and ends the stream. So does the request's limit (`Exchange`).

    ping_seconds: a sign of life is sent when nothing was for so long. write_seconds: a client that takes nothing for so long is
    dropped.
    """

    def __init__(
        self,
        frames: Frames,
        *,
        ping_seconds: float = 15.0,
        write_seconds: float = 30.0,
        error_frames: Callable[[ApiError], bytes] = openai_error_frames,
        framing: Framing = EVENTS,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-type", framing.content_type), *_HEADERS]
        self._ping = framing.ping
        self._frames = frames
        self._error_frames = error_frames
        self._ping_seconds, self._write_seconds = ping_seconds, write_seconds
        self._begun = self._ended = False
        self._sending = False
        self._since = time.monotonic()  # when sending last began or ended
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange | None = scope.get(SCOPE_KEY)
        over = asyncio.create_task(_until(_put_off(exchange)))
        pump = asyncio.create_task(self._pump(send, exchange))
        gone, stalled = asyncio.create_task(_until_gone(receive)), asyncio.create_task(self._watch_clock(send))
        try:
            await asyncio.wait([pump, gone, stalled, over], return_when=asyncio.FIRST_COMPLETED)
            is_late = over.done() and not (pump.done() or gone.done() or stalled.done())
            if stalled.done() and ABORT in scope:
                scope[ABORT]()
        finally:
            await _cancel(pump, gone, stalled, over)
            await self._frames.aclose()
        if not pump.cancelled():
            pump.result()
        elif is_late and exchange is not None:
            try:
                async with asyncio.timeout(min(LAST_WORDS_SECONDS, self._write_seconds)):
                    await self._end_late(send, exchange)
            except TimeoutError:
                if ABORT in scope:
                    scope[ABORT]()

    async def _end_late(self, send: Send, exchange: Exchange) -> None:
        error = late(exchange.seconds or 0.0)
        if not self._begun:
            raise error
        exchange.error = error.label
        await self._send(send, self._error_frames(error))
        await self._send(send, b"", more=False)

    async def _pump(self, send: Send, exchange: Exchange | None) -> None:
        try:
            async for frame in self._frames:
                await self._send(send, frame)
        except Exception as error:
            if not self._begun:
                raise
            told = as_api_error(error)
            if exchange is not None:
                exchange.error = told.label
                if told.status == 500 and told is not error:
                    logger.error("request %s failed: %s", exchange.request_id, type(error).__name__, exc_info=error)
            await self._send(send, self._error_frames(told))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        async with self._turn:
            if self._ended:  # a sign of life that came due meanwhile
                return
            self._ended = not more
            self._sending, self._since = True, time.monotonic()
            if not self._begun:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._begun = True
            await send({"type": "http.response.body", "body": body, "more_body": more})
            self._sending, self._since = False, time.monotonic()

    async def _watch_clock(self, send: Send) -> None:
        """Pings. Ends where a frame is not taken for too long."""
        while True:
            limit = self._write_seconds if self._sending else math.inf if self._ended else self._ping_seconds
            left = self._since + limit - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, self._write_seconds))
            elif self._sending:
                logger.info("a client took nothing of its stream for %g seconds", self._write_seconds)
                return
            else:
                await self._send(send, self._ping)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; if the client leaves first, work is cancelled, and ClientDisconnect raised."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
    finally:
        await _cancel(task, watcher)
    return task.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _put_off(exchange: Exchange | None) -> float | None:
    """When the request's limit is, which is put off a little for the last words, before anything is sent that would need them.
    Raises what a request gets that is late already."""
    if exchange is None or exchange.limit is None or (when := exchange.limit.when()) is None:
        return None
    if when <= asyncio.get_running_loop().time():
        raise late(exchange.seconds or 0.0)
    exchange.limit.reschedule(when + 2 * LAST_WORDS_SECONDS)
    return when


async def _until(when: float | None) -> None:
    """A time of the loop's clock, which never comes where there is none."""
    if when is None:
        await asyncio.Event().wait()
    else:
        await asyncio.sleep(when - asyncio.get_running_loop().time())


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
