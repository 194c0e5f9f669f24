"""The inner loops of integer matmuls of few rows, from planes of bits to products in one pass (see simd_int.py, whose formula and
bits these are, and quant/cpu_records.py, which has the planes).

Codes are put together in registers, and multiplied there with all rows, so that nothing is written between. Each is read once, in
the order in which it lies, without a pause: that is what a processor fetches ahead by itself.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from nanovllm_cli.kernels.ahead import JUST_READ
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.record_kinds import ROW_PLACES
from nanovllm_cli.kernels.simd import VECTORS, WIDE
from nanovllm_cli.kernels.simd_ir import (
    BYTES,
    F32,
    I32,
    I64,
    LANES,
    STEP_UNITS,
    UNIT_BYTES,
    VF,
    VI,
    ask_for,
    at_address,
    code_bytes,
    fma,
    host_has,
    keep_order,
    look_up_bytes,
    multiple,
    splat,
    table_of_bytes,
)  # fmt: skip
from nanovllm_cli.kernels.simd_products import HAS_BYTE_DOT, products_of
from nanovllm_cli.kernels.simd_unpack import in_turn

_ONE_PASS = WIDE or HAS_BYTE_DOT
_ONE_PASS_OF_FEW_BITS = _ONE_PASS or host_has("avx2")
"""Of 1 and 2, of which a panel is far larger than what is read."""
SEVERAL = WIDE and HAS_BYTE_DOT
"""Whether the products of four rows and 64 columns fit the registers."""
MOST_ROWS = 8
"""That passes of four are quicker for than a panel."""


def _make_rows(rows: int, planes: tuple[int, ...], pairs: bool, with_low: bool, has_table: bool = False) -> Any:
    """An intrinsic for so many rows and all 64 columns:
    pass(codes, scales, lows, steps, group_steps, offset, x, x_stride, groups, out, accumulate, table, ahead); out fp32
    [rows][64], the rest as in `simd_int._make_tile`.

    table: where has_table, of 16 bytes that codes of 4 bits stand for. group_steps: steps of 32 k's to a group; with `pairs` a
    step has two groups. ahead: see `ahead.distance`.
    """
    fold_units = STEP_UNITS // 2 if pairs else STEP_UNITS
    way = products_of(not has_table and sum(planes) < 8)
    cells = [(r, v) for r in range(rows) for v in range(VECTORS)]

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        codes, scales, lows, steps, group_steps, offset, x, x_stride, groups, out, accumulate, table, ahead = args
        entries = table_of_bytes(b, table) if has_table else None
        negative = b.sub(I32(way.bias), b.trunc(offset, I32))
        x_rows = [b.add(x, multiple(b, x_stride, r)) for r in range(rows)]
        x_codes = [b.add(row, multiple(b, groups, 12)) for row in x_rows]
        out_at = {(r, v): at_address(b, out, I64(4 * LANES * (VECTORS * r + v)), VF) for r, v in cells}

        def number(r: int, g: Any, part: int, kind: ir.Type) -> Any:
            return b.load(at_address(b, x_rows[r], multiple(b, b.add(multiple(b, groups, part), g), 4), kind), align=4)

        def starts(g: Any) -> dict[tuple[int, int], Any]:
            of_rows = [splat(b, b.mul(number(r, g, 2, I32), negative), VI) for r in range(rows)]
            return {(r, v): of_rows[r] for r, v in cells}

        def products(step: Any, units: range, dots: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
            """dots + the products of these units of a step."""
            read = b.add(codes, multiple(b, step, UNIT_BYTES * sum(planes)))
            packed: dict[tuple[int, int], Any] = {}

            def spread_at(unit: int, r: int) -> Any:
                at = b.add(multiple(b, step, 4 * STEP_UNITS), I64(4 * unit))
                return splat(b, b.load(at_address(b, x_codes[r], at, I32), align=4), VI)

            def codes_at(unit: int, v: int) -> Any:
                def in_order(row: int) -> Any:
                    for each in in_turn(packed, row, v):
                        line = b.add(read, I64(ROW_PLACES[sum(planes), row] * UNIT_BYTES + 64 * each))
                        ask_for(b, b.add(line, ahead), near=False)
                        packed[row, each] = b.load(b.inttoptr(line, BYTES.as_pointer()), align=4)
                        keep_order(b)
                    return packed[row, v]

                whole = code_bytes(b, planes, unit, in_order)
                return b.bitcast(whole if entries is None else look_up_bytes(b, entries, whole), VI)

            for unit in units[:: way.together]:
                dots = way.add(b, dots, unit, codes_at, spread_at)
            return dots

        def fold(g: Any, dots: dict[tuple[int, int], Any]) -> None:
            """Onto the sums, which are in memory: beside four rows' dots there are no registers for them."""
            xs = [splat(b, number(r, g, 0, F32), VF) for r in range(rows)]
            xl = [splat(b, number(r, g, 1, F32), VF) for r in range(rows)] if with_low else []
            for v in range(VECTORS):
                at = b.add(multiple(b, g, UNIT_BYTES), I64(64 * v))
                scale = b.load(at_address(b, scales, at, VF), align=4)
                low = b.load(at_address(b, lows, at, VF), align=4) if with_low else None
                for r in range(rows):
                    scaled = b.fmul(b.sitofp(dots[r, v], VF), scale)
                    total = fma(b, scaled, xs[r], b.load(out_at[r, v], align=4))
                    b.store(fma(b, low, xl[r], total) if with_low else total, out_at[r, v], align=4)

        clear, group, end = (b.function.append_basic_block(n) for n in ("clear", "group", "end"))
        entry = b.block
        b.cbranch(b.icmp_signed("!=", accumulate, I64(0)), group, clear)
        b.position_at_end(clear)
        for at in out_at.values():
            b.store(ir.Constant(VF, [0.0] * LANES), at, align=4)
        b.branch(group)

        b.position_at_end(group)
        g, first = b.phi(I64), b.phi(I64)
        for block in (entry, clear):
            g.add_incoming(I64(0), block)
            first.add_incoming(I64(0), block)
        if pairs:
            following = g
            for half in range(2):
                units = range(half * fold_units, (half + 1) * fold_units)
                fold(following, products(first, units, starts(following)))
                following = b.add(following, I64(1))
            last = b.add(first, I64(1))
        else:
            last = b.add(first, group_steps)
            last = b.select(b.icmp_signed("<", last, steps), last, steps)
            begin, loop = starts(g), b.function.append_basic_block("loop")
            b.branch(loop)
            b.position_at_end(loop)
            step, dots = b.phi(I64), {cell: b.phi(VI) for cell in cells}
            step.add_incoming(first, group)
            for cell, phi in dots.items():
                phi.add_incoming(begin[cell], group)
            new = products(step, range(STEP_UNITS), dict(dots))
            after = b.add(step, I64(1))
            step.add_incoming(after, loop)
            for cell, phi in dots.items():
                phi.add_incoming(new[cell], loop)
            done = b.function.append_basic_block("fold")
            b.cbranch(b.icmp_signed("<", after, last), loop, done)
            b.position_at_end(done)
            fold(g, new)
            following = b.add(g, I64(1))
        g.add_incoming(following, b.block)
        first.add_incoming(last, b.block)
        b.cbranch(b.icmp_signed("<", following, groups), group, end)
        b.position_at_end(end)
        return context.get_dummy_value()

    @intrinsic
    def one_pass(typing: Any, codes, scales, lows, steps, group_steps, offset, x, xs, groups, out, accumulate, table, ahead):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 13), code

    return one_pass


