"""The inner loop of integer matmuls, and the unpacking of bit planes, written as LLVM vectors (see simd.py).

    out[r, c] (+)= sum over groups g of  xs[r, g] * scale[g, c] * dot(r, g, c) + xl[r, g] * low[g, c]
    dot(r, g, c)  = sum over k of group g of  x[r, k] * (code[k, c] - offset)                         whole numbers, exact

x is s8, codes are u8; xs is the scale of x and xl that scale times the sum of x's codes, so that `low` (minus a zero point times
its scale, or a min) costs one multiply-add a group. A group's whole numbers stay in registers beside the fp32 sums. Groups come
in ascending order, whatever the number of rows, so a row's bits depend on that row and the weights alone.

Codes lie as [k / 4][64 columns][4]: what `vpdpbusd` multiplies at once, for AVX512-VNNI. Elsewhere two `pmaddwd` do, or
whatever LLVM finds on another processor; the whole numbers are the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from nanovllm_cli.kernels.record_kinds import TILE
from nanovllm_cli.kernels.simd import LANES, MAX_ROWS, VECTORS, host_has, typed_pointer

HAS_BYTE_DOT = host_has("avx512vnni")
# Whole numbers and fp32 sums of 6 x 2 vectors fit 32 wide registers, those of 2 x 1 fit 16 registers half as wide.
WIDE = host_has("avx512f")
TILE_ROWS = MAX_ROWS if WIDE else 2
UNIT_BYTES = 256
"""Four codes of each of 64 columns."""
STEP_UNITS = 8
PREFETCH_BYTES, ROW_PREFETCH_BYTES = 8192, 4096
"""How long before their use codes are asked for; by a single row, which leaves them after that."""

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VI, _VF = ir.VectorType(_I32, LANES), ir.VectorType(_F32, LANES)
_BYTES, _SHORTS = ir.VectorType(_I8, 4 * LANES), ir.VectorType(_I16, 2 * LANES)


def _function(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
    known = builder.module.globals.get(name)
    return known if known is not None else ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def _at(b: ir.IRBuilder, base: Any, offset: Any, kind: ir.Type) -> Any:
    return b.inttoptr(b.add(base, offset), kind.as_pointer())


def _prefetch(b: ir.IRBuilder, address: Any, *, again: bool = True) -> None:
    """again: it is worth a place in the caches behind the first, too."""
    pointer = _I8.as_pointer()
    hint = _function(b, "llvm.prefetch.p0", ir.VoidType(), pointer, _I32, _I32, _I32)
    b.call(hint, [b.inttoptr(address, pointer), _I32(0), _I32(3 if again else 0), _I32(1)])


def _keep_order(b: ir.IRBuilder) -> None:
    """No instruction: loads before and after it are not exchanged."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


def _times(b: ir.IRBuilder, value: Any, n: int) -> Any:
    return b.mul(value, _I64(n))


def _splat(b: ir.IRBuilder, value: Any, kind: ir.VectorType) -> Any:
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(_VI, [0] * LANES))


