"""What compressed convolutional attention and its routers do beside matmuls, on the CPU. See `compressed_rules` for what it is,
and for the names.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_of_squares


@kernel(fastmath=FAST)
def rescale(arguments, thread, team):
    """x [num_rows, width] = (x + shift) * gains, in place; shift and gains [width] fp32. Rows lie row_stride numbers apart."""
    tag, x, row_stride, shift, gains, num_rows, width = fields(arguments)
    lines = carray(typed_pointer(x, tag), (num_rows, row_stride))
    shifts = carray(typed_pointer(shift, np.float32(0)), (width,))
    factors = carray(typed_pointer(gains, np.float32(0)), (width,))
    for r in share(num_rows, thread, team):
        line = lines[r]
        for i in range(width):
            store(line, i, (load(line, i) + shifts[i]) * factors[i])


@kernel(fastmath=FAST)
def open_gates(arguments, thread, team):
    """out [num_rows, 3, channels]: ones, ones, and the first columns of x, whose rows lie row_stride numbers apart."""
    tag, x, row_stride, out, num_rows, channels = fields(arguments)
    lines = carray(typed_pointer(x, tag), (num_rows, row_stride))
    result = carray(typed_pointer(out, tag), (num_rows, 3, channels))
    for r in share(num_rows, thread, team):
        line, gate, out_gate, value = lines[r], result[r, 0], result[r, 1], result[r, 2]
        for i in range(channels):
            store(gate, i, np.float32(1.0))
            store(out_gate, i, np.float32(1.0))
            store(value, i, load(line, i))


@kernel(fastmath=FAST)
def of_the_best(arguments, thread, team):
    """out [num_rows, count - 1] fp32 of logits [num_rows, count] and bias [count]. A NaN among the logits makes one of the first
    expert's."""
    logits, bias, out, num_rows, count = fields(arguments)
    lines = carray(typed_pointer(logits, np.float32(0)), (num_rows, count))
    biases = carray(typed_pointer(bias, np.float32(0)), (count,))
    result = carray(typed_pointer(out, np.float32(0)), (num_rows, count - 1))
    for r in share(num_rows, thread, team):
        own, target = lines[r], result[r]
        most, total = own[0], np.float32(0.0)
        for e in range(1, count):
            most = own[e] if own[e] > most else most
        for e in range(count):
            total += exp_not_positive(own[e] - most)
        best, score = 0, exp_not_positive(own[0] - most) / total + biases[0]
        for e in range(1, count):
            other = exp_not_positive(own[e] - most) / total + biases[e]
            if other > score:
                best, score = e, other
        highest = np.float32(-np.inf)
        for e in range(count):
            if e != best and own[e] > highest:
                highest = own[e]
        rest = np.float32(0.0)
        for e in range(count):
            if e != best:
                rest += exp_not_positive(own[e] - highest)
        for e in range(count - 1):
            target[e] = np.float32(-np.inf)
        if best < count - 1:
            target[best] = own[best] - highest - np.log(rest)
        if total != total:
            target[0] = total


@kernel(fastmath=FAST)
def met_heads(arguments, thread, team):
    """out [T, (heads + 2 keys) * dim]. projected [T, (heads + 2 keys) * dim], convolved [T, (heads + keys) * dim], bias
    [(heads + keys) * dim]; before [T, …], whose rows lie before_stride numbers apart; gains [keys] fp32. Work is split by tokens
    and key heads, each with its queries."""
    (
        tag, projected, convolved, bias, before, before_stride, gains, out, num_rows, heads, keys, dim, least,
    ) = fields(arguments)  # fmt: skip
    every, width, half = (heads + 2 * keys) * dim, (heads + keys) * dim, keys * dim // 2
    sources = carray(typed_pointer(projected, tag), (num_rows, every))
    made = carray(typed_pointer(convolved, tag), (num_rows, width))
    biases = carray(typed_pointer(bias, tag), (width,))
    olds = carray(typed_pointer(before, tag), (num_rows, before_stride))
    factors = carray(typed_pointer(gains, np.float32(0)), (keys,))
    result = carray(typed_pointer(out, tag), (num_rows, every))
    group, root = heads // keys, np.sqrt(np.float32(dim))
    memory = scratch(8 * dim)
    row, mean = floats_at(memory.ctypes.data, (dim,)), floats_at(memory.ctypes.data + 4 * dim, (dim,))
    for task in share(num_rows * keys, thread, team):
        r, key = task // keys, task % keys
        source, beside, old, target = sources[r], made[r], olds[r], result[r]
        at = (heads + key) * dim
        for i in range(dim):
            mean[i] = np.float32(0.0)
        for head in range(key * group, key * group + group + 1):
            place = head * dim if head < (key + 1) * group else at  # the key head comes last, when all of its queries are known
            if place < at:
                for i in range(dim):
                    both = (load(source, place + i) + load(source, at + i)) * np.float32(0.5)
                    mean[i] += both
                    row[i] = load(beside, place + i) + load(biases, place + i) + both
            else:
                for i in range(dim):
                    row[i] = load(beside, at + i) + load(biases, at + i) + mean[i] / np.float32(group)
            length = np.sqrt(sum_of_squares(np.float32(0.0), row.ctypes.data, dim))
            factor = root / (np.float32(least) if length < np.float32(least) else length)
            if place == at:
                factor *= factors[key]
            for i in range(dim):
                store(target, place + i, row[i] * factor)
        for i in range(key * dim, key * dim + dim):  # half of all values first, whichever heads they are of
            value = load(source, width + half + i) if i < half else load(old, width + i - half)
            store(target, width + i, value)
    keep(memory)
