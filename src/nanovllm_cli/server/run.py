"""The life of a server: HTTP is there first and says that models are loading; then requests; then the end.

SIGTERM, Ctrl-C, or a terminal that closes (which nohup has ignored): nobody new gets in (503), what is under way finishes, or is
broken off after drain_seconds. A second signal does not wait. Either way engines, connections and socket files are gone when
`serve` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from nanovllm_cli import system
from nanovllm_cli.server.app import build_routes
from nanovllm_cli.server.gate import Gate
from nanovllm_cli.server.listen import BACKLOG, Listener, tls_context
from nanovllm_cli.server.protocol import protocol_for
from nanovllm_cli.server.settings import ServeSettings

_BREAK_OFF_SECONDS = 1
_MOST_FILES = 65536
"""Each connection is one; the usual limit of 1024 is for programs of long ago."""
_SWITCH_SECONDS = 0.001


class Loads(Protocol):
    """What has to be there before requests can be answered: served_models.ServedModels."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Interrupted(Exception):
    """A signal came before the server was ready, or again while it ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def is_ctrl_c(self) -> bool:
        return self.signum == signal.SIGINT


def serve(
    app: FastAPI,
    settings: ServeSettings,
    listener: Listener,
    models: Loads,
    *,
    on_ready: Callable[[], None] = lambda: None,
    on_drain: Callable[[int], None] = lambda in_flight: None,
    on_end: Sequence[Callable[[], Awaitable[None]]] = (),
) -> None:
    """Serves until a signal comes. on_ready: models are there; on_drain: the end begins, with so many requests under way;
    on_end: what else to close.

    Raises what loading raises, and Interrupted.
    """
    system.allow_open_files(_MOST_FILES)
    sys.setswitchinterval(_SWITCH_SECONDS)  # how long a thread that tokenizes keeps the event loop waiting
    config = http_config(app, settings)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what is news is told here
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_Life(config, app, settings, listener, models).run(on_ready, on_drain, on_end))


def http_config(app: FastAPI, settings: ServeSettings) -> uvicorn.Config:
    """Raises UsageError for TLS files that are none."""
    tls = tls_context(settings)
    config = uvicorn.Config(
        app,
        http=protocol_for(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=_BREAK_OFF_SECONDS,
    )
    config.load()
    config.ssl = tls
    return config


class _Life:
    def __init__(
        self, config: uvicorn.Config, app: FastAPI, settings: ServeSettings, listener: Listener, models: Loads
    ) -> None:
        self._http = HttpServer(config, settings.header_seconds)
        self._app, self._settings, self._listener, self._models = app, settings, listener, models
        self._gate: Gate = app.state.gate
        self._signals: list[int] = []
        self._first, self._second = asyncio.Event(), asyncio.Event()

    async def run(
        self,
        on_ready: Callable[[], None],
        on_drain: Callable[[int], None],
        on_end: Sequence[Callable[[], Awaitable[None]]],
    ) -> None:
        with self._listening_to_signals():
            http = asyncio.create_task(self._http.serve(self._listener.sockets))
            try:
                start = asyncio.gather(self._models.start(), build_routes(self._app))
                if not await self._before(self._first, http, start):
                    raise Interrupted(self._signals[0])
                gc.collect()
                gc.freeze()  # what is loaded stays: going through it again would hold streams up
                on_ready()
                await self._before(self._first, http)
                on_drain(self._gate.in_flight)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.drain_seconds):
                        await self._before(self._second, http, self._gate.drain())
            finally:
                await self._close_models()  # what is still under way is told that it ends here
                self._http.force_exit = self._second.is_set()
                self._http.should_exit = True
                await asyncio.gather(http, self._models.close(), *(close() for close in on_end))
            if self._second.is_set():
                raise Interrupted(self._signals[-1])

    async def _close_models(self) -> None:
        """Until they are closed, or a second signal comes: they may keep what they have read, which takes a while."""
        tasks = [asyncio.create_task(self._models.close()), asyncio.create_task(self._second.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _before(self, event: asyncio.Event, http: asyncio.Task[None], work: Any = None) -> bool:
        """Waits for the work or the event, whichever comes first; True for the work. HTTP does not end by itself: if it does, it
        raises. What the work raises is raised."""
        waiting = asyncio.create_task(event.wait())
        working = asyncio.ensure_future(work) if work is not None else None
        others = [task for task in (working,) if task is not None]
        try:
            await asyncio.wait([http, waiting, *others], return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()
                raise RuntimeError("the HTTP server ended by itself")
            if working is not None and working.done():
                working.result()
                return True
            return False
        finally:
            for task in (waiting, *others):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    @contextlib.contextmanager
    def _listening_to_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        ours = [signum for signum, handler in before.items() if handler is not signal.SIG_IGN]
        for signum in ours:
            loop.add_signal_handler(signum, self._note, signum)
        try:
            yield
        finally:
            for signum in ours:
                loop.remove_signal_handler(signum)
                signal.signal(signum, before[signum])

    def _note(self, signum: int) -> None:
        self._signals.append(signum)
        (self._second if self._first.is_set() else self._first).set()


class HttpServer(uvicorn.Server):
    """uvicorn, which leaves signals to others. handshake_seconds: how long a client has for TLS's handshake."""

    def __init__(self, config: uvicorn.Config, handshake_seconds: float) -> None:
        super().__init__(config)
        self._handshake_seconds = handshake_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own leaves a client a minute for the handshake, in which its connection is not counted."""
        loop, config = asyncio.get_running_loop(), self.config
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        protocol = partial(make, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        limit = None if config.ssl is None else self._handshake_seconds
        self.servers = [
            await loop.create_server(
                protocol, sock=sock, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=limit
            )
            for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
