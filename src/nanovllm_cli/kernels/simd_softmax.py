"""The exponentials of a row of 64 scores as LLVM vectors: all sixty-four stay in registers from the scores to the weights.

Loops over a row in memory, one for each thing that is done with it, take several times as long as the two products around them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanovllm_cli.kernels.cpu_numbers import EXP2, LOG2_E
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import by_type
from nanovllm_cli.kernels.simd_ir import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI,
    BFloatVector,
    at_address,
    fma,
    host_has,
    known_function,
    splat,
)
from nanovllm_cli.kernels.simd_sums import halved, larger

_COUNT = 64
_SCALES, _BF16 = host_has("avx512f"), BFloatVector(LANES)
_LEEWAY = 5.0
"""How far scores may lie above what they are measured by. Their weights then are at most e^5, and no less exact; while what was
summed so far need not be scaled anew each time that a score is a little higher than all before it, which nobody can foresee."""


def _each(value: float) -> Any:
    return ir.Constant(VF, [value] * LANES)


def _exp(b: ir.IRBuilder, x: Any) -> Any:
    """As cpu_numbers.exp_not_positive, which has room for some more than 0, with one rounding in each of its steps."""
    least = _each(-150.0 if _SCALES else -127.0)
    t = b.fmul(x, _each(float(LOG2_E)))
    t = b.select(b.fcmp_ordered("<", t, least), least, t)
    if _SCALES:
        whole = b.call(known_function(b, "llvm.roundeven.v16f32", VF, VF), [t])
    else:
        n = b.fptosi(b.fadd(t, _each(127.5)), VI)
        whole = b.sitofp(b.sub(n, ir.Constant(VI, [127] * LANES)), VF)
    f = b.fsub(t, whole)
    p = _each(float(EXP2[0]))
    for factor in EXP2[1:]:
        p = fma(b, p, f, _each(float(factor)))
    if _SCALES:
        scale = known_function(b, "llvm.x86.avx512.mask.scalef.ps.512", VF, VF, VF, VF, I16, I32)
        return b.call(scale, [p, whole, p, I16(-1), I32(4)])
    return b.fmul(p, b.bitcast(b.shl(n, ir.Constant(VI, [23] * LANES)), VF))


def _rounded(b: ir.IRBuilder, x: Any) -> Any:
    """fp32 to the nearest bf16, ties to even."""
    if host_has("avx512bf16"):
        return b.call(known_function(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", _BF16, VF), [x])
    bits, sixteen = b.bitcast(x, VI), ir.Constant(VI, [16] * LANES)
    odd = b.and_(b.lshr(bits, sixteen), ir.Constant(VI, [1] * LANES))
    up = b.add(b.add(bits, ir.Constant(VI, [0x7FFF] * LANES)), odd)
    return b.trunc(b.lshr(up, sixteen), ir.VectorType(I16, LANES))


def _bounded(b: ir.IRBuilder, place: Any) -> Any:
    """As far as it says something of 64 places."""
    least, most = I64(0), I64(_COUNT)
    place = b.select(b.icmp_signed("<", place, least), least, place)
    return b.select(b.icmp_signed(">", place, most), most, place)


def _make(size: int, has_factors: bool, count: int) -> Any:
    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        scores, bounds, base, scale, states, factors, weights, found = args
        scales, minus_infinity, zero = splat(b, scale, VF), ir.Constant(F32, float("-inf")), ir.Constant(F32, 0.0)

        def number(base: Any, place: int, kind: Any = F32) -> Any:
            return b.load(at_address(b, base, I64(place), kind), align=4)

        loaded = [[b.fmul(number(scores, 4 * (_COUNT * row + i), VF), scales) for i in range(0, _COUNT, LANES)]
                  for row in range(count)]  # fmt: skip
        edges = [[b.sub(number(bounds, 16 * row + 8 * side, I64), base) for side in (0, 1)] for row in range(count)]
        whole = ir.Constant(ir.IntType(1), 1)
        for low, high in edges:
            whole = b.and_(whole, b.and_(b.icmp_signed("<=", low, I64(0)), b.icmp_signed(">=", high, I64(_COUNT))))
        entry, mask, seen = b.block, b.function.append_basic_block("mask"), b.function.append_basic_block("seen")
        b.cbranch(whole, seen, mask)

        b.position_at_end(mask)
        masked: list[list[Any]] = []
        for row, (low, high) in zip(loaded, edges, strict=True):
            nearest, farthest = (splat(b, b.trunc(_bounded(b, each), I32), VI) for each in (low, high))
            masked.append([])
            for place, x in enumerate(row):
                key = ir.Constant(VI, [place * LANES + lane for lane in range(LANES)])
                visible = b.and_(b.icmp_signed(">=", key, nearest), b.icmp_signed("<", key, farthest))
                masked[-1].append(b.select(visible, x, _each(float("-inf"))))
        b.branch(seen)

        b.position_at_end(seen)
        rows = []
        for every, some in zip(loaded, masked, strict=True):
            rows.append([b.phi(VF) for _ in every])
            for phi, x, without in zip(rows[-1], every, some, strict=True):
                phi.add_incoming(x, entry)
                phi.add_incoming(without, mask)
        tops, rises, risen = [], [], I64(0)
        for place, row in enumerate(rows):
            floor = number(states, 8 * place)
            top = halved(b, larger(b, larger(b, row[0], row[1]), larger(b, row[2], row[3])), lambda x, y: larger(b, x, y))
            top = b.select(b.fcmp_unordered("uno", top, top), zero, top)  # what stays is NaN, whatever it is measured by
            rises.append(b.fcmp_ordered(">", top, b.fadd(floor, ir.Constant(F32, _LEEWAY))))
            top = b.select(rises[-1], top, floor)
            b.store(top, at_address(b, found, I64(8 * place), F32), align=4)
            tops.append(splat(b, b.select(b.fcmp_ordered("==", top, minus_infinity), zero, top), VF))  # all weights are 0 then
        powers = [[_exp(b, b.fsub(x, top)) for x in row] for row, top in zip(rows, tops, strict=True)]
        for place, row in enumerate(powers):
            total = halved(b, b.fadd(b.fadd(row[0], row[1]), b.fadd(row[2], row[3])), b.fadd)
            b.store(total, at_address(b, found, I64(8 * place + 4), F32), align=4)
            before, sum_at = number(states, 8 * place + 4), at_address(b, states, I64(8 * place + 4), F32)
            b.store(b.select(rises[place], before, b.fadd(before, total)), sum_at, align=4)
            risen = b.or_(risen, b.shl(b.zext(rises[place], I64), I64(place)))
            for i, x in enumerate(row):
                if has_factors:
                    x = b.fmul(x, number(factors, 4 * LANES * i, VF))
                kept = _rounded(b, x) if size == 2 else x
                b.store(kept, at_address(b, weights, I64(size * (_COUNT * place + LANES * i)), kept.type), align=size)
        return risen

    @intrinsic
    def of_type(typing: Any, scores, bounds, base, scale, states, factors, weights, found):  # type: ignore[no-untyped-def]
        i, f = types.int64, types.float32
        return i(i, i, i, f, i, i, i, i), code

    return of_type


_TOGETHER = 3 if _SCALES else 1
"""Rows whose exponentials are computed side by side, where registers hold so many: one alone waits for its own last step."""


def _make_rows(size: int, has_factors: bool) -> Any:
    one, several = _make(size, has_factors, 1), _make(size, has_factors, _TOGETHER)

    @inner
    def rows_of_type(rows, scores, bounds, base, scale, states, factors, weights, found):
        row, risen = 0, np.int64(0)
        while row + _TOGETHER <= rows:
            some = several(
                scores + 256 * row, bounds + 16 * row, base, scale, states + 8 * row, factors, weights + 64 * size * row,
                found + 8 * row,
            )  # fmt: skip
            risen, row = risen | some << row, row + _TOGETHER
        while row < rows:
            some = one(
                scores + 256 * row, bounds + 16 * row, base, scale, states + 8 * row, factors, weights + 64 * size * row,
                found + 8 * row,
            )  # fmt: skip
            risen, row = risen | some << row, row + 1
        return risen

    return rows_of_type


_of_bf16, _of_bf16_with_factors = _make_rows(2, False), _make_rows(2, True)
_of_f32, _of_f32_with_factors = _make_rows(4, False), _make_rows(4, True)


@by_type()
def softmax64(tag, kind, rows, scores, bounds, base, scale, states, factors, weights, found):
    """weights [rows, 64] of tag's type = exp(scale * score - top) of scores [rows, 64], times their factors [64] unless values
    are kept as they are (kind). bounds [rows, 2] int64: seen are those from low to before high, the first being number `base`.
    states [rows, 2]: what the row's scores are measured by, -inf at first, and the sum of the exponentials so far, to which these
    are added; but not where a score is far above that. Such rows are returned, a bit each: found [rows, 2] has the highest score
    that they are measured by here, and their sum. Addresses, of fp32 where nothing else is said."""
    is_dense = kind in (types.uint16, types.float32)
    if tag == types.uint16:
        softmax = _of_bf16 if is_dense else _of_bf16_with_factors
    else:
        softmax = _of_f32 if is_dense else _of_f32_with_factors
    return lambda tag, kind, rows, scores, bounds, base, scale, states, factors, weights, found: softmax(
        rows, scores, bounds, base, scale, states, factors, weights, found
    )
