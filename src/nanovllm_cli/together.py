"""Work of an event loop, a part of it at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(works: Iterable[Coroutine[Any, Any, T]], most: int) -> AsyncGenerator[T, None]:
    """What each returns, as it comes; at most so many run at once, the next begins when one has ended."""
    waiting = iter(works)
    running: set[asyncio.Task[T]] = set()
    try:
        while True:
            while len(running) < most and (work := next(waiting, None)) is not None:
                running.add(asyncio.create_task(work))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
