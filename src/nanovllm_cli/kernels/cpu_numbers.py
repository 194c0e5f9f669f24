"""Small pieces that the CPU kernels are made of: bf16 in and out, exponentials that vectorise, dot products by element type.

bf16 has no numpy type: it travels as uint16, and an array of uint16 means bf16 everywhere in these kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import (
    by_type,
    dot64_bf16,
    dot64_f32,
    paged16_bf16,
    paged16_f32,
    paged64_bf16,
    paged64_f32,
    typed_pointer,
)

# Neither `reassoc` nor `arcp`: a kernel's bits would depend on whether it was just compiled or comes from the cache. No `nnan`,
# no `ninf`: masked scores are -inf, and a NaN must come out as one.
FAST = {"contract", "nsz"}
LOG2_E = np.float32(1.4426950408889634)
_I32 = ir.IntType(32)
EXP2 = tuple(map(np.float32, (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)))
"""2**f is near their sum, f to the power of 6 times the first, and so on: its Taylor series."""


@inner
def scratch(num_bytes):
    """u8 [num_bytes] from the beginning of a cache line on: a vector that lies in two lines takes twice the time.

    A thread has one of these for all its tasks, and reaches what lies in it by address. Of arrays that are made on the way numba
    counts the users, slices too, by locked instructions behind which every load waits: up to half of a kernel's time. It frees an
    array after its last use by name, whatever addresses of it are about, so that `keep` comes last.
    """
    memory = np.empty(num_bytes + 64, np.uint8)
    skip = (64 - np.int64(memory.ctypes.data) % 64) % 64
    return memory[skip : skip + num_bytes]


@inner
def keep(memory):
    """Scratch is in use until here."""
    memory[:1] = 0


@njit(inline="always")
def floats_at(address, shape):
    """fp32 of this shape at an address."""
    return carray(typed_pointer(address, np.float32(0)), shape)


@njit(inline="always")
def whole_lines(num_bytes):
    """As many bytes, or up to the end of a cache line."""
    return (num_bytes + 63) // 64 * 64


@intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The fp32 with these bits. `view` calls a function that could fail, which keeps loops from being vectors."""
    code = lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())
    return types.float32(types.uint32), code


@intrinsic
def bits_of(typing: Any, number: Any) -> Any:
    """The bits of an fp32."""
    code = lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))
    return types.uint32(types.float32), code


@intrinsic
def load(typing: Any, array: Any, i: Any) -> Any:
    """array[i] as fp32, i not negative."""
    _check_row(array)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        value = builder.load(_place(context, builder, array, i, args))
        if array.dtype != types.uint16:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), ir.FloatType())

    return types.float32(array, i), code


@intrinsic
def store(typing: Any, array: Any, i: Any, value: Any) -> Any:
    """array[i] = fp32 value, i not negative, rounded to nearest even where the array is bf16."""
    _check_row(array)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        value = args[2]
        if array.dtype == types.uint16:
            bits = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
            rounded = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
            value = builder.trunc(builder.lshr(rounded, _I32(16)), ir.IntType(16))
        builder.store(value, _place(context, builder, array, i, args))
        return context.get_dummy_value()

    return types.void(array, i, types.float32), code


def _check_row(array: types.Array) -> None:
    if array.ndim != 1 or array.layout != "C":
        raise TypingError(f"not a row of adjacent numbers: {array}")


def _place(context: Any, builder: ir.IRBuilder, array: types.Array, i: types.Integer, args: Any) -> ir.Value:
    index = context.cast(builder, args[1], i, types.intp)
    return builder.gep(make_array(array)(context, builder, args[0]).data, [index])


@njit(inline="always")
def exp_not_positive(x):
    """e**x for x <= 0, relative error about 2e-7; 0 below -87; NaN stays NaN. Straight-line code that LLVM vectorises.

    2**t = 2**n * 2**f with n the nearest integer and f in [-0.5, 0.5].
    """
    t = np.float32(x) * LOG2_E
    t = np.float32(-127.0) if t < np.float32(-127.0) else t
    n = np.int32(t + np.float32(127.5))
    f = t - np.float32(n - np.int32(127))
    p = EXP2[0]
    p = p * f + EXP2[1]
    p = p * f + EXP2[2]
    p = p * f + EXP2[3]
    p = p * f + EXP2[4]
    p = p * f + EXP2[5]
    p = p * f + EXP2[6]
    return p * float_of(n << np.int32(23))


@by_type()
def dot64(tag, rows, x, xs, w0, w1, w2, w3, step, steps, out, os, add):
    """`simd.dot_tile` over 64 columns, for the element type of `tag`. Addresses and byte strides."""
    dot = dot64_bf16 if tag == types.uint16 else dot64_f32
    return lambda tag, rows, x, xs, w0, w1, w2, w3, step, steps, out, os, add: dot(
        rows, x, xs, w0, w1, w2, w3, step, steps, out, os, add, 0
    )


@by_type()
def paged64(tag, rows, x, xs, table, page_bits, begin, step, steps, out, os):
    """The same of a weight in pages, added to what is there: see `simd._make_tile`."""
    dot = paged64_bf16 if tag == types.uint16 else paged64_f32
    return lambda tag, rows, x, xs, table, page_bits, begin, step, steps, out, os: dot(
        rows, x, xs, table, page_bits, begin, step, steps, out, os
    )


@by_type()
def paged16(tag, rows, x, xs, table, page_bits, begin, step, steps, out, os):
    """The same over 16 columns."""
    dot = paged16_bf16 if tag == types.uint16 else paged16_f32
    return lambda tag, rows, x, xs, table, page_bits, begin, step, steps, out, os: dot(
        rows, x, xs, table, page_bits, begin, step, steps, out, os
    )


@njit(inline="always")
def softplus(x):
    return max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))
