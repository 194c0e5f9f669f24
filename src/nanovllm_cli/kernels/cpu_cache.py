"""What the CPU's KV cache keeps of a number. The type of a scalar `kind` says it, as that of `tag` says what is computed in:

    uint16, float32   bf16, fp32: the compute type itself
    int8              code * scale, scale = largest magnitude of the row / 127
    uint8             the bits of an e4m3 (OCP 8-bit floating point, without infinities) * scale, scale = largest / 448

A row is K or V of one token and head. What a block keeps of one head is a record: the codes of its 16 rows, arranged as
cpu_attention says, and for the last two kinds 16 fp32 scales behind them. A row with an infinity or a NaN gets a NaN for a scale.
Functions without meaning for a dense kind are empty there, so that dense kernels carry nothing of this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from nanovllm_cli.kernels.cpu_numbers import bits_of, float_of, store
from nanovllm_cli.kernels.simd import by_type, prefetch, typed_pointer

BLOCK = 16
SCALE_BYTES = 4 * BLOCK
INT8_MAX, E4M3_MAX = np.float32(127.0), np.float32(448.0)
_INFINITY_BITS = np.uint32(0x7F800000)
SMALLEST_NORMAL = np.float32(2.0**-126)


def _is_dense(kind: Any) -> bool:
    return kind in (types.uint16, types.float32)


@by_type()
def encode(kind, row, codes):
    """codes = what `kind` keeps of a row of fp32; returns its scale."""
    if _is_dense(kind):

        def as_it_is(kind, row, codes):
            for i in range(row.size):
                store(codes, i, row[i])
            return np.float32(0.0)

        return as_it_is
    most, code_of = (INT8_MAX, _to_int8) if kind == types.int8 else (E4M3_MAX, _to_e4m3)

    def scaled(kind, row, codes):
        # The bits of magnitudes are ordered as magnitudes are, and those of a NaN come last.
        row_bits, largest = row.view(np.uint32), np.uint32(0)
        for i in range(row.size):
            bits = np.uint32(row_bits[i] & np.uint32(0x7FFFFFFF))
            largest = bits if bits > largest else largest
        scale = float_of(largest) / most
        if largest >= _INFINITY_BITS or scale < SMALLEST_NORMAL:
            for i in range(row.size):
                codes[i] = 0
            return np.float32(np.nan) if largest >= _INFINITY_BITS else np.float32(0.0)
        for i in range(row.size):
            codes[i] = code_of(row[i] / scale)
        return scale

    return scaled


@by_type()
def is_finite(kind, codes, scale):
    """Whether that is so of a row that `encode` has made this of."""
    if not _is_dense(kind):
        return lambda kind, codes, scale: scale == scale
    bits_type, infinity = (np.uint16, np.uint16(0x7F80)) if kind == types.uint16 else (np.uint32, _INFINITY_BITS)
    sign_less = bits_type(0x7FFF) if kind == types.uint16 else bits_type(0x7FFFFFFF)

    def dense(kind, codes, scale):
        bits, largest = codes.view(bits_type), bits_type(0)
        for i in range(bits.size):
            largest = max(largest, bits_type(bits[i] & sign_less))
        return largest < infinity

    return dense


@njit(inline="always")
def _to_int8(x):
    return np.int8(np.rint(x))


@njit(inline="always")
def _to_e4m3(x):
    """Bits of the nearest e4m3, ties to even, saturated. Below 2**-6 it counts in steps of 2**-9; above, an fp32 rounded to three
    bits of mantissa is one with another bias (127 against 7)."""
    bits = bits_of(x)
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    small = np.uint32(np.int32(np.rint(float_of(size) * np.float32(512.0))))
    rounding = np.uint32(np.uint32(0x7FFFF) + np.uint32(np.uint32(size >> np.uint32(20)) & np.uint32(1)))
    large = np.uint32(np.uint32(np.uint32(size + rounding) >> np.uint32(20)) - np.uint32(120 << 3))
    large = large if large < np.uint32(0x7E) else np.uint32(0x7E)
    code = small if size < np.uint32(121 << 23) else large
    return np.uint8(code | np.uint32(np.uint32(bits >> np.uint32(24)) & np.uint32(0x80)))


@by_type()
def put_scale(kind, record, num_codes, offset, scale):
    """The scale of the row at `offset` in a record of so many codes."""
    if _is_dense(kind):
        return lambda kind, record, num_codes, offset, scale: None

    def put(kind, record, num_codes, offset, scale):
        carray(typed_pointer(record + num_codes, np.float32(0)), (BLOCK,))[offset] = scale

    return put


@by_type()
def take_scales(kind, record, num_codes, target):
    """target [16] fp32 = the scales of a record."""
    if _is_dense(kind):
        return lambda kind, record, num_codes, target: None

    def take(kind, record, num_codes, target):
        scales = carray(typed_pointer(record + num_codes, np.float32(0)), (BLOCK,))
        for i in range(BLOCK):
            target[i] = scales[i]

    return take


@by_type()
def scale_by(kind, row, scales):
    """row *= scales."""
    if _is_dense(kind):
        return lambda kind, row, scales: None

    def multiply(kind, row, scales):
        for i in range(row.size):
            row[i] *= scales[i]

    return multiply


@by_type()
def scratch_size(kind, count):
    """Elements of scratch that `readable` needs for so many codes."""
    if _is_dense(kind):
        return lambda kind, count: 0
    return lambda kind, count: count


@by_type()
def readable(tag, kind, record, num_codes, scratch, ahead):
    """Where a record's codes lie as elements of the compute type: in the record itself, or now in scratch. Addresses.

    Unpacking asks for the record at `ahead` line by line: records lie anywhere, and waiting for them took longer than the work.
    """
    if _is_dense(kind):
        return lambda tag, kind, record, num_codes, scratch, ahead: record
    step = 32 if tag == types.uint16 else 16
    unpack_step = _make_unpack(kind == types.int8, tag == types.uint16, step)
    size = step * (tag.bitwidth // 8)

    def unpack(tag, kind, record, num_codes, scratch, ahead):
        for i in range(num_codes // step):
            prefetch(ahead + i * step)
            unpack_step(record + i * step, scratch + i * size)
        return scratch

    return unpack


def _make_unpack(from_int8: bool, to_bf16: bool, count: int) -> Any:
    """An intrinsic (source, target): `count` codes as elements of the compute type, exactly. Addresses.

    An int8 is converted. An e4m3 becomes the fp32 that has its bits of exponent and mantissa, times 2**120 for the other bias,
    which holds without an implicit bit as well. Both have so few bits that the upper half of the fp32 is the bf16.
    """
    i32, f32 = ir.VectorType(ir.IntType(32), count), ir.VectorType(ir.FloatType(), count)

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, target = args
        many = lambda kind, value: ir.Constant(kind, [value] * count)
        bytes_there = b.inttoptr(source, ir.VectorType(ir.IntType(8), count).as_pointer())
        codes = b.sext(b.load(bytes_there, align=1), i32)
        if from_int8:
            values = b.sitofp(codes, f32)
        else:
            bits = b.and_(b.shl(codes, many(i32, 20)), many(i32, 0x87F00000))  # sign, and seven bits of the rest
            values = b.fmul(b.bitcast(bits, f32), many(f32, 2.0**120))
        if to_bf16:
            halves = b.bitcast(values, ir.VectorType(ir.IntType(16), 2 * count))
            upper = ir.Constant(i32, [2 * i + 1 for i in range(count)])
            values = b.shuffle_vector(halves, ir.Constant(halves.type, ir.Undefined), upper)
        b.store(values, b.inttoptr(target, values.type.as_pointer()), align=4)
        return context.get_dummy_value()

    @intrinsic
    def unpack_step(typing: Any, source, target):  # type: ignore[no-untyped-def]
        return types.void(types.int64, types.int64), code

    return unpack_step
