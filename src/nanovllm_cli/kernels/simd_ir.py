"""What kernels written as LLVM vectors are made of: types, addresses, loops, requests to memory, look-ups of bytes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir

from nanovllm_cli.kernels import arm_features

if platform.machine() in ("aarch64", "arm64") and numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
    numba.config.CPU_FEATURES = arm_features.of_this_processor()  # before its first function: it asks once


def host_has(feature: str) -> bool:
    """True if kernels may use this feature, by LLVM's name for it ("avx512bf16"): if this processor has it, or, where
    NUMBA_CPU_FEATURES says what to compile for, if that has it."""
    asked = numba.config.CPU_FEATURES
    if asked is not None:
        return f"+{feature}" in (each.strip() for each in asked.split(","))
    return bool(llvm.get_host_cpu_features().get(feature, False))


NEON = host_has("neon")
"""64-bit ARM: 32 registers of 16 bytes."""
LANES = 16
UNIT_BYTES = 256
"""Four codes of each of 64 columns."""
STEP_UNITS = 8

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VI, VF = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
BYTES, SHORTS = ir.VectorType(I8, 4 * LANES), ir.VectorType(I16, 2 * LANES)


class BFloatVector(ir.Type):  # type: ignore[misc]
    """<count x bfloat>, which llvmlite has no class for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def _to_string(self) -> str:
        return f"<{self.count} x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloatVector) and self.count == other.count

    def __hash__(self) -> int:
        return hash(self._to_string())


