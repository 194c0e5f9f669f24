"""Matmul with bf16 weights that are kept exactly, in 12 bits each (simd_compact.py has the layout), and the packing.

A tile of 64 outputs is a record: its table, then [K / 2][192 bytes]. Pairs with an exponent that is not in the table are listed
apart, [tiles][most + 1] of (place i32, pair u32), place = step * 64 + output in ascending order, and a place past all of them at
the end. A tile with more of them than that is kept as it is, in 16 bits, as cpu_matmul.py would have it.

Whatever the number of rows, a row's sums are those of `simd.dot_tile` over the same weights in 16 bits, to the bit.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_matmul import put_row
from nanovllm_cli.kernels.cpu_numbers import floats_at, keep, scratch
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import ASKING_PASSES, MAX_ROWS, TILE_COLUMNS, dot64_bf16_ahead, prefetch, typed_pointer
from nanovllm_cli.kernels.simd_compact import (
    DIRECT_ROWS,
    ENTRY_BYTES,
    FEW_ROWS,
    STEP_BYTES,
    TABLE_BYTES,
    few_rows,
    unpack_steps,
)

SMALL_PANEL_ROWS, SMALL_PANEL_STEPS, LARGE_PANEL_STEPS = 24, 64, 512
"""Pairs of k that are unpacked at a time: 16 KiB, which stay in the first cache while the next are asked for, or, where many rows
read them again and again, 128 KiB in the second."""
AHEAD_BYTES = 4096
"""Behind a panel: what is nearer is on its way before the products of this panel begin."""
ROWS_PER_TASK = 192
_BF16, _F32 = np.uint16(0), np.float32(0)
_EXPONENTS = 16


@njit(inline="always")
def _listed(patches, most, tile):
    return patches + tile * (most + 1) * ENTRY_BYTES


@kernel()
def compact_rows(arguments, thread, team):
    """Rows of a row-major bf16 [num_rows, 2 * steps] weight, from a tile's first row on, into records; what the last tile lacks
    are zeros. overfull: address of int64 [tiles of these rows], set to 1 where a tile's list was too short, else 0."""
    source, num_rows, steps, records, patches, most, first_tile, overfull = fields(arguments)
    rows = carray(typed_pointer(source, _BF16), (num_rows, 2 * steps))
    num_tiles = (num_rows + TILE_COLUMNS - 1) // TILE_COLUMNS
    too_many = carray(typed_pointer(overfull, np.int64(0)), (num_tiles,))
    counts, code_of, pairs = np.empty(256, np.int64), np.empty(256, np.uint16), np.empty(4 * 32, np.uint16)
    for own in share(num_tiles, thread, team):
        tile = first_tile + own
        begin, columns = own * TILE_COLUMNS, min(TILE_COLUMNS, num_rows - own * TILE_COLUMNS)
        record = records + tile * (TABLE_BYTES + steps * STEP_BYTES)
        table = carray(typed_pointer(record, _BF16), (2, _EXPONENTS))
        kept = carray(typed_pointer(record + TABLE_BYTES, _BF16), (steps, 3, 32))
        listed = carray(typed_pointer(_listed(patches, most, tile), np.uint32(0)), (most + 1, 2))
        counts[:] = 0
        for r in range(columns):
            line = rows[begin + r]
            for i in range(2 * steps):
                counts[(line[i] >> np.uint16(7)) & np.uint16(255)] += 1
        _choose(counts, table, code_of)
        for i in range(4 * 32):
            pairs[i] = 0
        used = 0
        for s in range(steps):
            for r in range(columns):
                line = rows[begin + r]
                low, high = line[2 * s], line[2 * s + 1]
                pairs[2 * r], pairs[2 * r + 1] = low, high
                if max(code_of[(low >> 7) & 255], code_of[(high >> 7) & 255]) >= _EXPONENTS:
                    if used < most:
                        listed[used, 0] = s * TILE_COLUMNS + r
                        listed[used, 1] = np.uint32(low) | (np.uint32(high) << np.uint32(16))
                    used += 1
            target = kept[s]
            for i in range(32):
                a, b, c, d = pairs[i], pairs[32 + i], pairs[64 + i], pairs[96 + i]
                of_a, of_b = code_of[(a >> 7) & 255] & 15, code_of[(b >> 7) & 255] & 15
                of_c, of_d = code_of[(c >> 7) & 255] & 15, code_of[(d >> 7) & 255] & 15
                target[0, i] = (a & 0x807F) | (of_a << 7) | (of_b << 11)
                target[1, i] = (b & 0x807F) | (of_c << 7) | (of_d << 11)
                target[2, i] = (c & 0x807F) | ((d & 0x8000) >> 1) | ((d & 0x7F) << 7)
        listed[min(used, most), 0] = steps * TILE_COLUMNS
        too_many[own] = 1 if used > most else 0


