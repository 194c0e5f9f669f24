"""How the CPU's kernels are compiled and started.

A kernel is a C function (address of its arguments, thread, team), which every thread of a team runs on its share of the tasks:

    @kernel()
    def negate(arguments, thread, team):
        tag, x, count = fields(arguments)
        values = carray(typed_pointer(x, tag), (count,))
        for i in share(count, thread, team):
            values[i] = -values[i]

Who is done helps the others: a thread's part of the tasks is cut into PIECES, and what is left of another's is there to be taken.
Threads differ, by their cores or by what else runs there. It changes who computes, never what.

Its arguments are a C struct: tags, scalars whose type says an element type (cpu_numbers); int64 numbers; float64 numbers. It is
compiled, or loaded from the cache, when it is first asked for with these tags: nobody waits for what no model uses. Since all of
them start alike, a recorded step is a list of addresses.

The threads are numba's. Its `prange` takes the code of a loop, and all that it calls, through LLVM four times. On macOS they are
those that it makes itself, not OpenMP's: what numba would find there is not the library that torch brings, and two in one process
call each other's functions and crash (https://github.com/scverse/scanpy/issues/4026).

What several processes compiled lies in the cache side by side, and where it is loaded, equal names all mean what came first.
Numba tells functions of one name and type apart (closures that a factory made) by counting them, in each process from 1 on: one
closure could get another's code. Here each process counts from a number of its own.

Of processes that start together one compiles a kernel, and the others wait for it. That is not only quicker: numba counts the
files of a kernel in its cache, so that two processes which add different tags at once may put one's code under the other's name.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import caching, cgutils
from numba.core.bytecode import FunctionIdentity
from numba.core.ccallback import CFunc
from numba.core.runtime.nrt import rtsys
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic

from nanovllm_cli import system
from nanovllm_cli.errors import UsageError
from nanovllm_cli.kernels.inner import inner, whole_kernels
from nanovllm_cli.kernels.simd import typed_pointer

TAG_TYPES = {"H": types.uint16, "f": types.float32, "b": types.int8, "B": types.uint8}
"""By `struct`'s letters."""
ALIGNMENT = 8
"""Of arguments, whose bytes are a multiple of it."""
LOCK_SECONDS = 120.0
"""That a process waits for another one, which takes seconds, before it compiles for itself and keeps nothing."""
logger = logging.getLogger(__name__)
_I64, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
PIECES = 8
"""Of a thread's part of the tasks: so many times each thread asks for more, by an instruction that takes some 20 ns."""
_LINE = 128
"""Of a Mac's caches; others have half of it."""


class Kernel:
    """A function of (arguments, thread, team), compiled for each combination of tags that is used."""

    def __init__(self, function: Callable[..., None], **options: Any) -> None:
        self._function = function
        self._options = {"error_model": "numpy"} | options
        self._compiled: dict[tuple[str, int, int], tuple[Any, int, struct.Struct]] = {}

    def step(self, tags: str, ints: tuple[int, ...], floats: tuple[float, ...] = ()) -> tuple[int, bytes]:
        """Its address, and its arguments. tags: letters of TAG_TYPES."""
        key = tags, len(ints), len(floats)
        if key not in self._compiled:
            self._compiled[key] = self._compile(*key)
        _, address, layout = self._compiled[key]
        return address, layout.pack(*(0 for _ in tags), *ints, *floats)

    def is_at(self, address: int) -> bool:
        """Whether a step's kernel is this one."""
        return any(address == own for _, own, _ in self._compiled.values())

    def run(self, tags: str, ints: tuple[int, ...], floats: tuple[float, ...] = ()) -> None:
        """Now, on the threads that numba is set to use, without the interpreter's lock."""
        address, arguments = self.step(tags, ints, floats)
        memory = ctypes.create_string_buffer(arguments, len(arguments))
        row = (ctypes.c_int64 * 2)(address, ctypes.addressof(memory))
        replay(ctypes.addressof(row), 1)

    def _compile(self, tags: str, num_ints: int, num_floats: int) -> tuple[Any, int, struct.Struct]:
        members = [*(TAG_TYPES[tag] for tag in tags), *[types.int64] * num_ints, *[types.float64] * num_floats]
        signature = types.void(types.CPointer(types.Tuple(members)), types.int64, types.int64)
        compiled = compile_once(self._function, signature, **self._options)
        return compiled, int(compiled.address), struct.Struct(f"@{tags}{num_ints}q{num_floats}d0q")


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """options: numba's."""
    return lambda function: Kernel(function, **options)


