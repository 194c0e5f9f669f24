"""The inner loop of few rows of bf16 over weights whose codes stand for numbers of bf16, in one pass from codes to products,
without a panel (cpu_values.py has the formula; the sums are those of its panels, to the bit).

A number's two bytes are looked up apart, the upper one and the lower one by the code, and put together to the pairs that are
multiplied. Of 4 bits the tables have 16 entries; of e4m3, whose codes are sign and magnitude, 128, which AVX512-VBMI finds for 64
codes at once. Where there is none e4m3 becomes fp32 by shifts: its exponent and fraction where fp32 has them, times 2**120.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nanovllm_cli.kernels.compiled import compile_once
from nanovllm_cli.kernels.record_kinds import NO_LOW, STEP, RecordLayout
from nanovllm_cli.kernels.simd import HAS_BF16_DOT, VECTORS, WIDE, pair_multiply_add
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
    counted,
    fma,
    host_has,
    keep_order,
    known_function,
    look_up_bytes,
    multiple,
    splat,
    table_of_bytes,
)  # fmt: skip
from nanovllm_cli.kernels.simd_unpack import in_turn

_BY_TABLES = WIDE and host_has("avx512vbmi")
AVAILABLE = _BY_TABLES or not HAS_BF16_DOT
"""Whether sums of e4m3, too, are those of panels, which some processors add up in pairs."""
MOST_ROWS = 8 if WIDE else 3
"""That such passes are quicker for than a panel."""
_PLACES = range(4 * LANES)


def _e4m3_bytes() -> list[list[int]]:
    """The lower and the upper bytes of the bf16 of each magnitude."""
    codes = np.arange(128)
    exponents, fractions = codes >> 3, codes & 7
    numbers = np.where(exponents > 0, (1 + fractions / 8) * 2.0 ** (exponents - 7), fractions * 2.0**-9).astype(np.float32)
    bits = numbers.view(np.uint32) >> 16
    return [(bits & 255).tolist(), (bits >> 8).tolist()]


def _bytes_of(values: Any) -> ir.Constant:
    return ir.Constant(BYTES, list(values))


def _of_two(b: ir.IRBuilder, first: Any, places: Any, second: Any) -> Any:
    """Of each place the byte of two vectors behind each other."""
    look = known_function(b, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, BYTES, BYTES, BYTES)
    return b.call(look, [first, places, second])


def _tables(b: ir.IRBuilder, bits: int, address: Any) -> list[Any]:
    """Of the lower and the upper bytes, where codes have 4 bits."""
    return [table_of_bytes(b, b.add(address, I64(16 * i))) for i in range(2)] if bits == 4 else []


def _codes_read(b: ir.IRBuilder, read: Any, bits: int, ahead: Any) -> Callable[[int, int], Any]:
    """codes(unit, vector) of the step at an address, which is read in order."""
    packed: dict[tuple[int, int], Any] = {}

    def codes(unit: int, v: int) -> Any:
        def in_order(row: int) -> Any:
            for each in in_turn(packed, row, v):
                line = b.add(read, I64(row * UNIT_BYTES + 64 * each))
                ask_for(b, b.add(line, ahead), near=False)
                packed[row, each] = b.load(b.inttoptr(line, BYTES.as_pointer()), align=4)
                keep_order(b)
            return packed[row, v]

        return code_bytes(b, (bits,), unit, in_order)

    return codes


def _pairs(b: ir.IRBuilder, tables: list[Any], codes: Any) -> list[Any]:
    """What bytes 0 and 1, and 2 and 3, of each column stand for, as pairs of bf16. tables: none for e4m3."""
    if tables:
        lower, upper = (look_up_bytes(b, table, codes) for table in tables)
    else:
        lower, upper = (_of_two(b, _bytes_of(each[:64]), codes, _bytes_of(each[64:])) for each in _e4m3_bytes())
        upper = b.or_(upper, b.and_(codes, _bytes_of([0x80] * len(_PLACES))))
    pairs = []
    for pair in range(2):
        places = [4 * (i // 4) + 2 * pair + i % 4 // 2 + 64 * (i % 2) for i in _PLACES]
        if _BY_TABLES:
            found = _of_two(b, lower, _bytes_of(places), upper)
        else:
            found = b.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, len(places)), places))
        pairs.append(b.bitcast(found, VI))
    return pairs


def _words(value: int) -> ir.Constant:
    return ir.Constant(VI, [value] * LANES)


def _e4m3_numbers(b: ir.IRBuilder, codes: Any) -> list[Any]:
    """What bytes 0 to 3 of each column stand for, in fp32."""
    whole, placed = b.bitcast(codes, VI), []
    for byte in range(4):
        moved = b.ashr(b.shl(whole, _words(24 - 8 * byte)), _words(4))
        number = b.bitcast(b.and_(moved, _words(0x87F00000)), VF)
        placed.append(b.fmul(number, ir.Constant(VF, [2.0**120] * LANES)))
    return placed


def _products(b: ir.IRBuilder, tables: list[Any], codes: Any) -> list[Callable[[Any, Any], Any]]:
    """Of two pairs of each column: add(sums, x)."""
    if tables or _BY_TABLES:

        def add_pair(sums: Any, x: Any, pair: Any) -> Any:
            return pair_multiply_add(b, sums, pair, x)

        return [partial(add_pair, pair=pair) for pair in _pairs(b, tables, codes)]
    numbers = _e4m3_numbers(b, codes)

    def add(sums: Any, x: Any, first: int) -> Any:
        halves = b.shl(x, _words(16)), b.and_(x, _words(0xFFFF0000))
        for number, half in zip(numbers[first : first + 2], halves, strict=True):
            sums = fma(b, number, b.bitcast(half, VF), sums)
        return sums

    return [partial(add, first=first) for first in (0, 2)]


def is_known(layout: RecordLayout, is_e4m3: bool) -> bool:
    """True where `expand` and `few_rows` have the kind of weight."""
    return AVAILABLE and layout.bits == (8 if is_e4m3 else 4) and layout.low == NO_LOW


def most_rows(layout: RecordLayout, is_e4m3: bool) -> int:
    """That `few_rows` is quicker for than a panel; 0: it has none of this kind."""
    fits = is_known(layout, is_e4m3) and layout.width % STEP == 0 and layout.group % STEP == 0
    return MOST_ROWS if fits else 0


def expand(layout: RecordLayout) -> int:
    """The address of expand(codes, steps, panel, table, ahead): steps of 32 k's to pairs of bf16 [16 steps][64] at panel. table,
    ahead: as in `few_rows`."""
    return int(_compiled_expand(layout.bits).address)


def few_rows(layout: RecordLayout) -> int:
    """The address of few(rows, codes, scales, steps, group_steps, x, x_stride, factors, factor_row, factor_group, groups, out,
    accumulate, table, ahead) for up to `most_rows`: as many in a pass as can be, and then what is left.

    codes: in steps of 32 k's, of e4m3, or of 4 bits, of which table, address of 32 bytes, has the lower bytes and the upper ones.
    scales fp32 [groups][64]. A row's numbers of x are bf16, x_stride bytes from the next one's. What multiplies a group's sum
    beside its scale is fp32 at factors, so many bytes further for a row or a group. out fp32 [rows][64]. ahead: see
    `ahead.distance`.
    """
    return int(_compiled_few(layout.bits).address)


@cache
def _compiled_expand(bits: int) -> Any:
    # Closed over numbers alone: numba's cache knows a function by what it is closed over, and other functions are new each time.
    def expand_codes(codes, steps, panel, table, ahead):
        _expand(bits, (codes, steps, panel, table, ahead))

    return compile_once(expand_codes, types.void(*[types.int64] * 5), error_model="numpy")


@cache
def _compiled_few(bits: int) -> Any:
    def of_four(rows, codes, scales, steps, many, x, xs, factors, row, group, groups, out, add, table, ahead):
        of_weight = codes, scales, steps, many, table
        while rows >= 4:
            _rows(4, bits, of_weight, (x, xs, factors, row, group, groups, out, add, ahead))
            rows, x, out, factors = rows - 4, x + 4 * xs, out + 4 * UNIT_BYTES, factors + 4 * row
        rest = x, xs, factors, row, group, groups, out, add, ahead
        if rows == 3:
            _rows(3, bits, of_weight, rest)
        elif rows == 2:
            _rows(2, bits, of_weight, rest)
        elif rows == 1:
            _rows(1, bits, of_weight, rest)

    def of_one(rows, codes, scales, steps, many, x, xs, factors, row, group, groups, out, add, table, ahead):
        for r in range(rows):
            place = out + r * UNIT_BYTES
            rest = x + r * xs, xs, factors + r * row, row, group, groups, place, add, ahead
            _rows(1, bits, (codes, scales, steps, many, table), rest)

    return compile_once(of_four if WIDE else of_one, types.void(*[types.int64] * 15), error_model="numpy")


@intrinsic(prefer_literal=True)
def _expand(typing, bits, arguments):
    if not isinstance(bits, types.IntegerLiteral):
        return None
    number = bits.literal_value

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _write_expand(b, number, *cgutils.unpack_tuple(b, args[-1]))
        return context.get_dummy_value()

    return types.void(bits, arguments), code


def _write_expand(b: ir.IRBuilder, bits: int, codes: Any, steps: Any, panel: Any, table: Any, ahead: Any) -> None:
    tables = _tables(b, bits, table)
    with counted(b, steps) as step:
        read = _codes_read(b, b.add(codes, multiple(b, step, UNIT_BYTES * bits)), bits, ahead)
        write = b.add(panel, multiple(b, step, 2 * STEP_UNITS * UNIT_BYTES))
        for unit in range(STEP_UNITS):
            for v in range(VECTORS):
                if tables or _BY_TABLES:
                    pairs = _pairs(b, tables, read(unit, v))
                else:
                    numbers = [b.bitcast(number, VI) for number in _e4m3_numbers(b, read(unit, v))]
                    pairs = [
                        b.or_(b.lshr(numbers[i], _words(16)), b.and_(numbers[i + 1], _words(0xFFFF0000))) for i in (0, 2)
                    ]
                for pair, found in enumerate(pairs):
                    b.store(found, at_address(b, write, I64((2 * unit + pair) * UNIT_BYTES + 64 * v), VI), align=4)


@intrinsic(prefer_literal=True)
def _rows(typing, rows, bits, of_weight, rest):
    if not (isinstance(rows, types.IntegerLiteral) and isinstance(bits, types.IntegerLiteral)):
        return None
    count, number = rows.literal_value, bits.literal_value

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _write_rows(b, count, number, *cgutils.unpack_tuple(b, args[-2]), *cgutils.unpack_tuple(b, args[-1]))
        return context.get_dummy_value()

    return types.void(rows, bits, of_weight, rest), code


def _write_rows(
    b: ir.IRBuilder, rows: int, bits: int, codes: Any, scales: Any, steps: Any, group_steps: Any, table: Any,
    x: Any, x_stride: Any, factors: Any, factor_row: Any, factor_group: Any, groups: Any, out: Any, accumulate: Any, ahead: Any,
) -> None:  # fmt: skip
    """So many rows and all 64 columns."""
    tables = _tables(b, bits, table)
    x_rows = [b.add(x, multiple(b, x_stride, r)) for r in range(rows)]
    out_at = {(r, v): at_address(b, out, I64(4 * LANES * (VECTORS * r + v)), VF) for r in range(rows) for v in range(VECTORS)}

    def products(step: Any, sums: Cells) -> Cells:
        read = _codes_read(b, b.add(codes, multiple(b, step, UNIT_BYTES * bits)), bits, ahead)
        for unit in range(STEP_UNITS):
            at = b.add(multiple(b, step, 2 * STEP), I64(8 * unit))
            spread = {
                (r, pair): splat(b, b.load(at_address(b, x_rows[r], b.add(at, I64(4 * pair)), I32), align=4), VI)
                for r in range(rows)
                for pair in range(2)
            }
            for v in range(VECTORS):
                for pair, add in enumerate(_products(b, tables, read(unit, v))):
                    for r in range(rows):
                        sums[r, v] = add(sums[r, v], spread[r, pair])
        return sums

    def fold(g: Any, sums: Cells) -> None:
        for v in range(VECTORS):
            scale = b.load(at_address(b, scales, b.add(multiple(b, g, UNIT_BYTES), I64(64 * v)), VF), align=4)
            for r in range(rows):
                place = b.add(multiple(b, factor_row, r), b.mul(g, factor_group))
                of_x = splat(b, b.load(at_address(b, factors, place, F32), align=4), VF)
                own = b.fmul(b.fmul(sums[r, v], scale), of_x)
                b.store(b.fadd(own, b.load(out_at[r, v], align=4)), out_at[r, v], align=4)

    def group(g: Any, first: Any) -> tuple[Any, Any]:
        last = b.add(first, group_steps)
        last = b.select(b.icmp_signed("<", last, steps), last, steps)
        zero = ir.Constant(VF, [0.0] * LANES)
        fold(g, each_step(b, first, last, dict.fromkeys(out_at, zero), products))
        return b.add(g, I64(1)), last

    each_group(b, groups, out_at, accumulate, group)
