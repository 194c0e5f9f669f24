"""An asynchronous stream for a program that waits for it, and that has to look up now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_UP_SECONDS = 0.1


def stepwise(stream: AsyncGenerator[T, None]) -> Generator[T | None, None, None]:
    """Its items; None ten times a second while there is none. Closing it closes the stream. A signal's exception must not be
    raised within a step: the event loop would swallow it."""
    loop = asyncio.new_event_loop()
    task: asyncio.Task[T] | None = None
    try:
        while True:
            task = task or loop.create_task(_next(stream))
            loop.run_until_complete(asyncio.wait({task}, timeout=LOOK_UP_SECONDS))
            if not task.done():
                yield None
                continue
            done, task = task, None
            try:
                item = done.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if task is not None:
            task.cancel()
            loop.run_until_complete(asyncio.wait({task}))
        loop.run_until_complete(stream.aclose())
        loop.run_until_complete(asyncio.sleep(0))  # transports that were aborted are closed in the loop's next round
        loop.close()


async def single(work: Coroutine[Any, Any, T]) -> AsyncGenerator[T, None]:
    """A stream of one item: what `work` returns."""
    yield await work


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)
