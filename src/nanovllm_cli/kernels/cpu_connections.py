"""What layers whose halves read and write several residual streams do beside attention and MLP on the CPU (hyper-connections, Zhu
et al. 2024, and the gated streams of Qwen4-Exp). See `reference` for the formulas.

Streams lie one behind the other, [S, T, width]. What becomes of a token is made of its own streams alone, in one order of sums.
Legend: S streams, T tokens.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_fused import sigmoid
from nanovllm_cli.kernels.cpu_numbers import FAST, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares


@kernel(fastmath=FAST)
def spread(arguments, thread, team):
    """streams [S, T, width], each of them x [T, width]. Work is split by streams and tokens."""
    tag, x, count, num_rows, width, streams = fields(arguments)
    lines = carray(typed_pointer(x, tag), (num_rows, width))
    targets = carray(typed_pointer(streams, tag), (count, num_rows, width))
    for task in share(count * num_rows, thread, team):
        line, target = lines[task % num_rows], targets[task // num_rows, task % num_rows]
        for i in range(width):
            target[i] = line[i]


@inner
def _even(matrix, rounds, least):
    """Logits [S, S] become `mixing_rules.mixing` of them."""
    count = matrix.shape[0]
    for j in range(count):
        top, total = matrix[j, 0], np.float32(0.0)
        for k in range(count):
            top = max(top, matrix[j, k])
        for k in range(count):
            matrix[j, k] = np.exp(matrix[j, k] - top)
            total += matrix[j, k]
        for k in range(count):
            matrix[j, k] = matrix[j, k] / total + least
    for turn in range(2 * rounds - 1):
        for a in range(count):
            total = least
            for b in range(count):
                total += matrix[b, a] if turn % 2 == 0 else matrix[a, b]
            for b in range(count):
                if turn % 2 == 0:
                    matrix[b, a] /= total
                else:
                    matrix[a, b] /= total


@kernel(fastmath=FAST)
def read_streams(arguments, thread, team):
    """out [T, width] = the sum of streams [S, T, width], each times a weight, and kept [T, writes] fp32, the weights by which all
    are written: `reference.read_streams`. matrix [S + writes, S * width], base [S + writes] and scale [1 to 3] fp32; writes is S
    or 0, or with rounds S + S * S, of which the last ones mix streams: `mixing_rules.mixing`. Work is split by tokens."""
    tag, streams, count, num_rows, width, matrix, base, scale, writes, rounds, out, kept, eps, least, most = fields(arguments)
    lines = carray(typed_pointer(streams, tag), (count, num_rows, width))
    rows = carray(typed_pointer(matrix, np.float32(0)), (count + writes, count, width))
    bases = carray(typed_pointer(base, np.float32(0)), (count + writes,))
    scales = carray(typed_pointer(scale, np.float32(0)), (3,))
    sums = carray(typed_pointer(out, tag), (num_rows, width))
    written = carray(typed_pointer(kept, np.float32(0)), (num_rows, max(1, writes)))
    memory = scratch(4 * ((count + 2) * width + count))
    own = floats_at(memory.ctypes.data, (count, width))
    beside = floats_at(memory.ctypes.data + 4 * count * width, (width,))
    totals = floats_at(memory.ctypes.data + 4 * (count + 1) * width, (width,))
    weights = floats_at(memory.ctypes.data + 4 * (count + 2) * width, (count,))
    for r in share(num_rows, thread, team):
        square = np.float32(0.0)
        for s in range(count):
            line, numbers = lines[s, r], own[s]
            for i in range(width):
                numbers[i] = load(line, i)
            square += sum_of_squares(np.float32(0.0), numbers.ctypes.data, width)
        norm = np.float32(1.0) / np.sqrt(square / np.float32(count * width) + np.float32(eps))
        for k in range(count + writes):
            logit = np.float32(0.0)
            for s in range(count):
                numbers, factors = own[s], rows[k, s]
                for i in range(width):
                    beside[i] = numbers[i] * factors[i]
                logit += sum_f32(beside.ctypes.data, width)
            logit = logit * norm * scales[min(k // count, 2)] + bases[k]
            if k >= 2 * count:
                written[r, k - count] = logit
                continue
            sigmoid = np.float32(1.0) / (np.float32(1.0) + np.exp(-logit))
            if k < count:
                weights[k] = sigmoid + np.float32(least)
            else:
                written[r, k - count] = np.float32(most) * sigmoid + np.float32(0.0 if rounds > 0 else least)
        if rounds > 0 and writes > 0:
            _even(written[r, count:].reshape((count, count)), rounds, np.float32(least))
        for i in range(width):
            totals[i] = np.float32(0.0)
        for s in range(count):
            numbers, weight = own[s], weights[s]
            for i in range(width):
                totals[i] += weight * numbers[i]
        target = sums[r]
        for i in range(width):
            store(target, i, totals[i])
    keep(memory)


@kernel(fastmath=FAST)
def write_streams(arguments, thread, team):
    """streams [S, T, width] += found [T, width] times weights [T, S] fp32. Work is split by streams and tokens."""
    tag, streams, count, num_rows, width, found, weights = fields(arguments)
    lines = carray(typed_pointer(streams, tag), (count, num_rows, width))
    made = carray(typed_pointer(found, tag), (num_rows, width))
    factors = carray(typed_pointer(weights, np.float32(0)), (num_rows, count))
    for task in share(count * num_rows, thread, team):
        s, r = task // num_rows, task % num_rows
        line, mine, factor = lines[s, r], made[r], factors[r, s]
        for i in range(width):
            store(line, i, factor * load(mine, i) + load(line, i))


@kernel(fastmath=FAST)
def mix_and_write(arguments, thread, team):
    """streams [S, T, width] become what weights [T, S + S * S] fp32 make of them and of found [T, width]: stream k the first S's
    k-th times found, plus the sum over j of the others' [j, k] times stream j. Work is split by tokens."""
    tag, streams, count, num_rows, width, found, weights = fields(arguments)
    lines = carray(typed_pointer(streams, tag), (count, num_rows, width))
    made = carray(typed_pointer(found, tag), (num_rows, width))
    factors = carray(typed_pointer(weights, np.float32(0)), (num_rows, count * (count + 1)))
    memory = scratch(4 * (count + 1) * width)
    old = floats_at(memory.ctypes.data, (count, width))
    totals = floats_at(memory.ctypes.data + 4 * count * width, (width,))
    for r in share(num_rows, thread, team):
        own, mine = factors[r], made[r]
        for s in range(count):
            line, numbers = lines[s, r], old[s]
            for i in range(width):
                numbers[i] = load(line, i)
        for k in range(count):
            line, factor = lines[k, r], own[k]
            for i in range(width):
                totals[i] = factor * load(mine, i)
            for j in range(count):
                numbers, share_of = old[j], own[count + j * count + k]
                for i in range(width):
                    totals[i] += share_of * numbers[i]
            for i in range(width):
                store(line, i, totals[i])
    keep(memory)


