"""What the library tells whoever waits for it: which stage of loading it is in, and how far.

The library calls these methods; what they draw, and whether they draw at all, is the door's business
(`cli/progress_line.py`). Stages follow one another, they do not nest.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

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
