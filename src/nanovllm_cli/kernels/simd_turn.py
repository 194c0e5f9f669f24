"""Blocks of keys turned into blocks of values on the CPU, where both are the same numbers (latent attention): see cpu_attention
for the two layouts.

In bf16 both are rows of eight 64-bit units: a pair of dims of a pair of keys lies as [key][dim] in one and [dim][key] in the
other. In fp32 they are rows of 16 numbers. So each is a square of units to be transposed, 64 bytes a row, in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from nanovllm_cli.kernels.simd import by_type, typed_pointer

ROW = 64
"""Bytes of a row of either."""


def _make_square(unit_bits: int, swaps_halves: bool) -> Any:
    """An intrinsic (source, target, stride): a square of units, rows of 64 bytes at `source`, transposed to rows `stride` bytes
    apart. Swaps halves: the middle two of a unit's four parts change places."""
    count = 8 * ROW // unit_bits
    row_type = ir.VectorType(ir.IntType(unit_bits), count)
    i32, i64 = ir.IntType(32), ir.IntType(64)

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, target, stride = args

        def shuffled(left: Any, right: Any, order: list[int]) -> Any:
            return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(i32, len(order)), order))

        rows = []
        for i in range(count):
            address = b.inttoptr(b.add(source, ir.Constant(i64, ROW * i)), row_type.as_pointer())
            row = b.load(address, align=1)
            if swaps_halves:
                parts = b.bitcast(row, ir.VectorType(ir.IntType(unit_bits // 4), 4 * count))
                order = [4 * (j // 4) + (0, 2, 1, 3)[j % 4] for j in range(4 * count)]
                row = b.bitcast(shuffled(parts, parts, order), row_type)
            rows.append(row)
        distance = 1
        while distance < count:  # squares of `distance` change places across the diagonal of those twice as large
            low = [j if not j & distance else j - distance + count for j in range(count)]
            high = [j + distance if not j & distance else j + count for j in range(count)]
            for i in range(count):
                if not i & distance:
                    one, other = rows[i], rows[i + distance]
                    rows[i], rows[i + distance] = shuffled(one, other, low), shuffled(one, other, high)
            distance *= 2
        for i, row in enumerate(rows):
            address = b.inttoptr(b.add(target, b.mul(stride, ir.Constant(i64, i))), row_type.as_pointer())
            b.store(row, address, align=1)
        return context.get_dummy_value()

    @intrinsic
    def square(typing: Any, source, target, stride):  # type: ignore[no-untyped-def]
        return types.void(types.int64, types.int64, types.int64), code

    return square


_square_bf16, _square_f32 = _make_square(64, True), _make_square(32, False)


@by_type()
def turn_block(tag, source, first, dim, target, padded):
    """target, a block of values with `padded` dims, = dims from `first` on, a multiple of 16, of a block of keys with dim dims.
    Addresses. What is behind dim in target is junk."""
    if tag == types.uint16:

        def bf16(tag, source, first, dim, target, padded):
            whole = dim // 16 * 16
            for d in range(first, whole, 16):
                _square_bf16(source + d // 2 * ROW, target + 4 * d, 4 * padded)
            keys = carray(typed_pointer(source, np.uint16(0)), (dim // 2, 16, 2))
            values = carray(typed_pointer(target, np.uint16(0)), (8, padded, 2))
            for d in range(max(first, whole), dim):
                for key in range(16):
                    values[key // 2, d, key % 2] = keys[d // 2, key, d % 2]

        return bf16

    def f32(tag, source, first, dim, target, padded):
        whole = dim // 16 * 16
        for d in range(first, whole, 16):
            _square_f32(source + d * ROW, target + 4 * d, 4 * padded)
        keys = carray(typed_pointer(source, np.float32(0)), (dim, 16))
        values = carray(typed_pointer(target, np.float32(0)), (16, padded))
        for d in range(max(first, whole), dim):
            for key in range(16):
                values[key, d] = keys[d, key]

    return f32
