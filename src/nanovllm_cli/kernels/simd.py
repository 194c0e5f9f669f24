"""The one inner loop that all CPU matmuls share, written as LLVM vectors so that numba compiles it for the host's processor.

    out[r, 16 v + j] (+)= sum over s of  x[r, s] * w[v, s, j]        r < rows, v < vectors, j < 16

is `dot_tile`: a tile of `rows` x `16 * vectors` fp32 sums that lives in registers while it walks along k. Each sum is one chain
of fused multiply-adds in ascending k, so a row's bits depend on that row and the weights alone: not on how many rows share the
tile, nor on how the rows were split over calls. That is what makes results independent of the batch (docs/architecture.md).

Three kinds of element, by what one step s holds:

    bf16 pairs, AVX512-BF16   two k's a step, vdpbf16ps                                  (Zen 4, Sapphire Rapids and newer)
    bf16 pairs, elsewhere     two k's a step, w widened to fp32 by shifts, two FMAs      (any processor LLVM knows)
    fp32                      one k a step, one FMA

Pairs mean that w holds [.., k / 2, 16, 2] bf16 and x holds bf16 rows, read 32 bits at a time. Elsewhere rows of x are widened to
fp32 first, a few hundred at a time, so that their numbers come from memory into all lanes by one load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd_ir import (
    F32,
    I64,
    LANES,
    NEON,
    VF,
    VI,
    BFloatVector,
    ask_for,
    at_address,
    fma,
    host_has,
    keep_order,
    known_function,
    multiple,
    splat,
)  # fmt: skip

MAX_ROWS = 6
VECTORS = 4
TILE_COLUMNS = LANES * VECTORS

_MultiplyAdd = Callable[[ir.IRBuilder, Any, Any, Any], Any]


HAS_BF16_DOT = host_has("avx512bf16")
WIDE = host_has("avx512f")
"""32 registers of 16 floats; elsewhere 16 of 8, or 32 of 4."""
_VECTORS_OF_ROWS = {rows: VECTORS if WIDE else vectors for rows, vectors in ((1, 4), (2, 2), (3, 1), (4, 1), (5, 1), (6, 1))}
"""Whose sums fit the registers, and are many: a sum waits for its last product."""
ASKING_PASSES = 3 if WIDE else 1
"""Passes over a panel, all rows in the first of them at best, that ask for as many lines of what comes next as they have steps;
those with fewer registers ask for four times as many."""
WIDENED_STEPS = 128
"""Pairs whose x are widened at a time: 6 KiB."""


def _pair_dot(builder: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """acc + w.low * x.low + w.high * x.high for 16 pairs of bf16, by the processor's own instruction."""
    pairs = BFloatVector(2 * LANES)
    dot = known_function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF, VF, pairs, pairs)
    return builder.call(dot, [acc, builder.bitcast(w, pairs), builder.bitcast(x, pairs)])


