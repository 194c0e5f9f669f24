"""The one inner loop that all CPU matmuls share, written as LLVM vectors so that numba compiles it for the host's processor.

    out[r, 16 v + j] (+)= sum over s of  x[r, s] * w[v, s, j]        r < rows, v < vectors, j < 16

is `dot_tile`: a tile of `rows` x `16 * vectors` fp32 sums that lives in registers while it walks along k. Each sum is one chain
of fused multiply-adds in ascending k, so a row's bits depend on that row and the weights alone: not on how many rows share the
tile, nor on how the rows were split over calls. That is what makes results independent of the batch (docs/architecture.md).

Three kinds of element, by what one step s holds:

    bf16 pairs, AVX512-BF16   two k's a step, vdpbf16ps                                  (Zen 4, Sapphire Rapids and newer)
    bf16 pairs, elsewhere     two k's a step, widened to fp32 by shifts, two FMAs        (any processor LLVM knows)
    fp32                      one k a step, one FMA

Pairs mean that w holds [.., k / 2, 16, 2] bf16 and x holds bf16 rows, read 32 bits at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from nanovllm_cli.kernels.simd_ir import (
    I32,
    I64,
    LANES,
    VF,
    VI,
    ask_for,
    at_address,
    fma,
    host_has,
    known_function,
    multiple,
    splat,
)  # fmt: skip

MAX_ROWS = 6
VECTORS = 4
TILE_COLUMNS = LANES * VECTORS

_MultiplyAdd = Callable[[ir.IRBuilder, Any, Any, Any], Any]
Function = TypeVar("Function", bound=Callable[..., None])


class _BFloatVector(ir.Type):  # type: ignore[misc]
    """<32 x bfloat>, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "<32 x bfloat>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloatVector)

    def __hash__(self) -> int:
        return hash("<32 x bfloat>")


HAS_BF16_DOT = host_has("avx512bf16")
# With 32 wide registers, 6 rows x 4 vectors of sums fit; with 16 narrower ones, one vector at a time does.
TILE_VECTORS = VECTORS if host_has("avx512f") else 1


