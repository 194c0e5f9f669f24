"""The inner loops of integer matmuls, written as LLVM vectors (see simd.py and simd_ir.py).

    out[r, c] (+)= sum over groups g of  xs[r, g] * scale[g, c] * dot(r, g, c) + xl[r, g] * low[g, c]
    dot(r, g, c)  = sum over k of group g of  x[r, k] * (code[k, c] - offset)                         whole numbers, exact

x is s8, codes are u8; xs is the scale of x and xl that scale times the sum of x's codes, so that `low` (minus a zero point times
its scale, or a min) costs one multiply-add a group. A group's whole numbers stay in registers beside the fp32 sums. Groups come
in ascending order, whatever the number of rows, so a row's bits depend on that row and the weights alone.

Codes lie as [k / 4][64 columns][4]: what `vpdpbusd` multiplies at once. simd_products.py has what others do instead; the whole
numbers are the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_cli.kernels.compiled import compile_once
from nanovllm_cli.kernels.record_kinds import NO_LOW, RecordLayout
from nanovllm_cli.kernels.simd import VECTORS, WIDE
from nanovllm_cli.kernels.simd_ir import (
    F32,
    I32,
    I64,
    LANES,
    NEON,
    UNIT_BYTES,
    VF,
    VI,
    ask_for,
    at_address,
    counted,
    fma,
    multiple,
    splat,
)  # fmt: skip
from nanovllm_cli.kernels.simd_products import HAS_BYTE_DOT, MOST_SMALL, products_of


def tiles(*, wide: bool, neon: bool, byte_dot: bool) -> dict[int, int]:
    """Vectors of columns of a tile, by its rows."""
    if wide:
        return {1: 4, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2}
    if neon:
        return {1: 4, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1} if byte_dot else {1: 4, 2: 2, 3: 1}
    return {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1} if byte_dot else {1: 4, 2: 1, 3: 1, 4: 1}


_VECTORS_OF_ROWS = tiles(wide=WIDE, neon=NEON, byte_dot=HAS_BYTE_DOT)
"""Vectors of columns whose whole numbers fit the registers, and fp32 sums too, where there are 32 registers of 16 floats."""
TILE_ROWS = max(_VECTORS_OF_ROWS)
FEW_ROWS = 3 if WIDE else 0
"""Rows that take all columns at once, in the order in which they lie, so that nothing need be asked for."""


def dot_rows(layout: RecordLayout) -> int:
    """The address of dot(rows, codes, scales, lows, units, group_units, offset, x, x_stride, groups, out, out_stride, accumulate,
    ahead, ahead_step) for up to TILE_ROWS rows over a panel, by addresses and byte strides.

    codes [units][256]; scales, lows fp32 [groups][64]; x: a row's xs, xl and sums of codes ([groups] each), then its codes. With
    each unit the tiles that read it ask for four lines that will be read later, ahead_step bytes further each time, unless rows
    are few.
    """
    most = max(layout.table) if layout.table is not None else (1 << layout.bits) - 1
    small = layout.codebook is None and most <= MOST_SMALL and products_of(True) != products_of(False)
    return int(_compiled(int(layout.low != NO_LOW), int(small)).address)


@cache
def _compiled(with_low: int, small: int) -> Any:
    # Closed over numbers alone: numba's cache knows a function by what it is closed over, and other functions are new each time.
    def dot(rows, codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step):
        rest = codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step
        if rows == 6:
            _columns(6, with_low, small, rest)
        elif rows == 1:
            _columns(1, with_low, small, rest)
        elif rows == 2:
            _columns(2, with_low, small, rest)
        elif rows == 3:
            _columns(3, with_low, small, rest)
        elif rows == 4:
            _columns(4, with_low, small, rest)
        else:
            _columns(5, with_low, small, rest)

    return compile_once(dot, types.void(*[types.int64] * 15), error_model="numpy")


@intrinsic(prefer_literal=True)
def _columns(typing, rows, with_low, small, arguments):
    """Tiles of so many rows side by side, until they have all 64 columns."""
    if not all(isinstance(kind, types.IntegerLiteral) for kind in (rows, with_low, small)):
        return None
    count, low, codes_are_small = (kind.literal_value for kind in (rows, with_low, small))
    count = min(count, TILE_ROWS)  # more are never asked for
    vectors = _VECTORS_OF_ROWS[count]

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        codes, scales, lows, *between, out, out_stride, accumulate, ahead, step = cgutils.unpack_tuple(b, args[-1])
        with counted(b, I64(64 * VECTORS), 64 * vectors) as at:
            lines = b.sub(I64(64 * (VECTORS // vectors - 1)), b.udiv(at, I64(vectors)))
            own = [b.add(address, at) for address in (codes, scales, lows)]
            own += [*between, b.add(out, at), out_stride, accumulate, b.add(ahead, lines), step]
            _write_tile(b, count, vectors, low, codes_are_small, *own)
        return context.get_dummy_value()

    return types.void(rows, with_low, small, arguments), code


def _write_tile(
    b: ir.IRBuilder, rows: int, vectors: int, with_low: int, small: int,
    codes: Any, scales: Any, lows: Any, units: Any, group_units: Any, offset: Any, x: Any, x_stride: Any, groups: Any,
    out: Any, out_stride: Any, accumulate: Any, ahead: Any, ahead_step: Any,
) -> None:  # fmt: skip
    """`rows` x `16 * vectors` of one panel."""
    products = products_of(bool(small))
    cells = [(r, v) for r in range(rows) for v in range(vectors)]
    out_at = {(r, v): at_address(b, out, b.add(multiple(b, out_stride, r), I64(64 * v)), VF) for r, v in cells}
    x_rows = [b.add(x, multiple(b, x_stride, r)) for r in range(rows)]
    x_codes = [b.add(row, multiple(b, groups, 12)) for row in x_rows]
    negative = b.sub(I32(products.bias), b.trunc(offset, I32))

    entry, function = b.block, b.function
    load, group, loop, fold, end = (
        function.append_basic_block(n) for n in ("load", "group", "loop", "fold", "end")
    )
    b.cbranch(b.icmp_signed("!=", accumulate, I64(0)), load, group)
    b.position_at_end(load)
    carried = {cell: b.load(out_at[cell], align=4) for cell in cells}
    b.branch(group)

    b.position_at_end(group)
    g, first = b.phi(I64), b.phi(I64)
    sums = {cell: b.phi(VF) for cell in cells}
    for block in (entry, load):
        g.add_incoming(I64(0), block)
        first.add_incoming(I64(0), block)
    for cell, phi in sums.items():
        phi.add_incoming(ir.Constant(VF, [0.0] * LANES), entry)
        phi.add_incoming(carried[cell], load)
    last = b.add(first, group_units)
    last = b.select(b.icmp_signed("<", last, units), last, units)

    def number(r: int, part: int, kind: ir.Type) -> Any:
        """xs, xl or the sum of codes of row r in this group."""
        return b.load(at_address(b, x_rows[r], multiple(b, b.add(multiple(b, groups, part), g), 4), kind), align=4)

    starts = [splat(b, b.mul(number(r, 2, I32), negative), VI) for r in range(rows)]
    b.branch(loop)

    b.position_at_end(loop)
    unit = b.phi(I64)
    unit.add_incoming(first, group)
    dots: dict[tuple[int, int], Any] = {cell: b.phi(VI) for cell in cells}
    for (r, _), phi in dots.items():
        phi.add_incoming(starts[r], group)
    w_offset, x_offset = multiple(b, unit, UNIT_BYTES), multiple(b, unit, 4)
    for i in range(products.together if rows > FEW_ROWS else 0):
        for line in range(0, UNIT_BYTES, UNIT_BYTES // vectors):
            ask_for(b, b.add(b.add(ahead, b.mul(b.add(unit, I64(i)), ahead_step)), I64(line)))

    def codes_at(i: int, v: int) -> Any:
        return b.load(at_address(b, codes, b.add(w_offset, I64(UNIT_BYTES * i + 64 * v)), VI), align=4)

    def spread_at(i: int, r: int) -> Any:
        return splat(b, b.load(at_address(b, x_codes[r], b.add(x_offset, I64(4 * i)), I32), align=4), VI)

    new = products.add(b, dots, 0, codes_at, spread_at)
    following = b.add(unit, I64(products.together))
    unit.add_incoming(following, loop)
    for cell, phi in dots.items():
        phi.add_incoming(new[cell], loop)
    b.cbranch(b.icmp_signed("<", following, last), loop, fold)

    b.position_at_end(fold)
    table_at = [b.add(multiple(b, g, UNIT_BYTES), I64(64 * v)) for v in range(vectors)]
    scale = [b.load(at_address(b, scales, at, VF), align=4) for at in table_at]
    low = [b.load(at_address(b, lows, at, VF), align=4) for at in table_at] if with_low else []
    folded = {}
    for r in range(rows):
        xs = splat(b, number(r, 0, F32), VF)
        xl = splat(b, number(r, 1, F32), VF) if with_low else None
        for v in range(vectors):
            scaled = b.fmul(b.sitofp(new[r, v], VF), scale[v])
            total = fma(b, scaled, xs, sums[r, v])
            folded[r, v] = fma(b, low[v], xl, total) if with_low else total
    next_group = b.add(g, I64(1))
    g.add_incoming(next_group, fold)
    first.add_incoming(last, fold)
    for cell, phi in sums.items():
        phi.add_incoming(folded[cell], fold)
    b.cbranch(b.icmp_signed("<", next_group, groups), group, end)

    b.position_at_end(end)
    for cell in cells:
        b.store(folded[cell], out_at[cell], align=4)
