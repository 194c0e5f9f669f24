"""Matmul of unrounded activations with packed weights on the CPU: a panel of codes becomes numbers of the compute type, in
scratch that stays in the cache, and goes through the inner loop of all other matmuls (simd.py).

Weights lie in records (quant/cpu_records.py). What a code stands for is one of

    CODE      code - offset, or code - zero point
    E4M3      an 8-bit float: sign, four bits of exponent, three of fraction
    TABLE     one of 16 numbers, in fp32

In bf16 a panel holds these numbers, all of them exact, and a group's scale multiplies its fp32 sums; its low, if it has one,
multiplies the sum of the group's activations. In fp32 it holds the weight
itself: scale * number + low. Groups come in ascending order, and a row's bits depend on that row and the weights alone.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from nanovllm_cli.kernels.cpu_cache import SMALLEST_NORMAL
from nanovllm_cli.kernels.cpu_integer import codes_at, packed_code, records_of, unpack_panel, unpack_scales
from nanovllm_cli.kernels.cpu_matmul import put_row
from nanovllm_cli.kernels.cpu_numbers import bits_of, dot64, float_of, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.record_kinds import CHUNK, MIN, STEP, SUB_MIN, TILE, ZERO
from nanovllm_cli.kernels.simd import MAX_ROWS, by_type, call_at, typed_pointer
from nanovllm_cli.kernels.simd_ir import UNIT_BYTES
from nanovllm_cli.kernels.simd_unpack import PREFETCH_BYTES

CODE, E4M3, TABLE = range(3)
ROWS_PER_TASK = 96
_MOST_GROUPS = CHUNK // 16
_UNITS = CHUNK // 4
_E4M3_BIAS = np.float32(2.0**120)
_E4M3_MAX = np.float32(448.0)


@njit(inline="always")
def _e4m3(code):
    """The number that eight bits stand for, exactly. NaN (all but the sign set) does not occur: readers refuse it."""
    magnitude = float_of(np.uint32((code & np.uint32(0x7F)) << np.uint32(20))) * _E4M3_BIAS
    sign = np.uint32((code & np.uint32(0x80)) << np.uint32(24))
    return float_of(np.uint32(bits_of(magnitude) | sign))


@njit(inline="always")
def _value(code, kind, table, taken):
    """fp32. taken: offset or zero point, for CODE."""
    if kind == E4M3:
        return _e4m3(code)
    if kind == TABLE:
        return table[code]
    return np.float32(code) - taken


@njit(inline="always")
def _upper(value):
    """The bf16 bits of an fp32 that is a bf16, in the lower half of 32 bits."""
    return bits_of(value) >> np.uint32(16)


def _filler(fill, kind):
    """One unit of codes, with the kind known to the compiler: a branch inside would keep it from using vectors."""

    @inner
    def of_one_kind(codes, table, taken, scales, lows, target):
        fill(codes, kind, table, taken, scales, lows, target)

    return of_one_kind


@njit(inline="always")
def _unit_bf16(codes, kind, table, taken, scales, lows, target):
    pairs = target.view(np.uint32)
    first, second = pairs[:TILE], pairs[TILE : 2 * TILE]
    for c in range(TILE):
        four, off = codes[c], taken[c]
        a = _upper(_value(four & np.uint32(255), kind, table, off))
        b = _upper(_value((four >> np.uint32(8)) & np.uint32(255), kind, table, off))
        first[c] = a | (b << np.uint32(16))
        a = _upper(_value((four >> np.uint32(16)) & np.uint32(255), kind, table, off))
        b = _upper(_value(four >> np.uint32(24), kind, table, off))
        second[c] = a | (b << np.uint32(16))


@njit(inline="always")
def _unit_f32(codes, kind, table, taken, scales, lows, target):
    for j in range(4):
        line = target[j * TILE : (j + 1) * TILE]
        for c in range(TILE):
            code = (codes[c] >> np.uint32(8 * j)) & np.uint32(255)
            line[c] = scales[c] * _value(code, kind, table, taken[c]) + lows[c]


def _make_fill(unit):
    as_code, as_e4m3, as_table = (_filler(unit, kind) for kind in (CODE, E4M3, TABLE))

    def fill(tag, codes, units, group, kind, table, taken, scales, lows, panel):
        size = panel.size // CHUNK
        for u in range(units):
            some = codes[u * TILE : (u + 1) * TILE]
            at = u * 4 // group * TILE
            off, factor, low = taken[at : at + TILE], scales[at : at + TILE], lows[at : at + TILE]
            target = panel[4 * u * size : 4 * (u + 1) * size]
            if kind == CODE:
                as_code(some, table, off, factor, low, target)
            elif kind == E4M3:
                as_e4m3(some, table, off, factor, low, target)
            else:
                as_table(some, table, off, factor, low, target)

    return fill


_fill_bf16, _fill_f32 = _make_fill(_unit_bf16), _make_fill(_unit_f32)


@by_type()
def fill_panel(tag, codes, units, group, kind, table, taken, scales, lows, panel):
    """codes u32 [units * 64], each four codes along k, become a panel of the compute type, as `dot64` reads weights. taken: fp32
    [groups * 64], scales and lows likewise; the last two count in fp32 only."""
    return _fill_bf16 if tag == types.uint16 else _fill_f32


@by_type()
def scaled_after(tag):
    """True if a panel holds numbers that are yet to be multiplied by their group's scale."""
    after = tag == types.uint16
    return lambda tag: after