def replay(steps: int, count: int) -> None:
    """Run kernels one after another. steps: address of [count, 2] int64, a kernel's address and that of its arguments.

    Of several threads that come at once (two models in one process) each has the whole team in its turn. Where there is no
    OpenMP, numba ends a process that asks for more.
    """
    with _turn:
        if not _replay:
            numba.get_num_threads()  # starts them: compiled code from the cache doesn't, and crashes without
            compiled = compile_once(_run_all, types.void(types.int64, types.int64, types.int64), error_model="numpy")
            team = np.zeros(team_bytes() // 8, np.int64)
            _replay.extend((PROTOTYPE(compiled.address), team.ctypes.data, compiled, team))
        _replay[0](steps, count, _replay[1])


def _refuse(*_: int) -> None:
    hint = 'load models in the process that uses them; the start method of multiprocessing has to be "spawn"'
    raise UsageError("this process was forked from one that has loaded a model, whose threads it lacks", hint)


def _count_from_a_number_of_its_own() -> None:
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(62))


def _in_a_forked_child() -> None:
    """OpenMP would end it, with a line of its own; or never return, where only torch has used it."""
    global _turn
    _count_from_a_number_of_its_own()
    _turn = threading.Lock()  # another thread may have had it
    if _replay:
        _replay[0] = _refuse
    else:
        _use_own_threads()


def _use_own_threads() -> None:
    """Those of numba, which need no OpenMP."""
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = "workqueue"


_keeps = True
_passes_over: ContextVar[bool] = ContextVar("passes_over", default=False)
_turn = threading.Lock()
_replay: list[Any] = []
os.register_at_fork(after_in_child=_in_a_forked_child)
_count_from_a_number_of_its_own()
if system.is_macos():
    _use_own_threads()


def compile_once(function: Callable[..., None], signature: Any, **options: Any) -> Any:
    """A cfunc, compiled for the signature or loaded from the cache. Where nothing can be kept (a disk that is full or only to be
    read) that is said, and it is compiled all the same; what the cache has is read."""
    with _alone_with(function) as ours:
        made: Any = CFunc(function, normalize_signature(signature), locals={}, options=options)
        if ours:
            made._cache = _cache_of(function)
        with whole_kernels():
            made.compile()
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


# ---- compiled ----


@intrinsic
def fields(typing: Any, arguments: Any) -> Any:
    """The arguments of a kernel, as a tuple."""
    members = arguments.dtype

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        layout = ir.LiteralStructType([context.get_value_type(member) for member in members])
        base = builder.bitcast(args[0], layout.as_pointer())
        values = [builder.load(cgutils.gep_inbounds(builder, base, 0, i)) for i in range(len(members))]
        return context.make_tuple(builder, members, values)

    return members(arguments), code


