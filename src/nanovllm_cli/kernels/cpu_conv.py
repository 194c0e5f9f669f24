"""The gated short convolution on the CPU. See `conv.gated_conv` for what it does, and for the names.

A task is a sequence and some of its channels: it goes through the step's tokens in their order.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_cache import BLOCK
from nanovllm_cli.kernels.cpu_numbers import FAST, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer

CHANNELS = 512
"""Of a task."""


@kernel(fastmath=FAST)
def gated_conv(arguments, thread, team):
    """out [T, channels] = c * (bias + sum of weight[i] * inputs of the token width - 1 - i before); inputs = b * h are kept.

    projected [T, 3 channels]: b, c and h. weight [width, channels]; bias [channels], or 0. cache [N, BLOCK, channels]. starts
    [B + 1], lens [B] int32; tables [B, P] int32.
    """
    (
        tag, projected, num_tokens, channels, weight, bias, width, cache, num_blocks, starts, lens, tables, num_sequences,
        table_width, out,
    ) = fields(arguments)  # fmt: skip
    source = carray(typed_pointer(projected, tag), (num_tokens, 3, channels))
    result = carray(typed_pointer(out, tag), (num_tokens, channels))
    taps = carray(typed_pointer(weight, tag), (width, channels))
    offsets = carray(typed_pointer(bias if bias != 0 else out, tag), (channels,))
    inputs = carray(typed_pointer(cache, tag), (num_blocks, BLOCK, channels))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    table_of = carray(typed_pointer(tables, np.int32(0)), (num_sequences, table_width))
    parts = -(-channels // CHANNELS)
    memory = scratch(4 * (width + 1) * CHANNELS)
    rows = carray(typed_pointer(memory.ctypes.data, np.float32(0)), (width, CHANNELS))  # of the token at p, p modulo width
    total = carray(typed_pointer(memory.ctypes.data + 4 * width * CHANNELS, np.float32(0)), (CHANNELS,))
    for task in share(num_sequences * parts, thread, team):
        sequence, first = task // parts, task % parts * CHANNELS
        count = min(CHANNELS, channels - first)
        begin, end = start_of[sequence], start_of[sequence + 1]
        position = len_of[sequence] - (end - begin)
        for p in range(position - width + 1, position):
            row = rows[p % width]
            if p < 0:
                for i in range(count):
                    row[i] = np.float32(0.0)
            else:
                line = inputs[table_of[sequence, p // BLOCK], p % BLOCK]
                for i in range(count):
                    row[i] = load(line, first + i)
        for t in range(begin, end):
            gate, out_gate, value = source[t, 0], source[t, 1], source[t, 2]
            row, line, target = rows[position % width], inputs[table_of[sequence, position // BLOCK], position % BLOCK], result[t]
            for i in range(count):
                store(line, first + i, load(gate, first + i) * load(value, first + i))
            for i in range(count):
                row[i] = load(line, first + i)
                total[i] = load(offsets, first + i) if bias != 0 else np.float32(0.0)
            for k in range(width):
                tap, other = taps[k], rows[(position + 1 + k) % width]
                for i in range(count):
                    total[i] += load(tap, first + i) * other[i]
            for i in range(count):
                store(target, first + i, load(out_gate, first + i) * total[i])
            position += 1
    keep(memory)
