"""The inner loops of integer matmuls of few rows, from planes of bits to products in one pass (see simd_int.py, whose formula and
bits these are, and quant/cpu_records.py, which has the planes).

Codes are put together in registers, and multiplied there with all rows, so that nothing is written between. Each is read once, in
the order in which it lies, without a pause: that is what a processor fetches ahead by itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_cli.kernels.ahead import JUST_READ
from nanovllm_cli.kernels.compiled import compile_once
from nanovllm_cli.kernels.record_kinds import NO_LOW, PLANES, ROW_PLACES, STEP, RecordLayout
from nanovllm_cli.kernels.simd import VECTORS, WIDE
from nanovllm_cli.kernels.simd_groups import Cells, each_group, each_step
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
SEVERAL = WIDE and HAS_BYTE_DOT
"""Whether the products of four rows and 64 columns fit the registers."""
_SIGNATURE = types.void(*[types.int64] * 15)


def most_rows(layout: RecordLayout) -> int:
    """That `few_rows` of this kind of weight is quicker for than a panel; 0: it has none."""
    bits, in_pairs, with_low = layout.bits, layout.group < STEP, layout.low != NO_LOW
    if SEVERAL and bits in PLANES:
        return 4 if bits <= 3 else 8
    if in_pairs:
        known = bits == (2 if with_low else 3) or (bits == 6 and WIDE and not with_low)
        return int(_ONE_PASS and known)
    if bits <= 2:  # of which a panel is far larger than what is read
        return int(bits > 0 and (_ONE_PASS or host_has("avx2")) and not (bits == 1 and with_low))
    return int(_ONE_PASS and bits <= 5)


def few_rows(layout: RecordLayout) -> int:
    """The address of few(rows, codes, scales, lows, steps, group_units, offset, x, x_stride, groups, out, accumulate, table,
    ahead, next_record) for up to `most_rows`: four in a pass, and then what is left. out fp32 [rows][64]; table: of 16 bytes that
    codes of 4 bits stand for; ahead: see `ahead.distance`; the rest as in `simd_int.dot_rows`.

    next_record: how far it is. Where there are several passes the last one asks for its lines, as this record is in the first
    cache then, and nothing is read that a processor could go by.
    """
    kind = layout.bits, int(layout.group < STEP), int(layout.low != NO_LOW), int(layout.bits == 4 and layout.table is not None)
    return int(_compiled(most_rows(layout) > 1, *kind).address)


@cache
def _compiled(several: bool, bits: int, pairs: int, with_low: int, has_table: int) -> Any:
    # Closed over numbers alone: numba's cache knows a function by what it is closed over, and other functions are new each time.
    def up_to_any(rows, codes, scales, lows, steps, group_units, offset, x, xs, groups, out, add, table, ahead, next_record):
        of_weight = codes, scales, lows, steps, group_units // STEP_UNITS, offset, table
        asked = ahead if rows <= 4 else next_record
        while rows >= 4:
            now = asked if rows == 4 else JUST_READ
            _rows(4, bits, pairs, with_low, has_table, of_weight, (x, xs, groups, out, add, now))
            rows, x, out = rows - 4, x + 4 * xs, out + 4 * UNIT_BYTES
        rest = x, xs, groups, out, add, asked
        if rows == 3:
            _rows(3, bits, pairs, with_low, has_table, of_weight, rest)
        elif rows == 2:
            _rows(2, bits, pairs, with_low, has_table, of_weight, rest)
        elif rows == 1:
            _rows(1, bits, pairs, with_low, has_table, of_weight, rest)

    def one_row(rows, codes, scales, lows, steps, group_units, offset, x, xs, groups, out, add, table, ahead, next_record):
        of_weight = codes, scales, lows, steps, group_units // STEP_UNITS, offset, table
        _rows(1, bits, pairs, with_low, has_table, of_weight, (x, xs, groups, out, add, ahead))

    return compile_once(up_to_any if several else one_row, _SIGNATURE, error_model="numpy")


@intrinsic(prefer_literal=True)
def _rows(typing, rows, bits, pairs, with_low, has_table, of_weight, rest):
    shape = rows, bits, pairs, with_low, has_table
    if not all(isinstance(kind, types.IntegerLiteral) for kind in shape):
        return None
    numbers = tuple(kind.literal_value for kind in shape)

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _write_rows(b, *numbers, *cgutils.unpack_tuple(b, args[-2]), *cgutils.unpack_tuple(b, args[-1]))
        return context.get_dummy_value()

    return types.void(*shape, of_weight, rest), code


def _write_rows(
    b: ir.IRBuilder, rows: int, bits: int, pairs: int, with_low: int, has_table: int,
    codes: Any, scales: Any, lows: Any, steps: Any, group_steps: Any, offset: Any, table: Any,
    x: Any, x_stride: Any, groups: Any, out: Any, accumulate: Any, ahead: Any,
) -> None:  # fmt: skip
    """So many rows and all 64 columns. group_steps: steps of 32 k's to a group; with `pairs` a step has two groups."""
    planes = PLANES[bits]
    way = products_of(bits < 7 and not has_table)
    cells = [(r, v) for r in range(rows) for v in range(VECTORS)]
    entries = table_of_bytes(b, table) if has_table else None
    negative = b.sub(I32(way.bias), b.trunc(offset, I32))
    x_rows = [b.add(x, multiple(b, x_stride, r)) for r in range(rows)]
    x_codes = [b.add(row, multiple(b, groups, 12)) for row in x_rows]
    out_at = {(r, v): at_address(b, out, I64(4 * LANES * (VECTORS * r + v)), VF) for r, v in cells}

    def number(r: int, g: Any, part: int, kind: ir.Type) -> Any:
        return b.load(at_address(b, x_rows[r], multiple(b, b.add(multiple(b, groups, part), g), 4), kind), align=4)

    def starts(g: Any) -> Cells:
        of_rows = [splat(b, b.mul(number(r, g, 2, I32), negative), VI) for r in range(rows)]
        return {(r, v): of_rows[r] for r, v in cells}

    def products(step: Any, units: range, dots: Cells) -> Cells:
        """dots + the products of these units of a step."""
        read = b.add(codes, multiple(b, step, UNIT_BYTES * bits))
        packed: dict[tuple[int, int], Any] = {}

        def spread_at(unit: int, r: int) -> Any:
            at = b.add(multiple(b, step, 4 * STEP_UNITS), I64(4 * unit))
            return splat(b, b.load(at_address(b, x_codes[r], at, I32), align=4), VI)

        def codes_at(unit: int, v: int) -> Any:
            def in_order(row: int) -> Any:
                for each in in_turn(packed, row, v):
                    line = b.add(read, I64(ROW_PLACES[bits, row] * UNIT_BYTES + 64 * each))
                    ask_for(b, b.add(line, ahead), near=False)
                    packed[row, each] = b.load(b.inttoptr(line, BYTES.as_pointer()), align=4)
                    keep_order(b)
                return packed[row, v]

            whole = code_bytes(b, planes, unit, in_order)
            return b.bitcast(whole if entries is None else look_up_bytes(b, entries, whole), VI)

        for unit in units[:: way.together]:
            dots = way.add(b, dots, unit, codes_at, spread_at)
        return dots

    def fold(g: Any, dots: Cells) -> None:
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

    def group(g: Any, first: Any) -> tuple[Any, Any]:
        last = b.add(first, group_steps)
        last = b.select(b.icmp_signed("<", last, steps), last, steps)
        fold(g, each_step(b, first, last, starts(g), lambda step, dots: products(step, range(STEP_UNITS), dots)))
        return b.add(g, I64(1)), last

    def two_groups(g: Any, step: Any) -> tuple[Any, Any]:
        for units in (range(STEP_UNITS // 2), range(STEP_UNITS // 2, STEP_UNITS)):
            fold(g, products(step, units, starts(g)))
            g = b.add(g, I64(1))
        return g, b.add(step, I64(1))

    each_group(b, groups, out_at, accumulate, two_groups if pairs else group)
