"""The inner loops over bf16 weights that are kept in 12 bits each, written as LLVM vectors (see simd.py and simd_ir.py).

Of the 256 exponents that a bf16 could have, trained weights use few: a tile of 64 outputs has a table of its 16 most common ones,
and its weights keep sign, fraction and four bits of place in that table. The few weights with another exponent are listed, whole.
So nothing is rounded, and a step reads three quarters of the bytes.

Two k's of 64 outputs are 4 vectors of 32 words, of which 3 are kept (s sign, m fraction, c a code; a, b, c, d the four words):

    word 0   s(a) | c(b) c(a) | m(a)         1, 4 + 4, 7 bits from the top
    word 1   s(b) | c(d) c(c) | m(b)
    word 2   s(c) | s(d) m(d) | m(c)         1, 1 + 7, 7

A table is 32 words, the 16 exponents twice, as `vpermw` looks at five bits: the fifth belongs to a neighbour. Without AVX512-BW
the exponents' bytes are looked up by `vpshufb`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import TILE_COLUMNS, VECTORS, WIDE, pair_multiply_add
from nanovllm_cli.kernels.simd_ir import (
    BYTES,
    I32,
    I64,
    LANES,
    NEON,
    SHORTS,
    VF,
    VI,
    ask_for,
    at_address,
    counted,
    host_has,
    known_function,
    look_up_bytes,
    multiple,
    splat,
)  # fmt: skip

_BY_WORDS = host_has("avx512bw")
AVAILABLE = host_has("avx2") or NEON
"""Whether this processor can look many numbers up at once."""
TABLE_BYTES = 64
STEP_BYTES = 3 * 64
"""Of two k's and 64 outputs."""
ENTRY_BYTES = 8
"""Of a listed pair."""
FEW_ROWS = 4 if WIDE else 1
"""Rows whose sums fit the registers beside what unpacking needs."""
DIRECT_ROWS = 8 if WIDE else 1
"""Rows, in two passes, that are multiplied without a panel."""
_SIGN, _OWN = 0x8000, 0x807F


def _words(value: int) -> ir.Constant:
    return ir.Constant(SHORTS, [value] * (2 * LANES))


def _load_table(b: ir.IRBuilder, table: Any) -> Any:
    """What `_look_up` takes, of the table at an address."""
    words = b.load(b.inttoptr(table, SHORTS.as_pointer()), align=4)
    if _BY_WORDS:
        return words
    exponents = b.bitcast(b.lshr(words, _words(7)), BYTES)
    return b.shuffle_vector(exponents, exponents, ir.Constant(ir.VectorType(I32, 4 * LANES), list(range(0, 32, 2)) * 4))


def _look_up(b: ir.IRBuilder, table: Any, codes: Any) -> Any:
    """Exponents in place; the codes are in the lowest bits of words, under others."""
    if _BY_WORDS:
        permute = known_function(b, "llvm.x86.avx512.permvar.hi.512", SHORTS, SHORTS, SHORTS)
        return b.call(permute, [table, codes])
    places = b.or_(b.and_(codes, _words(15)), _words(0x8000))
    return b.shl(b.bitcast(look_up_bytes(b, table, b.bitcast(places, BYTES)), SHORTS), _words(7))


def _unpacked(b: ir.IRBuilder, read: Any, table: Any) -> list[Any]:
    """The four vectors of pairs at the address of a step."""
    one, two, three = (b.load(at_address(b, read, I64(64 * i), SHORTS), align=4) for i in range(3))
    fourth = b.or_(
        b.and_(b.shl(three, _words(1)), _words(_SIGN)), b.and_(b.lshr(three, _words(7)), _words(0xFFFF ^ _SIGN))
    )
    codes = [b.lshr(kept, _words(shift)) for kept in (one, two) for shift in (7, 11)]
    return [
        b.bitcast(b.or_(b.and_(own, _words(_OWN)), _look_up(b, table, code)), VI)
        for own, code in zip((one, two, three, fourth), codes, strict=True)
    ]


