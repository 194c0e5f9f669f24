"""Packing of plain arrays into records (quant/cpu_records.py has the layout) on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from nanovllm_cli.kernels.record_kinds import CHUNK, TILE


def _make_plane(plane):
    """place(source, planes, column, bits, row, shift): one plane of one column. source: u32, four codes each, eight to a step."""
    per_row, mask = 8 // plane, np.uint32(((1 << plane) - 1) * 0x01010101)

    @njit(nogil=True, error_model="numpy")
    def place(source, planes, column, bits, row, shift):
        for step in range(source.size // 8):
            for line in range(plane):
                word = np.uint32(0)
                for j in range(per_row):
                    four = (source[step * 8 + line * per_row + j] >> np.uint32(shift)) & mask
                    word |= np.uint32(four << np.uint32(j * plane))
                planes[(step * bits + row + line) * TILE + column] = word

    return place


_plane1, _plane2, _plane4, _plane8 = _make_plane(1), _make_plane(2), _make_plane(4), _make_plane(8)


@njit(parallel=True, nogil=True, cache=True, error_model="numpy")
def pack_records(tiles, first_row, codes, bits, group, full_bytes, scales, lows, supers, super_lows):
    """Rows first_row … of tiles, u8 [tiles, bytes of a tile], from their parts.

    codes: u32 [n, K / 4], four codes of a row; K a multiple of 32. full_bytes: of a record of 256 codes along k. The others are
    bytes: scales, lows u8 [n, groups, size], supers, super_lows u8 [n, chunks, 2]; size 0 where the layout has none.
    """
    n, num_units = codes.shape
    last_row = first_row + n
    first_tile = first_row // TILE
    num_chunks = (4 * num_units + CHUNK - 1) // CHUNK
    chunk_groups = CHUNK // group
    for task in prange(((last_row + TILE - 1) // TILE - first_tile) * num_chunks):
        tile, chunk = first_tile + task // num_chunks, task % num_chunks
        record = tiles[tile, chunk * full_bytes :]
        k = min(CHUNK, 4 * num_units - chunk * CHUNK)
        groups = (k + group - 1) // group
        begin, end = max(first_row, tile * TILE), min(last_row, (tile + 1) * TILE)
        at = 0
        at = _put(record, at, supers, chunk, 1, begin, end, first_row, tile)
        at = _put(record, at, super_lows, chunk, 1, begin, end, first_row, tile)
        at = _put(record, at, scales, chunk * chunk_groups, groups, begin, end, first_row, tile)
        at = _put(record, at, lows, chunk * chunk_groups, groups, begin, end, first_row, tile)
        planes = record[at : at + TILE * k * bits // 8].view(np.uint32)
        for r in range(begin, end):
            source, column = codes[r - first_row, chunk * CHUNK // 4 : (chunk * CHUNK + k) // 4], r - tile * TILE
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


@njit(inline="always")
def _put(record, at, values, first, count, begin, end, first_row, tile):
    """values[:, first … first + count] to record[at …] as [count, 64, size]; what is beyond their end (padding) stays. Where the
    next part begins."""
    size = values.shape[2]
    for g in range(min(count, values.shape[1] - first)):
        for r in range(begin, end):
            for byte in range(size):
                record[at + (g * TILE + r - tile * TILE) * size + byte] = values[r - first_row, first + g, byte]
    return at + count * TILE * size
