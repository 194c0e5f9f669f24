"""What a mixture of experts needs on the CPU beside matmuls: which experts a token takes, and the sum of what they say."""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, load
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer


@kernel()
def route(arguments, thread, team):
    """chosen, weights [num_rows, num_chosen]: of each row of logits [num_rows, num_experts] fp32 the places of the largest, the
    lower one first among equals, in ascending order, and exp(logit) over the sum of it: of all, or with norm_topk of the chosen.

    A NaN is larger than any number, so that it comes out in the weights. Sums go up in order: a row's bits are its own.
    """
    logits, num_rows, num_experts, num_chosen, norm_topk, chosen, weights = fields(arguments)
    rows = carray(typed_pointer(logits, np.float32(0)), (num_rows, num_experts))
    places = carray(typed_pointer(chosen, np.int64(0)), (num_rows, num_chosen))
    shares = carray(typed_pointer(weights, np.float32(0)), (num_rows, num_chosen))
    for r in share(num_rows, thread, team):
        row, place, part = rows[r], places[r], shares[r]
        largest = np.float32(0.0)
        for c in range(num_chosen):
            best = -1
            for e in range(num_experts):
                if best >= 0 and not (row[e] > row[best] or (np.isnan(row[e]) and not np.isnan(row[best]))):
                    continue
                taken = False
                for i in range(c):
                    taken = taken or place[i] == e
                if not taken:
                    best = e
            i = c
            while i > 0 and place[i - 1] > best:
                place[i] = place[i - 1]
                i -= 1
            place[i] = best
            largest = row[best] if c == 0 else largest
        total = np.float32(0.0)
        if norm_topk == 0:
            for e in range(num_experts):
                total += exp_not_positive(row[e] - largest)
        for c in range(num_chosen):
            part[c] = exp_not_positive(row[place[c]] - largest)
            if norm_topk != 0:
                total += part[c]
        for c in range(num_chosen):
            part[c] /= total


@kernel(fastmath=FAST)
def add_weighted_rows(arguments, thread, team):
    """out [any, width] fp32: row rows[i] += weights[i] * y[i], for y [n, width]. No row comes twice."""
    tag, out, y, rows, weights, n, width = fields(arguments)
    source = carray(typed_pointer(y, tag), (n, width))
    row_of = carray(typed_pointer(rows, np.int64(0)), (n,))
    weight_of = carray(typed_pointer(weights, np.float32(0)), (n,))
    for i in share(n, thread, team):
        line, weight = source[i], weight_of[i]
        total = carray(typed_pointer(out + 4 * width * row_of[i], np.float32(0)), (width,))
        for j in range(width):
            total[j] += weight * load(line, j)
