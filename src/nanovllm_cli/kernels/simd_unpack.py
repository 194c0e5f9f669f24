"""Unpacking of records (quant/cpu_records.py), written as LLVM vectors: bit planes to codes, scales to fp32, codes by a table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.record_kinds import ROW_PLACES, TILE
from nanovllm_cli.kernels.simd import VECTORS, WIDE, typed_pointer
from nanovllm_cli.kernels.simd_ir import (
    BYTES,
    I8,
    I64,
    LANES,
    NEON,
    STEP_UNITS,
    UNIT_BYTES,
    VF,
    VI,
    ask_for,
    at_address,
    code_bytes,
    counted,
    host_has,
    keep_order,
    look_up_bytes,
    multiple,
    splat,
    table_of_bytes,
)  # fmt: skip

PREFETCH_BYTES = 8192
"""How long before their use codes are asked for."""


def in_turn(read: Collection[tuple[int, int]], row: int, vector: int) -> range:
    """The vectors of a row to be read now: none, if this one has been, or, where there are registers for them, all."""
    if (row, vector) in read:
        return range(0)
    return range(VECTORS) if WIDE else range(vector, vector + 1)


def _make_unpack(planes: tuple[int, ...], has_table: bool = False) -> Any:
    """An intrinsic unpack(source, steps, target, ahead, table): bit planes (quant/cpu_records.py) to codes [8 * steps
    units][256], or to what they stand for in a table of 16 bytes.

    What lies at `ahead`, as long as the planes are, is asked for meanwhile."""
    bits = sum(planes)

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, steps, target, ahead, table = args
        entries = table_of_bytes(b, table) if has_table else None
        with counted(b, steps) as step:
            advance, write = multiple(b, step, UNIT_BYTES * bits), multiple(b, step, UNIT_BYTES * STEP_UNITS)
            read = b.add(source, advance)
            packed: dict[tuple[int, int], Any] = {}
            for unit in range(STEP_UNITS):
                for v in range(VECTORS):

                    def in_order(row: int, v: int = v) -> Any:
                        for each in in_turn(packed, row, v):
                            place = I64(ROW_PLACES[bits, row] * UNIT_BYTES + 64 * each)
                            ask_for(b, b.add(b.add(ahead, advance), place))
                            packed[row, each] = b.load(at_address(b, read, place, BYTES), align=4)
                            keep_order(b)
                        return packed[row, v]

                    whole = code_bytes(b, planes, unit, in_order)
                    if entries is not None:
                        whole = look_up_bytes(b, entries, whole)
                    b.store(whole, at_address(b, target, b.add(write, I64(unit * UNIT_BYTES + 64 * v)), BYTES), align=4)
        return context.get_dummy_value()

    @intrinsic
    def unpack(typing: Any, source, steps, target, ahead, table):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 5), code

    return unpack


_u1, _u2, _u3, _u4 = (_make_unpack(planes) for planes in ((1,), (2,), (2, 1), (4,)))
_u4_by_table = _make_unpack((4,), has_table=True)
_u5, _u6, _u7 = _make_unpack((4, 1)), _make_unpack((4, 2)), _make_unpack((4, 2, 1))


@inner
def unpack_codes(bits, source, steps, target, ahead, table):
    """Planes of 1 to 7 bits to u8 codes at `target`, 32 k's of 64 columns a step. ahead: what is asked for meanwhile. table: 0,
    or of codes of 4 bits the address of 16 bytes that they stand for; a single bit stands for 0 or 2."""
    if bits == 4:
        if table != 0:
            _u4_by_table(source, steps, target, ahead, table)
        else:
            _u4(source, steps, target, ahead, table)
    elif bits == 6:
        _u6(source, steps, target, ahead, table)
    elif bits == 5:
        _u5(source, steps, target, ahead, table)
    elif bits == 3:
        _u3(source, steps, target, ahead, table)
    elif bits == 2:
        _u2(source, steps, target, ahead, table)
    elif bits == 1:
        _u1(source, steps, target, ahead, table)
    else:
        _u7(source, steps, target, ahead, table)


def _make_times(kind: str) -> Any:
    """An intrinsic times(source, count, factors, target): target fp32 [count][64] = whole numbers u8 or i8 at `source`, times
    factors fp32 [64]. kind: "u8", "i8", "lower" or "upper" half of a byte; "-" before it: times -factors. "odd": twice the lower
    half and 1, then of the upper, [count][2][64]."""
    halves = ("lower", "upper") if kind == "odd" else (kind,)

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, count, factors, target = args
        vector = ir.VectorType(I8, LANES)
        lanes = range(VECTORS)
        factor = [b.load(at_address(b, factors, I64(64 * v), VF), align=4) for v in lanes]
        if kind.startswith("-"):
            factor = [b.fneg(f) for f in factor]
        with counted(b, count) as g:
            for v in lanes:
                codes = b.load(at_address(b, source, b.add(multiple(b, g, TILE), I64(LANES * v)), vector), align=1)
                for line, half in enumerate(halves):
                    whole = b.sext(codes, VI) if kind == "i8" else b.zext(codes, VI)
                    if half.endswith("lower"):
                        whole = b.and_(whole, ir.Constant(VI, [15] * LANES))
                    elif half.endswith("upper"):
                        whole = b.lshr(whole, ir.Constant(VI, [4] * LANES))
                    if kind == "odd":
                        whole = b.or_(b.shl(whole, ir.Constant(VI, [1] * LANES)), ir.Constant(VI, [1] * LANES))
                    at = b.add(multiple(b, g, 4 * TILE * len(halves)), I64(4 * TILE * line + 64 * v))
                    b.store(b.fmul(b.sitofp(whole, VF), factor[v]), at_address(b, target, at, VF), align=4)
        return context.get_dummy_value()

    @intrinsic
    def times(typing: Any, source, count, factors, target):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 4), code

    return times


times_u8, times_i8, times_lower, times_odd = (_make_times(kind) for kind in ("u8", "i8", "lower", "odd"))
minus_u8, minus_upper = _make_times("-u8"), _make_times("-upper")


@intrinsic
def _halves_vectors(typing: Any, source, count, factor, target):  # type: ignore[no-untyped-def]
    """target fp32 [count] = f16 at `source`, times the float32 factor; count is a multiple of 64. By F16C, AVX512 or NEON."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, count, factor, target = args
        spread = splat(b, factor, VF)
        with counted(b, count, VECTORS * LANES) as at:
            for v in range(VECTORS):
                place = b.add(at, I64(LANES * v))
                half = b.load(at_address(b, source, multiple(b, place, 2), ir.VectorType(ir.HalfType(), LANES)), align=2)
                b.store(b.fmul(b.fpext(half, VF), spread), at_address(b, target, multiple(b, place, 4), VF), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), code


@inner
def _halves_numbers(source, count, factor, target):
    """The same by whole numbers: finite ones, subnormal ones too, exactly."""
    bits = carray(typed_pointer(source, np.uint16(0)), (count,))
    out = carray(typed_pointer(target, np.float32(0)), (count,))
    for i in range(count):
        h = np.uint32(bits[i])
        magnitude = np.uint32((h & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
        sign = np.uint32((h & np.uint32(0x8000)) << np.uint32(16))
        out[i] = np.uint32(np.float32(magnitude).view(np.uint32) | sign).view(np.float32) * factor


unpack_halves = _halves_vectors if NEON or host_has("f16c") else _halves_numbers
"""unpack_halves(source, count, factor, target)."""