def known_function(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def at_address(b: ir.IRBuilder, base: Any, offset: Any, kind: ir.Type) -> Any:
    return b.inttoptr(b.add(base, offset), kind.as_pointer())


def fma(b: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    """x * y + z of fp32 vectors, with one rounding."""
    return b.call(known_function(b, "llvm.fma.v16f32", VF, VF, VF, VF), [x, y, z])


@contextmanager
def counted(b: ir.IRBuilder, count: Any, step: int = 1) -> Iterator[Any]:
    """What is built within is a loop's body, for the number that it gives: 0, step, 2 step, … below count, which is above 0."""
    entry, loop, end = b.block, *(b.function.append_basic_block(name) for name in ("loop", "end"))
    b.branch(loop)
    b.position_at_end(loop)
    number = b.phi(I64)
    number.add_incoming(I64(0), entry)
    yield number
    following = b.add(number, I64(step))
    number.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, end)
    b.position_at_end(end)


def ask_for(b: ir.IRBuilder, address: Any, *, near: bool = True) -> None:
    """For the cache line at an address. near: into the first cache; else into the second, from which the processor's own fetching
    brings on what is read in order (a line that is in the first already does not set that going)."""
    pointer = I8.as_pointer()
    hint = known_function(b, "llvm.prefetch.p0", ir.VoidType(), pointer, I32, I32, I32)
    b.call(hint, [b.inttoptr(address, pointer), I32(0), I32(3 if near else 2), I32(1)])


def keep_order(b: ir.IRBuilder) -> None:
    """No instruction: loads before and after it are not exchanged."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def multiple(b: ir.IRBuilder, value: Any, n: int) -> Any:
    return b.mul(value, I64(n))


def splat(b: ir.IRBuilder, value: Any, kind: ir.VectorType) -> Any:
    source = ir.VectorType(kind.element, 4) if NEON else kind
    first = b.insert_element(ir.Constant(source, ir.Undefined), value, I32(0))
    if NEON:
        first = opaque(b, first)
    return b.shuffle_vector(first, ir.Constant(source, ir.Undefined), ir.Constant(VI, [0] * LANES))


def opaque(b: ir.IRBuilder, register: Any) -> Any:
    """The same register, of which LLVM forgets where it came from. ARM multiplies with one lane of a register as with all; but
    LLVM loads a lane that comes from memory into all of them, which takes a multiplier's time."""
    return b.asm(ir.FunctionType(register.type, [register.type]), "", "=w,0", [register], False)


def look_up_bytes(b: ir.IRBuilder, table: Any, places: Any) -> Any:
    """table[place & 15] for 64 bytes, 0 where a place's highest bit is set; no other bit above the fourth is. table: 16 bytes,
    four times."""
    if host_has("avx512bw"):
        return b.call(known_function(b, "llvm.x86.avx512.pshuf.b.512", BYTES, BYTES, BYTES), [table, places])
    if host_has("avx2"):
        half = ir.VectorType(I8, 2 * LANES)
        shuffle = known_function(b, "llvm.x86.avx2.pshuf.b", half, half, half)
        return joined(b, [b.call(shuffle, list(both)) for both in zip(halves_of(b, table), halves_of(b, places), strict=True)])
    if not (NEON or host_has("ssse3")):
        return _look_up_one_by_one(b, table, places)
    quarter = ir.VectorType(I8, LANES)
    name = "llvm.aarch64.neon.tbl1.v16i8" if NEON else "llvm.x86.ssse3.pshuf.b.128"
    look = known_function(b, name, quarter, quarter, quarter)
    return by_quarters(b, lambda entries, some: b.call(look, [entries, some]), table, places)


def table_of_bytes(b: ir.IRBuilder, address: Any) -> Any:
    """What `look_up_bytes` takes, of 16 bytes in memory."""
    words = ir.VectorType(I32, 4)
    quarter = b.load(b.inttoptr(address, words.as_pointer()), align=1)
    return b.bitcast(b.shuffle_vector(quarter, quarter, ir.Constant(VI, list(range(4)) * 4)), BYTES)


def _look_up_one_by_one(b: ir.IRBuilder, table: Any, places: Any) -> Any:
    lowest = b.and_(places, ir.Constant(BYTES, [15] * (4 * LANES)))
    found = ir.Constant(BYTES, ir.Undefined)
    for i in range(4 * LANES):
        place = b.zext(b.extract_element(lowest, I32(i)), I32)
        found = b.insert_element(found, b.extract_element(table, place), I32(i))
    zeros = ir.Constant(BYTES, [0] * (4 * LANES))
    return b.select(b.icmp_signed("<", places, zeros), zeros, found)


def halves_of(b: ir.IRBuilder, vector: Any) -> list[Any]:
    """The first and the second half of a vector's elements."""
    count = vector.type.count
    return [
        b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, count // 2), list(range(first, first + count // 2))))
        for first in (0, count // 2)
    ]


def joined(b: ir.IRBuilder, halves: list[Any]) -> Any:
    count = 2 * halves[0].type.count
    return b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, count), list(range(count))))


def by_quarters(b: ir.IRBuilder, function: Callable[..., Any], *vectors: Any) -> Any:
    """What a function of a quarter of the width makes of each quarter."""
    quarters = zip(*([part for half in halves_of(b, v) for part in halves_of(b, half)] for v in vectors), strict=True)
    parts = [function(*some) for some in quarters]
    return joined(b, [joined(b, parts[:2]), joined(b, parts[2:])])


def code_bytes(b: ir.IRBuilder, planes: tuple[int, ...], unit: int, load: Callable[[int], Any]) -> Any:
    """Codes of one unit, a byte each, from their planes (quant/cpu_records.py); of a single bit, 0 or 2. load(row): 64 bytes of
    that row of the step."""
    constant = lambda value: ir.Constant(BYTES, [value] * (4 * LANES))
    if planes == (1,):
        signs = load(0)
        signs = b.lshr(signs, constant(unit - 1)) if unit else b.shl(signs, constant(1))
        return b.and_(signs, constant(2))
    row = shift = 0
    whole = None
    for plane in planes:
        j = unit % (8 // plane)
        part = load(row + unit * plane // 8)
        if j:
            part = b.lshr(part, constant(j * plane))
        if j * plane + plane < 8:
            part = b.and_(part, constant((1 << plane) - 1))
        whole = part if whole is None else b.or_(whole, b.shl(part, constant(shift)))
        row, shift = row + plane, shift + plane
    return whole
