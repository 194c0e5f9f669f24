"""Small operators on the CPU that some families alone have between two matmuls, each a single pass over its rows; as those of
`cpu_fused.py` are."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_fused import CHUNK, sigmoid
from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, load, softplus, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer


@kernel(fastmath=FAST)
def put_columns(arguments, thread, team):
    """wide [num_rows, width], whose rows lie row_stride numbers apart, = x [num_rows, width], with rows x_stride apart."""
    tag, x, wide, num_rows, width, x_stride, row_stride = fields(arguments)
    lines, targets = carray(typed_pointer(x, tag), (num_rows, x_stride)), carray(typed_pointer(wide, tag), (num_rows, row_stride))
    for r in share(num_rows, thread, team):
        line, target = lines[r], targets[r]
        for i in range(width):
            target[i] = line[i]


@kernel(fastmath=FAST)
def add_row(arguments, thread, team):
    """x [num_rows, width] += row [width] fp32, at each of its rows."""
    tag, x, row, num_rows, width = fields(arguments)
    lines, added = carray(typed_pointer(x, tag), (num_rows, width)), carray(typed_pointer(row, np.float32(0)), (width,))
    for r in share(num_rows, thread, team):
        line = lines[r]
        for i in range(width):
            store(line, i, load(line, i) + added[i])


@kernel(fastmath=FAST)
def clip(arguments, thread, team):
    """x [num_rows, width], held between least and most; what is no number stays none. Rows lie row_stride numbers apart."""
    tag, x, num_rows, width, row_stride, bottom, top = fields(arguments)
    lines, least, most = carray(typed_pointer(x, tag), (num_rows, row_stride)), np.float32(bottom), np.float32(top)
    for r in share(num_rows, thread, team):
        line = lines[r]
        for i in range(width):
            value = load(line, i)
            if value > most:
                store(line, i, most)
            elif value < least:
                store(line, i, least)


@kernel(fastmath=FAST)
def temper(arguments, thread, team):
    """x [num_rows, width] *= 1 + scale * log(1 + (position + offset) // length), of positions [num_rows] int64. Rows lie
    row_stride numbers apart; those whose factor is 1 stay as they are."""
    tag, x, num_rows, width, row_stride, positions, length, offset, scale = fields(arguments)
    lines = carray(typed_pointer(x, tag), (num_rows, row_stride))
    of_rows = carray(typed_pointer(positions, np.int64(0)), (num_rows,))
    for r in share(num_rows, thread, team):
        steps = (of_rows[r] + offset) // length
        if steps == 0:
            continue
        factor, line = np.float32(1.0 + scale * np.log(1.0 + steps)), lines[r]
        for i in range(width):
            store(line, i, load(line, i) * factor)


@njit(inline="always")
def _expm1_less_x(x):
    """exp(x) - 1 - x of an x that is not above 0: near 0 by its series, where all digits of that difference would be lost."""
    small = max(x, np.float32(-0.5))
    sum_ = np.float32(1 / 5040) + small * np.float32(1 / 40320)
    sum_ = np.float32(1 / 24) + small * (np.float32(1 / 120) + small * (np.float32(1 / 720) + small * sum_))
    series = small * small * (np.float32(1 / 2) + small * (np.float32(1 / 6) + small * sum_))
    return series if x > np.float32(-0.5) else exp_not_positive(x) - np.float32(1.0) - x


@kernel(fastmath=FAST)
def xielu(arguments, thread, team):
    """x [size] = xIELU of each number by itself; see `reference.xielu`."""
    tag, x, size, positive, negative, slope, edge = fields(arguments)
    numbers = carray(typed_pointer(x, tag), (size,))
    for chunk in share(-(-size // CHUNK), thread, team):
        own = numbers[CHUNK * chunk : min(size, CHUNK * (chunk + 1))]
        for i in range(own.size):
            value = load(own, i)
            below = min(min(value, np.float32(edge)), np.float32(0.0))
            curved = np.float32(negative) * (_expm1_less_x(below) + (below - value))
            curved = np.float32(positive) * value * value if value > np.float32(0.0) else curved
            store(own, i, curved + np.float32(slope) * value)


@kernel(fastmath=FAST)
def sigmoid_gate(arguments, thread, team):
    """x [num_rows, width] *= sigmoid(gate), or with is_softplus that, of gate [num_rows, width / each], whose rows lie
    gate_stride numbers apart: one for `each` numbers."""
    tag, gate_tag, x, gate, num_rows, width, gate_stride, each, is_softplus = fields(arguments)
    lines = carray(typed_pointer(x, tag), (num_rows, width))
    gates = carray(typed_pointer(gate, gate_tag), (num_rows, gate_stride))
    for r in share(num_rows, thread, team):
        line, own = lines[r], gates[r]
        if each == 1 and is_softplus == 0:
            for i in range(width):
                store(line, i, load(line, i) * sigmoid(load(own, i)))
            continue
        for g in range(width // each):
            value = load(own, g)
            factor = sigmoid(value) if is_softplus == 0 else softplus(value)
            for i in range(g * each, (g + 1) * each):
                store(line, i, load(line, i) * factor)


@kernel(fastmath=FAST)
def best_gate(arguments, thread, team):
    """out [num_rows, width] = x times the sigmoid of each row's largest of logits [num_rows, count], a NaN being above all."""
    tag, x, logits, out, num_rows, width, count = fields(arguments)
    lines, result = carray(typed_pointer(x, tag), (num_rows, width)), carray(typed_pointer(out, tag), (num_rows, width))
    of_rows = carray(typed_pointer(logits, np.float32(0)), (num_rows, count))
    for r in share(num_rows, thread, team):
        own, line, target = of_rows[r], lines[r], result[r]
        best = own[0]
        for e in range(1, count):
            if own[e] > best or own[e] != own[e]:
                best = own[e]
        factor = sigmoid(best)
        for i in range(width):
            store(target, i, load(line, i) * factor)
