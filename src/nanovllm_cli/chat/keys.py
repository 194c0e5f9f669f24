"""The keyboard while no line is read: what is typed does not show up in an answer, and is there for the next line.

Ctrl-C stays a signal. Ctrl-T is seen at once; everything else waits. A paste is bracketed, as at a prompt, so that its lines
are not sent one by one.
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

CTRL_D, CTRL_T = b"\x04", b"\x14"
_MAX_TYPED = 1 << 24
_PASTE_ON, _PASTE_OFF = b"\x1b[?2004h", b"\x1b[?2004l"
_PASTE_BEGINS, _PASTE_ENDS = b"\x1b[200~", b"\x1b[201~"
_PASTE_SECONDS = 1.0  # within which more of a paste comes, or it is over


class AnswerKeys:
    """Watches a terminal (a descriptor) between `watch` and `release`, which leaves it as it was."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None
        self._after_stop: Any = None
        self._typed = bytearray()
        atexit.register(self.release)

    def watch(self) -> None:
        """From now on, or again after somebody else has read keys, who has found the terminal in this mode."""
        if self._before is None:
            try:
                self._before = termios.tcgetattr(self._descriptor)
            except termios.error:
                return
            self._after_stop = signal.signal(signal.SIGCONT, self._watch_again)
            self._take_lines()
        self._set_quiet()

    def poll(self) -> int:
        """How often Ctrl-T was pressed since the last time."""
        if self._before is None:
            return 0
        presses = 0
        while data := self._read(0):
            presses += data.count(CTRL_T)
            self._typed += data.replace(CTRL_T, b"")[: _MAX_TYPED - len(self._typed)]
        return presses

    def take(self) -> bytes:
        """What was typed, other than Ctrl-T; a paste to its end."""
        self.poll()
        while self._typed.rfind(_PASTE_BEGINS) > self._typed.rfind(_PASTE_ENDS):
            self._typed += self._read(_PASTE_SECONDS) or _PASTE_ENDS
        typed = bytes(self._typed)
        self._typed.clear()
        return typed

    def release(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        signal.signal(signal.SIGCONT, self._after_stop)
        self._write(_PASTE_OFF)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._descriptor, termios.TCSANOW, before)

    def _take_lines(self) -> None:
        """What was entered before the first `watch`: the terminal has made a new line of each Enter, an end of Ctrl-D."""
        while select.select([self._descriptor], [], [], 0)[0]:
            line = self._read(0)
            self._typed += line.replace(b"\n", b"\r") or CTRL_D
            if not line:
                return

    def _read(self, seconds: float) -> bytes:
        """What comes within so many seconds, perhaps nothing."""
        try:
            return os.read(self._descriptor, 1 << 16) if select.select([self._descriptor], [], [], seconds)[0] else b""
        except OSError:
            return b""

    def _write(self, sequence: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, sequence)

    def _set_quiet(self) -> None:
        """No echo, no lines: each key by itself, and Enter as the key that it is."""
        with contextlib.suppress(termios.error):
            mode = termios.tcgetattr(self._descriptor)
            mode[0] &= ~termios.ICRNL
            mode[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
            mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._descriptor, termios.TCSANOW, mode)
        self._write(_PASTE_ON)

    def _watch_again(self, signum: int, frame: FrameType | None) -> None:
        """After Ctrl-Z and fg: shells set the terminal to what they like."""
        self._set_quiet()
