"""merged(): several streams read as one. What order they come in is the order in which they have something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import TypeVar

MERGED_STEPS = 64
"""Steps of several prompts that wait for a slow reader; then their generations wait, too."""

T = TypeVar("T")


async def merged(streams: Sequence[AsyncIterable[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """The steps of all, as they come, with the position of whose they are. Raises what the first of them raises that fails."""
    if len(streams) == 1:
        async for step in streams[0]:
            yield 0, step
        return
    steps: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(MERGED_STEPS)

    async def read(position: int) -> None:
        try:
            async for step in streams[position]:
                await steps.put((position, step))
            await steps.put(None)
        except Exception as error:
            await steps.put(error)

    readers = [asyncio.create_task(read(position)) for position in range(len(streams))]
    try:
        unfinished = len(readers)
        while unfinished:
            news = await steps.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                unfinished -= 1
            else:
                yield news
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
