"""Ctrl-C and requests to end, as exceptions that unwind the program, and that do not get lost on the way.

A handler can raise in the middle of an import or of a destructor, where Python or a library swallows what is raised.
So the signal is also written down, and `check`, called wherever the program waits long, raises again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

_PATIENCE_SECONDS = 1.5
_INSIST_SECONDS = 0.2

_received: int | None = None
_insists = False
_held = _held_firmly = False


class Terminated(BaseException):
    """A signal asks for the end: unwinds like Ctrl-C does."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def install() -> None:
    """Takes over SIGINT, SIGTERM and SIGHUP, except where they are ignored (nohup, background jobs)."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, _receive)
    sys.unraisablehook = _on_unraisable


def check() -> None:
    """Raises for a signal that has come and that nothing has unwound for; where signals are held, at the end of that."""
    if _received is not None and not _held:
        raise _exception(_received)


@contextlib.contextmanager
def held(*, firmly: bool = True) -> Iterator[None]:
    """Within, a signal is only written down, and raised at the end: for what should not be broken off in the middle, such as a
    step of an engine that goes on being used. firmly: however often it comes; else the second one does not wait."""
    global _held, _held_firmly
    before = _held, _held_firmly
    _held, _held_firmly = True, firmly or (_held and _held_firmly)
    try:
        yield
    finally:
        _held, _held_firmly = before
    check()


def forgive() -> None:
    """An interrupt has had its effect, and the program goes on. A request to end stays one."""
    global _received
    if _received == signal.SIGINT:
        _received = None


@contextlib.contextmanager
def insisting() -> Iterator[None]:
    """Within, a signal is written down and raised at the end; where that takes long, or at the second signal, it raises again and
    again until it gets through. For imports: they have nothing to clean up, but libraries that an exception hits while they
    start may end the process with a crash."""
    global _insists
    before = signal.signal(signal.SIGALRM, _insist)
    _insists = True
    try:
        yield
    finally:
        _insists = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    check()


def restore() -> None:
    """From here on a signal ends the process at once: nothing is left to be unwound."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) == _receive:
            signal.signal(signum, signal.SIG_DFL)
    # CPython remembers an interrupt that hit the code of an `exec`, though it was caught, and would die of it at exit.
    exec("")


def _receive(signum: int, frame: FrameType | None) -> None:
    global _received
    is_first = _received is None
    if _received is None or _received == signal.SIGINT:
        _received = signum
    if _held and (is_first or _held_firmly):
        return
    if _insists:
        signal.setitimer(signal.ITIMER_REAL, _PATIENCE_SECONDS if is_first else _INSIST_SECONDS, _INSIST_SECONDS)
        if is_first:
            return
    raise _exception(signum)


def _insist(signum: int, frame: FrameType | None) -> None:
    if _insists:
        check()


def _exception(signum: int) -> BaseException:
    return KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signum)


def _on_unraisable(unraisable: sys.UnraisableHookArgs, /) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt | Terminated):
        sys.__unraisablehook__(unraisable)