def _pair_fma(builder: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """The same by widening: a bf16 is the upper half of an fp32."""
    for half in (_lower_half, _upper_half):
        acc = _float_fma(builder, acc, half(builder, w), half(builder, x))
    return acc


def _lower_half(builder: ir.IRBuilder, w: Any) -> Any:
    return builder.shl(w, ir.Constant(VI, [16] * LANES))


def _upper_half(builder: ir.IRBuilder, w: Any) -> Any:
    return builder.and_(w, ir.Constant(VI, [0xFFFF0000] * LANES))


def _whole(builder: ir.IRBuilder, w: Any) -> Any:
    return w


def _float_fma(builder: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    return fma(builder, builder.bitcast(w, VF), builder.bitcast(x, VF), acc)


def _lines_asked(vectors: int) -> int:
    """By a step of a tile, of what is read later."""
    return 1 if WIDE else vectors


_Products = tuple[tuple[Callable[[ir.IRBuilder, Any], Any], _MultiplyAdd], ...]
"""Of a step, one for each word of x: what is multiplied with it of a word of w, and how."""
_PAIRS: _Products = ((_whole, _pair_dot),)
_WIDENED: _Products = ((_lower_half, _float_fma), (_upper_half, _float_fma))
_FLOATS: _Products = ((_whole, _float_fma),)


def _make_tile(rows: int, vectors: int, products: _Products, fetches: bool, paged: bool) -> Any:
    """An intrinsic over addresses and byte strides:
    tile(x, x_row_stride, w0, w1, w2, w3, w_step, steps, out, out_row_stride, accumulate, ahead).

    fetches: each step asks for cache lines that will be read later (`_lines_asked`), from the address `ahead` on.
    paged: the weight lies in pages of 2**w1 steps, whose addresses stand at w0 one after another, its vectors side by side; w2 is
    where in a page they begin, w3 nothing.
    """

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, x_stride, *bases, w_step, steps, out, out_stride, accumulate, ahead = args
        cells = [(r, v) for r in range(rows) for v in range(vectors)]
        out_at = {(r, v): at_address(b, out, b.add(multiple(b, out_stride, r), I64(4 * LANES * v)), VF) for r, v in cells}

        zero = ir.Constant(VF, [0.0] * LANES)
        entry, function = b.block, b.function
        load, loop, end = (function.append_basic_block(n) for n in ("load", "loop", "end"))
        b.cbranch(b.icmp_signed("!=", accumulate, I64(0)), load, loop)
        b.position_at_end(load)
        carried = {cell: b.load(out_at[cell], align=4) for cell in cells}
        b.branch(loop)

        b.position_at_end(loop)
        step = b.phi(I64)
        sums = {cell: b.phi(VF) for cell in cells}
        step.add_incoming(I64(0), entry)
        step.add_incoming(I64(0), load)
        for cell, phi in sums.items():
            phi.add_incoming(zero, entry)
            phi.add_incoming(carried[cell], load)
        in_page = step
        if paged:
            table, page_bits, begin, _ = bases
            page = b.lshr(step, page_bits)
            in_page = b.sub(step, b.shl(page, page_bits))
            start = b.add(b.load(at_address(b, table, multiple(b, page, 8), I64), align=8), begin)
            bases = [b.add(start, I64(4 * LANES * v)) for v in range(vectors)]
        w_offset, x_offset = b.mul(in_page, w_step), multiple(b, step, 4 * len(products))
        for line in range(_lines_asked(vectors) if fetches else 0):
            ask_for(b, b.add(ahead, b.add(multiple(b, step, 64 * _lines_asked(vectors)), I64(64 * line))))
        w = [b.load(at_address(b, bases[v], w_offset, VI), align=4) for v in range(vectors)]
        new: dict[tuple[int, int], Any] = dict(sums)
        for word, (part, multiply_add) in enumerate(products):
            if word and NEON:  # loaded again: beside the sums there are no registers to keep them in
                keep_order(b)
                w = [b.load(at_address(b, bases[v], w_offset, VI), align=4) for v in range(vectors)]
            parts = [part(b, of_vector) for of_vector in w]
            for r in range(rows):
                place = b.add(multiple(b, x_stride, r), b.add(x_offset, I64(4 * word)))
                spread = splat(b, b.load(at_address(b, x, place, F32), align=4), VF)
                for v in range(vectors):
                    new[r, v] = multiply_add(b, new[r, v], parts[v], spread)
        following = b.add(step, I64(1))
        step.add_incoming(following, loop)
        for cell, phi in sums.items():
            phi.add_incoming(new[cell], loop)
        b.cbranch(b.icmp_signed("<", following, steps), loop, end)

        b.position_at_end(end)
        for cell in cells:
            b.store(new[cell], out_at[cell], align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing: Any, x, x_stride, w0, w1, w2, w3, w_step, steps, out, out_stride, accumulate, ahead):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 12), code

    return tile


def by_type(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of what is given the types of its arguments, and returns the function that is compiled for these: for compiled
    code, which calls it with the arguments. options: of numba's `overload`."""

    def declare(choose: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(choose)
        def compiled_only(*arguments: Any) -> Any:
            raise RuntimeError(f"{choose.__qualname__} is there in compiled code alone")

        overload(compiled_only, **options)(choose)
        return compiled_only

    return declare


def _make_columns(rows: int, products: _Products, fetches: bool) -> Any:
    """Tiles of so many rows side by side, until they have all 64 columns."""
    vectors = _VECTORS_OF_ROWS[rows]
    tile = _make_tile(rows, vectors, products, fetches, False)
    asked = 64 * _lines_asked(vectors)

    @inner
    def columns(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead):
        if vectors == 4:
            tile(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead)
        elif vectors == 2:
            tile(x, xs, w0, w1, w0, w1, step, steps, out, os, add, ahead)
            tile(x, xs, w2, w3, w2, w3, step, steps, out + 128, os, add, ahead + asked * steps)
        else:
            tile(x, xs, w0, w0, w0, w0, step, steps, out, os, add, ahead)
            tile(x, xs, w1, w1, w1, w1, step, steps, out + 64, os, add, ahead + asked * steps)
            tile(x, xs, w2, w2, w2, w2, step, steps, out + 128, os, add, ahead + 2 * asked * steps)
            tile(x, xs, w3, w3, w3, w3, step, steps, out + 192, os, add, ahead + 3 * asked * steps)

    return columns


def _make_paged_columns(rows: int, num_vectors: int, products: _Products) -> Any:
    """The same of a weight in pages, for 16 or 64 columns."""
    vectors = min(num_vectors, _VECTORS_OF_ROWS[rows])
    tile, width, step_bytes = _make_tile(rows, vectors, products, False, True), 4 * LANES * num_vectors, 4 * LANES * vectors

    @inner
    def columns(x, xs, table, page_bits, begin, w3, step, steps, out, os, add, ahead):
        for first in range(0, width, step_bytes):
            tile(x, xs, table, page_bits, begin + first, w3, step, steps, out + first, os, add, ahead)

    return columns


def _make_dot(make_columns: Callable[[int], Any]) -> Any:
    """One compiled function for 1 to MAX_ROWS rows."""
    t1, t2, t3, t4, t5, t6 = (make_columns(rows) for rows in range(1, MAX_ROWS + 1))

    @inner
    def dot(rows, x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead):
        if rows == 6:
            t6(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead)
        elif rows == 1:
            t1(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead)
        elif rows == 2:
            t2(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead)
        elif rows == 3:
            t3(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead)
        elif rows == 4:
            t4(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead)
        else:
            t5(x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead)

    return dot


@intrinsic
def _room_for_widened(typing: Any) -> Any:
    """The address of fp32 [MAX_ROWS][2 * WIDENED_STEPS] on the stack."""
    room = ir.ArrayType(F32, MAX_ROWS * 2 * WIDENED_STEPS)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, room)
        memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(), code


@inner
def _widen(rows, x, xs, steps, target):
    """Pairs of bf16 of some rows as fp32, 2 * WIDENED_STEPS of them a row."""
    for r in range(rows):
        pairs = carray(typed_pointer(x + r * xs, np.uint16(0)), (2 * steps,))
        words = carray(typed_pointer(target + r * 8 * WIDENED_STEPS, np.uint32(0)), (2 * steps,))
        for i in range(2 * steps):
            words[i] = np.uint32(pairs[i]) << np.uint32(16)


def _make_wide_dot(products: _Products, fetches: bool = False) -> Any:
    """The dot over 4 vectors, 64 columns."""
    of_products = _make_dot(lambda rows: _make_columns(rows, products, fetches))
    if products is not _WIDENED:
        return of_products

    @inner
    def dot(rows, x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead):
        memory = _room_for_widened()
        for first in range(0, steps, WIDENED_STEPS):
            some, at = min(WIDENED_STEPS, steps - first), first * step
            _widen(rows, x + 4 * first, xs, some, memory)
            of_products(
                rows, memory, 8 * WIDENED_STEPS, w0 + at, w1 + at, w2 + at, w3 + at, step, some, out, os, add + first,
                ahead + 4 * 64 * first,
            )  # fmt: skip

    return dot


def _make_paged_dot(vectors: int, products: _Products) -> Any:
    """The dot over 16 or 64 columns of a weight in pages, of WIDENED_STEPS steps at most, added to `out`: see `_make_tile`."""
    onto = _make_dot(lambda rows: _make_paged_columns(rows, vectors, products))
    widens = products is _WIDENED

    @inner
    def dot(rows, x, xs, table, page_bits, begin, step, steps, out, os):
        if widens:
            memory = _room_for_widened()
            _widen(rows, x, xs, steps, memory)
            x, xs = memory, 8 * WIDENED_STEPS
        onto(rows, x, xs, table, page_bits, begin, 0, step, steps, out, os, 1, 0)

    return dot


pair_multiply_add = _pair_dot if HAS_BF16_DOT else _pair_fma
"""acc + the two products of bf16 in each lane of two vectors of pairs."""
_BF16 = _PAIRS if HAS_BF16_DOT else _WIDENED
dot64_bf16, dot64_f32 = _make_wide_dot(_BF16), _make_wide_dot(_FLOATS)
dot64_bf16_ahead = _make_wide_dot(_BF16, fetches=True)
"""The same for weights whose neighbours are still in memory."""
paged64_bf16, paged16_bf16 = (_make_paged_dot(vectors, _BF16) for vectors in (VECTORS, 1))
paged64_f32, paged16_f32 = (_make_paged_dot(vectors, _FLOATS) for vectors in (VECTORS, 1))


@intrinsic
def typed_pointer(typing: Any, address: Any, tag: Any) -> Any:
    """A pointer for numba's `carray` from an address; its element type is that of the scalar `tag`."""
    element = types.CPointer(tag)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(element))

    return element(types.int64, tag), code


@intrinsic
def call_at(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the function of int64 (a tuple of them) at an address."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), cgutils.unpack_tuple(builder, args[1]))
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(arguments))), code


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address, to be read soon. Any address will do; nothing happens otherwise."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        ask_for(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), code
