"""Unpacking of records whose codes come from a codebook (quant/cpu_records.py has the layout): a function of its own for each
shape of codebook, compiled when a weight first needs it and called by its address.

With AVX512-VBMI nothing is looked up one by one. A point's codes lie in one or two bytes, so a codebook is one or two tables of
bytes. `vpermi2b` looks 64 bytes up in 128 at once; larger tables are several of these, and bits of the index choose. A byte
becomes four codes of 2 bits, or two of 4, by `vpmultishiftqb`, which leaves other bits on top of them, and a code becomes its
number by `vpermb` in a table of 64, in which those other bits make no difference. Elsewhere a point's codes, a byte each, are
read from memory, column by column, and become numbers by `look_up_bytes`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from nanovllm_cli.kernels.compiled import compile_once
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.record_kinds import NO_SIGNS, SIGN_A_CODE, STEP, TILE, Codebook
from nanovllm_cli.kernels.simd import VECTORS, by_type, prefetch, typed_pointer
from nanovllm_cli.kernels.simd_ir import (
    BYTES,
    I32,
    I64,
    LANES,
    STEP_UNITS,
    UNIT_BYTES,
    VI,
    ask_for,
    at_address,
    counted,
    host_has,
    known_function,
    look_up_bytes,
    multiple,
)  # fmt: skip

_BY_VECTORS = host_has("avx512vbmi")
_BITS, _PLACES = ir.VectorType(ir.IntType(1), TILE), ir.VectorType(I32, TILE)
_SIGNATURE = types.void(*[types.int64] * 5)
_LINE = 64


def unpacker(codebook: Codebook) -> int:
    """The address of unpack(source, steps, target, ahead, table): a record's codes to u8 numbers at `target`, 32 k's of 64
    columns a step, as `simd_unpack.unpack_codes` leaves them. table: address of `tables`."""
    return int(_compiled(codebook.index_bits, codebook.length, codebook.code_bits, codebook.signs).address)


def tables(codebook: Codebook) -> torch.Tensor:
    """What `unpacker`'s function reads of a codebook, u8, from the beginning of a cache line on."""
    points = np.frombuffer(codebook.points, np.uint8).reshape(-1, codebook.length)
    numbers = np.zeros((2, 16), np.uint8)
    for own, given in zip(numbers, codebook.numbers, strict=True):
        own[: len(given)] = given
    if _BY_VECTORS:
        each = 8 // codebook.code_bits
        shifts = np.arange(each, dtype=np.uint8) * codebook.code_bits
        points = np.bitwise_or.reduce(points.reshape(len(points), -1, each) << shifts, 2).T
    data = np.concatenate([points.reshape(-1), numbers.reshape(-1)])
    memory = torch.empty(data.size + _LINE, dtype=torch.uint8)
    aligned = memory[-memory.data_ptr() % _LINE :][: data.size]
    return aligned.copy_(torch.from_numpy(data))


@cache
def _compiled(index_bits: int, length: int, code_bits: int, signs: int) -> Any:
    # Closed over numbers alone: numba's cache knows a function by what it is closed over, and other functions are new each time.
    def unpack_points(source: int, steps: int, target: int, ahead: int, table: int) -> None:
        _unpack(index_bits, length, code_bits, signs, source, steps, target, ahead, table)

    return compile_once(unpack_points, _SIGNATURE, error_model="numpy")


@inner
def places_in_step(index_bits, length, signs):
    """Of a step: rows of indices, one for `length` codes along k; rows of their low bytes, and high bits of each; where high bits
    and signs begin; bytes."""
    rows, high_bits = STEP // length, max(0, index_bits - 8)
    low_rows = index_bits if index_bits < 8 else rows
    high_at = TILE * low_rows
    signs_at = high_at + 8 * rows * high_bits
    sign_bits = length if signs == SIGN_A_CODE else (0 if signs == NO_SIGNS else 1)
    return rows, low_rows, high_bits, high_at, signs_at, signs_at + 8 * rows * sign_bits


# ---- by vectors ----


@intrinsic(prefer_literal=True)
def _unpack_vectors(typing, index_bits, length, code_bits, signs, source, steps, to, ahead, table):
    if not isinstance(index_bits, types.IntegerLiteral):
        return None
    shape = tuple(kind.literal_value for kind in (index_bits, length, code_bits, signs))

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _write_loop(b, *shape, *args[4:])
        return context.get_dummy_value()

    return types.void(index_bits, length, code_bits, signs, *[types.int64] * 5), code