@kernel(fastmath=FAST)
def norm_streams(arguments, thread, team):
    """out [T, S * width]: of each of streams [S, T, width] its numbers divided by their root mean square, times offset + gains
    [S, width]; those of a token lie behind each other. Work is split by tokens and streams."""
    tag, streams, count, num_rows, width, gains, out, eps, offset = fields(arguments)
    lines = carray(typed_pointer(streams, tag), (count, num_rows, width))
    factors = carray(typed_pointer(gains, tag), (count, width))
    normed = carray(typed_pointer(out, tag), (num_rows, count, width))
    for task in share(num_rows * count, thread, team):
        r, s = task // count, task % count
        line, factor, target = lines[s, r], factors[s], normed[r, s]
        square = sum_of_squares(tag, line.ctypes.data, width)
        inverse = np.float32(1.0) / np.sqrt(square / np.float32(width) + np.float32(eps))
        for i in range(width):
            store(target, i, load(line, i) * inverse * (np.float32(offset) + load(factor, i)))


@kernel(fastmath=FAST)
def mix_streams(arguments, thread, team):
    """out [T, width] = the mean of what lies in normed [T, S * width] of S streams, each number times the sigmoid of that in
    gates, which lie alike. weights [T, S] fp32, if there are any (0: none), become 2 * sigmoid(weight / S). Work is split by
    tokens."""
    tag, normed, gates, count, num_rows, width, weights, out = fields(arguments)
    lines = carray(typed_pointer(normed, tag), (num_rows, count, width))
    logits = carray(typed_pointer(gates, tag), (num_rows, count, width))
    means = carray(typed_pointer(out, tag), (num_rows, width))
    written = carray(typed_pointer(weights, np.float32(0)), (num_rows, count))
    share_of_one = np.float32(1.0) / np.float32(count)
    memory = scratch(4 * width)
    total = floats_at(memory.ctypes.data, (width,))
    for r in share(num_rows, thread, team):
        for i in range(width):
            total[i] = np.float32(0.0)
        for s in range(count):
            line, logit = lines[r, s], logits[r, s]
            for i in range(width):
                total[i] += load(line, i) * sigmoid(load(logit, i))
        target = means[r]
        for i in range(width):
            store(target, i, total[i] * share_of_one)
        if weights != 0:
            for s in range(count):
                written[r, s] = np.float32(2.0) * sigmoid(written[r, s] * share_of_one)
    keep(memory)
