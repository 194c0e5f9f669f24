"""Requests that wait for something to be made ready before they may be scheduled, such as a constraint that is being compiled.

They hold up nobody. A failure of what they wait for is theirs alone.
"""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from nanovllm_cli.engine.sequence import Request, Sequence
from nanovllm_cli.errors import NanovllmError, UsageError

logger = logging.getLogger(__name__)

_SECONDS = 0.05
"""How long an engine that has nothing else to do waits in one step: its caller may have something to abort or to add."""


class Prepared(NamedTuple):
    """error: what came of it instead. unmeetable: that is what the request asked for."""

    request: Request
    error: str | None
    unmeetable: bool


class Preparing:
    """add(), then ready() until it has been given back, or drop() of all of its sequences."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Request, Future[Any]]] = {}

    def __len__(self) -> int:
        """Sequences."""
        return sum(len(request.sequences) for request, _ in self._waiting.values())

    def add(self, request: Request, future: Future[Any]) -> None:
        self._waiting[request.request_id] = (request, future)

    def ready(self, *, is_idle: bool) -> list[Prepared]:
        """Those that wait no longer, in order of arrival. is_idle: there is time to wait a moment for one."""
        if not self._waiting:
            return []
        if is_idle:
            wait([future for _, future in self._waiting.values()], _SECONDS, FIRST_COMPLETED)
        done = [entry for entry in self._waiting.values() if entry[1].done()]
        for request, _ in done:
            del self._waiting[request.request_id]
        return [Prepared(request, *_failure(future)) for request, future in done]

    def drop(self, sequence: Sequence) -> bool:
        """Forgets a sequence that waits here; False where it does not."""
        request = sequence.request
        if request.request_id not in self._waiting:
            return False
        if sequence in request.sequences:
            request.sequences.remove(sequence)
        if not request.sequences:
            del self._waiting[request.request_id]
        return True


def _failure(future: Future[Any]) -> tuple[str | None, bool]:
    """What it is, and whether it is what the request asked for."""
    if future.cancelled():
        return "the engine was closed", False
    error = future.exception()
    if error is None:
        return None, False
    if isinstance(error, NanovllmError):
        return error.message, isinstance(error, UsageError)
    logger.error("a request could not be prepared", exc_info=error)
    return f"an internal error ({type(error).__name__})", False
