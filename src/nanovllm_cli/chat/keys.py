"""The keyboard while an answer is written: what is typed does not show up in it, and is there for the next prompt.

Ctrl-C stays a signal. Ctrl-T is seen at once; everything else waits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import termios
from types import FrameType
from typing import Any

CTRL_T = b"\x14"
_MAX_TYPED = 1 << 16


class AnswerKeys:
    """Watches a terminal (a descriptor) between `watch` and `release`, which leaves it as it was."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None
        self._after_stop: Any = None
        self._typed = b""
        atexit.register(self.release)

    def watch(self) -> None:
        if self._before is not None:
            return
        try:
            self._before = termios.tcgetattr(self._descriptor)
        except termios.error:
            return
        self._after_stop = signal.signal(signal.SIGCONT, self._watch_again)
        self._set_quiet()

    def poll(self) -> int:
        """How often Ctrl-T was pressed since the last time."""
        if self._before is None:
            return 0
        presses = 0
        while select.select([self._descriptor], [], [], 0)[0]:
            try:
                data = os.read(self._descriptor, 1024)
            except OSError:
                break
            if not data:
                break
            presses += data.count(CTRL_T)
            self._typed = (self._typed + data.replace(CTRL_T, b""))[:_MAX_TYPED]
        return presses

    def release(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        signal.signal(signal.SIGCONT, self._after_stop)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._descriptor, termios.TCSANOW, before)

    def take(self) -> bytes:
        """What was typed."""
        typed, self._typed = self._typed, b""
        return typed

    def _set_quiet(self) -> None:
        """No echo, no lines: each key by itself, and Enter as the key that it is."""
        with contextlib.suppress(termios.error):
            mode = termios.tcgetattr(self._descriptor)
            mode[0] &= ~termios.ICRNL
            mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._descriptor, termios.TCSANOW, mode)

    def _watch_again(self, signum: int, frame: FrameType | None) -> None:
        """After Ctrl-Z and fg: shells set the terminal to what they like."""
        self._set_quiet()
