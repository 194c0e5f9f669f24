"""Sums of products of u8 codes and s8 activations, four in each lane, as each kind of processor has them best (see simd_int.py).

    AVX512-VNNI, AVX-VNNI    vpdpbusd: all four at once
    AVX2, codes up to 64     vpmaddubsw adds two in 16 bits, where two of these sums have room; vpmaddwd adds pairs of them
    AVX2, any codes          the same with codes - 128, whose sign goes to the activation, one sum of two at a time
    ARM, dotprod             sdot: all four at once, of s8: codes above MOST_SMALL as code - 128; with i8mm usdot takes u8
    ARM, else                smull, and pairs of products added in 16 bits
    elsewhere                products of 16 bits, as LLVM finds them

Whole numbers, exact: which way is taken changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir

from nanovllm_cli.kernels.simd_ir import (
    BYTES,
    I8,
    I16,
    I32,
    LANES,
    NEON,
    SHORTS,
    VI,
    by_quarters,
    halves_of,
    host_has,
    joined,
    known_function,
)  # fmt: skip

_WIDE_DOT, _NARROW_DOT = host_has("avx512vnni"), host_has("avxvnni")
_ARM_DOT, _ARM_MIXED_DOT = host_has("dotprod"), host_has("i8mm")
HAS_BYTE_DOT = _WIDE_DOT or _NARROW_DOT or _ARM_DOT
_WIDE_PAIRS, _NARROW_PAIRS = host_has("avx512bw"), host_has("avx2")
MOST_SMALL = 64
"""The largest code of which four products with s8 are a whole number of 16 bits, whatever their signs: 4 * 64 * 127."""

Cell = tuple[int, int]
_Vector = Callable[[int, int], Any]


class Products(NamedTuple):
    """How dots are added up. together: units that `add` takes at once; bias: what it has taken from each code.

    add(b, dots, first, w, x): dots of cells (row, vector), plus the products of the units first, first + 1, …; w(unit, vector)
    and x(unit, row) load codes and spread activations, and are called in the order of addresses.
    """

    together: int
    bias: int
    add: Callable[[ir.IRBuilder, dict[Cell, Any], int, _Vector, _Vector], dict[Cell, Any]]


def products_of(small: bool) -> Products:
    """small: no code is above MOST_SMALL."""
    if NEON:
        if small or _ARM_MIXED_DOT:
            return Products(1, 0, _one_by_one(_arm_dot))
        return Products(1, 128, _one_by_one(_arm_dot_of_any))
    if HAS_BYTE_DOT:
        return Products(1, 0, _one_by_one(_byte_dot))
    if small and (_WIDE_PAIRS or _NARROW_PAIRS):
        return Products(2, 0, _add_two_units)
    if _NARROW_PAIRS and not _WIDE_PAIRS:
        return Products(1, 128, _one_by_one(_signed_dot))
    return Products(1, 0, _one_by_one(_dot_of_shorts))


@cache
def _one_by_one(dot: Callable[[ir.IRBuilder, Any, Any, Any], Any]) -> Any:
    def add(b: ir.IRBuilder, dots: dict[Cell, Any], unit: int, w: _Vector, x: _Vector) -> dict[Cell, Any]:
        codes = {v: w(unit, v) for v in sorted({v for _, v in dots})}
        spread = {r: x(unit, r) for r in sorted({r for r, _ in dots})}
        return {(r, v): dot(b, dots[r, v], codes[v], spread[r]) for r, v in dots}

    return add


def _add_two_units(b: ir.IRBuilder, dots: dict[Cell, Any], first: int, w: _Vector, x: _Vector) -> dict[Cell, Any]:
    sums: dict[Cell, Any] = {}
    for unit in (first, first + 1):
        codes = {v: w(unit, v) for v in sorted({v for _, v in dots})}
        for r in sorted({r for r, _ in dots}):
            spread = b.bitcast(x(unit, r), BYTES)
            for v, of_vector in codes.items():
                two = _sums_of_two(b, b.bitcast(of_vector, BYTES), spread)
                sums[r, v] = b.add(sums[r, v], two) if unit > first else two
    ones = ir.Constant(SHORTS, [1] * (2 * LANES))
    return {cell: _pair_dot(b, dots[cell], sums[cell], ones) for cell in dots}


def _byte_dot(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    if _WIDE_DOT:
        return b.call(known_function(b, "llvm.x86.avx512.vpdpbusd.512", VI, VI, VI, VI), [acc, w, x])
    return _by_halves(b, "llvm.x86.avx512.vpdpbusd.256", VI, acc, w, x)


def _signed_dot(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """Of codes - 128. Their magnitude, up to 128, times an activation of up to 127: two such sums are below 2**15."""
    signed = b.bitcast(b.xor(w, ir.Constant(VI, [0x80808080] * LANES)), BYTES)
    negative = b.icmp_signed("<", signed, ir.Constant(BYTES, [0] * (4 * LANES)))
    magnitude = b.select(negative, b.neg(signed), signed)
    return _pair_dot(
        b, acc, _sums_of_two(b, magnitude, _by_halves(b, "llvm.x86.avx2.psign.b", BYTES, b.bitcast(x, BYTES), signed)),
        ir.Constant(SHORTS, [1] * (2 * LANES)),
    )  # fmt: skip


def _sums_of_two(b: ir.IRBuilder, w: Any, x: Any) -> Any:
    """Of neighbouring products of u8 and s8, in 16 bits."""
    if _WIDE_PAIRS:
        return b.call(known_function(b, "llvm.x86.avx512.pmaddubs.w.512", SHORTS, BYTES, BYTES), [w, x])
    return _by_halves(b, "llvm.x86.avx2.pmadd.ub.sw", SHORTS, w, x)


def _by_halves(b: ir.IRBuilder, name: str, result: ir.VectorType, *vectors: Any) -> Any:
    """What a function of half the width makes of both halves."""
    both = list(zip(*(halves_of(b, v) for v in vectors), strict=True))
    half = ir.VectorType(result.element, result.count // 2)
    function = known_function(b, name, half, *(v.type for v in both[0]))
    return joined(b, [b.call(function, list(part)) for part in both])


def _arm_dot_of_any(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """Of codes - 128."""
    return _arm_dot(b, acc, b.xor(w, ir.Constant(VI, [0x80808080] * LANES)), x)


def _arm_dot(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    return by_quarters(b, lambda *some: _arm_quarter(b, *some), acc, b.bitcast(w, BYTES), b.bitcast(x, BYTES))


def _arm_quarter(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    if _ARM_DOT:
        name = f"llvm.aarch64.neon.{'usdot' if _ARM_MIXED_DOT else 'sdot'}.v4i32.v16i8"
        return b.call(known_function(b, name, acc.type, acc.type, w.type, w.type), [acc, w, x])
    shorts, eight = ir.VectorType(I16, 8), ir.VectorType(I8, 8)
    multiply = known_function(b, "llvm.aarch64.neon.smull.v8i16", shorts, eight, eight)
    products = [b.call(multiply, list(both)) for both in zip(halves_of(b, w), halves_of(b, x), strict=True)]
    pairs = b.call(known_function(b, "llvm.aarch64.neon.addp.v8i16", shorts, shorts, shorts), products)
    return b.add(acc, b.call(known_function(b, "llvm.aarch64.neon.saddlp.v4i32.v8i16", acc.type, shorts), [pairs]))


def _dot_of_shorts(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    eight = ir.Constant(SHORTS, [8] * (2 * LANES))
    w, x = b.bitcast(w, SHORTS), b.bitcast(x, SHORTS)
    acc = _pair_dot(b, acc, b.and_(w, ir.Constant(SHORTS, [255] * (2 * LANES))), b.ashr(b.shl(x, eight), eight))
    return _pair_dot(b, acc, b.lshr(w, eight), b.ashr(x, eight))


def _pair_dot(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """acc + the two products of 16-bit numbers in each lane, in the form that LLVM knows as `pmaddwd`."""
    products = b.mul(*(b.sext(v, ir.VectorType(I32, 2 * LANES)) for v in (w, x)), flags=("nsw",))
    halves = [
        b.shuffle_vector(products, products, ir.Constant(VI, list(range(first, 2 * LANES, 2)))) for first in (0, 1)
    ]
    return b.add(acc, b.add(*halves))