def _make_one_row_low() -> Any:
    """One compiled function of a row, of weights with lows."""
    r2, r3, r4, r5 = (_make_rows(1, planes, False, True) for planes in ((2,), (2, 1), (4,), (4, 1)))
    p2 = _make_rows(1, (2,), True, True)

    @inner
    def one_row(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead):
        if many == 0:
            p2(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 4:
            r4(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 5:
            r5(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 3:
            r3(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        else:
            r2(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)

    return one_row


def _make_one_row() -> Any:
    """The same of weights without."""
    r1, r2, r3, r4, r5, r8 = (_make_rows(1, planes, False, False) for planes in ((1,), (2,), (2, 1), (4,), (4, 1), (8,)))
    p3, p6 = (_make_rows(1, planes, True, False) for planes in ((2, 1), (4, 2)))
    t4 = _make_rows(1, (4,), False, False, has_table=True)

    @inner
    def one_row(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead):
        if bits == 6:
            p6(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif many == 0:
            p3(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 1:
            r1(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif table != 0:
            t4(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 4:
            r4(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 5:
            r5(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 8:
            r8(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 3:
            r3(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        else:
            r2(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)

    return one_row


def _make_several_low(rows: int) -> Any:
    """One compiled function of 2 to 4 rows, for the weights that most files have: compiling takes its time for each."""
    r4, r5 = (_make_rows(rows, planes, False, True) for planes in ((4,), (4, 1)))

    @inner
    def several(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead):
        if bits == 4:
            r4(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        else:
            r5(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)

    return several


def _make_several(rows: int) -> Any:
    r4, r8 = (_make_rows(rows, planes, False, False) for planes in ((4,), (8,)))
    p6 = _make_rows(rows, (4, 2), True, False)

    @inner
    def several(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead):
        if bits == 4:
            r4(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        elif bits == 6:
            p6(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)
        else:
            r8(codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, ahead)

    return several


def _make_few(one_row: Any, two_rows: Any, three_rows: Any, four_rows: Any) -> Any:
    """One compiled function for any number of rows: four in a pass, and then what is left.

    next_record: how far it is. Where there are several passes the last one asks for its lines, as this record is in the first
    cache then, and nothing is read that a processor could go by.
    """

    @inner
    def few(rows, bits, codes, scales, lows, steps, group_units, offset, x, xs, groups, out, add, table, ahead, next_record):
        many, asked = group_units // STEP_UNITS, ahead if rows <= 4 else next_record
        if SEVERAL:
            while rows >= 4:
                now = asked if rows == 4 else JUST_READ
                four_rows(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, now)
                rows, x, out = rows - 4, x + 4 * xs, out + 4 * UNIT_BYTES
            if rows == 3:
                three_rows(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, asked)
            elif rows == 2:
                two_rows(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, asked)
        if rows == 1:
            one_row(bits, codes, scales, lows, steps, many, offset, x, xs, groups, out, add, table, asked)

    return few


few_rows = _make_few(_make_one_row(), *map(_make_several, (2, 3, 4)))
few_rows_low = _make_few(_make_one_row_low(), *map(_make_several_low, (2, 3, 4)))


@njit(inline="always")
def in_one_pass(rows, bits, group, table, with_low):
    """True where `few_rows`, or with lows `few_rows_low`, has this kind and so many rows, and is quicker than a panel."""
    if rows > 1 and not (SEVERAL and rows <= MOST_ROWS and table == 0):
        return False
    if group < 32:
        known = bits == 2 and rows == 1 if with_low else (bits == 6 and WIDE) or (bits == 3 and rows == 1)
        return _ONE_PASS and table == 0 and known
    if rows > 1:
        return bits == 4 or bits == (5 if with_low else 8)
    if bits <= 2:
        return _ONE_PASS_OF_FEW_BITS and not (bits == 1 and with_low)
    return _ONE_PASS and (bits == 4 if table != 0 else bits <= 5)