def _byte_dot(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """acc + the four products of u8 and s8 in each lane."""
    if HAS_BYTE_DOT:
        return b.call(_function(b, "llvm.x86.avx512.vpdpbusd.512", _VI, _VI, _VI, _VI), [acc, w, x])
    eight = ir.Constant(_SHORTS, [8] * (2 * LANES))
    w, x = b.bitcast(w, _SHORTS), b.bitcast(x, _SHORTS)
    acc = _pair_dot(b, acc, b.and_(w, ir.Constant(_SHORTS, [255] * (2 * LANES))), b.ashr(b.shl(x, eight), eight))
    return _pair_dot(b, acc, b.lshr(w, eight), b.ashr(x, eight))


def _pair_dot(b: ir.IRBuilder, acc: Any, w: Any, x: Any) -> Any:
    """acc + the two products of 16-bit numbers in each lane, in the form that LLVM knows as `pmaddwd`."""
    products = b.mul(*(b.sext(v, ir.VectorType(_I32, 2 * LANES)) for v in (w, x)), flags=("nsw",))
    halves = [
        b.shuffle_vector(products, products, ir.Constant(_VI, list(range(first, 2 * LANES, 2)))) for first in (0, 1)
    ]
    return b.add(acc, b.add(*halves))


def _make_tile(rows: int, vectors: int, with_low: bool) -> Any:
    """An intrinsic over addresses and byte strides, for `rows` x `16 * vectors` of one panel:
    tile(codes, scales, lows, units, group_units, offset, x, x_stride, groups, out, out_stride, accumulate, ahead, ahead_step).

    codes [units][256]; scales, lows fp32 [groups][64]; x: a row's xs, xl and sums of codes ([groups] each), then its codes.
    With each unit two lines are asked for that will be read later, ahead_step bytes further each time; not by tiles of all
    columns, which few rows take: they have no time to spare.
    """

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        codes, scales, lows, units, group_units, offset, x, x_stride, groups, out, out_stride, accumulate = args[:12]
        ahead, ahead_step = args[12:]
        cells = [(r, v) for r in range(rows) for v in range(vectors)]
        out_at = {(r, v): _at(b, out, b.add(_times(b, out_stride, r), _I64(64 * v)), _VF) for r, v in cells}
        x_rows = [b.add(x, _times(b, x_stride, r)) for r in range(rows)]
        x_codes = [b.add(row, _times(b, groups, 12)) for row in x_rows]
        fma = _function(b, "llvm.fma.v16f32", _VF, _VF, _VF, _VF)
        negative = b.neg(b.trunc(offset, _I32))

        entry, function = b.block, b.function
        load, group, loop, fold, end = (
            function.append_basic_block(n) for n in ("load", "group", "loop", "fold", "end")
        )
        b.cbranch(b.icmp_signed("!=", accumulate, _I64(0)), load, group)
        b.position_at_end(load)
        carried = {cell: b.load(out_at[cell], align=4) for cell in cells}
        b.branch(group)

        b.position_at_end(group)
        g, first = b.phi(_I64), b.phi(_I64)
        sums = {cell: b.phi(_VF) for cell in cells}
        for block in (entry, load):
            g.add_incoming(_I64(0), block)
            first.add_incoming(_I64(0), block)
        for cell, phi in sums.items():
            phi.add_incoming(ir.Constant(_VF, [0.0] * LANES), entry)
            phi.add_incoming(carried[cell], load)
        last = b.add(first, group_units)
        last = b.select(b.icmp_signed("<", last, units), last, units)

        def number(r: int, part: int, kind: ir.Type) -> Any:
            """xs, xl or the sum of codes of row r in this group."""
            return b.load(_at(b, x_rows[r], _times(b, b.add(_times(b, groups, part), g), 4), kind), align=4)

        starts = [_splat(b, b.mul(number(r, 2, _I32), negative), _VI) for r in range(rows)]
        b.branch(loop)

        b.position_at_end(loop)
        unit = b.phi(_I64)
        unit.add_incoming(first, group)
        dots = {cell: b.phi(_VI) for cell in cells}
        for (r, _), phi in dots.items():
            phi.add_incoming(starts[r], group)
        w_offset, x_offset = _times(b, unit, UNIT_BYTES), _times(b, unit, 4)
        if vectors < VECTORS:
            for line in (0, 128):
                _prefetch(b, b.add(b.add(ahead, b.mul(unit, ahead_step)), _I64(line)))
        w = [b.load(_at(b, codes, b.add(w_offset, _I64(64 * v)), _VI), align=4) for v in range(vectors)]
        new = {}
        for r in range(rows):
            spread = _splat(b, b.load(_at(b, x_codes[r], x_offset, _I32), align=4), _VI)
            for v in range(vectors):
                new[r, v] = _byte_dot(b, dots[r, v], w[v], spread)
        following = b.add(unit, _I64(1))
        unit.add_incoming(following, loop)
        for cell, phi in dots.items():
            phi.add_incoming(new[cell], loop)
        b.cbranch(b.icmp_signed("<", following, last), loop, fold)

        b.position_at_end(fold)
        table_at = [b.add(_times(b, g, UNIT_BYTES), _I64(64 * v)) for v in range(vectors)]
        scale = [b.load(_at(b, scales, at, _VF), align=4) for at in table_at]
        low = [b.load(_at(b, lows, at, _VF), align=4) for at in table_at] if with_low else []
        folded = {}
        for r in range(rows):
            xs = _splat(b, number(r, 0, _F32), _VF)
            xl = _splat(b, number(r, 1, _F32), _VF) if with_low else None
            for v in range(vectors):
                scaled = b.fmul(b.sitofp(new[r, v], _VF), scale[v])
                total = b.call(fma, [scaled, xs, sums[r, v]])
                folded[r, v] = b.call(fma, [low[v], xl, total]) if with_low else total
        next_group = b.add(g, _I64(1))
        g.add_incoming(next_group, fold)
        first.add_incoming(last, fold)
        for cell, phi in sums.items():
            phi.add_incoming(folded[cell], fold)
        b.cbranch(b.icmp_signed("<", next_group, groups), group, end)

        b.position_at_end(end)
        for cell in cells:
            b.store(folded[cell], out_at[cell], align=4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typing: Any, codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, accumulate, ahead, step):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 14), code

    return tile


