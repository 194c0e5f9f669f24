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

They are started once for all kernels of a list. Between two of them they wait for each other by looking at a counter, which takes
a tenth of what it takes to start them.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_cli import system
from nanovllm_cli.errors import UsageError
from nanovllm_cli.kernels.compiled import compile_once
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.waiting import LOOKS, added, let_others, rest, tell, told

TAG_TYPES = {"H": types.uint16, "f": types.float32, "b": types.int8, "B": types.uint8}
"""By `struct`'s letters."""
ALIGNMENT = 8
"""Of arguments, whose bytes are a multiple of it."""
_I64, _BYTES = ir.IntType(64), ir.IntType(8).as_pointer()
PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
PIECES = 8
"""Of a thread's part of the tasks: so many times each thread asks for more, by an instruction that takes some 20 ns."""
_LINE = 128
"""Of a Mac's caches; others have half of it."""
_PROGRAM, _DOOR, _SIZE, _CROSSED, _TEAMS = (_LINE * i for i in range(5))
"""Where in the memory of who runs a list of kernels is what: its address and length, words that threads look at, two teams."""
_CLOSED = 1 << 32
_MOST_YIELDS = 1 << 14
"""That the first thread takes for the others, some milliseconds: longer than one that may run waits for its turn."""


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
            listed = compile_once(_run_listed, types.void(*[types.int64] * 3), error_model="numpy")
            compiled = compile_once(_run_all, types.void(*[types.int64] * 4), error_model="numpy")
            memory = np.zeros(_TEAMS + 2 * team_bytes() + _LINE, np.uint8)
            begin = memory.ctypes.data + -memory.ctypes.data % _LINE
            _replay.extend((ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(compiled.address), listed.address, begin))
            _replay.extend((compiled, listed, memory))
        _replay[0](steps, count, _replay[1], _replay[2])


def _refuse(*_: int) -> None:
    hint = 'load models in the process that uses them; the start method of multiprocessing has to be "spawn"'
    raise UsageError("this process was forked from one that has loaded a model, whose threads it lacks", hint)


def _in_a_forked_child() -> None:
    """OpenMP would end it, with a line of its own; or never return, where only torch has used it."""
    global _turn
    _turn = threading.Lock()  # another thread may have had it
    if _replay:
        _replay[0] = _refuse
    else:
        _use_own_threads()


def _use_own_threads() -> None:
    """Those of numba, which need no OpenMP."""
    if "NUMBA_THREADING_LAYER" not in os.environ:
        numba.config.THREADING_LAYER = "workqueue"


_turn = threading.Lock()
_replay: list[Any] = []
os.register_at_fork(after_in_child=_in_a_forked_child)
if system.is_macos():
    _use_own_threads()


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
        piece = added(team + (1 + owner) * _LINE, 1) - 1
        while piece < PIECES:
            for task in range(first + (end - first) * piece // PIECES, first + (end - first) * (piece + 1) // PIECES):
                yield task
            piece = added(team + (1 + owner) * _LINE, 1) - 1


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


def _run_all(steps: Any, count: Any, listed: Any, memory: Any) -> None:
    """listed: address of `_run_listed`. memory: see _PROGRAM."""
    function, arguments = listed, memory
    if count == 1:
        row = carray(typed_pointer(steps, np.int64(0)), (2,))
        function, arguments = row[0], row[1]
    else:
        program = carray(typed_pointer(memory + _PROGRAM, np.int64(0)), (2,))
        program[0], program[1] = steps, count
        for word in (_DOOR, _SIZE, _CROSSED):
            tell(memory + word, 0)
    _on_all_threads(function, arguments, memory + _TEAMS)


def _run_listed(memory: Any, thread: Any, team: Any) -> None:
    """A thread's part of all kernels of a list. team: the first of two that are used by turns, or 0 for a thread alone."""
    program = carray(typed_pointer(memory + _PROGRAM, np.int64(0)), (2,))
    count = program[1]
    table = carray(typed_pointer(program[0], np.int64(0)), (count, 2))
    own, next_, threads = team, 0, 0
    if team != 0:
        wanted = carray(typed_pointer(team, np.int64(0)), (1,))[0]
        number, threads = _join(memory, team, wanted)
        thread, next_ = (thread if threads == wanted else number), team + (1 + wanted) * _LINE
        if number >= threads:
            return
    for i in range(count):
        if team != 0 and thread == 0:  # nobody has a part in the kernel before this one any more
            clear_team(next_, threads)
        run_kernel(table[i, 0], table[i, 1], thread, own)
        if team != 0 and i + 1 < count:
            _wait_for_all(memory + _CROSSED, threads * (i + 1))
        own, next_ = next_, own


@inner
def _join(memory, team, wanted):
    """This thread's number among those that run the list together, and how many they are; as large a number for one that comes
    when they have begun. A pool may give fewer threads than it is asked for, one after the other, so that nobody is waited for
    without end."""
    number = added(memory + _DOOR, 1) - 1
    if number >= _CLOSED:
        return 0, 0
    looks = 0
    if number == 0:
        while told(memory + _DOOR) < wanted and looks < LOOKS + _MOST_YIELDS:
            looks = _looked(looks)
        threads = added(memory + _DOOR, _CLOSED) - _CLOSED
        clear_team(team, threads)
        tell(memory + _SIZE, threads)
        return 0, threads
    while told(memory + _SIZE) == 0:
        looks = _looked(looks)
    return number, told(memory + _SIZE)


@inner
def _wait_for_all(counter, goal):
    """Until all together have come so often."""
    looks, come = 0, added(counter, 1)
    while come < goal:
        looks = _looked(looks)
        come = told(counter)


@inner
def _looked(looks):
    """One look more, behind which the processor may do something else."""
    if looks > LOOKS:
        let_others()
    else:
        rest()
    return looks + 1


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
