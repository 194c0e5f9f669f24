"""Packing of plain arrays into records (quant/cpu_records.py has the layout) on the CPU."""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.record_kinds import CHUNK, ROW_PLACES, TILE
from nanovllm_cli.kernels.simd import typed_pointer


def _make_plane(plane):
    """place(source, planes, column, bits, row, shift): one plane of one column. source: u32, four codes each, eight to a step."""
    per_row, mask = 8 // plane, np.uint32(((1 << plane) - 1) * 0x01010101)

    @inner
    def place(source, planes, column, bits, row, shift):
        for step in range(source.size // 8):
            for line in range(plane):
                word = np.uint32(0)
                for j in range(per_row):
                    four = (source[step * 8 + line * per_row + j] >> np.uint32(shift)) & mask
                    word |= np.uint32(four << np.uint32(j * plane))
                planes[(step * bits + ROW_PLACES[bits, row + line]) * TILE + column] = word

    return place


_plane1, _plane2, _plane4, _plane8 = _make_plane(1), _make_plane(2), _make_plane(4), _make_plane(8)


@kernel()
def pack_records(arguments, thread, team):
    """Rows first_row … first_row + n of tiles, each of tile_bytes, from their parts.

    codes: u32 [n, num_units], four codes of a row; a multiple of 8 units. full_bytes: of a record of 256 codes along k. The
    others are u8 [n, count, size]: scales and lows a group, supers and super_lows a chunk; 0 of 0 bytes where there are none.
    """
    (
        tiles, tile_bytes, full_bytes, first_row, n, codes, num_units, bits, group,
        scales, num_scales, scale_size, lows, num_lows, low_size,
        supers, num_supers, super_size, super_lows, num_super_lows, super_low_size,
    ) = fields(arguments)  # fmt: skip
    last_row = first_row + n
    first_tile = first_row // TILE
    num_tiles = (last_row + TILE - 1) // TILE - first_tile
    num_chunks = (4 * num_units + CHUNK - 1) // CHUNK
    chunk_groups = CHUNK // group
    for task in share(num_tiles * num_chunks, thread, team):
        tile, chunk = first_tile + task // num_chunks, task % num_chunks
        begin, end = max(first_row, tile * TILE), min(last_row, (tile + 1) * TILE)
        k = min(CHUNK, 4 * num_units - chunk * CHUNK)
        groups = (k + group - 1) // group
        at = tiles + tile * tile_bytes + chunk * full_bytes
        rows = (begin - first_row, end - first_row, begin - tile * TILE)
        at = _put(at, supers, num_supers, super_size, rows, chunk, 1)
        at = _put(at, super_lows, num_super_lows, super_low_size, rows, chunk, 1)
        at = _put(at, scales, num_scales, scale_size, rows, chunk * chunk_groups, groups)
        at = _put(at, lows, num_lows, low_size, rows, chunk * chunk_groups, groups)
        planes = carray(typed_pointer(at, np.uint32(0)), (TILE * k * bits // 32,))
        for r in range(begin, end):
            first_unit = (r - first_row) * num_units + chunk * CHUNK // 4
            source, column = carray(typed_pointer(codes + 4 * first_unit, np.uint32(0)), (k // 4,)), r - tile * TILE
            if bits == 8:
                _plane8(source, planes, column, bits, 0, 0)
            else:
                row, shift = 0, 0
                if bits >= 4:
                    _plane4(source, planes, column, bits, row, shift)
                    row, shift = 4, 4
                if bits & 2 != 0:
                    _plane2(source, planes, column, bits, row, shift)
                    row, shift = row + 2, shift + 2
                if bits & 1 != 0:
                    _plane1(source, planes, column, bits, row, shift)


@inner
def _put(record, values, num_values, size, rows, first, count):
    """values u8 [rows, num_values, size], of rows[0] … rows[1] the `count` from `first` on, to record as [count, 64, size] from
    column rows[2] on; what is beyond their end (padding) stays. Addresses. Where the next part begins."""
    begin, end, column = rows
    source = carray(typed_pointer(values, np.uint8(0)), (end, num_values, size))
    target = carray(typed_pointer(record, np.uint8(0)), (count, TILE, size))
    for g in range(min(count, num_values - first)):
        for r in range(begin, end):
            for byte in range(size):
                target[g, r - begin + column, byte] = source[r, first + g, byte]
    return record + count * TILE * size
