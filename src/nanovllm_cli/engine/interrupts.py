"""Ctrl-C while an engine works. Python raises KeyboardInterrupt between any two instructions, also between the two that say what
a sequence drew: its tokens would be lost to a stream that nobody interrupted. So a step only notes the signal, and raises it when
its books are closed. Computing, which takes the time, is broken off at once: what it would have drawn is drawn again.

Signals come to the main thread alone. Handlers are the process's, and so is what is kept here.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]


class _Hold:
    """In the place of a handler. is_open: what comes is passed on to it. So is, in any case, what comes behind the first: who
    insists gets through."""

    def __init__(self, handler: _Handler) -> None:
        self._handler = handler
        self._is_noted = False
        self.is_open = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.is_open or self._is_noted:
            self._is_noted = False
            self._handler(signum, frame)
        else:
            self._is_noted = True

    def tell(self) -> None:
        """Raises for what was noted, as the handler does."""
        is_noted, self._is_noted = self._is_noted, False
        if is_noted:
            self._handler(signal.SIGINT, None)


_hold: _Hold | None = None


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within, Ctrl-C is noted, and raised at the end."""
    global _hold
    before = signal.getsignal(signal.SIGINT)
    if _hold is not None or not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    hold = _Hold(before)
    try:
        signal.signal(signal.SIGINT, hold)
        _hold = hold
        yield
    finally:
        _hold = None
        signal.signal(signal.SIGINT, before)
        hold.tell()


@contextlib.contextmanager
def let_in() -> Iterator[None]:
    """Within, inside of `held`, it is raised at once: for what can be broken off."""
    hold = _hold if threading.current_thread() is threading.main_thread() else None
    if hold is None:
        yield
        return
    hold.is_open = True
    try:
        hold.tell()
        yield
    finally:
        hold.is_open = False
