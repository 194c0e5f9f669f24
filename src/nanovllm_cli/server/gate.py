"""Gate: how many requests are under way, and whether new ones are let in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Used from one event loop."""

    def __init__(self) -> None:
        self.draining = False
        self.in_flight = 0
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