@intrinsic
def unpack_steps(typing: Any, codes, table, steps, panel):  # type: ignore[no-untyped-def]
    """panel u32 [steps][64], pairs as simd.py multiplies them, from codes [steps][192 bytes] and a table."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        codes, table, steps, panel = args
        exponents = _load_table(b, table)
        with counted(b, steps) as step:
            offset = multiple(b, step, STEP_BYTES)
            write = b.add(panel, multiple(b, step, 4 * LANES * VECTORS))
            for v, pairs in enumerate(_unpacked(b, b.add(codes, offset), exponents)):
                b.store(pairs, at_address(b, write, I64(64 * v), VI), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), code


def _make_rows(rows: int) -> Any:
    """An intrinsic for few rows of bf16, from codes to products without a panel:
    tile(x, x_row_stride, codes, table, steps, listed, out, ahead): out fp32 [rows][64].

    listed: address of (place i32, pair u32) in ascending order, place = step * 64 + output, and after them one with the place
    steps * 64. ahead: see `ahead.distance`. The sums are those of `simd.dot_tile`, to the bit.
    """
    cells = [(r, v) for r in range(rows) for v in range(VECTORS)]

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        x, x_stride, codes, table, steps, listed, out, ahead = args
        exponents = _load_table(b, table)
        x_rows = [b.add(x, multiple(b, x_stride, r)) for r in range(rows)]
        entry = b.block
        until, plain, stop, patch, replace, replaced, end = (
            b.function.append_basic_block(n) for n in ("until", "plain", "stop", "patch", "replace", "replaced", "end")
        )

        def place_at(address: Any) -> Any:
            return b.sext(b.load(at_address(b, address, I64(0), I32), align=4), I64)

        def weights(step: Any) -> list[Any]:
            read = b.add(codes, multiple(b, step, STEP_BYTES))
            for line in range(3):
                ask_for(b, b.add(b.add(read, I64(64 * line)), ahead), near=False)
            return _unpacked(b, read, exponents)

        def add_products(step: Any, w: list[Any], sums: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
            at = multiple(b, step, 4)
            spread = [splat(b, b.load(at_address(b, row, at, I32), align=4), VI) for row in x_rows]
            return {(r, v): pair_multiply_add(b, sums[r, v], w[v], spread[r]) for r, v in cells}

        b.branch(until)
        # ---- up to the next step with listed pairs
        b.position_at_end(until)
        first, entry_at, begun = b.phi(I64), b.phi(I64), {cell: b.phi(VF) for cell in cells}
        first.add_incoming(I64(0), entry)
        entry_at.add_incoming(listed, entry)
        for phi in begun.values():
            phi.add_incoming(ir.Constant(VF, [0.0] * LANES), entry)
        place = place_at(entry_at)
        last = b.ashr(place, I64(6))
        b.cbranch(b.icmp_signed("<", first, last), plain, stop)

        b.position_at_end(plain)
        step, sums = b.phi(I64), {cell: b.phi(VF) for cell in cells}
        new = add_products(step, weights(step), sums)
        following = b.add(step, I64(1))
        for phi, start, next_ in ((step, first, following), *((sums[cell], begun[cell], new[cell]) for cell in cells)):
            phi.add_incoming(start, until)
            phi.add_incoming(next_, plain)
        b.cbranch(b.icmp_signed("<", following, last), plain, stop)

        b.position_at_end(stop)
        here = {cell: b.phi(VF) for cell in cells}
        for cell, phi in here.items():
            phi.add_incoming(begun[cell], until)
            phi.add_incoming(new[cell], plain)
        b.cbranch(b.icmp_signed("<", last, steps), patch, end)

        # ---- that step
        b.position_at_end(patch)
        kept = weights(last)
        b.branch(replace)
        b.position_at_end(replace)
        at, current, w = b.phi(I64), b.phi(I64), [b.phi(VI) for _ in range(VECTORS)]
        pair = splat(b, b.load(at_address(b, at, I64(4), I32), align=4), VI)
        output = splat(b, b.trunc(b.and_(current, I64(TILE_COLUMNS - 1)), I32), VI)
        whole = []
        for v in range(VECTORS):
            own = ir.Constant(VI, [LANES * v + lane for lane in range(LANES)])
            whole.append(b.select(b.icmp_signed("==", output, own), pair, w[v]))
        next_at = b.add(at, I64(ENTRY_BYTES))
        next_place = place_at(next_at)
        for phi, start, next_ in ((at, entry_at, next_at), (current, place, next_place), *zip(w, kept, whole, strict=True)):
            phi.add_incoming(start, patch)
            phi.add_incoming(next_, replace)
        b.cbranch(b.icmp_signed("==", b.ashr(next_place, I64(6)), last), replace, replaced)

        b.position_at_end(replaced)
        added = add_products(last, whole, here)
        for phi, next_ in ((first, b.add(last, I64(1))), (entry_at, next_at), *((begun[c], added[c]) for c in cells)):
            phi.add_incoming(next_, replaced)
        b.branch(until)

        b.position_at_end(end)
        for r, v in cells:
            b.store(here[r, v], at_address(b, out, I64(4 * (TILE_COLUMNS * r + LANES * v)), VF), align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing: Any, x, x_stride, codes, table, steps, listed, out, ahead):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 8), code

    return tile


def _make_few() -> Any:
    """One compiled function for 1 to FEW_ROWS rows."""
    made = [_make_rows(rows) for rows in range(1, FEW_ROWS + 1)]
    t1, t2, t3, t4 = made + made[-1:] * (4 - FEW_ROWS)

    @inner
    def few(rows, x, xs, codes, table, steps, listed, out, ahead):
        if rows == 1:
            t1(x, xs, codes, table, steps, listed, out, ahead)
        elif rows == 2:
            t2(x, xs, codes, table, steps, listed, out, ahead)
        elif rows == 3:
            t3(x, xs, codes, table, steps, listed, out, ahead)
        else:
            t4(x, xs, codes, table, steps, listed, out, ahead)

    return few


few_rows = _make_few()
