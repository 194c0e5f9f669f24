"""The search behind the K-quants: which scales of a block of 256 make the weighted squared error small. Compiled by numba.

    affine       x ~ d * sub * code - dmin * sub_min,   0 <= code <= most_code     Q2_K, Q4_K, Q5_K
    symmetric    x ~ d * sub * value,             -half <= value < half            Q3_K, Q6_K

A block goes through three steps. (1) For each group alone: scales from 16 ways of cutting the group's range, each with the
least-squares fit of its codes; the best is kept. (2) The largest of them gives d (and dmin), rounded to float16; then every group
takes the best of 16 pairs of whole numbers (sub, sub_min) around its own optimum, now with the error measured as it will be.
(3) Given all codes, d and dmin are fitted anew to the whole block, rounded, and step 2 is repeated, as long as that helps.

The 16 candidates lie side by side as lanes, so sums run over a group in a fixed order: the result is the same on every processor
and with any number of threads. Blocks are scaled by a power of two first, so that nothing over- or underflows.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer

BLOCK = 256
LANES = 16
ROUNDS = 3  # of step 3
TINY = np.float32(1e-30)
LEAST_IMPORTANT = np.float32(1e-6)  # beside 1: groups that no text has used are rounded well all the same
ONE = np.float32(1)  # numba makes float64 of a float32 and a whole number
BYTE = np.uint8(0)


@inner
def to_half(value, exponent):
    """value, rounded so that value * 2**exponent is a number of float16, or one that would be if its exponents had no end."""
    if value == 0:
        return value
    scale = max(math.frexp(value)[1] + exponent, -13) - 11 - exponent  # the exponent of the last bit that is kept
    return math.ldexp(np.rint(math.ldexp(value, -scale)), scale)


@inner
def normalise(x, importance, xs, ws):
    """xs, ws [256]: x * 2**-exponent, largest magnitude in [0.5, 1); importance, 1e-6 to 1. Returns the exponent."""
    largest, heaviest = np.float32(0), np.float32(0)
    for j in range(BLOCK):
        largest = max(largest, abs(x[j]))
        heaviest = max(heaviest, importance[j])
    exponent = math.frexp(np.float64(largest))[1]
    for j in range(BLOCK):
        xs[j] = math.ldexp(np.float64(x[j]), -exponent)
        ws[j] = max(importance[j] / heaviest, LEAST_IMPORTANT) if heaviest > 0 else ONE
    return exponent


@inner
def copy(source, target):
    """Numba takes seconds to compile an assignment to a slice."""
    for i in range(source.size):
        target[i] = source[i]


# ---- affine ----


@inner
def affine_alone(x, w, cuts, most, lanes):
    """Step 1 for x [group]: the best scale and minimum."""
    low, high = np.float32(0), x[0]
    sum_w, sum_x = np.float32(0), np.float32(0)
    for j in range(x.size):
        low, high = min(low, x[j]), max(high, x[j])
        sum_w += w[j]
        sum_x += w[j] * x[j]
    if high <= low:
        return np.float32(0), -low
    for c in range(LANES):
        lanes[0, c] = low + cuts[0, c] * (high - low)
        lanes[1, c] = most / ((cuts[1, c] - cuts[0, c]) * (high - low))
        lanes[2, c] = lanes[3, c] = lanes[4, c] = 0
    for j in range(x.size):
        for c in range(LANES):
            q = np.rint(min(max((x[j] - lanes[0, c]) * lanes[1, c], np.float32(0)), most))
            wq = w[j] * q
            lanes[2, c] += wq
            lanes[3, c] += wq * q
            lanes[4, c] += wq * x[j]
    best, scale, minimum = np.float32(np.inf), np.float32(0), np.float32(0)
    for c in range(LANES):
        sum_q, sum_qq, sum_qx = lanes[2, c], lanes[3, c], lanes[4, c]
        det = sum_w * sum_qq - sum_q * sum_q
        s = (sum_w * sum_qx - sum_x * sum_q) / det
        m = (s * sum_q - sum_x) / sum_w
        if not (det > np.float32(1e-5) * sum_w * sum_qq and m > 0):
            s, m = sum_qx / max(sum_qq, TINY), np.float32(0)
        error = s * (s * sum_qq - sum_qx - sum_qx) + m * (m * sum_w + sum_x + sum_x - s * (sum_q + sum_q))
        if error < best and s > 0:
            best, scale, minimum = error, s, m
    return scale, minimum


@inner
def affine_groups(x, w, group, most, most_sub, d, dmin, scales, minima, lanes, codes, sub, sub_min):
    """Step 2: codes [256], sub and sub_min [G] for d and dmin, near the wished scales and minima [G]. Returns the error."""
    total = 0.0
    for g in range(BLOCK // group):
        first_sub = wish(scales[g], d, most_sub)
        first_min = wish(minima[g], dmin, most_sub)
        for c in range(LANES):
            lanes[0, c] = np.float32(first_sub + c // 4) * d
            lanes[1, c] = np.float32(first_min + c % 4) * dmin
            lanes[2, c] = ONE / lanes[0, c] if lanes[0, c] > 0 else np.float32(0)
            lanes[3, c] = 0
        for j in range(g * group, (g + 1) * group):
            for c in range(LANES):
                q = np.rint(min(max((x[j] + lanes[1, c]) * lanes[2, c], np.float32(0)), most))
                r = x[j] - lanes[0, c] * q + lanes[1, c]
                lanes[3, c] += w[j] * r * r
        best = 0
        for c in range(1, LANES):
            if lanes[3, c] < lanes[3, best]:
                best = c
        total += lanes[3, best]
        sub[g], sub_min[g] = first_sub + best // 4, first_min + best % 4
        for j in range(g * group, (g + 1) * group):
            codes[j] = np.uint8(np.rint(min(max((x[j] + lanes[1, best]) * lanes[2, best], np.float32(0)), most)))
    return total


@inner
def wish(value, unit, most):
    """The first of four whole numbers around value / unit, all of them within 0 … most."""
    if unit <= 0:
        return np.int32(0)
    return np.int32(min(max(np.floor(value / unit) - 1, np.float32(0)), np.float32(most - 3)))


@inner
def affine_fit(x, w, group, codes, sub, sub_min):
    """Step 3: d and dmin of least squares, given everything else."""
    uu, uv, vv, xu, xv = 0.0, 0.0, 0.0, 0.0, 0.0
    for g in range(BLOCK // group):
        sum_w, sum_x, sum_q, sum_qq, sum_qx = np.float32(0), np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for j in range(g * group, (g + 1) * group):
            q = np.float32(codes[j])
            wq = w[j] * q
            sum_w += w[j]
            sum_x += w[j] * x[j]
            sum_q += wq
            sum_qq += wq * q
            sum_qx += wq * x[j]
        u, v = np.float64(sub[g]), np.float64(sub_min[g])
        uu += u * u * sum_qq
        uv += u * v * sum_q
        vv += v * v * sum_w
        xu += u * sum_qx
        xv += v * sum_x
    det = uu * vv - uv * uv
    if det > 1e-6 * uu * vv:
        d, dmin = (xu * vv - xv * uv) / det, (xu * uv - xv * uu) / det
        if d > 0 and dmin >= 0:
            return d, dmin
    return (xu / uu if uu > 0 and xu > 0 else 0.0), 0.0


@kernel()
def affine(arguments, thread, team):
    """x float32 [n, width]; importance float32 [width]; cuts float32 [2, 16]: where a group's range is cut, as shares of it.
    Fills codes [n, width], sub, sub_min [n, G], all uint8, and d and dmin, float64 [n, S] with float16's numbers or larger ones.
    """
    x, importance, n, width, group, most_code, most_sub, cuts, codes, d, sub, dmin, sub_min = fields(arguments)
    blocks, groups = width // BLOCK, BLOCK // group
    most = np.float32(most_code)
    rows, weights = carray(typed_pointer(x, ONE), (n, width)), carray(typed_pointer(importance, ONE), (width,))
    shares = carray(typed_pointer(cuts, ONE), (2, LANES))
    all_codes = carray(typed_pointer(codes, BYTE), (n, blocks, BLOCK))
    subs = carray(typed_pointer(sub, BYTE), (n, blocks, groups))
    sub_mins = carray(typed_pointer(sub_min, BYTE), (n, blocks, groups))
    ds, dmins = carray(typed_pointer(d, 0.0), (n, blocks)), carray(typed_pointer(dmin, 0.0), (n, blocks))
    xs, ws = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    lanes = np.empty((5, LANES), np.float32)
    scales, minima = np.empty(groups, np.float32), np.empty(groups, np.float32)
    new_codes, new_sub, new_min = np.empty(BLOCK, np.uint8), np.empty(groups, np.uint8), np.empty(groups, np.uint8)
    for task in share(n * blocks, thread, team):
        row, b = task // blocks, task % blocks
        exponent = normalise(rows[row, b * BLOCK :], weights[b * BLOCK :], xs, ws)
        high, high_min = np.float32(0), np.float32(0)
        for g in range(groups):
            first, end = g * group, (g + 1) * group
            scales[g], minima[g] = affine_alone(xs[first:end], ws[first:end], shares, most, lanes)
            high, high_min = max(high, scales[g]), max(high_min, minima[g])
        trial, trial_min = np.float64(high) / most_sub, np.float64(high_min) / most_sub
        least = np.inf
        for _ in range(1 + ROUNDS):
            trial, trial_min = to_half(trial, exponent), to_half(trial_min, exponent)
            error = affine_groups(
                xs, ws, group, most, most_sub, np.float32(trial), np.float32(trial_min), scales, minima, lanes,
                new_codes, new_sub, new_min,
            )  # fmt: skip
            if not error < least:
                break
            least = error
            copy(new_codes, all_codes[row, b])
            copy(new_sub, subs[row, b])
            copy(new_min, sub_mins[row, b])
            ds[row, b], dmins[row, b] = math.ldexp(trial, exponent), math.ldexp(trial_min, exponent)
            trial, trial_min = affine_fit(xs, ws, group, new_codes, new_sub, new_min)


# ---- symmetric ----


@inner
def symmetric_alone(x, w, cuts, half, lanes):
    """Step 1 for x [group]: the best scale, of either sign."""
    largest = np.float32(0)
    for j in range(x.size):
        if abs(x[j]) > abs(largest):
            largest = x[j]
    if largest == 0:
        return np.float32(0)
    for c in range(LANES):
        lanes[0, c] = cuts[c] / largest
        lanes[1, c] = lanes[2, c] = 0
    for j in range(x.size):
        for c in range(LANES):
            v = np.rint(min(max(x[j] * lanes[0, c], -half), half - ONE))
            wv = w[j] * v
            lanes[1, c] += wv * v
            lanes[2, c] += wv * x[j]
    most, scale = np.float32(-1), np.float32(0)
    for c in range(LANES):
        explained = lanes[2, c] * lanes[2, c] / max(lanes[1, c], TINY)
        if explained > most:
            most, scale = explained, lanes[2, c] / max(lanes[1, c], TINY)
    return scale


@inner
def symmetric_groups(x, w, group, half, half_sub, d, scales, lanes, codes, sub):
    """Step 2: codes [256] and sub [G] for d, near the wished scales [G]. Returns the error."""
    total = 0.0
    for g in range(BLOCK // group):
        centre = np.rint(scales[g] / d) if d != 0 else np.float32(0)
        first = np.int32(min(max(centre - LANES // 2, np.float32(-half_sub)), np.float32(half_sub - LANES)))
        for c in range(LANES):
            lanes[0, c] = (first + c) * d
            lanes[1, c] = ONE / lanes[0, c] if lanes[0, c] != 0 else np.float32(0)
            lanes[2, c] = 0
        for j in range(g * group, (g + 1) * group):
            for c in range(LANES):
                v = np.rint(min(max(x[j] * lanes[1, c], -half), half - ONE))
                r = x[j] - lanes[0, c] * v
                lanes[2, c] += w[j] * r * r
        best = 0
        for c in range(1, LANES):
            if lanes[2, c] < lanes[2, best]:
                best = c
        total += lanes[2, best]
        sub[g] = first + best
        for j in range(g * group, (g + 1) * group):
            codes[j] = np.uint8(np.rint(min(max(x[j] * lanes[1, best], -half), half - ONE)) + half)
    return total


@inner
def symmetric_fit(x, w, group, half, codes, sub):
    """Step 3: d of least squares, given everything else."""
    uu, xu = 0.0, 0.0
    for g in range(BLOCK // group):
        sum_vv, sum_vx = np.float32(0), np.float32(0)
        for j in range(g * group, (g + 1) * group):
            v = np.float32(codes[j]) - half
            sum_vv += w[j] * v * v
            sum_vx += w[j] * v * x[j]
        u = np.float64(sub[g])
        uu += u * u * sum_vv
        xu += u * sum_vx
    return xu / uu if uu > 0 else 0.0


@kernel()
def symmetric(arguments, thread, team):
    """x float32 [n, width]; importance float32 [width]; cuts float32 [16]: to which value a group's largest magnitude goes. Fills
    codes uint8 [n, width], sub int8 [n, G] and d, as `affine` does."""
    x, importance, n, width, group, half_code, half_sub, cuts, codes, d, sub = fields(arguments)
    blocks, groups = width // BLOCK, BLOCK // group
    half = np.float32(half_code)
    rows, weights = carray(typed_pointer(x, ONE), (n, width)), carray(typed_pointer(importance, ONE), (width,))
    targets = carray(typed_pointer(cuts, ONE), (LANES,))
    all_codes = carray(typed_pointer(codes, BYTE), (n, blocks, BLOCK))
    subs, ds = carray(typed_pointer(sub, np.int8(0)), (n, blocks, groups)), carray(typed_pointer(d, 0.0), (n, blocks))
    xs, ws = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    lanes = np.empty((3, LANES), np.float32)
    scales = np.empty(groups, np.float32)
    new_codes, new_sub = np.empty(BLOCK, np.uint8), np.empty(groups, np.int8)
    for task in share(n * blocks, thread, team):
        row, b = task // blocks, task % blocks
        exponent = normalise(rows[row, b * BLOCK :], weights[b * BLOCK :], xs, ws)
        largest = np.float32(0)
        for g in range(groups):
            first, end = g * group, (g + 1) * group
            scales[g] = symmetric_alone(xs[first:end], ws[first:end], targets, half, lanes)
            largest = scales[g] if abs(scales[g]) > abs(largest) else largest
        trial = np.float64(largest) / -half_sub
        least = np.inf
        for _ in range(1 + ROUNDS):
            trial = to_half(trial, exponent)
            error = symmetric_groups(xs, ws, group, half, half_sub, np.float32(trial), scales, lanes, new_codes, new_sub)
            if not error < least:
                break
            least = error
            copy(new_codes, all_codes[row, b])
            copy(new_sub, subs[row, b])
            ds[row, b] = math.ldexp(trial, exponent)
            trial = symmetric_fit(xs, ws, group, half, new_codes, new_sub)
