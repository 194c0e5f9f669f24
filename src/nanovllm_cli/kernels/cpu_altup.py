"""What layers with several residual streams do beside their attention and MLP on the CPU (AltUp, Baykal et al. 2023), and gates
of which few stay above 0 (Gemma 3n). See `reference` for the formulas.

Streams lie one behind the other, [S, T, width]. A token's logits are of a small router; `factor` multiplies them. Legend: S
streams, T tokens.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_numbers import FAST, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares

LEAST_SQUARE = np.float32(1e-5)


@kernel(fastmath=FAST)
def altup_predict(arguments, thread, team):
    """streams [S, T, width] become their predictions, the first of which goes to first [T, width] as well. logits [T, S] and
    coefficients [S * S, S] fp32. Work is split by tokens."""
    tag, streams, count, num_rows, width, logits, coefficients, first, factor = fields(arguments)
    lines = carray(typed_pointer(streams, tag), (count, num_rows, width))
    copies = carray(typed_pointer(first, tag), (num_rows, width))
    router = carray(typed_pointer(logits, np.float32(0)), (num_rows, count))
    table = carray(typed_pointer(coefficients, np.float32(0)), (count * count, count))
    memory = scratch(4 * ((count + 1) * width + count))
    own = floats_at(memory.ctypes.data, (count, width))
    sums = floats_at(memory.ctypes.data + 4 * count * width, (width,))
    shares = floats_at(memory.ctypes.data + 4 * (count + 1) * width, (count,))
    for r in share(num_rows, thread, team):
        for j in range(count):
            shares[j] = np.tanh(router[r, j] * np.float32(factor))
        for s in range(count):
            line, numbers = lines[s, r], own[s]
            for i in range(width):
                numbers[i] = load(line, i)
        for k in range(count):
            line, numbers = lines[k, r], own[k]
            for i in range(width):
                sums[i] = numbers[i]
            for s in range(count):
                numbers, weight = own[s], np.float32(0.0)
                for j in range(count):
                    weight += table[k * count + s, j] * shares[j]
                for i in range(width):
                    sums[i] += weight * numbers[i]
            for i in range(width):
                store(line, i, sums[i])
        line, target = lines[0, r], copies[r]
        for i in range(width):
            store(target, i, load(line, i))
    keep(memory)


@kernel(fastmath=FAST)
def altup_correct(arguments, thread, team):
    """streams [S, T, width], predictions, are corrected by what a layer has made of the first, found [T, width]; first [T, width]
    is the first one then, times gains [width]. logits [T, S] and coefficients [S, S] fp32. Work is split by tokens."""
    tag, streams, count, num_rows, width, found, logits, coefficients, gains, first, factor = fields(arguments)
    lines = carray(typed_pointer(streams, tag), (count, num_rows, width))
    made = carray(typed_pointer(found, tag), (num_rows, width))
    scaled = carray(typed_pointer(first, tag), (num_rows, width))
    router = carray(typed_pointer(logits, np.float32(0)), (num_rows, count))
    table = carray(typed_pointer(coefficients, np.float32(0)), (count, count))
    scales = carray(typed_pointer(gains, tag), (width,))
    memory = scratch(4 * (width + 2 * count))
    news = floats_at(memory.ctypes.data, (width,))
    weights = floats_at(memory.ctypes.data + 4 * width, (count,))
    shares = floats_at(memory.ctypes.data + 4 * (width + count), (count,))
    for r in share(num_rows, thread, team):
        for j in range(count):
            shares[j] = np.tanh(router[r, j] * np.float32(factor))
        for k in range(count):
            weights[k] = np.float32(1.0)
            for j in range(count):
                weights[k] += table[k, j] * shares[j]
        mine, line, target = made[r], lines[0, r], scaled[r]
        for i in range(width):
            news[i] = load(mine, i) - load(line, i)
        for k in range(count):
            line, weight = lines[k, r], weights[k]
            for i in range(width):
                store(line, i, load(line, i) + weight * news[i])
        line = lines[0, r]
        for i in range(width):
            store(target, i, load(line, i) * load(scales, i))
    keep(memory)


@kernel(fastmath=FAST)
def altup_match(arguments, thread, team):
    """out [copies + N, T, width]: like [T, width] itself, with copies 1, then rows [T, N * width], each part of them as large as
    like. out may be rows, where N is 1. Work is split by tokens and parts."""
    tag, like, rows, parts, num_rows, width, out, copies = fields(arguments)
    likes = carray(typed_pointer(like, tag), (num_rows, width))
    sources = carray(typed_pointer(rows, tag), (num_rows, parts, width))
    targets = carray(typed_pointer(out, tag), (copies + parts, num_rows, width))
    for task in share((copies + parts) * num_rows, thread, team):
        part, r = task // num_rows, task % num_rows
        line, target = likes[r], targets[part, r]
        if part < copies:
            for i in range(width):
                store(target, i, load(line, i))
        else:
            source = sources[r, part - copies]
            wanted = sum_of_squares(tag, line.ctypes.data, width) / np.float32(width)
            found = sum_of_squares(tag, source.ctypes.data, width) / np.float32(width)
            ratio = np.sqrt(wanted) / np.sqrt(LEAST_SQUARE if found < LEAST_SQUARE else found)
            for i in range(width):
                store(target, i, load(source, i) * ratio)


@kernel(fastmath=FAST)
def sparse_gate(arguments, thread, team):
    """x [num_rows, width], whose rows lie row_stride numbers apart, in place: what a number is above its row's mean and `cutoff`
    times the deviation, or 0."""
    tag, x, num_rows, width, row_stride, cutoff = fields(arguments)
    lines = carray(typed_pointer(x, tag), (num_rows, row_stride))
    memory = scratch(4 * width)
    beside = floats_at(memory.ctypes.data, (width,))
    for r in share(num_rows, thread, team):
        line = lines[r]
        for i in range(width):
            beside[i] = load(line, i)
        mean = sum_f32(beside.ctypes.data, width) / np.float32(width)
        for i in range(width):
            beside[i] -= mean
        bound = np.float32(cutoff) * np.sqrt(sum_of_squares(np.float32(0.0), beside.ctypes.data, width) / np.float32(width))
        for i in range(width):
            value = beside[i] - bound
            store(line, i, np.float32(0.0) if value < np.float32(0.0) else value)
    keep(memory)