def _write_loop(
    b: ir.IRBuilder, index_bits: int, length: int, code_bits: int, signs: int,
    source: Any, steps: Any, target: Any, ahead: Any, table: Any,
) -> None:  # fmt: skip
    _, low_rows, high_bits, high_at, signs_at, num_bytes = places_in_step.py_func(index_bits, length, signs)
    units = length // 4
    planes = [b.add(table, I64(plane << index_bits)) for plane in range(length * code_bits // 8)]
    behind = b.add(planes[-1], I64(1 << index_bits))
    numbers = [_numbers(b, at_address(b, behind, I64(16 * sign), ir.VectorType(I32, 4)), code_bits) for sign in range(2)]
    with counted(b, steps) as step:
        advance = multiple(b, step, num_bytes)
        read, write = b.add(source, advance), b.add(target, multiple(b, step, UNIT_BYTES * STEP_UNITS))
        for line in range(0, num_bytes, _LINE):
            ask_for(b, b.add(b.add(ahead, advance), I64(line)))

        def word(place: int, kind: ir.Type) -> Any:
            return b.load(at_address(b, read, I64(place), kind), align=1)

        lows = [word(TILE * row, BYTES) for row in range(low_rows)]
        if index_bits == 7:
            tops = [b.and_(b.lshr(low, _bytes(7 - bit)), _bytes(1 << bit)) for bit, low in enumerate(lows)]
            last = tops[0]
            for top in tops[1:]:
                last = b.or_(last, top)
            lows.append(last)
        for row, low in enumerate(lows):
            words = [word(high_at + 8 * (row * high_bits + bit), I64) for bit in range(high_bits)]
            choices = [b.icmp_signed("<", low, _bytes(0))] if index_bits >= 8 else []
            choices += [b.bitcast(of_columns, _BITS) for of_columns in words]
            found = [_look_up(b, plane, low, choices) for plane in planes]
            turned = word(signs_at + 8 * row, I64) if signs > SIGN_A_CODE else None
            for unit in range(row * units, (row + 1) * units):
                for v in range(VECTORS):
                    codes = _spread(b, found, unit % units, v, code_bits)
                    plain, other = (_look_up_numbers(b, side, codes) for side in numbers)
                    if signs == SIGN_A_CODE:
                        mask = b.bitcast(word(signs_at + 32 * unit + 8 * v, I64), _BITS)
                        plain = b.select(mask, other, plain)
                    elif turned is not None:
                        plain = b.select(_of_columns(b, turned, v), other, plain)
                    b.store(plain, at_address(b, write, I64(UNIT_BYTES * unit + 64 * v), BYTES), align=4)


def _bytes(value: int) -> ir.Constant:
    return ir.Constant(BYTES, [value] * TILE)


def _numbers(b: ir.IRBuilder, address: Any, code_bits: int) -> Any:
    """64 bytes, of which the lowest bits of their place choose among the 16 (or the first 4) at an address."""
    sixteen = _spread_numbers(b, address)
    return b.shuffle_vector(sixteen, sixteen, ir.Constant(_PLACES, [i % (1 << code_bits) for i in range(TILE)]))


def _spread_numbers(b: ir.IRBuilder, address: Any) -> Any:
    """16 bytes at an address, four times."""
    four = b.load(address, align=1)
    return b.bitcast(b.shuffle_vector(four, four, ir.Constant(VI, list(range(4)) * 4)), BYTES)


def _look_up(b: ir.IRBuilder, table: Any, low: Any, choices: list[Any]) -> Any:
    """table[index] for 64 indices, whose lowest seven bits are those of `low`, the others masks."""
    both = known_function(b, "llvm.x86.avx512.vpermi2var.qi.512", BYTES, BYTES, BYTES, BYTES)
    quarters = [b.load(at_address(b, table, I64(64 * i), BYTES), align=1) for i in range(2 << len(choices))]
    found = [b.call(both, [quarters[i], low, quarters[i + 1]]) for i in range(0, len(quarters), 2)]
    for choice in choices:
        found = [b.select(choice, found[i + 1], found[i]) for i in range(0, len(found), 2)]
    return found[0]


def _spread(b: ir.IRBuilder, found: list[Any], unit: int, v: int, code_bits: int) -> Any:
    """Four codes of each of 16 columns, a byte each, under bits of others. found: the points' bytes, [64] each."""
    both, of_column = (found[unit], found[unit]), range(1)
    if code_bits == 4:
        both, of_column = (found[0], found[1]), range(2)
    places = []
    for pair in range(8):
        taken = [16 * v + 2 * pair + column + TILE * half for column in range(2) for half in of_column]
        places += taken + taken[:1] * (8 - len(taken))
    shifts = ir.Constant(BYTES, [code_bits * i for i in range(8)] * 8)
    shift = known_function(b, "llvm.x86.avx512.pmultishift.qb.512", BYTES, BYTES, BYTES)
    return b.call(shift, [shifts, b.shuffle_vector(*both, ir.Constant(_PLACES, places))])


def _look_up_numbers(b: ir.IRBuilder, numbers: Any, codes: Any) -> Any:
    return b.call(known_function(b, "llvm.x86.avx512.permvar.qi.512", BYTES, BYTES, BYTES), [numbers, codes])


def _of_columns(b: ir.IRBuilder, bits: Any, v: int) -> Any:
    """A bit a column as a mask of four bytes each, for columns 16 v and on."""
    own = b.bitcast(b.trunc(b.lshr(bits, I64(LANES * v)), ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
    return b.icmp_signed("<", b.bitcast(b.sext(own, VI), BYTES), _bytes(0))


# ---- column by column ----


@by_type(prefer_literal=True)
def _unpack_columns(index_bits, length, code_bits, signs, source, steps, target, ahead, table):
    if not isinstance(index_bits, types.IntegerLiteral):
        return None
    num_points, codes, kind = 1 << index_bits.literal_value, length.literal_value, signs.literal_value
    units, words_type, numbers_at = codes // 4, np.uint64 if codes == 8 else np.uint32, codes * num_points

    def unpack(index_bits, length, code_bits, signs, source, steps, target, ahead, table):
        rows, low_rows, high_bits, high_at, signs_at, num_bytes = places_in_step(index_bits, length, signs)
        points = carray(typed_pointer(table, words_type(0)), (num_points,))
        index, found = np.empty(TILE, np.uint32), np.empty(TILE, words_type)
        for step in range(steps):
            read = source + step * num_bytes
            for line in range(0, num_bytes, _LINE):
                prefetch(ahead + step * num_bytes + line)
            low = carray(typed_pointer(read, np.uint8(0)), (low_rows, TILE))
            high = carray(typed_pointer(read + high_at, np.uint64(0)), (rows, high_bits))
            for row in range(rows):
                if row < low_rows:
                    for c in range(TILE):
                        index[c] = np.uint32(low[row, c]) & np.uint32((1 << index_bits) - 1)
                else:
                    for c in range(TILE):
                        index[c] = 0
                    for bit in range(low_rows):
                        for c in range(TILE):
                            index[c] |= (np.uint32(low[bit, c]) >> np.uint32(7)) << np.uint32(bit)
                for bit in range(high_bits):
                    for half in range(2):
                        word = np.uint32(high[row, bit] >> np.uint64(32 * half))
                        for c in range(TILE // 2):
                            index[32 * half + c] |= ((word >> np.uint32(c)) & np.uint32(1)) << np.uint32(8 + bit)
                for c in range(TILE):
                    found[c] = points[index[c]]
                own_signs = read + signs_at + (8 * length if signs == SIGN_A_CODE else 8) * row
                _numbers_of_row(
                    units, kind, found.ctypes.data, table + numbers_at, own_signs,
                    target + (step * STEP_UNITS + row * units) * UNIT_BYTES,
                )  # fmt: skip

    return unpack


@intrinsic(prefer_literal=True)
def _numbers_of_row(typing, units, signs, found, numbers, own_signs, target):
    """The numbers of points of `units` words each, codes at `found`, [64 columns], into [units][64 columns][4] at `target`."""
    if not isinstance(units, types.IntegerLiteral):
        return None
    num_units, kind = units.literal_value, signs.literal_value

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        _, _, found, numbers, own_signs, target = args
        sides = [_spread_numbers(b, at_address(b, numbers, I64(16 * side), ir.VectorType(I32, 4))) for side in range(2)]
        turned = b.load(at_address(b, own_signs, I64(0), I64), align=1) if kind > SIGN_A_CODE else None
        for v in range(VECTORS):
            words = [
                b.load(at_address(b, found, I64(64 * (num_units * v + part)), VI), align=4) for part in range(num_units)
            ]
            if num_units == 2:
                words = [b.shuffle_vector(*words, ir.Constant(VI, list(range(unit, 32, 2)))) for unit in range(2)]
            for unit, codes in enumerate(words):
                plain, other = (look_up_bytes(b, side, b.bitcast(codes, BYTES)) for side in sides)
                if kind == SIGN_A_CODE:
                    mask = b.load(at_address(b, own_signs, I64(32 * unit + 8 * v), I64), align=1)
                    plain = b.select(b.bitcast(mask, _BITS), other, plain)
                elif turned is not None:
                    plain = b.select(_of_columns(b, turned, v), other, plain)
                b.store(plain, at_address(b, target, I64(UNIT_BYTES * unit + 64 * v), BYTES), align=4)
        return context.get_dummy_value()

    return types.void(units, signs, *[types.int64] * 4), code


_unpack = _unpack_vectors if _BY_VECTORS else _unpack_columns