@inner
def _split_numbers(kind, numbers, table, offset, halves):
    """halves u8 [32]: the lower and the upper bytes of the bf16 that codes of 4 bits stand for. table: as in `value_matmul`."""
    for i in range(16):
        code = np.uint32(i)
        if table != 0:
            code = np.uint32(carray(typed_pointer(table, np.uint8(0)), (16,))[i])
        bits = _upper(_value(code, kind, numbers, offset))
        halves[i], halves[16 + i] = np.uint8(bits & np.uint32(255)), np.uint8(bits >> np.uint32(8))


@kernel()
def value_matmul(arguments, thread, team):
    """out [num_rows, n], out_stride bytes apart, = x @ weight.T (+ bias): fp32 sums, one rounding to the output's type.

    x: [num_rows, width rounded up to a pair] of tag's type, x_stride bytes apart. x_scales: address of fp32 [num_rows, x_groups]
    that multiply a row's groups (x_groups 1: the whole row), or 0. width: along k. step_bytes … unit: as in RecordLayout; table,
    unpacker: as in `cpu_integer.integer_matmul`. few, most_few: address of `simd_values.few_rows`, and how many it is for;
    expand: that of `simd_values.expand`, or 0. kind: what codes stand for; numbers: address of fp32 [16], for TABLE. bias:
    address of [n] in the output's type, or 0. asked_ahead: see `ahead.distance`.
    """
    (
        tag, out_tag, x, num_rows, x_stride, x_scales, x_groups, weight, n, width, step_bytes, group, scale, low, offset, unit,
        table, unpacker, few, most_few, expand, kind, numbers, bias, out, out_stride, asked_ahead,
    ) = fields(arguments)  # fmt: skip
    size = 4 // _per_word(tag)
    padded, num_chunks, full, tile_bytes = records_of(width, step_bytes, group, scale, low)
    num_tiles = (n + TILE - 1) // TILE
    num_parts = (num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    values = carray(typed_pointer(numbers, np.float32(0)), (16,))
    added = carray(typed_pointer(bias, out_tag), (n,))
    factors = carray(typed_pointer(x_scales, np.float32(0)), (num_rows, max(1, x_groups)))
    by_group = scaled_after(tag) or x_groups > 1
    most_rows = min(num_rows, ROWS_PER_TASK)
    memory = scratch(CHUNK * TILE * (1 + size) + 4 * TILE * (2 + 3 * _MOST_GROUPS + most_rows + MAX_ROWS))
    unpacked_at = memory.ctypes.data
    panel_at = unpacked_at + CHUNK * TILE
    sums_at = panel_at + CHUNK * TILE * size
    partial_at = sums_at + 4 * TILE * most_rows
    rest = partial_at + 4 * TILE * MAX_ROWS
    unpacked = carray(typed_pointer(unpacked_at, np.uint32(0)), (CHUNK * TILE // 4,))
    panel = carray(typed_pointer(panel_at, tag), (CHUNK * TILE,))
    sums, partial = floats_at(sums_at, (most_rows, TILE)), floats_at(partial_at, (MAX_ROWS, TILE))
    scales, lows = floats_at(rest, (_MOST_GROUPS * TILE,)), floats_at(rest + 4 * _MOST_GROUPS * TILE, (_MOST_GROUPS * TILE,))
    taken = floats_at(rest + 8 * _MOST_GROUPS * TILE, (_MOST_GROUPS * TILE,))
    of_supers = floats_at(rest + 12 * _MOST_GROUPS * TILE, (TILE,))
    one, halves = floats_at(rest + 12 * _MOST_GROUPS * TILE + 4 * TILE, (1,)), unpacked[:8].view(np.uint8)
    one[0] = np.float32(1.0)
    for i in range(_MOST_GROUPS * TILE):
        lows[i], taken[i] = np.float32(0.0), np.float32(offset)
    factors_at, factor_row, factor_group = x_scales, 4 * x_groups, 4
    if x_groups <= 1:
        factors_at, factor_row, factor_group = one.ctypes.data, 0, 0
    if expand != 0 and kind != E4M3:
        _split_numbers(kind, values, table, np.float32(offset), halves)
    for task in share(num_tiles * num_parts, thread, team):
        tile, part = task // num_parts, task % num_parts
        begin, end = part * ROWS_PER_TASK, min(num_rows, (part + 1) * ROWS_PER_TASK)
        for chunk in range(num_chunks):
            k = min(CHUNK, padded - chunk * CHUNK)
            real = min(k, width - chunk * CHUNK)
            groups = (real + group - 1) // group
            record = weight + tile * tile_bytes + chunk * full
            unpack_scales(record, k, group, scale, low, unit, scales, lows, of_supers)
            if low == ZERO:
                for i in range(groups * TILE):
                    taken[i] = lows[i]
                    lows[i] = np.float32(0.0)
            codes = record + codes_at(k, group, scale, low)
            if num_rows <= most_few:
                at, of_x = x + begin * x_stride + chunk * CHUNK * size, factors_at + chunk * CHUNK // group * factor_group
                call_at(few, (
                    end - begin, codes, scales.ctypes.data, k // STEP, group // STEP, at, x_stride, of_x, factor_row,
                    factor_group, groups, sums_at, chunk, halves.ctypes.data, asked_ahead,
                ))  # fmt: skip
                continue
            if expand != 0:
                call_at(expand, (codes, k // STEP, panel_at, halves.ctypes.data, asked_ahead))
            elif step_bytes != 8 * UNIT_BYTES:
                unpack_panel(step_bytes, unpacker, table, codes, k, unpacked_at, codes + PREFETCH_BYTES)
                fill_panel(tag, unpacked, k // 4, group, kind, values, taken, scales, lows, panel)
            else:
                whole = carray(typed_pointer(codes, np.uint32(0)), (_UNITS * TILE,))
                fill_panel(tag, whole, k // 4, group, kind, values, taken, scales, lows, panel)
            for row in range(begin, end, MAX_ROWS):
                rows = min(MAX_ROWS, end - row)
                at = x + row * x_stride + chunk * CHUNK * size
                first = row - begin
                if not by_group:
                    w, target = panel_at, sums_at + first * TILE * 4
                    dot64(tag, rows, at, x_stride, w, w + 64, w + 128, w + 192, 256, real, target, TILE * 4, chunk)
                    continue
                for g in range(groups):
                    w = panel_at + g * group * TILE * size
                    steps = (min(group, real - g * group) * size + 3) // 4
                    dot64(
                        tag, rows, at + g * group * size, x_stride, w, w + 64, w + 128, w + 192, 256, steps, partial_at, TILE * 4,
                        0,
                    )  # fmt: skip
                    for r in range(rows):
                        of_x = factors[row + r, (chunk * CHUNK // group + g)] if x_groups > 1 else np.float32(1.0)
                        line = sums[first + r]
                        new = chunk == 0 and g == 0
                        for c in range(TILE):
                            own = partial[r, c] * (scales[g * TILE + c] if scaled_after(tag) else np.float32(1.0))
                            line[c] = own * of_x + (np.float32(0.0) if new else line[c])
                        if scaled_after(tag) and (low == MIN or low >= SUB_MIN):
                            begins, total = at + r * x_stride + g * group * size, np.float32(0.0)
                            numbers_of_x = carray(typed_pointer(begins, tag), (min(group, real - g * group),))
                            for i in range(numbers_of_x.size):
                                total += load(numbers_of_x, i)
                            total *= of_x
                            for c in range(TILE):
                                line[c] += lows[g * TILE + c] * total
        for r in range(end - begin):
            line = carray(typed_pointer(out + (begin + r) * out_stride, out_tag), (n,))
            if x_groups == 1:
                for c in range(TILE):
                    sums[r, c] *= factors[begin + r, 0]
            put_row(sums[r], line, tile * TILE, added, bias != 0)
    keep(memory)


@kernel()
def value_rows(arguments, thread, team):
    """out [num_ids, width] = rows `ids` (int64) of E4M3 or TABLE, dequantized: scale * number in fp32, rounded to the output's
    type. Whole numbers: `cpu_integer.integer_rows`."""
    tag, weight, ids, num_ids, width, step_bytes, group, scale, low, kind, numbers, out = fields(arguments)
    bits = step_bytes // UNIT_BYTES
    padded, num_chunks, full, tile_bytes = records_of(width, step_bytes, group, scale, low)
    rows = carray(typed_pointer(ids, np.int64(0)), (num_ids,))
    values = carray(typed_pointer(numbers, np.float32(0)), (16,))
    dst = carray(typed_pointer(out, tag), (num_ids, width))
    memory = scratch(4 * TILE * (1 + 2 * _MOST_GROUPS))
    scales_at = memory.ctypes.data
    scales = floats_at(scales_at, (_MOST_GROUPS * TILE,))
    lows = floats_at(scales_at + 4 * _MOST_GROUPS * TILE, (_MOST_GROUPS * TILE,))
    of_supers = floats_at(scales_at + 8 * _MOST_GROUPS * TILE, (TILE,))
    for r in share(num_ids, thread, team):
        tile, column = rows[r] // TILE, rows[r] % TILE
        line = dst[r]
        for chunk in range(num_chunks):
            k = min(CHUNK, padded - chunk * CHUNK)
            record = weight + tile * tile_bytes + chunk * full
            unpack_scales(record, k, group, scale, low, 0, scales, lows, of_supers)
            planes = carray(typed_pointer(record + codes_at(k, group, scale, low), np.uint8(0)), (k // STEP, bits, TILE, 4))
            for i in range(min(k, width - chunk * CHUNK)):
                at = i // group * TILE + column
                code = np.uint32(packed_code(planes, bits, column, i))
                store(line, chunk * CHUNK + i, scales[at] * _value(code, kind, values, np.float32(0.0)))
    keep(memory)


@kernel()
def round_e4m3(arguments, thread, team):
    """out [num_rows, width] = x / scale, rounded to what e4m3 can say, in x's type; scales fp32 [num_rows, groups].

    A scale is the largest magnitude of a row's group / 448, or the one at the address `fixed` where that is not 0. group: columns
    that share a scale.
    """
    tag, x, num_rows, width, group, fixed, out, scales = fields(arguments)
    source = carray(typed_pointer(x, tag), (num_rows, width))
    target = carray(typed_pointer(out, tag), (num_rows, width))
    groups = (width + group - 1) // group
    factors = carray(typed_pointer(scales, np.float32(0)), (num_rows, groups))
    given = np.float32(0.0)
    if fixed != 0:  # outside of the loop, out of which numba would lift the reading without the condition
        given = carray(typed_pointer(fixed, np.float32(0)), (1,))[0]
    for r in share(num_rows, thread, team):
        line, rounded = source[r], target[r]
        for g in range(groups):
            begin, end = g * group, min(width, (g + 1) * group)
            largest = np.float32(0.0)
            for i in range(begin, end):
                magnitude = abs(load(line, i))
                largest = max(largest, magnitude)  # a NaN makes its own code one
            factor = given if fixed != 0 else largest / _E4M3_MAX
            factors[r, g] = factor
            inverse = np.float32(1.0) / factor if factor >= SMALLEST_NORMAL else np.float32(0.0)  # of subnormal ones infinite
            for i in range(begin, end):
                store(rounded, i, _to_e4m3(load(line, i) * inverse))


@njit(inline="always")
def _to_e4m3(value):
    """Rounded to three bits after the leading one, ties to even, 2**-9 apart below 2**-6, at most 448. NaN stays NaN."""
    bits = bits_of(value)
    bits = np.uint32(bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) & np.uint32(0xFFF00000)
    normal = float_of(bits)
    small = np.rint(np.float32(value) * np.float32(512.0)) * np.float32(1.0 / 512.0)
    rounded = small if abs(value) < np.float32(2.0**-6) else normal
    rounded = _E4M3_MAX if rounded > _E4M3_MAX else rounded
    rounded = -_E4M3_MAX if rounded < -_E4M3_MAX else rounded
    return rounded if value == value else np.float32(np.nan)


@by_type()
def _per_word(tag):
    """Numbers of the compute type in 32 bits."""
    count = 2 if tag == types.uint16 else 1
    return lambda tag: count
