"""Gate: how much is under way, and whether new requests are let in. Turnstile: how fast a crowd of them is taken up."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Used from one event loop. in_flight: requests; arriving: bytes of bodies that have not come to their end."""

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = self.arriving = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Within, a request is under way."""
        self.in_flight += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._empty.set()

    async def drain(self) -> None:
        """Lets nobody new in, and returns when nothing is under way."""
        self.draining = True
        await self._empty.wait()


class Turnstile:
    """Lets one through in each round of the event loop, in their order. Parsing and checking a body takes a good part of a
    millisecond: what else comes in (refusals, /health, running answers) is not to wait until that is done for a whole crowd.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # in this round

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        mine = loop.create_future()
        self._waiting.append(mine)
        await mine

    def _next(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # its client may have left
                future.set_result(None)
                future.get_loop().call_soon(self._next)
                return
        self._is_taken = False
