"""Packing of indices and signs of a codebook's points into records (quant/cpu_records.py has the layout) on the CPU."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.record_kinds import CHUNK, SIGN_A_CODE, STEP, TILE
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_codebook import places_in_step


@kernel()
def pack_points(arguments, thread, team):
    """Indices and signs of rows first_row … first_row + n of a weight, to its tiles of tile_bytes.

    full_bytes: of a record of 256 codes along k; codes_at, last_codes_at: where indices begin in it, and in a tile's last record.
    padded: columns, a multiple of 32.
    index: address of i16 [n, padded / length]; bits: of u8 [n, padded / 8], one a code, lowest first, or one a point, or nothing.
    """
    (
        tiles, tile_bytes, full_bytes, codes_at, last_codes_at, first_row, n, padded, index_bits, length, signs, index, bits,
    ) = fields(arguments)  # fmt: skip
    all_points, all_bits = padded // length, padded // 8
    rows, low_rows, high_bits, high_at, signs_at, num_bytes = places_in_step(index_bits, length, signs)
    source = carray(typed_pointer(index, np.int16(0)), (n, all_points))
    given = carray(typed_pointer(bits, np.uint8(0)), (n, all_bits))
    first_tile, end_tile = first_row // TILE, (first_row + n + TILE - 1) // TILE
    for task in share(end_tile - first_tile, thread, team):
        tile = first_tile + task
        for r in range(max(first_row, tile * TILE), min(first_row + n, (tile + 1) * TILE)):
            column = r - tile * TILE
            for step in range(padded // STEP):
                chunk, inside = step * STEP // CHUNK, step % (CHUNK // STEP)
                before = codes_at if (chunk + 1) * CHUNK < padded else last_codes_at
                to = tiles + tile * tile_bytes + chunk * full_bytes + before + inside * num_bytes
                target = carray(typed_pointer(to, np.uint8(0)), (num_bytes,))
                points = source[r - first_row, step * rows : (step + 1) * rows]
                for row in range(rows):
                    point = np.int64(points[row])
                    if row < low_rows:
                        target[row * TILE + column] = point & 255
                    for bit in range(high_bits):
                        _set_bit(target, 8 * (high_at + 8 * (row * high_bits + bit)) + column, point >> (8 + bit))
                if low_rows < rows:
                    for bit in range(low_rows):
                        _set_bit(target, 8 * (bit * TILE + column) + 7, np.int64(points[low_rows]) >> bit)
                signed = given[r - first_row, step * 4 : (step + 1) * 4]
                if signs == SIGN_A_CODE:
                    for unit in range(STEP // 4):  # four bits, half a byte that two columns share
                        at, up = signs_at + (unit * TILE + column) // 2, column % 2 * 4
                        four = np.int64(signed[unit // 2]) >> (unit % 2 * 4) & 15
                        target[at] = target[at] & ~(15 << up) | four << up
                elif num_bytes > signs_at:
                    for row in range(rows):
                        _set_bit(target, 8 * (signs_at + 8 * row) + column, np.int64(signed[row]))


@njit(inline="always")
def _set_bit(target, bit, value):
    mask = np.uint8(1 << (bit % 8))
    target[bit // 8] = target[bit // 8] & ~mask | mask * np.uint8(value & 1)
