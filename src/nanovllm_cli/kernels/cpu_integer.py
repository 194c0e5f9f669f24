"""Matmul of int8 activations with packed integer weights on the CPU, the rounding of activations, and row look-up.

Weights lie in records (quant/cpu_records.py). A panel, 64 columns by at most 256 of k, is unpacked into scratch that stays in the
L1 cache, once, and all rows of a task run over it; a single row is multiplied while its panel is unpacked.

Activations are rounded to int8 by `quantize`, once for all weights that read them: [chunks, T, stride bytes], and in a row of a
chunk, with G groups there, xs fp32 [G], xl fp32 [G], sums of codes i32 [G], codes s8 [k] (what they mean: simd_int.py). A scale
is the largest magnitude / 127, of a group or of the whole row. A row's numbers depend on that row alone.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_matmul import put_row
from nanovllm_cli.kernels.cpu_numbers import bits_of, float_of, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.record_kinds import (
    BF16,
    CHUNK,
    E8M0,
    F16,
    F32,
    MIN,
    NIBBLE,
    ROW_PLACES,
    STEP,
    SUB_I8,
    SUB_MIN,
    SUB_ODD,
    SUB_U8,
    TILE,
    UE4M3,
    ZERO,
)
from nanovllm_cli.kernels.simd import WIDE, call_at, typed_pointer
from nanovllm_cli.kernels.simd_int import FEW_ROWS, TILE_ROWS
from nanovllm_cli.kernels.simd_ir import STEP_UNITS, UNIT_BYTES
from nanovllm_cli.kernels.simd_unpack import (
    PREFETCH_BYTES,
    minus_u8,
    minus_upper,
    times_i8,
    times_lower,
    times_odd,
    times_u8,
    unpack_codes,
    unpack_halves,
)

ROWS_PER_TASK = 256
_MOST_GROUPS = CHUNK // 16
# Adding 1.5 * 2**23 leaves a float's nearest whole number (even in the middle) in its lowest bits.
_ROUNDING, _ROUNDING_BITS = np.float32(12582912.0), np.int32(0x4B400000)


@kernel()
def quantize(arguments, thread, team):
    """Round rows of x [num_rows, width], x_stride bytes apart, to int8 (layout: above).

    group: columns that share a scale and a sum; per_row: 1 for one scale a row. order: address of i32 [width], the columns of x
    in the order of the weight's, or 0.
    """
    tag, x, num_rows, x_stride, width, group, per_row, order, out, stride = fields(arguments)
    padded = (width + STEP - 1) // STEP * STEP
    columns = carray(typed_pointer(order, np.int32(0)), (width,))
    memory = scratch(4 * padded)
    values = floats_at(memory.ctypes.data, (padded,))
    for i in range(width, padded):
        values[i] = np.float32(0.0)
    for r in share(num_rows, thread, team):
        line = carray(typed_pointer(x + r * x_stride, tag), (width,))
        if order == 0:
            for i in range(width):
                values[i] = load(line, i)
        else:
            for i in range(width):
                values[i] = load(line, columns[i])
        whole = _largest(values) if per_row != 0 else np.float32(0.0)
        for chunk in range((padded + CHUNK - 1) // CHUNK):
            part = values[chunk * CHUNK : min(padded, (chunk + 1) * CHUNK)]
            groups = (part.size + group - 1) // group
            target = out + (chunk * num_rows + r) * stride
            scales = carray(typed_pointer(target, np.float32(0)), (2 * groups,))
            sums = carray(typed_pointer(target + 8 * groups, np.int32(0)), (groups,))
            codes = carray(typed_pointer(target + 12 * groups, np.int8(0)), (part.size,))
            for g in range(groups):
                # Slices, because a loop that doesn't start at 0 is not vectorised.
                piece, rounded = part[g * group : (g + 1) * group], codes[g * group : (g + 1) * group]
                largest = whole if per_row != 0 else _largest(piece)
                scale = largest / np.float32(127.0)
                total = np.int32(0)
                # A group with a NaN or an infinity has no codes; its scale makes a NaN of whatever it is multiplied with.
                finite = largest < np.float32(np.inf)
                inverse = np.float32(127.0) / largest if finite and largest > np.float32(1e-36) else np.float32(0.0)
                for i in range(piece.size):
                    code = np.int32(np.int32(bits_of(piece[i] * inverse + _ROUNDING)) - _ROUNDING_BITS)
                    rounded[i] = np.int8(code)
                    total += code
                scales[g] = scale if finite else np.float32(np.nan)
                scales[groups + g] = scales[g] * np.float32(total)
                sums[g] = total
    keep(memory)


@njit(inline="always")
def _largest(values):
    """The largest magnitude, found among bit patterns, which puts infinities and NaNs above all numbers."""
    bits, most = values.view(np.uint32), np.uint32(0)
    for i in range(bits.size):
        most = max(most, bits[i] & np.uint32(0x7FFFFFFF))
    return float_of(most)


@inner
def record_bytes(width, step_bytes, group, scale, low):
    """See `record_kinds.RecordLayout.record_bytes`."""
    return codes_at(width, group, scale, low) + width // STEP * step_bytes


@inner
def records_of(width, step_bytes, group, scale, low):
    """Of a tile: its columns with those that fill up the last step, how many records they are, and bytes: of a record but the
    last, of all."""
    padded = (width + STEP - 1) // STEP * STEP
    num_chunks = (padded + CHUNK - 1) // CHUNK
    full = record_bytes(min(CHUNK, padded), step_bytes, group, scale, low)
    tile_bytes = (num_chunks - 1) * full + record_bytes(padded - (num_chunks - 1) * CHUNK, step_bytes, group, scale, low)
    return padded, num_chunks, full, tile_bytes


@inner
def codes_at(width, group, scale, low):
    """See `record_kinds.RecordLayout.codes_at`."""
    groups = (width + group - 1) // group
    scale_bytes = 4 if scale == F32 else (2 if scale == F16 or scale == BF16 else 1)
    scales = (groups + 1) // 2 if scale == SUB_ODD else groups * scale_bytes
    low_bytes = scale_bytes if low == MIN else (1 if low == ZERO or low == SUB_MIN else 0)
    return TILE * (super_bytes(scale, low) + scales + groups * low_bytes)


@inner
def super_bytes(scale, low):
    """See `record_kinds.RecordLayout.super_bytes`."""
    return (4 if scale == UE4M3 else 2 * int(SUB_U8 <= scale <= SUB_ODD)) + 2 * int(low >= SUB_MIN)


@inner
def unpack_floats(at, count, kind, target):
    """count numbers of F32, F16 or BF16 at `at` to fp32; what lies behind them."""
    if kind == F16:
        unpack_halves(at, count, np.float32(1.0), target.ctypes.data)
        return at + 2 * count
    if kind == BF16:
        bits16 = carray(typed_pointer(at, np.uint16(0)), (count,))
        for i in range(count):
            target[i] = load(bits16, i)
        return at + 2 * count
    floats = carray(typed_pointer(at, np.float32(0)), (count,))
    for i in range(count):
        target[i] = floats[i]
    return at + 4 * count


@inner
def unpack_scales(record, width, group, scale, low, unit, scales, lows, factors):
    """scales, lows: fp32 [groups * 64]; factors: scratch fp32 [64].

    What a record holds before its codes: what multiplies a code, and what is added to the product (for ZERO: the zero point as
    it is)."""
    count = (width + group - 1) // group * TILE
    supers, super_lows = record, record + 2 * TILE
    at = record + TILE * super_bytes(scale, low)
    if scale <= BF16:
        at = unpack_floats(at, count, scale, scales)
    elif scale == E8M0:
        exponents = carray(typed_pointer(at, np.uint8(0)), (count,))
        for i in range(count):
            e = np.uint32(exponents[i])
            word = np.uint32(0x200000) << e if e < np.uint32(2) else (e - np.uint32(1)) << np.uint32(23)
            scales[i] = float_of(word)
        at += count
    elif scale == UE4M3:
        small, floats = carray(typed_pointer(at, np.uint8(0)), (count,)), carray(typed_pointer(supers, np.float32(0)), (TILE,))
        to_unit = float_of(np.int32((247 - unit) << 23))
        for g in range(count // TILE):
            for i in range(TILE):
                scales[g * TILE + i] = float_of(np.uint32(small[g * TILE + i]) << np.uint32(20)) * to_unit * floats[i]
        at += count
    else:
        groups, half_to_unit = count // TILE, float_of(np.int32((127 - unit) << 23))
        unpack_halves(supers, TILE, half_to_unit, factors.ctypes.data)
        if scale == SUB_I8:
            times_i8(at, groups, factors.ctypes.data, scales.ctypes.data)
        elif scale == SUB_ODD:
            times_odd(at, (groups + 1) // 2, factors.ctypes.data, scales.ctypes.data)
        elif low == NIBBLE:
            times_lower(at, groups, factors.ctypes.data, scales.ctypes.data)
        else:
            times_u8(at, groups, factors.ctypes.data, scales.ctypes.data)
        if low >= SUB_MIN:
            unpack_halves(super_lows, TILE, np.float32(1.0), factors.ctypes.data)
            if low == NIBBLE:
                minus_upper(at, groups, factors.ctypes.data, lows.ctypes.data)
            else:
                minus_u8(at + count, groups, factors.ctypes.data, lows.ctypes.data)
    if low == MIN:
        unpack_floats(at, count, scale, lows)
    elif low == ZERO:
        zeros = carray(typed_pointer(at, np.uint8(0)), (count,))
        for i in range(count):
            lows[i] = np.float32(zeros[i])


@inner
def unpack_panel(step_bytes, unpacker, table, codes, width, panel, ahead):
    """A record's codes, as they lie at `codes`, to u8 at `panel`: [width / 4][64 columns][4]. What lies at `ahead` is asked for
    meanwhile. unpacker, table: as in `integer_matmul`."""
    if unpacker != 0:
        call_at(unpacker, (codes, width // STEP, panel, ahead, table))
    else:
        unpack_codes(step_bytes // UNIT_BYTES, codes, width // STEP, panel, ahead, table)


@kernel()
def integer_matmul(arguments, thread, team):
    """out [num_rows, n], out_stride bytes apart, = x @ weight.T (+ bias): one rounding to the output's type.

    x: what `quantize` made of the rows, in the weight's order, with its group. width: along k. step_bytes … unit: as in
    RecordLayout. table: address of 16 bytes, or 0. unpacker: address of a codebook's function, which reads its tables at `table`,
    or 0. few, most_few: address of `simd_planes.few_rows`, and how many it is for; dot: that of `simd_int.dot_rows`. bias:
    address of [n] in the output's type, or 0. asked_ahead: see `ahead.distance`.
    """
    (
        out_tag, x, num_rows, x_stride, weight, n, width, step_bytes, group, scale, low, offset, unit, table, unpacker,
        few, most_few, dot, bias, out, out_stride, asked_ahead,
    ) = fields(arguments)  # fmt: skip
    bits = step_bytes // UNIT_BYTES
    padded, num_chunks, full, tile_bytes = records_of(width, step_bytes, group, scale, low)
    num_tiles = (n + TILE - 1) // TILE
    num_parts = (num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    added = carray(typed_pointer(bias, out_tag), (n,))
    most_rows = min(num_rows, ROWS_PER_TASK)
    memory = scratch(CHUNK * TILE + 4 * TILE * (1 + 2 * _MOST_GROUPS + most_rows))
    panel = memory.ctypes.data
    scales_at = panel + CHUNK * TILE
    lows_at = scales_at + 4 * _MOST_GROUPS * TILE
    factors_at = lows_at + 4 * _MOST_GROUPS * TILE
    sums_at = factors_at + 4 * TILE
    scales, lows = floats_at(scales_at, (_MOST_GROUPS * TILE,)), floats_at(lows_at, (_MOST_GROUPS * TILE,))
    factors, sums = floats_at(factors_at, (TILE,)), floats_at(sums_at, (most_rows, TILE))
    for task in share(num_tiles * num_parts, thread, team):
        tile, part = task // num_parts, task % num_parts
        begin, end = part * ROWS_PER_TASK, min(num_rows, (part + 1) * ROWS_PER_TASK)
        for chunk in range(num_chunks):
            k = min(CHUNK, padded - chunk * CHUNK)
            groups = (k + group - 1) // group
            record = weight + tile * tile_bytes + chunk * full
            unpack_scales(record, k, group, scale, low, unit, scales, lows, factors)
            if low == ZERO:
                for i in range(groups * TILE):
                    lows[i] *= -scales[i]
            codes = record + codes_at(k, group, scale, low)
            if end - begin <= most_few:
                at = x + (chunk * num_rows + begin) * x_stride
                call_at(few, (
                    end - begin, codes, scales_at, lows_at, k // STEP, group // 4, offset, at, x_stride, groups, sums_at, chunk,
                    table, asked_ahead, full,
                ))  # fmt: skip
                continue
            asking = max(1, (end - begin) // TILE_ROWS + int((end - begin) % TILE_ROWS > FEW_ROWS))
            ahead, ahead_step = codes + PREFETCH_BYTES, step_bytes // STEP_UNITS
            if bits != 8:
                # the products of more rows have time to ask for what comes next, evenly
                unpack_panel(step_bytes, unpacker, table, codes, k, panel, ahead if end - begin <= FEW_ROWS else codes)
                codes = panel
            if bits != 8 or asking > 1 or not WIDE:  # the next record, a part of it in each pass over this one
                ahead, ahead_step = record + record_bytes(k, step_bytes, group, scale, low), full // (k // 4 * asking)
            for row in range(begin, end, TILE_ROWS):
                rows = min(TILE_ROWS, end - row)
                at = x + (chunk * num_rows + row) * x_stride
                target = sums_at + (row - begin) * TILE * 4
                call_at(dot, (
                    rows, codes, scales_at, lows_at, k // 4, group // 4, offset, at, x_stride, groups, target, TILE * 4, chunk,
                    ahead, ahead_step,
                ))  # fmt: skip
                ahead += full // asking
        for r in range(end - begin):
            line = carray(typed_pointer(out + (begin + r) * out_stride, out_tag), (n,))
            put_row(sums[r], line, tile * TILE, added, bias != 0)
    keep(memory)


@kernel()
def integer_rows(arguments, thread, team):
    """out [num_ids, width] = rows `ids` (int64), dequantized: scale * (code - offset) + low, rounded to fp32 after each step as
    `quant.cpu_records.dequantize` does, and once more to the output's type. order: as in `quantize`."""
    (
        out_tag, weight, ids, num_ids, width, step_bytes, group, scale, low, offset, unit, table, unpacker, order, out,
    ) = fields(arguments)  # fmt: skip
    bits = 8 if unpacker != 0 else step_bytes // UNIT_BYTES
    padded, num_chunks, full, tile_bytes = records_of(width, step_bytes, group, scale, low)
    rows = carray(typed_pointer(ids, np.int64(0)), (num_ids,))
    columns = carray(typed_pointer(order, np.int32(0)), (width,))
    dst = carray(typed_pointer(out, out_tag), (num_ids, width))
    values = carray(typed_pointer(table, np.uint8(0)), (16,))
    memory = scratch(CHUNK * TILE + 4 * TILE * (1 + 2 * _MOST_GROUPS))
    panel = memory.ctypes.data
    scales = floats_at(panel + CHUNK * TILE, (_MOST_GROUPS * TILE,))
    lows = floats_at(panel + CHUNK * TILE + 4 * _MOST_GROUPS * TILE, (_MOST_GROUPS * TILE,))
    factors = floats_at(panel + CHUNK * TILE + 8 * _MOST_GROUPS * TILE, (TILE,))
    for i in range(lows.size):
        lows[i] = np.float32(0.0)
    for r in share(num_ids, thread, team):
        tile, column = rows[r] // TILE, rows[r] % TILE
        line = dst[r]
        for chunk in range(num_chunks):
            k = min(CHUNK, padded - chunk * CHUNK)
            record = weight + tile * tile_bytes + chunk * full
            unpack_scales(record, k, group, scale, low, unit, scales, lows, factors)
            codes = record + codes_at(k, group, scale, low)
            if unpacker != 0:
                call_at(unpacker, (codes, k // STEP, panel, codes, table))
                codes = panel
            planes = carray(typed_pointer(codes, np.uint8(0)), (k // STEP, bits, TILE, 4))
            for i in range(min(k, width - chunk * CHUNK)):
                code = np.float32(packed_code(planes, bits, column, i))
                if table != 0 and unpacker == 0:
                    code = np.float32(values[np.int64(code)])
                at = i // group * TILE + column
                position = chunk * CHUNK + i
                if order != 0:
                    position = columns[position]
                if low == ZERO:
                    store(line, position, scales[at] * (code - lows[at]))
                else:
                    store(line, position, scales[at] * (code - np.float32(offset)) + lows[at])
    keep(memory)


@njit(inline="always")
def packed_code(planes, bits, column, i):
    """Code i of a column, put together from its planes."""
    step, unit, byte = i // STEP, i // 4 % 8, i % 4
    code, row, shift, left = 0, 0, 0, bits
    while left > 0:
        plane = 8 if left == 8 else (4 if left >= 4 else (2 if left >= 2 else 1))
        per_row = 8 // plane
        packed = np.int64(planes[step, ROW_PLACES[bits, row + unit // per_row], column, byte])
        code |= ((packed >> (unit % per_row * plane)) & ((1 << plane) - 1)) << shift
        row, shift, left = row + plane, shift + plane, left - plane
    return code