@intrinsic
def _next_piece(typing: Any, counter: Any) -> Any:
    """The number at an address, which becomes the next one, for whoever asks."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), _I64(1), "monotonic")

    return types.int64(types.int64), code


@inner
def share(count, thread, team):
    """The tasks, of `count`, that this thread finds to do, one by one.

    team: address of the number of threads and then, a cache line each, of counters of the pieces taken of their parts; 0 for a
    thread alone.
    """
    if team == 0:
        for task in range(count):
            yield task
        return
    threads = carray(typed_pointer(team, np.int64(0)), (1,))[0]
    for other in range(threads):
        owner = (thread + other) % threads
        first, end = count * owner // threads, count * (owner + 1) // threads
        piece = _next_piece(team + (1 + owner) * _LINE)
        while piece < PIECES:
            for task in range(first + (end - first) * piece // PIECES, first + (end - first) * (piece + 1) // PIECES):
                yield task
            piece = _next_piece(team + (1 + owner) * _LINE)


@inner
def clear_team(team, threads):
    """A team (see `share`) of so many threads at an address, of which nobody has taken anything."""
    carray(typed_pointer(team, np.int64(0)), (1,))[0] = threads
    for owner in range(threads):
        carray(typed_pointer(team + (1 + owner) * _LINE, np.int64(0)), (1,))[0] = 0


def team_bytes() -> int:
    """Of a team of all threads."""
    return (1 + int(numba.config.NUMBA_NUM_THREADS)) * _LINE


@intrinsic
def run_kernel(typing: Any, function: Any, arguments: Any, thread: Any, team: Any) -> Any:
    """This thread's part of the kernel at an address."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        b.call(b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64]).as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), code


def _run_all(steps: Any, count: Any, team: Any) -> None:
    table = carray(typed_pointer(steps, np.int64(0)), (count, 2))
    for i in range(count):
        _on_all_threads(table[i, 0], table[i, 1], team)


@intrinsic
def _on_all_threads(typing: Any, function: Any, arguments: Any, team: Any) -> Any:
    """Run the kernel at an address on as many threads as numba is set to use.

    Numba's pool (`numba.np.ufunc.parallel.build_gufunc_kernel`) calls f(args, dimensions, steps, data) on each thread, with
    args[0] moved on by steps[0] for each item before its first, and dimensions[0] items. From 0 on in steps of 1, args[0] is the
    number of the first.
    """

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        function, arguments, team = args
        outer = b.function
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64, _I64])
        threads = b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(_I64, []), "get_num_threads"), [])
        with b.if_else(b.icmp_signed("==", threads, _I64(1))) as (alone, together):
            with alone:
                b.call(b.inttoptr(function, kind.as_pointer()), [arguments, _I64(0), _I64(0)])
            with together:
                data, number, step, first = (
                    cgutils.alloca_once(b, held) for held in (ir.ArrayType(_I64, 3), _I64, _I64, _I64)
                )
                numbers = b.inttoptr(team, _I64.as_pointer())
                b.store(threads, numbers)
                with cgutils.for_range(b, threads) as loop:
                    b.store(_I64(0), b.gep(numbers, [b.mul(b.add(loop.index, _I64(1)), _I64(_LINE // 8))]))
                for i, value in enumerate((function, arguments, team)):
                    b.store(value, cgutils.gep_inbounds(b, data, 0, i))
                b.store(threads, number)
                b.store(_I64(1), step)
                b.store(_I64(0), first)
                pool_kind = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [_I64] * 3)
                pool = cgutils.get_or_insert_function(b.module, pool_kind, "numba_parallel_for")
                pointers = [b.bitcast(held, _BYTES) for held in (_items(outer.module, kind), first, number, step, data)]
                b.call(pool, [*pointers, _I64(0), _I64(1), threads])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code


def _items(module: Any, kernel_kind: ir.FunctionType) -> ir.Function:
    """What the pool calls on each thread."""
    many = _I64.as_pointer()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [many, many, many, many]), "kernel_items")
    function.linkage = "internal"
    b = ir.IRBuilder(function.append_basic_block())
    firsts, counts, _, data = function.args
    address, arguments, team = (b.load(b.gep(data, [_I64(i)])) for i in range(3))
    first, count = b.load(firsts), b.load(counts)
    with cgutils.for_range(b, count) as loop:
        b.call(b.inttoptr(address, kernel_kind.as_pointer()), [arguments, b.add(first, loop.index), team])
    b.ret_void()
    return function
