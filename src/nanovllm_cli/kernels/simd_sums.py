"""Sums in an order that is written down, as LLVM vectors.

Where a compiler may reorder additions, it does so differently each time it sees the code: a kernel that was just compiled and the
same one from numba's cache then give other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanovllm_cli.kernels.simd import by_type
from nanovllm_cli.kernels.simd_ir import F32, I16, I32, I64, LANES, VF, VI, at_address, known_function, multiple


def halved(b: ir.IRBuilder, vector: Any, joined: Callable[[Any, Any], Any]) -> Any:
    """A vector's numbers as one: its halves joined, and again, until one is left."""
    width = LANES
    while width > 1:
        width //= 2
        halves = [b.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, width), [first + i for i in range(width)]))
                  for first in (0, width)]  # fmt: skip
        vector = joined(*halves)
    return b.extract_element(vector, I32(0))


def larger(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """Of two, or of each pair. One instruction: x where one is NaN."""
    return b.select(b.fcmp_ordered(">", y, x), y, x)


def _make(size: int, squares: bool) -> Any:
    def element(b: ir.IRBuilder, address: Any, index: Any, lanes: int) -> Any:
        """fp32, one or a vector."""
        number, whole = (VF, VI) if lanes > 1 else (F32, I32)
        if size == 4:
            return b.load(at_address(b, address, multiple(b, index, 4), number), align=4)
        stored = ir.VectorType(I16, lanes) if lanes > 1 else I16
        shift = ir.Constant(VI, [16] * lanes) if lanes > 1 else I32(16)
        bits = b.load(at_address(b, address, multiple(b, index, 2), stored), align=2)
        return b.bitcast(b.shl(b.zext(bits, whole), shift), number)

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        address, count = args

        def plus(total: Any, x: Any) -> Any:
            if not squares:
                return b.fadd(total, x)
            name, kind = ("v16f32", VF) if x.type == VF else ("f32", F32)
            return b.call(known_function(b, f"llvm.fma.{name}", kind, kind, kind, kind), [x, x, total])

        vectors = b.and_(count, I64(-LANES))
        entry, loop, fold, rest, end = b.block, *(b.function.append_basic_block(n) for n in ("loop", "fold", "rest", "end"))
        zeros = ir.Constant(VF, [0.0] * LANES)
        b.cbranch(b.icmp_signed(">", vectors, I64(0)), loop, fold)

        b.position_at_end(loop)
        at, sums = b.phi(I64), b.phi(VF)
        x = element(b, address, at, LANES)
        more, following = plus(sums, x), b.add(at, I64(LANES))
        for phi, first, next_ in ((at, I64(0), following), (sums, zeros, more)):
            phi.add_incoming(first, entry)
            phi.add_incoming(next_, loop)
        b.cbranch(b.icmp_signed("<", following, vectors), loop, fold)

        b.position_at_end(fold)
        total = b.phi(VF)
        total.add_incoming(zeros, entry)
        total.add_incoming(more, loop)
        whole = halved(b, total, b.fadd)
        b.cbranch(b.icmp_signed("<", vectors, count), rest, end)

        b.position_at_end(rest)
        at, total = b.phi(I64), b.phi(F32)
        x = element(b, address, at, 1)
        added, following = plus(total, x), b.add(at, I64(1))
        for phi, first, next_ in ((at, vectors, following), (total, whole, added)):
            phi.add_incoming(first, fold)
            phi.add_incoming(next_, rest)
        b.cbranch(b.icmp_signed("<", following, count), rest, end)

        b.position_at_end(end)
        result = b.phi(F32)
        result.add_incoming(whole, fold)
        result.add_incoming(added, rest)
        return result

    @intrinsic
    def of_size(typing: Any, address, count):  # type: ignore[no-untyped-def]
        return types.float32(types.int64, types.int64), code

    return of_size


_of_bf16, _of_f32 = _make(2, True), _make(4, True)
sum_f32 = _make(4, False)
"""sum_f32(address, count): the same without squares, of fp32."""


@by_type()
def sum_of_squares(tag, address, count):
    """fp32, of `count` elements of tag's type: sixteen sums, halved four times, then what is left over, one by one."""
    if tag == types.uint16:
        return lambda tag, address, count: _of_bf16(address, count)
    return lambda tag, address, count: _of_f32(address, count)