def _make_rows(rows: int, with_low: bool) -> Any:
    """Tiles of so many rows side by side, until they have all 64 columns."""
    vectors = (VECTORS if rows <= 3 else 2) if WIDE else 1
    tile = _make_tile(rows, vectors, with_low)
    parts, step = VECTORS // vectors, 64 * vectors

    @njit(nogil=True, error_model="numpy")
    def columns(codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, ahead_step):
        for part in range(parts):
            at = part * step
            tile(
                codes + at, scales + at, lows + at, units, group_units, offset, x, xs, groups, out + at, os, add,
                ahead + 64 * (1 - part % 2), ahead_step,
            )  # fmt: skip

    return columns


def _make_dot(with_low: bool) -> Any:
    """One compiled function for any number of rows up to TILE_ROWS."""
    c1, c2, c3, c4, c5, c6 = (_make_rows(min(rows, TILE_ROWS), with_low) for rows in range(1, MAX_ROWS + 1))

    @njit(nogil=True, error_model="numpy")
    def dot(rows, codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step):
        if rows == 6:
            c6(codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step)
        elif rows == 1:
            c1(codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step)
        elif rows == 2:
            c2(codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step)
        elif rows == 3:
            c3(codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step)
        elif rows == 4:
            c4(codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step)
        else:
            c5(codes, scales, lows, units, group_units, offset, x, xs, groups, out, os, add, ahead, step)

    return dot


dot_panel, dot_panel_low = _make_dot(False), _make_dot(True)


