"""What latent attention needs on the CPU beside the attention of cpu_attention.py: products with a matrix of each head, and the
rows that it reads."""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_matmul import ROWS_PER_TASK, put_row
from nanovllm_cli.kernels.cpu_numbers import FAST, dot64, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import MAX_ROWS, TILE_COLUMNS, typed_pointer


@kernel()
def head_products(arguments, thread, team):
    """Of each head, n columns of out = some columns of x @ its matrix.T: fp32 sums, one rounding.

    x, out: addresses of the first row's first head; from row to row x_stride bytes and out_stride numbers, from head to head
    x_step bytes and out_step numbers. weight: a matrix a head, each packed as in cpu_matmul; steps of 32 bits.
    """
    tag, x, num_rows, x_stride, x_step, weight, num_heads, n, steps, out, out_stride, out_step = fields(arguments)
    num_blocks = (n + TILE_COLUMNS - 1) // TILE_COLUMNS
    num_chunks = (num_rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    memory = scratch(4 * MAX_ROWS * TILE_COLUMNS)
    sums_at = memory.ctypes.data
    sums = floats_at(sums_at, (MAX_ROWS, TILE_COLUMNS))
    rows_of_out = carray(typed_pointer(out, tag), (num_rows, out_stride))
    for task in share(num_heads * num_blocks * num_chunks, thread, team):
        place, chunk = task // num_chunks, task % num_chunks
        head, block = place // num_blocks, place % num_blocks
        w = weight + place * steps * TILE_COLUMNS * 4
        row, end = chunk * ROWS_PER_TASK, min(num_rows, (chunk + 1) * ROWS_PER_TASK)
        while row < end:
            rows = min(MAX_ROWS, end - row)
            source = x + row * x_stride + head * x_step
            dot64(tag, rows, source, x_stride, w, w + 64, w + 128, w + 192, 256, steps, sums_at, 256, 0)
            for r in range(rows):
                line = rows_of_out[row + r, head * out_step : head * out_step + n]
                put_row(sums[r], line, block * TILE_COLUMNS, line, False)
            row += rows
    keep(memory)


@kernel(fastmath=FAST)
def latent_rows(arguments, thread, team):
    """out [num_rows, heads + 1, rotary + rank]: of each head's query [key_dim + rotary] what is rotated, in the first numbers;
    then the row that is kept: of kept [num_rows, rank + rotary] what is rotated, and the norm of the rest."""
    tag, q, kept, norm, num_rows, heads, key_dim, rotary, rank, out, eps, offset = fields(arguments)
    queries = carray(typed_pointer(q, tag), (num_rows, heads, key_dim + rotary))
    sources = carray(typed_pointer(kept, tag), (num_rows, rank + rotary))
    gains = carray(typed_pointer(norm, tag), (rank,))
    targets = carray(typed_pointer(out, tag), (num_rows, heads + 1, rotary + rank))
    for t in share(num_rows, thread, team):
        source, target = sources[t], targets[t]
        for h in range(heads):
            for i in range(rotary):
                target[h, i] = queries[t, h, key_dim + i]
        own = target[heads]
        for i in range(rotary):
            own[i] = source[rank + i]
        squares = np.float32(0.0)
        for i in range(rank):
            squares += load(source, i) * load(source, i)
        factor = np.float32(1.0) / np.sqrt(squares / np.float32(rank) + np.float32(eps))
        for i in range(rank):
            store(own, rotary + i, load(source, i) * factor * (np.float32(offset) + load(gains, i)))