@inner
def _choose(counts, table, code_of):
    """The most common exponents, the lowest first among equals, into a table; code_of: their places, 16 for those without."""
    for e in range(256):
        code_of[e] = _EXPONENTS
    for place in range(_EXPONENTS):
        best = -1
        for e in range(256):
            if code_of[e] == _EXPONENTS and (best < 0 or counts[e] > counts[best]):
                best = e
        code_of[best] = place
        table[0, place] = table[1, place] = best << 7


@kernel()
def expand_rows(arguments, thread, team):
    """Row-major bf16 rows `ids` (int64), as they were before packing. whole: address of int64 [tiles], see `compact_matmul`."""
    records, patches, most, whole, ids, num_ids, steps, out = fields(arguments)
    rows = carray(typed_pointer(ids, np.int64(0)), (num_ids,))
    dst = carray(typed_pointer(out, _BF16), (num_ids, 2 * steps))
    for r in share(num_ids, thread, team):
        tile, column = rows[r] // TILE_COLUMNS, rows[r] % TILE_COLUMNS
        line = dst[r]
        kept_whole = carray(typed_pointer(whole, np.int64(0)), (tile + 1,))[tile]
        if kept_whole != 0:
            pairs = carray(typed_pointer(kept_whole, _BF16), (steps, TILE_COLUMNS, 2))
            for i in range(2 * steps):
                line[i] = pairs[i // 2, column, i % 2]
            continue
        record = records + tile * (TABLE_BYTES + steps * STEP_BYTES)
        table = carray(typed_pointer(record, _BF16), (32,))
        kept = carray(typed_pointer(record + TABLE_BYTES, _BF16), (steps, 3, 32))
        vector, word = column // 16, 2 * (column % 16)
        for i in range(2 * steps):
            three = kept[i // 2, :, word + i % 2]
            code = (three[vector // 2] >> (7 + 4 * (vector % 2))) & 15
            own = three[vector] & 0x807F if vector < 3 else ((three[2] << 1) & 0x8000) | ((three[2] >> 7) & 0x7F)
            line[i] = own | table[code]
        listed = carray(typed_pointer(_listed(patches, most, tile), np.uint32(0)), (most + 1, 2))
        i = 0
        while listed[i, 0] < steps * TILE_COLUMNS:
            if listed[i, 0] % TILE_COLUMNS == column:
                step = listed[i, 0] // TILE_COLUMNS
                line[2 * step], line[2 * step + 1] = listed[i, 1] & np.uint32(0xFFFF), listed[i, 1] >> np.uint32(16)
            i += 1


@kernel()
def compact_matmul(arguments, thread, team):
    """out [num_rows, n] = x @ weight.T (+ bias): as `cpu_matmul.matmul`, of bf16.

    whole: address of int64 [tiles], addresses of tiles that are kept in 16 bits, and 0 for all others. wide: whether out and bias
    are fp32, not bf16; no tag, with which all of this would be compiled twice.
    asked_ahead: see `ahead.distance`.
    """
    wide, x, num_rows, records, patches, most, whole, n, steps, bias, out, asked_ahead = fields(arguments)
    x_stride = 4 * steps
    num_tiles = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_parts = (num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    tile_bytes = TABLE_BYTES + steps * STEP_BYTES
    out_f32, bias_f32 = carray(typed_pointer(out, _F32), (num_rows, n)), carray(typed_pointer(bias, _F32), (n,))
    out_bf16, bias_bf16 = carray(typed_pointer(out, _BF16), (num_rows, n)), carray(typed_pointer(bias, _BF16), (n,))
    whole_at = carray(typed_pointer(whole, np.int64(0)), (num_tiles,))
    most_rows = min(num_rows, ROWS_PER_TASK)
    memory = scratch(4 * TILE_COLUMNS * (most_rows + LARGE_PANEL_STEPS))
    sums_at = memory.ctypes.data
    panel, sums = sums_at + 4 * TILE_COLUMNS * most_rows, floats_at(sums_at, (most_rows, TILE_COLUMNS))
    for task in share(num_tiles * num_parts, thread, team):
        tile, part = task // num_parts, task % num_parts
        begin, end = part * ROWS_PER_TASK, min(num_rows, (part + 1) * ROWS_PER_TASK)
        at, record, listed = x + begin * x_stride, records + tile * tile_bytes, _listed(patches, most, tile)
        prefetch(listed + (most + 1) * ENTRY_BYTES)
        if whole_at[tile] != 0:
            _add_products(at, end - begin, x_stride, whole_at[tile], steps, sums_at, 0, 0)
        elif num_rows <= DIRECT_ROWS:
            half = num_rows if num_rows <= FEW_ROWS else (num_rows + 1) // 2
            for row in range(0, num_rows, half):
                rows, to = min(half, num_rows - row), sums_at + row * TILE_COLUMNS * 4
                few_rows(rows, at + row * x_stride, x_stride, record + TABLE_BYTES, record, steps, listed, to, asked_ahead)
        else:
            _by_panels(at, end - begin, x_stride, record, steps, listed, sums_at, panel)
        for r in range(end - begin):
            if wide:
                put_row(sums[r], out_f32[begin + r], tile * TILE_COLUMNS, bias_f32, bias != 0)
            else:
                put_row(sums[r], out_bf16[begin + r], tile * TILE_COLUMNS, bias_bf16, bias != 0)
    keep(memory)


@inner
def _by_panels(x, num_rows, x_stride, record, steps, listed, sums, panel):
    most = SMALL_PANEL_STEPS if num_rows <= SMALL_PANEL_ROWS else LARGE_PANEL_STEPS
    words = carray(typed_pointer(panel, np.uint32(0)), (most * TILE_COLUMNS,))
    patch = carray(typed_pointer(listed, np.uint32(0)), (steps * TILE_COLUMNS + 1, 2))
    i = 0
    for first in range(0, steps, most):
        some = min(most, steps - first)
        codes = record + TABLE_BYTES + first * STEP_BYTES
        unpack_steps(codes, record, some, panel)
        while patch[i, 0] < (first + some) * TILE_COLUMNS:
            words[patch[i, 0] - first * TILE_COLUMNS] = patch[i, 1]
            i += 1
        ahead = codes + some * STEP_BYTES + AHEAD_BYTES
        _add_products(x + 4 * first, num_rows, x_stride, panel, some, sums, first, ahead)


@inner
def _add_products(x, num_rows, x_stride, w, steps, sums, accumulate, ahead):
    """ahead: address of what will come from memory next, three lines for a step, or 0. Asked for evenly: a processor has a few
    dozen requests under way, and waits with more."""
    passes = max((num_rows + MAX_ROWS - 1) // MAX_ROWS, ASKING_PASSES)
    most = (num_rows + passes - 1) // passes if ahead != 0 else MAX_ROWS
    for row in range(0, num_rows, most):
        rows, number = min(most, num_rows - row), row // most
        target = sums + row * TILE_COLUMNS * 4
        asked = ahead + number * steps * 64 if ahead != 0 and number < ASKING_PASSES else w
        dot64_bf16_ahead(
            rows, x + row * x_stride, x_stride, w, w + 64, w + 128, w + 192, 256, steps, target, 4 * TILE_COLUMNS, accumulate,
            asked,
        )  # fmt: skip