def _make_row(planes: tuple[int, ...], pairs: bool, with_low: bool) -> Any:
    """An intrinsic for one row and all 64 columns, from planes to products without a panel:
    row(codes, scales, lows, steps, group_steps, offset, x, groups, out, accumulate); the rest as in `_make_tile`.

    group_steps: steps of 32 k's to a group; with `pairs` a step has two groups. Everything is read in the order in which it lies:
    that is what processors fetch ahead by themselves, at twice the pace of requests by instruction.
    """
    fold_units = STEP_UNITS // 2 if pairs else STEP_UNITS

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        codes, scales, lows, steps, group_steps, offset, x, groups, out, accumulate = args
        constant = lambda value: ir.Constant(_BYTES, [value] * (4 * LANES))
        lanes = range(VECTORS)
        fma = _function(b, "llvm.fma.v16f32", _VF, _VF, _VF, _VF)
        negative, x_codes = b.neg(b.trunc(offset, _I32)), b.add(x, _times(b, groups, 12))
        out_at = [_at(b, out, _I64(64 * v), _VF) for v in lanes]

        def number(g: Any, part: int, kind: ir.Type) -> Any:
            return b.load(_at(b, x, _times(b, b.add(_times(b, groups, part), g), 4), kind), align=4)

        def starts(g: Any) -> list[Any]:
            return [_splat(b, b.mul(number(g, 2, _I32), negative), _VI)] * VECTORS

        def products(step: Any, units: range, dots: list[Any]) -> list[Any]:
            """dots + the products of these units of a step."""
            read = b.add(codes, _times(b, step, UNIT_BYTES * sum(planes)))
            packed: dict[tuple[int, int], Any] = {}
            for unit in units:
                at = b.add(_times(b, step, 4 * STEP_UNITS), _I64(4 * unit))
                spread = _splat(b, b.load(_at(b, x_codes, at, _I32), align=4), _VI)
                for v in lanes:
                    row = shift = 0
                    whole = None
                    for plane in planes:
                        where, j = (row + unit * plane // 8, v), unit % (8 // plane)
                        if where not in packed:
                            line = b.add(read, _I64(where[0] * UNIT_BYTES + 64 * v))
                            _prefetch(b, b.add(line, _I64(ROW_PREFETCH_BYTES)), again=False)
                            packed[where] = b.load(b.inttoptr(line, _BYTES.as_pointer()), align=4)
                            _keep_order(b)
                        part = b.lshr(packed[where], constant(j * plane)) if j else packed[where]
                        if j * plane + plane < 8:
                            part = b.and_(part, constant((1 << plane) - 1))
                        whole = part if whole is None else b.or_(whole, b.shl(part, constant(shift)))
                        row, shift = row + plane, shift + plane
                    dots[v] = _byte_dot(b, dots[v], b.bitcast(whole, _VI), spread)
            return dots

        def fold(g: Any, dots: list[Any], sums: list[Any]) -> list[Any]:
            xs = _splat(b, number(g, 0, _F32), _VF)
            xl = _splat(b, number(g, 1, _F32), _VF) if with_low else None
            folded = []
            for v in lanes:
                at = b.add(_times(b, g, UNIT_BYTES), _I64(64 * v))
                scaled = b.fmul(b.sitofp(dots[v], _VF), b.load(_at(b, scales, at, _VF), align=4))
                total = b.call(fma, [scaled, xs, sums[v]])
                folded.append(b.call(fma, [b.load(_at(b, lows, at, _VF), align=4), xl, total]) if with_low else total)
            return folded

        entry = b.block
        load, group, end = (b.function.append_basic_block(n) for n in ("load", "group", "end"))
        b.cbranch(b.icmp_signed("!=", accumulate, _I64(0)), load, group)
        b.position_at_end(load)
        carried = [b.load(at, align=4) for at in out_at]
        b.branch(group)

        b.position_at_end(group)
        g, first, sums = b.phi(_I64), b.phi(_I64), [b.phi(_VF) for _ in lanes]
        for block in (entry, load):
            g.add_incoming(_I64(0), block)
            first.add_incoming(_I64(0), block)
        for v in lanes:
            sums[v].add_incoming(ir.Constant(_VF, [0.0] * LANES), entry)
            sums[v].add_incoming(carried[v], load)
        if pairs:
            folded, following = sums, g
            for half in range(2):
                units = range(half * fold_units, (half + 1) * fold_units)
                folded = fold(following, products(first, units, starts(following)), folded)
                following = b.add(following, _I64(1))
            last = b.add(first, _I64(1))
        else:
            last = b.add(first, group_steps)
            last = b.select(b.icmp_signed("<", last, steps), last, steps)
            begin, loop = starts(g), b.function.append_basic_block("loop")
            b.branch(loop)
            b.position_at_end(loop)
            step, dots = b.phi(_I64), [b.phi(_VI) for _ in lanes]
            step.add_incoming(first, group)
            for v in lanes:
                dots[v].add_incoming(begin[v], group)
            new = products(step, range(STEP_UNITS), list(dots))
            after = b.add(step, _I64(1))
            step.add_incoming(after, loop)
            for v in lanes:
                dots[v].add_incoming(new[v], loop)
            done = b.function.append_basic_block("fold")
            b.cbranch(b.icmp_signed("<", after, last), loop, done)
            b.position_at_end(done)
            folded, following = fold(g, new, sums), b.add(g, _I64(1))
        g.add_incoming(following, b.block)
        first.add_incoming(last, b.block)
        for v in lanes:
            sums[v].add_incoming(folded[v], b.block)
        b.cbranch(b.icmp_signed("<", following, groups), group, end)

        b.position_at_end(end)
        for v in lanes:
            b.store(folded[v], out_at[v], align=4)
        return context.get_dummy_value()

    @intrinsic
    def row(typing: Any, codes, scales, lows, steps, group_steps, offset, x, groups, out, accumulate):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 10), code

    return row


def _make_one_row(with_low: bool) -> Any:
    """One compiled function for planes of 2 to 6 bits."""
    r2, r3, r4, r5, r6 = (_make_row(planes, False, with_low) for planes in ((2,), (2, 1), (4,), (4, 1), (4, 2)))
    p2, p3, p6 = (_make_row(planes, True, with_low) for planes in ((2,), (2, 1), (4, 2)))

    @njit(nogil=True, error_model="numpy")
    def one_row(bits, codes, scales, lows, steps, group_units, offset, x, groups, out, add):
        many = group_units // STEP_UNITS
        if many == 0:
            if bits == 6:
                p6(codes, scales, lows, steps, many, offset, x, groups, out, add)
            elif bits == 3:
                p3(codes, scales, lows, steps, many, offset, x, groups, out, add)
            else:
                p2(codes, scales, lows, steps, many, offset, x, groups, out, add)
        elif bits == 4:
            r4(codes, scales, lows, steps, many, offset, x, groups, out, add)
        elif bits == 5:
            r5(codes, scales, lows, steps, many, offset, x, groups, out, add)
        elif bits == 6:
            r6(codes, scales, lows, steps, many, offset, x, groups, out, add)
        elif bits == 3:
            r3(codes, scales, lows, steps, many, offset, x, groups, out, add)
        else:
            r2(codes, scales, lows, steps, many, offset, x, groups, out, add)

    return one_row


