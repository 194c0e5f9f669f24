"""An engine process as the event loop sees it: started, watched, and started again when it dies.

When it dies, requests that were running end with an error; new ones are told to come back (503) until it is there again, which is
tried after half a second, then after twice as long each time, up to half a minute. Other models are not affected.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from nanovllm_cli import errors
from nanovllm_cli.children import child_environment
from nanovllm_cli.config import Lora
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.outputs import EngineStats
from nanovllm_cli.errors import NanovllmError, PromptTooLongError
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.server.api_error import ApiError, draining
from nanovllm_cli.server.engine_stream import EngineStream
from nanovllm_cli.server.messages import (
    HEADER,
    Abort,
    Embed,
    Embedded,
    Facts,
    Failed,
    FromEngine,
    Generate,
    Keep,
    Kept,
    Loading,
    Ready,
    Refused,
    Start,
    Step,
    ToEngine,
    decode_from_engine,
    encode,
)
from nanovllm_cli.server.ports import EngineState
from nanovllm_cli.vision_spec import TokenIds

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
STABLE_SECONDS = 60.0
STOP_SECONDS = 5.0
STUCK_SECONDS = 120.0  # of one step
KEEP_SECONDS = 300.0  # gigabytes, to a slow disk
IMAGE_BYTES = 1 << 30  # under way: of requests that the engine has not answered

OnLoading = Callable[[Loading], None]

logger = logging.getLogger(__name__)


class EngineClient:
    """One model's engine. See ports.EnginePort.

    on_loading: told how loading goes. on_restart: called when the process has died, and another is to take its place.
    """

    def __init__(
        self,
        name: str,
        start: Start,
        *,
        on_loading: OnLoading | None = None,
        on_restart: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.num_restarts = 0
        self._start = start
        self._on_loading = on_loading
        self._on_restart = on_restart
        self._state = EngineState.ASLEEP
        self.facts: Facts | None = None
        self.stats: EngineStats | None = None
        self._ids = itertools.count(1)
        self._streams: dict[int, EngineStream] = {}
        self._vectors: dict[int, asyncio.Future[Sequence[float]]] = {}
        self._heard = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._link: _Link | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Facts] | None = None
        self._kept: asyncio.Future[Kept] | None = None

    # ---- what it is ----

    @property
    def state(self) -> EngineState:
        if self._state is EngineState.READY and self.num_running:
            silent = asyncio.get_running_loop().time() - self._heard
            return EngineState.STUCK if silent > STUCK_SECONDS else EngineState.READY
        return self._state

    @property
    def num_running(self) -> int:
        """Requests that it has not answered."""
        return len(self._streams) + len(self._vectors)

    @property
    def image_bytes(self) -> int:
        """Of the images of those."""
        return sum(stream.image_bytes for stream in self._streams.values())

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    # ---- its life ----

    def announce(self) -> None:
        """It counts as loading from now on: `load` is about to be called."""
        self._state = EngineState.LOADING

    async def load(self) -> Facts:
        """Starts the process, and waits until the model is there. Raises what loading raised."""
        if self._keeper is None or self._keeper.done():
            self._state = EngineState.LOADING
            self._ready = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._ready), name=f"engine {self.name}")
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    async def unload(self, state: EngineState = EngineState.ASLEEP, *, keeps: bool = True) -> None:
        """Ends the process, once it has kept what the model has read, where that is wanted; not without `keeps`, and cancelling
        this leaves that out. What is running ends with an error, and so does a `load` that waits."""
        keeps = keeps and self._start.kept is not None and self.state is EngineState.READY
        self._state = state
        try:
            if keeps:
                await self._keep_read()
        finally:
            await self._end(state)

    async def _keep_read(self) -> None:
        if self._link is None:
            return
        self._kept = asyncio.get_running_loop().create_future()
        self._link.send(Keep())
        done, _ = await asyncio.wait((self._kept, self._link.closed), timeout=KEEP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self._kept in done:
            kept = self._kept.result()
            error = kept.error
            if kept.num_tokens:
                logger.info("%s: %d tokens are kept", self.name, kept.num_tokens)
        else:
            error = "its engine ended" if done else f"that took more than {KEEP_SECONDS:.0f} seconds"
        if error is not None:
            logger.error("%s: what was read is not kept: %s", self.name, error)

    async def _end(self, state: EngineState) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(NanovllmError(f"the engine of {self.name} was stopped while it loaded"))
            self._ready.exception()  # there may be nobody who waits
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
        self._state = state  # again: its last word may have been that it is ready

    async def _keep(self, ready: asyncio.Future[Facts]) -> None:
        """Runs the process, again and again. Ends where it never got ready, or when cancelled."""
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = loop.time()
            try:
                reason = await self._run_once(ready)
            except NanovllmError as error:
                self._state = EngineState.FAILED
                if not ready.done():
                    ready.set_exception(error)
                    return
                reason = error.message
            except OSError as error:  # no files, memory or processes left for it, or it does not end: that may pass
                reason = error.strerror or "it did not end"
            if not ready.done():
                self._state = EngineState.FAILED
                ready.set_exception(NanovllmError(f"the engine of {self.name} ended while it loaded: {reason}"))
                return
            if loop.time() - began > STABLE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            self.num_restarts += 1
            if self._on_restart is not None:
                self._on_restart()
            self._state = EngineState.RESTARTING
            logger.error("the engine of %s ended (%s); starting it again in %.1f s", self.name, reason, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _run_once(self, ready: asyncio.Future[Facts]) -> str:
        """From start to end of one process. Returns how it ended, or raises what it said about that."""
        ours, theirs = socket.socketpair()
        failure: list[Failed] = []
        self._link = link = _Link(lambda message: self._take(message, ready, failure))
        try:
            with theirs:
                self._process = process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "nanovllm_cli.server.engine_process", str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    env=child_environment(),
                )
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            link.send(self._start)
            await link.closed
            code = await asyncio.wait_for(process.wait(), STOP_SECONDS)
        finally:
            self._link = None
            if not link.close():
                ours.close()
            if self._process is not None and self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            died = ApiError(503, "the engine stopped while it was answering", code="engine_died", retry_after=1)
            self._fail_all(draining() if self._state is EngineState.STOPPED else died)
        if failure:
            raise _error(failure[0].kind, failure[0].message, failure[0].hint)
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    # ---- requests ----

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tells_reading: bool = False,
    ) -> EngineStream:
        link = self._checked_link()
        images = list(prompt_ids.images) if isinstance(prompt_ids, TokenIds) else []
        image_bytes = sum(placed.image.num_bytes for placed in images)
        if image_bytes and self.image_bytes and self.image_bytes + image_bytes > IMAGE_BYTES:  # one is let in, whatever it has
            raise ApiError(429, "too many images are under way", code="too_many_bytes", retry_after=1)
        request_id = next(self._ids)
        stream = EngineStream(lambda: self._abort(request_id), image_bytes)
        self._note_arrival()
        self._streams[request_id] = stream
        link.send(Generate(request_id, list(prompt_ids), params, priority, cache_salt, images, tells_reading))
        return stream

    async def embed(
        self,
        prompt_ids: Sequence[int],
        pooling: Pooled | Alignment,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: Sequence[Lora] = (),
    ) -> Sequence[float]:
        link = self._checked_link()
        request_id = next(self._ids)
        self._note_arrival()
        vector: asyncio.Future[Sequence[float]] = asyncio.get_running_loop().create_future()
        self._vectors[request_id] = vector
        images = list(prompt_ids.images) if isinstance(prompt_ids, TokenIds) else []
        link.send(Embed(request_id, list(prompt_ids), pooling, priority, list(lora), cache_salt, images))
        try:
            return await vector
        except asyncio.CancelledError:
            self._abort(request_id)
            raise
        finally:
            self._vectors.pop(request_id, None)

    def _abort(self, request_id: int) -> None:
        self._streams.pop(request_id, None)
        if self._link is not None:
            self._link.send(Abort(request_id))

    def _checked_link(self) -> _Link:
        if self._link is None or self._state is not EngineState.READY:
            raise ApiError(503, f"the model is {self._state}: try again", code="model_not_ready", retry_after=1)
        return self._link

    def _note_arrival(self) -> None:
        if not self.num_running:
            self._heard = asyncio.get_running_loop().time()

    # ---- what it says ----

    def _take(self, message: FromEngine, ready: asyncio.Future[Facts], failure: list[Failed]) -> None:
        self._heard = asyncio.get_running_loop().time()
        match message:
            case Step(outputs=outputs, stats=stats):
                self.stats = stats
                for output in outputs:
                    if output.request_id in self._streams:
                        self._streams[output.request_id].feed(output)
                        if output.finished:
                            del self._streams[output.request_id]
                    elif output.finished:  # an embedding that has no vector
                        self._settle(output.request_id, ApiError(500, "the text could not be embedded"))
            case Refused(request_id=request_id):
                error = _api_error(message)
                if request_id in self._vectors:
                    self._settle(request_id, error)
                elif request_id in self._streams:
                    self._streams.pop(request_id).fail(error)
            case Embedded(request_id=request_id):
                self._settle(request_id, array("f", message.vector))
            case Loading():
                if self._on_loading is not None:
                    self._on_loading(message)
            case Ready(facts=facts):
                self.facts, self._state = facts, EngineState.READY
                if not ready.done():
                    ready.set_result(facts)
            case Failed():
                failure.append(message)
            case Kept():
                if self._kept is not None and not self._kept.done():
                    self._kept.set_result(message)
            case _:
                self.stats = message.stats

    def _settle(self, request_id: int, outcome: Sequence[float] | ApiError) -> None:
        vector = self._vectors.get(request_id)
        if vector is None or vector.done():
            return
        if isinstance(outcome, ApiError):
            vector.set_exception(outcome)
        else:
            vector.set_result(outcome)

    def _fail_all(self, error: ApiError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        for request_id in list(self._vectors):
            self._settle(request_id, error)
        self.stats = None


class _Link(asyncio.Protocol):
    """The server's end of the socket pair. closed: done when the other end is."""

    def __init__(self, take: Callable[[FromEngine], None]) -> None:
        self._take = take
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._was_connected = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: ToEngine) -> None:
        if self._transport is not None:
            self._transport.write(encode(message))

    def close(self) -> bool:
        """Closes the socket, where it was connected. The loop does that itself: the number may soon be another socket's."""
        if self._transport is not None:
            self._transport.abort()
        return self._was_connected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses of asyncio's
        self._was_connected = True

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        begin = 0
        while len(self._buffer) - begin >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, begin)
            end = begin + HEADER.size + size
            if len(self._buffer) < end:
                break
            self._take(decode_from_engine(self._buffer[begin + HEADER.size : end]))
            begin = end
        del self._buffer[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)


def _error(kind: str, message: str, hint: str | None) -> NanovllmError:
    """The engine's typed error, as one of this process."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, NanovllmError) and found is not PromptTooLongError:
        return found(message, hint)
    return NanovllmError(message, hint)


def _api_error(refused: Refused) -> ApiError:
    if refused.kind == PromptTooLongError.__name__:
        error = ApiError(400, refused.message, code="context_length_exceeded")
    else:
        error = ApiError.of(_error(refused.kind, refused.message, refused.hint))
    error.by_engine = True
    return error