def _pair_dot(builder: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """acc + w.low * x.low + w.high * x.high for 16 pairs of bf16, by the processor's own instruction."""
    pairs = _BFloatVector()
    dot = known_function(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF, VF, pairs, pairs)
    return builder.call(dot, [acc, builder.bitcast(w, pairs), builder.bitcast(x, pairs)])


def _pair_fma(builder: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """The same by widening: a bf16 is the upper half of an fp32."""
    sixteen = ir.Constant(VI, [16] * LANES)
    upper = ir.Constant(VI, [0xFFFF0000] * LANES)
    for half in (lambda v: builder.shl(v, sixteen), lambda v: builder.and_(v, upper)):
        acc = fma(builder, builder.bitcast(half(w), VF), builder.bitcast(half(x), VF), acc)
    return acc


def _float_fma(builder: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    return fma(builder, builder.bitcast(w, VF), builder.bitcast(x, VF), acc)


def _make_tile(rows: int, vectors: int, multiply_add: _MultiplyAdd, fetches: bool, paged: bool) -> Any:
    """An intrinsic over addresses and byte strides:
    tile(x, x_row_stride, w0, w1, w2, w3, w_step, steps, out, out_row_stride, accumulate, ahead).

    fetches: each step asks for a cache line that will be read later, from the address `ahead` on.
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
        w_offset, x_offset = b.mul(in_page, w_step), multiple(b, step, 4)
        if fetches:
            ask_for(b, b.add(ahead, multiple(b, step, 64)))
        w = [b.load(at_address(b, bases[v], w_offset, VI), align=4) for v in range(vectors)]
        new = {}
        for r in range(rows):
            word = b.load(at_address(b, x, b.add(multiple(b, x_stride, r), x_offset), I32), align=4)
            spread = splat(b, word, VI)
            for v in range(vectors):
                new[r, v] = multiply_add(b, sums[r, v], w[v], spread)
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


def named(name: str) -> Callable[[Function], Function]:
    """Decorator of what several are made of before they are compiled: each needs a name of its own.

    Numba tells them apart by a number that it counts in the process. From its cache two that two processes compiled may come with
    one number, and in a process that loads both the linker takes the first for the other, too.
    """

    def rename(function: Function) -> Function:
        function.__qualname__ = name
        return function

    return rename


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


def _make_dot(name: str, vectors: int, multiply_add: _MultiplyAdd, fetches: bool = False, paged: bool = False) -> Any:
    """One compiled function that picks the tile for 1 to MAX_ROWS rows."""
    t1, t2, t3, t4, t5, t6 = (_make_tile(rows, vectors, multiply_add, fetches, paged) for rows in range(1, MAX_ROWS + 1))

    @njit(nogil=True, error_model="numpy")
    @named(name)
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


def _make_wide_dot(element: str, multiply_add: _MultiplyAdd) -> Any:
    """The dot over 4 vectors, 64 columns, for one kind of element."""
    if TILE_VECTORS == VECTORS:
        return _make_dot(f"dot64_{element}", VECTORS, multiply_add)
    narrow = _make_dot(f"dot16_{element}", 1, multiply_add)

    @njit(nogil=True, error_model="numpy")
    @named(f"dot64_{element}")
    def wide(rows, x, xs, w0, w1, w2, w3, step, steps, out, os, add, ahead):
        narrow(rows, x, xs, w0, w0, w0, w0, step, steps, out, os, add, ahead)
        narrow(rows, x, xs, w1, w1, w1, w1, step, steps, out + 64, os, add, ahead)
        narrow(rows, x, xs, w2, w2, w2, w2, step, steps, out + 128, os, add, ahead)
        narrow(rows, x, xs, w3, w3, w3, w3, step, steps, out + 192, os, add, ahead)

    return wide


def _make_paged_dot(element: str, multiply_add: _MultiplyAdd) -> tuple[Any, Any]:
    """(dot over 64 columns, dot over 16) of a weight in pages, added to `out`: see `_make_tile`."""
    one = _make_dot(f"paged16_{element}", 1, multiply_add, paged=True)
    four = _make_dot(f"paged64_{element}", TILE_VECTORS, multiply_add, paged=True)

    @njit(nogil=True, error_model="numpy")
    @named(f"paged16_{element}_onto")
    def narrow(rows, x, xs, table, page_bits, begin, step, steps, out, os):
        one(rows, x, xs, table, page_bits, begin, 0, step, steps, out, os, 1, 0)

    @njit(nogil=True, error_model="numpy")
    @named(f"paged64_{element}_onto")
    def wide(rows, x, xs, table, page_bits, begin, step, steps, out, os):
        for first in range(0, 4 * TILE_COLUMNS, 4 * LANES * TILE_VECTORS):
            four(rows, x, xs, table, page_bits, begin + first, 0, step, steps, out + first, os, 1, 0)

    return wide, narrow


pair_multiply_add = _pair_dot if HAS_BF16_DOT else _pair_fma
"""acc + the two products of bf16 in each lane of two vectors of pairs."""
dot64_bf16 = _make_wide_dot("bf16", pair_multiply_add)
dot64_bf16_ahead = _make_dot("dot64_bf16_ahead", TILE_VECTORS, pair_multiply_add, fetches=True)
"""The same for weights whose neighbours are still in memory."""
dot64_f32 = _make_wide_dot("f32", _float_fma)
paged64_bf16, paged16_bf16 = _make_paged_dot("bf16", pair_multiply_add)
paged64_f32, paged16_f32 = _make_paged_dot("f32", _float_fma)


@intrinsic
def typed_pointer(typing: Any, address: Any, tag: Any) -> Any:
    """A pointer for numba's `carray` from an address; its element type is that of the scalar `tag`."""
    element = types.CPointer(tag)

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(element))

    return element(types.int64, tag), code


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the cache line at an address, to be read soon. Any address will do; nothing happens otherwise."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        ask_for(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), code
