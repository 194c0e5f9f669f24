"""What the library tells whoever waits for it: which stage of loading it is in, and how far.

The library calls these methods; what they draw, and whether they draw at all, is the door's business
(`cli/progress_line.py`). Stages follow one another, they do not nest.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from nanovllm_cli.errors import UsageError

Counted = Callable[[int, int], None]
"""Called with (finished requests, all requests) whenever one finishes."""
Unit = Literal["B", "tensors", "tokens", "lines", "texts", "requests", "batches"]


class LoadProgress(Protocol):
    """A listener. Methods are called on the thread that loads, often: they return at once and never raise Exception."""

    def stage(self, name: str, total: int | None, unit: Unit) -> None:
        """A stage begins, and the one before it is over. total: its size in `unit`, None while that is unknown."""

    def advance(self, n: int) -> None:
        """`n` more units of the current stage are done."""

    def done(self) -> None:
        """The current stage is over and no other follows at once."""

    def note(self, message: str) -> None:
        """A line for the user, such as what a model's name resolved to."""

    def starting(self) -> AbstractContextManager[None]:
        """Around code that an exception from outside would crash, such as the loading of compiled kernels."""


class NullProgress:
    """Listens to nothing."""

    def stage(self, name: str, total: int | None, unit: Unit) -> None:
        pass

    def advance(self, n: int) -> None:
        pass

    def done(self) -> None:
        pass

    def note(self, message: str) -> None:
        pass

    def starting(self) -> AbstractContextManager[None]:
        return nullcontext()


def counting(what: str, progress: Counted | None, use_tqdm: bool) -> Counted | None:
    """What is told of requests that finish: `progress`, or a line on stderr. UsageError for both, and another bar."""
    if not isinstance(use_tqdm, bool):
        raise UsageError(f"use_tqdm is True or False, not {use_tqdm!r}", "progress=… is called with (done, all)")
    if use_tqdm and progress is not None:
        raise UsageError("progress and use_tqdm tell the same", "leave one of them out")
    return _CountLine(what) if use_tqdm else progress


class _CountLine:
    """A line that is written anew for each that finishes; where nobody looks, once in the end."""

    def __init__(self, what: str) -> None:
        self._what, self._began = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        looks, ends = sys.stderr.isatty(), done == total
        if looks or ends:
            rate = done / max(time.monotonic() - self._began, 1e-9)
            text = f"{self._what}: {done} of {total}, {rate:.1f} a second"
            sys.stderr.write(("\r" if looks else "") + text + ("\n" if ends else ""))
            sys.stderr.flush()
