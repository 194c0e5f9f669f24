"""How code for the CPU is compiled: once, whoever else does so at that moment, and kept for later runs.

What several processes compiled lies in the cache side by side, and where it is loaded, equal names all mean what came first.
Numba tells functions of one name and type apart (closures that a factory made) by counting them, in each process from 1 on: one
closure could get another's code. Here each process counts from a number of its own.

Of processes that start together one compiles a kernel, and the others wait for it. That is not only quicker: numba counts the
files of a kernel in its cache, so that two processes which add different tags at once may put one's code under the other's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numba
from numba.core import caching
from numba.core.bytecode import FunctionIdentity
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys
from numba.core.sigutils import normalize_signature

from nanovllm_cli import system
from nanovllm_cli.kernels.inner import whole_kernels

LOCK_SECONDS = 120.0
"""That a process waits for another one, which takes seconds, before it compiles for itself and keeps nothing."""
logger = logging.getLogger(__name__)
_keeps = True
_made: list[Any] = []
"""All of them: who has an address need not have what lies there, and of two threads that compiled the same one may forget it."""
_passes_over: ContextVar[bool] = ContextVar("passes_over", default=False)


def count_from_a_number_of_its_own() -> None:
    """This process, where numba numbers functions."""
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))


count_from_a_number_of_its_own()
os.register_at_fork(after_in_child=count_from_a_number_of_its_own)


def compile_once(function: Callable[..., None], signature: Any, **options: Any) -> Any:
    """A cfunc, compiled for the signature or loaded from the cache. Where nothing can be kept (a disk that is full or only to be
    read) that is said, and it is compiled all the same; what the cache has is read."""
    with _alone_with(function) as ours:
        made: Any = CFunc(function, normalize_signature(signature), locals={}, options=options)
        if ours:
            made._cache = _cache_of(function)
        with whole_kernels():
            made.compile()
        _made.append(made)
        return made


def _cache_of(function: Callable[..., None]) -> Any:
    try:
        return _Cache(function)
    except RuntimeError as failure:
        if "no locator available" not in str(failure):
            raise
        _tell_that_nothing_is_kept("")
        return caching.NullCache()


class _Kept(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """What was compiled of a source is good while that says the same: older versions of numba look at its time, which an image's
    layers round."""

    def get_source_stamp(self) -> str:
        return hashlib.sha256(Path(self._py_file).read_bytes()).hexdigest()


class _Readable(_Kept):
    """The cache where it may only be read (an image that has it in it, a read-only home), for what has been kept there."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        if not numba.config.CACHE_DIR:
            return None
        found = cls(py_func, py_file)
        index = f"*.{py_func.__qualname__}-{found.get_disambiguator()}.py*.nbi".translate({ord(each): None for each in "<>"})
        with contextlib.suppress(OSError):
            if any(Path(found.get_cache_path()).glob(index)):
                return found
        return None


class _Places(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Numba's other places are not named by all sources: they would give last month's kernels to this month's."""

    _locator_classes: ClassVar = [_Kept, _Readable]


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Numba's, which ends with an error where it can't write, or finds half a file (a machine that lost its power)."""

    _impl_class = _Places

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            rtsys.initialize(target_context)  # for arrays that kernels make; the rest that numba loads here only compiling needs
            return self._load_overload(sig, target_context)
        except OSError as failure:  # too many open files: what is kept is good for others
            logger.debug("the compiled %s can't be read: %s", self._name, failure)
            return None
        except Exception as failure:  # a pickle that is damaged may raise anything
            logger.debug("the compiled %s can't be read: %s", self._name, failure)
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as failure:
            _tell_that_nothing_is_kept(f": {failure.strerror}")


def _tell_that_nothing_is_kept(why: str) -> None:
    global _keeps
    if _keeps:
        logger.warning(
            "compiled kernels can't be kept in %s%s; each run compiles them anew, until NUMBA_CACHE_DIR names another place",
            numba.config.CACHE_DIR, why,
        )  # fmt: skip
    _keeps = False


def keeps() -> bool:
    """Whether all that was compiled so far is in the cache."""
    return _keeps


@contextlib.contextmanager
def _alone_with(function: Callable[..., None]) -> Iterator[bool]:
    """While no other process compiles it: True. The system takes the lock from one that dies. False: it has taken too long."""
    folder = Path(numba.config.CACHE_DIR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{function.__module__}.{function.__qualname__}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # nothing can be kept there
        yield True
        return
    try:
        yield _locked(lock, LOCK_SECONDS)
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open, too
        os.close(lock)


class UnderWay(Exception):
    """Another process is compiling it."""


@contextlib.contextmanager
def passing_over() -> Iterator[None]:
    """What another process is compiling is not waited for by this thread: UnderWay."""
    before = _passes_over.set(True)
    try:
        yield
    finally:
        _passes_over.reset(before)


def can_keep() -> bool:
    """Whether what is compiled can be found by other processes."""
    folder = Path(numba.config.CACHE_DIR)
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def _locked(handle: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not system.lock(handle):
        if _passes_over.get():
            raise UnderWay
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
