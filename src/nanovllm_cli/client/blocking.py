"""An asynchronous stream for a program that waits for it, and that has to look up now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
LOOK_UP_SECONDS = 0.1


def stepwise(stream: AsyncGenerator[T, None]) -> Generator[T | None, None, None]:
    """Its items; None ten times a second while there is none, so that signals take effect. Closing it, or an exception in the
    middle such as Ctrl-C, closes the stream."""
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


def once(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; a signal takes effect within a tenth of a second."""

    async def stream() -> AsyncGenerator[T, None]:
        yield await work

    steps = stepwise(stream())
    try:
        return next(item for item in steps if item is not None)
    finally:
        steps.close()


async def _next(stream: AsyncGenerator[T, None]) -> T:
    return await anext(stream)