one_row, one_row_low = _make_one_row(False), _make_one_row(True)


@njit(inline="always")
def in_one_pass(bits, group):
    """True where `one_row` has this kind; it needs 32 wide registers."""
    return WIDE and bits <= 6 and (group >= 32 or bits == 2 or bits == 3 or bits == 6)


def _make_unpack(planes: tuple[int, ...]) -> Any:
    """An intrinsic unpack(source, steps, target, ahead): bit planes (quant/cpu_records.py) to codes [8 * steps units][256].

    What lies at `ahead`, as long as the planes are, is asked for meanwhile."""
    bits = sum(planes)

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, steps, target, ahead = args
        constant = lambda value: ir.Constant(_BYTES, [value] * (4 * LANES))
        entry, loop, end = b.block, *(b.function.append_basic_block(n) for n in ("loop", "end"))
        b.branch(loop)
        b.position_at_end(loop)
        step = b.phi(_I64)
        step.add_incoming(_I64(0), entry)
        advance, write = _times(b, step, UNIT_BYTES * bits), _times(b, step, UNIT_BYTES * STEP_UNITS)
        read = b.add(source, advance)
        for v in range(VECTORS):
            units: list[Any] = [None] * STEP_UNITS
            row = shift = 0
            for plane in planes:
                per_row = 8 // plane
                for begin in range(0, STEP_UNITS, per_row):
                    at = _I64(row * UNIT_BYTES + 64 * v)
                    _prefetch(b, b.add(b.add(ahead, advance), at))
                    packed = b.load(_at(b, read, at, _BYTES), align=4)
                    for j in range(per_row):
                        part = b.lshr(packed, constant(j * plane)) if j else packed
                        if j * plane + plane < 8:
                            part = b.and_(part, constant((1 << plane) - 1))
                        if shift:
                            part = b.or_(units[begin + j], b.shl(part, constant(shift)))
                        units[begin + j] = part
                    row += 1
                shift += plane
            for i, unit in enumerate(units):
                b.store(unit, _at(b, target, b.add(write, _I64(i * UNIT_BYTES + 64 * v)), _BYTES), align=4)
        following = b.add(step, _I64(1))
        step.add_incoming(following, b.block)
        b.cbranch(b.icmp_signed("<", following, steps), loop, end)
        b.position_at_end(end)
        return context.get_dummy_value()

    @intrinsic
    def unpack(typing: Any, source, steps, target, ahead):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 4), code

    return unpack


_u2, _u3, _u4 = _make_unpack((2,)), _make_unpack((2, 1)), _make_unpack((4,))
_u5, _u6, _u7 = _make_unpack((4, 1)), _make_unpack((4, 2)), _make_unpack((4, 2, 1))


@njit(nogil=True, error_model="numpy")
def unpack_codes(bits, source, steps, target, ahead):
    """Planes of 2 to 7 bits to u8 codes at `target`, 32 k's of 64 columns a step. ahead: what is asked for meanwhile."""
    if bits == 4:
        _u4(source, steps, target, ahead)
    elif bits == 6:
        _u6(source, steps, target, ahead)
    elif bits == 5:
        _u5(source, steps, target, ahead)
    elif bits == 3:
        _u3(source, steps, target, ahead)
    elif bits == 2:
        _u2(source, steps, target, ahead)
    else:
        _u7(source, steps, target, ahead)


