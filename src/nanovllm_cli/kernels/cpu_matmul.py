"""Matmul with a packed weight on the CPU, for any number of rows, and the packing.

A weight [N, K] is kept as [N / 64, K / e, 64, e], e = 2 for bf16 and 1 for fp32, zero-padded at both ends: 64 outputs lie side by
side, so the inner loop (`simd.dot_tile`) walks straight through memory. One copy serves one row (the memory's speed) and
hundreds (the multipliers' speed). Work is split over blocks of 64 outputs, and over rows when there are many.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_numbers import dot64, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import MAX_ROWS, TILE_COLUMNS, typed_pointer

ROWS_PER_TASK = 96


@kernel()
def pack_rows(arguments, thread, team):
    """Rows of a row-major [num_rows, k] weight into place in a packed one, from row `first_row` on. pair: e above."""
    tag, pair, source, num_rows, k, packed, first_row = fields(arguments)
    steps = (k + pair - 1) // pair
    src = carray(typed_pointer(source, tag), (num_rows, k))
    for r in share(num_rows, thread, team):
        n = first_row + r
        block = carray(
            typed_pointer(packed + (n // TILE_COLUMNS) * steps * TILE_COLUMNS * 4, tag), (steps, TILE_COLUMNS, pair)
        )
        column = n % TILE_COLUMNS
        for i in range(k):
            block[i // pair, column, i % pair] = src[r, i]


@kernel()
def unpack_rows(arguments, thread, team):
    """Row-major rows `ids` (int64) of a packed weight: what an embedding needs of a tied head."""
    tag, pair, packed, ids, num_ids, k, out = fields(arguments)
    steps = (k + pair - 1) // pair
    rows = carray(typed_pointer(ids, np.int64(0)), (num_ids,))
    dst = carray(typed_pointer(out, tag), (num_ids, k))
    for r in share(num_ids, thread, team):
        n = rows[r]
        block = carray(
            typed_pointer(packed + (n // TILE_COLUMNS) * steps * TILE_COLUMNS * 4, tag), (steps, TILE_COLUMNS, pair)
        )
        column = n % TILE_COLUMNS
        for i in range(k):
            dst[r, i] = block[i // pair, column, i % pair]


@kernel()
def matmul(arguments, thread, team):
    """out [num_rows, n] = x @ weight.T (+ bias): fp32 sums, one rounding to the output's type.

    tag, out_tag: element types of x and weight, and of out and bias. Addresses; x_stride in bytes; steps of 32 bits along k.
    bias: address of [n] in the output's type, or 0.
    """
    tag, out_tag, x, num_rows, x_stride, weight, n, steps, bias, out = fields(arguments)
    num_blocks = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_chunks = (num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    dst = carray(typed_pointer(out, out_tag), (num_rows, n))
    added = carray(typed_pointer(bias, out_tag), (n,))
    memory = scratch(4 * MAX_ROWS * TILE_COLUMNS)
    sums_at = memory.ctypes.data
    sums = floats_at(sums_at, (MAX_ROWS, TILE_COLUMNS))
    for task in share(num_blocks * num_chunks, thread, team):
        block, chunk = task // num_chunks, task % num_chunks
        w = weight + block * steps * TILE_COLUMNS * 4
        row, end = chunk * ROWS_PER_TASK, min(num_rows, (chunk + 1) * ROWS_PER_TASK)
        while row < end:
            rows = min(MAX_ROWS, end - row)
            dot64(tag, rows, x + row * x_stride, x_stride, w, w + 64, w + 128, w + 192, 256, steps, sums_at, 256, 0)
            for r in range(rows):
                put_row(sums[r], dst[row + r], block * TILE_COLUMNS, added, bias != 0)
            row += rows
    keep(memory)


@inner
def put_row(sums, line, first, added, has_bias):
    """A tile's fp32 sums, plus bias, into an output row from column `first` on."""
    width = min(TILE_COLUMNS, line.size - first)
    if has_bias:
        for c in range(width):
            sums[c] += load(added, first + c)
    target = line[first : first + width]
    for c in range(width):
        store(target, c, sums[c])
