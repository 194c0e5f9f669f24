"""Files that may change while the server runs, such as keys and certificates that are renewed: read again when they have."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from nanovllm_cli.errors import NanovllmError

SETTLED_NS = 100_000_000

T = TypeVar("T")
_Stamp = tuple[tuple[int, ...] | None, ...]

logger = logging.getLogger(__name__)


class Reread(Generic[T]):
    """What `make` makes of these files. While one of them is away or broken, what was made last; the log says so.

    Raises what `make` raises; later that must be a NanovllmError. What is no file, such as a pipe, is read once.
    """

    def __init__(self, paths: Sequence[str], make: Callable[[], T]) -> None:
        self._paths, self._make = paths, make
        self._stamp, self._is_settled = self._look()
        self._value = make()

    def now(self) -> T:
        stamp, is_settled = self._look()
        if stamp != self._stamp or not self._is_settled:
            is_news = stamp != self._stamp
            self._stamp, self._is_settled = stamp, is_settled
            try:
                self._value = self._make()
                if is_news:
                    logger.warning("%s: what has changed counts now", " and ".join(self._paths))
            except NanovllmError as error:
                if is_news:
                    logger.error("%s; what was there before still counts", error.message)
        return self._value

    def _look(self) -> tuple[_Stamp, bool]:
        """What tells one state of the files from another; and whether it does: what changes twice within a tick of the file
        system's clock has the same times."""
        stamp: list[tuple[int, ...] | None] = []
        changed = 0
        for path in self._paths:
            try:
                found = os.stat(path)
            except (OSError, ValueError):
                stamp.append(None)
                continue
            if not stat.S_ISREG(found.st_mode):
                return (), True
            newest = max(found.st_mtime_ns, found.st_ctime_ns)
            changed = max(changed, newest)
            stamp.append((found.st_dev, found.st_ino, found.st_size, newest))
        return tuple(stamp), not 0 <= time.time_ns() - changed < SETTLED_NS