def _make_times(kind: str) -> Any:
    """An intrinsic times(source, groups, factors, target): target fp32 [groups][64] = whole numbers u8 or i8 at `source`, times
    factors fp32 [64]. kind: "u8", "i8", "lower" or "upper" half of a byte; "-" before it: times -factors."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, groups, factors, target = args
        vector = ir.VectorType(_I8, LANES)
        lanes = range(VECTORS)
        factor = [b.load(_at(b, factors, _I64(64 * v), _VF), align=4) for v in lanes]
        if kind.startswith("-"):
            factor = [b.fneg(f) for f in factor]
        entry, loop, end = b.block, *(b.function.append_basic_block(n) for n in ("loop", "end"))
        b.branch(loop)
        b.position_at_end(loop)
        g = b.phi(_I64)
        g.add_incoming(_I64(0), entry)
        for v in lanes:
            codes = b.load(_at(b, source, b.add(_times(b, g, TILE), _I64(LANES * v)), vector), align=1)
            whole = b.sext(codes, _VI) if kind == "i8" else b.zext(codes, _VI)
            if kind.endswith("lower"):
                whole = b.and_(whole, ir.Constant(_VI, [15] * LANES))
            elif kind.endswith("upper"):
                whole = b.lshr(whole, ir.Constant(_VI, [4] * LANES))
            place = _at(b, target, b.add(_times(b, g, 4 * TILE), _I64(64 * v)), _VF)
            b.store(b.fmul(b.sitofp(whole, _VF), factor[v]), place, align=4)
        following = b.add(g, _I64(1))
        g.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, groups), loop, end)
        b.position_at_end(end)
        return context.get_dummy_value()

    @intrinsic
    def times(typing: Any, source, groups, factors, target):  # type: ignore[no-untyped-def]
        return types.void(*[types.int64] * 4), code

    return times


times_u8, times_i8, times_lower = _make_times("u8"), _make_times("i8"), _make_times("lower")
minus_u8, minus_upper = _make_times("-u8"), _make_times("-upper")


@intrinsic
def _halves_vectors(typing: Any, source, count, factor, target):  # type: ignore[no-untyped-def]
    """target fp32 [count] = f16 at `source`, times the float32 factor; count is a multiple of 64. By F16C or AVX512."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        source, count, factor, target = args
        spread = _splat(b, factor, _VF)
        entry, loop, end = b.block, *(b.function.append_basic_block(n) for n in ("loop", "end"))
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(_I64)
        at.add_incoming(_I64(0), entry)
        for v in range(VECTORS):
            place = b.add(at, _I64(LANES * v))
            half = b.load(_at(b, source, _times(b, place, 2), ir.VectorType(ir.HalfType(), LANES)), align=2)
            b.store(b.fmul(b.fpext(half, _VF), spread), _at(b, target, _times(b, place, 4), _VF), align=4)
        following = b.add(at, _I64(VECTORS * LANES))
        at.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, count), loop, end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), code


@njit(nogil=True, error_model="numpy")
def _halves_numbers(source, count, factor, target):
    """The same by whole numbers: finite ones, subnormal ones too, exactly."""
    bits = carray(typed_pointer(source, np.uint16(0)), (count,))
    out = carray(typed_pointer(target, np.float32(0)), (count,))
    for i in range(count):
        h = np.uint32(bits[i])
        magnitude = np.uint32((h & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)
        sign = np.uint32((h & np.uint32(0x8000)) << np.uint32(16))
        out[i] = np.uint32(np.float32(magnitude).view(np.uint32) | sign).view(np.float32) * factor


unpack_halves = _halves_vectors if host_has("f16c") else _halves_numbers
"""unpack_halves(source, count, factor, target)."""


@intrinsic
def _look_up_vectors(typing: Any, codes, count, table):  # type: ignore[no-untyped-def]
    """codes[i] = table[codes[i]] in place, for 64 bytes at a time, by AVX512-BW's byte shuffle."""

    def code(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
        codes, count, table = args
        words = ir.VectorType(_I32, 4)
        quarter = b.load(b.inttoptr(table, words.as_pointer()), align=1)
        spread = ir.Constant(_VI, list(range(4)) * 4)
        entries = b.bitcast(b.shuffle_vector(quarter, quarter, spread), _BYTES)
        shuffle = _function(b, "llvm.x86.avx512.pshuf.b.512", _BYTES, _BYTES, _BYTES)
        entry, loop, end = b.block, *(b.function.append_basic_block(n) for n in ("loop", "end"))
        b.branch(loop)
        b.position_at_end(loop)
        at = b.phi(_I64)
        at.add_incoming(_I64(0), entry)
        place = _at(b, codes, at, _BYTES)
        b.store(b.call(shuffle, [entries, b.load(place, align=4)]), place, align=4)
        following = b.add(at, _I64(4 * LANES))
        at.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, count), loop, end)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), code


@njit(nogil=True, error_model="numpy")
def _look_up_bytes(codes, count, table):
    values, places = (
        carray(typed_pointer(table, np.uint8(0)), (16,)),
        carray(typed_pointer(codes, np.uint8(0)), (count,)),
    )
    for i in range(count):
        places[i] = values[places[i]]


look_up = _look_up_vectors if host_has("avx512bw") else _look_up_bytes
"""look_up(codes, count, table): codes[i] = table[codes[i]] in place; table has 16 bytes, count is a multiple of 64."""
