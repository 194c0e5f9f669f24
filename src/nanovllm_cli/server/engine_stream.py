"""One request's outputs on the event loop's side: fed by the engine's connection, read by a route."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from msgspec.structs import replace

from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.messages import Output, Piece


class EngineStream:
    """See ports.Stream. abort: tells the engine; called once, and only while the request is alive there. image_bytes: of the
    request's images."""

    def __init__(self, abort: Callable[[], None], image_bytes: int = 0) -> None:
        self._abort = abort
        self.image_bytes = image_bytes
        self._unread: Output | None = None
        self._error: ApiError | None = None
        self.ended = False  # nothing more will be fed
        self._reader: asyncio.Future[None] | None = None

    def feed(self, output: Output) -> None:
        if self.ended:
            return
        self._unread = output if self._unread is None else joined(self._unread, output)
        self.ended = output.finished
        self._wake()

    def fail(self, error: ApiError) -> None:
        """What came before is still read."""
        if not self.ended:
            self._error, self.ended = error, True
            self._wake()

    def abort(self) -> None:
        self._unread = None
        if not self.ended:
            self.ended = True
            self._abort()
            self._wake()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while self._unread is None:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        output, self._unread = self._unread, None
        return output

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def joined(first: Output, second: Output) -> Output:
    """Two outputs of a request, one after the other, as one."""
    pieces = {piece.index: piece for piece in first.pieces}
    for piece in second.pieces:
        before = pieces.get(piece.index)
        pieces[piece.index] = piece if before is None else _joined(before, piece)
    told = second.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs
    return replace(second, pieces=list(pieces.values()), prompt_logprobs=told)


def _joined(first: Piece, second: Piece) -> Piece:
    logprobs = second.logprobs if first.logprobs is None else first.logprobs + (second.logprobs or [])
    return replace(second, text=first.text + second.text, token_ids=first.token_ids + second.token_ids, logprobs=logprobs)
