"""The small operators of a layer on the CPU, each a single pass over its rows: norms, gated activations, and everything that
happens to q, k and v between their projection and attention.

`tag` says the element type by the type of a scalar (see cpu_numbers); everything else is addresses, counts and fp32 numbers.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_cache import BLOCK, encode, is_finite, put_scale
from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares

SILU, GELU_TANH, GELU, SWIGLU_OAI, SQUARED_RELU, RELU = 0, 1, 2, 3, 4, 5
SWIGLU_LIMIT = np.float32(7.0)
CHUNK = 4096  # numbers of a task that is not a row


@njit(inline="always")
def sigmoid(z):
    e = exp_not_positive(-abs(z))
    return (np.float32(1.0) if not z < np.float32(0.0) else e) / (np.float32(1.0) + e)


@njit(inline="always")
def _tanh_slope(x):
    """z of gelu_tanh(x) = x * sigmoid(z), 2 sqrt(2/pi) (x + 0.044715 x^3)."""
    return np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)


@njit(inline="always")
def _gelu(x):
    """x * (1 + erf(x / sqrt(2))) / 2, by Abramowitz and Stegun 7.1.26, whose error is 1.5e-7 at most. What is left of 1 - erf is
    taken as it is, so that numbers far below 0 keep their digits."""
    t = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911 * 0.7071067811865476) * abs(x))
    tail = np.float32(-1.453152027) + t * np.float32(1.061405429)
    tail = t * (np.float32(0.254829592) + t * (np.float32(-0.284496736) + t * (np.float32(1.421413741) + t * tail)))
    tail *= exp_not_positive(np.float32(-0.5) * x * x)
    return np.float32(0.5) * x * (tail if x < np.float32(0.0) else np.float32(2.0) - tail)


@kernel(fastmath=FAST)
def add_rms_norm(arguments, thread, team):
    """residual += x (skipped where residual is 0), then out = rms_norm(residual) * (offset + weight), row by row; with centered
    of what the row is without its mean, plus shift [width] where that is not 0. Rows lie row_stride numbers apart; out may be x,
    or residual. weight [num_gains, width]: rows take turns.

    The sum is rounded to the element type before it is squared, so that what is normalised is what the next layer adds to.
    """
    tag, x, residual, weight, shift, num_gains, out, num_rows, width, row_stride, centered, eps, offset = fields(arguments)
    shape = (num_rows, row_stride)
    added, result = carray(typed_pointer(x, tag), shape), carray(typed_pointer(out, tag), shape)
    stream = carray(typed_pointer(residual if residual != 0 else x, tag), shape)
    gains = carray(typed_pointer(weight, tag), (num_gains, width))
    shifts = carray(typed_pointer(shift if shift != 0 else weight, tag), (width,))
    memory = scratch(4 * width)
    beside = floats_at(memory.ctypes.data, (width,))
    for r in share(num_rows, thread, team):
        line, plus, target, scale = stream[r], added[r], result[r], gains[r % num_gains]
        if residual != 0:
            for i in range(width):
                store(line, i, load(line, i) + load(plus, i))
        if centered != 0:
            for i in range(width):
                beside[i] = load(line, i)
            mean = sum_f32(beside.ctypes.data, width) / np.float32(width)
            for i in range(width):
                beside[i] -= mean
            total = sum_of_squares(np.float32(0.0), beside.ctypes.data, width)
        else:
            total = sum_of_squares(tag, line.ctypes.data, width)
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(eps))
        if shift != 0:
            for i in range(width):
                store(target, i, beside[i] * inverse * (np.float32(offset) + load(scale, i)) + load(shifts, i))
        elif centered != 0:
            for i in range(width):
                store(target, i, beside[i] * inverse * (np.float32(offset) + load(scale, i)))
        else:
            for i in range(width):
                store(target, i, load(line, i) * inverse * (np.float32(offset) + load(scale, i)))
    keep(memory)


@kernel(fastmath=FAST)
def join_and_norm(arguments, thread, team):
    """residual = (residual + rms_norm(x) * (offset + gains)) * factor, the norm rounded to the element type as the sum is; then,
    where weight is not 0, out = rms_norm(residual) * (out_offset + weight), row by row."""
    tag, x, residual, gains, weight, out, num_rows, width, eps, offset, factor, out_eps, out_offset = fields(arguments)
    shape = (num_rows, width)
    added, stream = carray(typed_pointer(x, tag), shape), carray(typed_pointer(residual, tag), shape)
    result = carray(typed_pointer(out if out != 0 else x, tag), shape)
    first = carray(typed_pointer(gains, tag), (width,))
    second = carray(typed_pointer(weight if weight != 0 else gains, tag), (width,))
    memory = scratch(4 * width)
    row = carray(typed_pointer(memory.ctypes.data, tag), (width,))
    for r in share(num_rows, thread, team):
        plus, line, target = added[r], stream[r], result[r]
        total = sum_of_squares(tag, plus.ctypes.data, width)
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(eps))
        for i in range(width):
            store(row, i, load(plus, i) * inverse * (np.float32(offset) + load(first, i)))
        for i in range(width):
            store(line, i, (load(line, i) + load(row, i)) * np.float32(factor))
        if weight == 0:
            continue
        total = sum_of_squares(tag, line.ctypes.data, width)
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(out_eps))
        for i in range(width):
            store(target, i, load(line, i) * inverse * (np.float32(out_offset) + load(second, i)))
    keep(memory)


@kernel(fastmath=FAST)
def scale(arguments, thread, team):
    """x [size] *= factor; with a cap above 0, cap * tanh(x * factor / cap)."""
    tag, x, size, factor, cap = fields(arguments)
    numbers, bound = carray(typed_pointer(x, tag), (size,)), np.float32(cap)
    for chunk in share(-(-size // CHUNK), thread, team):
        for i in range(CHUNK * chunk, min(size, CHUNK * (chunk + 1))):
            value = load(numbers, i) * np.float32(factor)
            store(numbers, i, bound * np.tanh(value / bound) if bound > 0 else value)


@kernel(fastmath=FAST)
def activation(arguments, thread, team):
    """x [size] = act(x) of each number by itself. kind: SQUARED_RELU, GELU_TANH or GELU."""
    tag, x, size, kind = fields(arguments)
    numbers = carray(typed_pointer(x, tag), (size,))
    for chunk in share(-(-size // CHUNK), thread, team):
        own = numbers[CHUNK * chunk : min(size, CHUNK * (chunk + 1))]
        if kind == SQUARED_RELU:
            for i in range(own.size):
                value = load(own, i)
                value = np.float32(0.0) if value < np.float32(0.0) else value
                store(own, i, value * value)
        elif kind == GELU_TANH:
            for i in range(own.size):
                value = load(own, i)
                store(own, i, value * sigmoid(_tanh_slope(value)))
        else:
            for i in range(own.size):
                store(own, i, _gelu(load(own, i)))


@kernel(fastmath=FAST)
def gated_activation(arguments, thread, team):
    """out [num_rows, width] = act(gate) * up, whose rows lie strides apart. kind: SILU, GELU_TANH, GELU (by erf), SWIGLU_OAI,
    SQUARED_RELU or RELU (see reference.gated_activation)."""
    tag, gate_rows, gate_stride, up_rows, up_stride, out, num_rows, width, kind = fields(arguments)
    gates = carray(typed_pointer(gate_rows, tag), (num_rows, gate_stride))
    ups = carray(typed_pointer(up_rows, tag), (num_rows, up_stride))
    result = carray(typed_pointer(out, tag), (num_rows, width))
    for r in share(num_rows, thread, team):
        gate, up, target = gates[r, :width], ups[r, :width], result[r]
        if kind == SILU or kind == GELU_TANH:
            for i in range(width):
                g = load(gate, i)
                store(target, i, g * sigmoid(g if kind == SILU else _tanh_slope(g)) * load(up, i))
        elif kind == SWIGLU_OAI:
            for i in range(width):
                g, u = load(gate, i), load(up, i)
                g = SWIGLU_LIMIT if g > SWIGLU_LIMIT else g
                u = SWIGLU_LIMIT if u > SWIGLU_LIMIT else (-SWIGLU_LIMIT if u < -SWIGLU_LIMIT else u)
                store(target, i, g * sigmoid(np.float32(1.702) * g) * (u + np.float32(1.0)))
        elif kind == SQUARED_RELU or kind == RELU:
            for i in range(width):
                g = load(gate, i)
                g = np.float32(0.0) if g < np.float32(0.0) else g
                store(target, i, (g if kind == RELU else g * g) * load(up, i))
        else:
            for i in range(width):
                store(target, i, _gelu(load(gate, i)) * load(up, i))


@inner(fastmath=FAST)
def _norm_and_rotate(tag, source, buffer, weight, has_norm, eps, norm_offset, norm_last, cos, sin, rotary, interleaved):
    """One head: buffer = rope(rms_norm(source) * (norm_offset + weight)), or with norm_last the norm of what rope makes of it,
    whose root mean square is the same. Dimensions past `rotary` are not rotated."""
    width = buffer.size
    if has_norm:
        total = sum_of_squares(tag, source.ctypes.data, width)
        inverse = np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(eps))
        for i in range(width):
            gain = np.float32(1.0) if norm_last else np.float32(norm_offset) + load(weight, i)
            buffer[i] = load(source, i) * inverse * gain
    else:
        for i in range(width):
            buffer[i] = load(source, i)
    half = rotary // 2
    if interleaved:
        for i in range(half):
            a, b = buffer[2 * i], buffer[2 * i + 1]
            buffer[2 * i] = a * cos[i] - b * sin[i]
            buffer[2 * i + 1] = b * cos[i] + a * sin[i]
    else:
        for i in range(half):
            a, b = buffer[i], buffer[half + i]
            buffer[i] = a * cos[i] - b * sin[i]
            buffer[half + i] = b * cos[i] + a * sin[i]
    if has_norm and norm_last:
        for i in range(width):
            buffer[i] *= np.float32(norm_offset) + load(weight, i)


@kernel()
def rope_and_cache(arguments, thread, team):
    """q_out [T, heads, dim] = rope(norm(q)); rope(norm(k)) and norm(v) go to their slots of the cache (layout: cpu_attention;
    kinds: cpu_cache).

    qkv [T, (heads + kv_heads) * dim + kv_heads * num_values], whose rows lie row_stride numbers apart. With keys 1 it has no v: K
    is V as well, and there is no v_cache. With keys 0 it has q alone, and nothing is written. q_norm, k_norm, v_norm:
    addresses of [dim], the last of [num_values], or 0; with norm_last q and k are normed behind their rotation, and q_norm is
    [heads, dim].
    cos, sin: [T, rotary / 2] fp32. k_record, v_record: bytes of one head's part of a block. run [T] int32: tokens from this one
    to the end of its sequence in this step. The token that opens a block zeroes the values behind its run, because attention
    multiplies a masked value by 0, and stale memory may hold a NaN. For the same reason a v that is not finite is kept as zeros,
    and its k as NaN: who sees it finds NaN, and nobody else does.
    """
    (
        tag, k_kind, v_kind, pair, qkv, row_stride, num_tokens, heads, kv_heads, dim, num_values, padded, keys, q_norm, k_norm,
        v_norm, cos, sin, rotary, interleaved, slots, run, k_cache, v_cache, k_record, v_record, q_out, norm_last, eps,
        norm_offset,
    ) = fields(arguments)  # fmt: skip
    rows = carray(typed_pointer(qkv, tag), (num_tokens, row_stride))
    queries = carray(typed_pointer(q_out, tag), (num_tokens, heads, dim))
    q_weights = carray(typed_pointer(q_norm, tag), (heads, dim))
    k_weight = carray(typed_pointer(k_norm, tag), (dim,))
    v_weight = carray(typed_pointer(v_norm, tag), (num_values,))
    angle_cos = carray(typed_pointer(cos, np.float32(0)), (num_tokens, rotary // 2))
    angle_sin = carray(typed_pointer(sin, np.float32(0)), (num_tokens, rotary // 2))
    slot_of = carray(typed_pointer(slots, np.int64(0)), (num_tokens,))
    run_of = carray(typed_pointer(run, np.int32(0)), (num_tokens,))
    group, last = heads // kv_heads, norm_last != 0
    memory = scratch(12 * dim)
    buffer, value = floats_at(memory.ctypes.data, (dim,)), floats_at(memory.ctypes.data, (num_values,))
    k_codes = carray(typed_pointer(memory.ctypes.data + 4 * dim, k_kind), (dim,))
    v_codes = carray(typed_pointer(memory.ctypes.data + 8 * dim, v_kind), (num_values,))
    for task in share(num_tokens * kv_heads, thread, team):
        t, h = task // kv_heads, task % kv_heads
        parts = heads + min(keys, 1) * kv_heads
        source = rows[t, : parts * dim].reshape((parts, dim))
        c, s = angle_cos[t], angle_sin[t]
        for i in range(h * group, (h + 1) * group):
            q_weight = q_weights[i if last else 0]
            _norm_and_rotate(tag, source[i], buffer, q_weight, q_norm != 0, eps, norm_offset, last, c, s, rotary, interleaved)
            target = queries[t, i]
            for d in range(dim):
                store(target, d, buffer[d])
        if keys == 0:
            continue
        block, offset = slot_of[t] // BLOCK, slot_of[t] % BLOCK
        v_scale, sound = np.float32(0.0), True
        if keys != 1:
            first = parts * dim + h * num_values
            row = rows[t, first : first + num_values]
            _norm_and_rotate(tag, row, value, v_weight, v_norm != 0, eps, norm_offset, False, c, s, 0, interleaved)
            v_scale = encode(v_kind, value, v_codes)
            sound = is_finite(v_kind, v_codes, v_scale)
        record = k_cache + (block * kv_heads + h) * k_record
        key = carray(typed_pointer(record, k_kind), (dim // pair, BLOCK, pair))
        part = source[heads + h]
        _norm_and_rotate(tag, part, buffer, k_weight, k_norm != 0, eps, norm_offset, last, c, s, rotary, interleaved)
        if not sound:
            v_scale = np.float32(0.0)
            for d in range(dim):
                buffer[d] = np.float32(np.nan)
            for d in range(num_values):
                v_codes[d] = v_kind
        put_scale(k_kind, record, dim * BLOCK, offset, encode(k_kind, buffer, k_codes))
        if pair == 2:  # a division of every place would take longer than all the rest
            for p in range(dim // 2):
                key[p, offset, 0], key[p, offset, 1] = k_codes[2 * p], k_codes[2 * p + 1]
        else:
            for d in range(dim):
                key[d, offset, 0] = k_codes[d]
        if keys == 1:
            if offset == 0:
                for o in range(run_of[t], BLOCK):
                    put_scale(k_kind, record, dim * BLOCK, o, np.float32(0.0))
                    for d in range(dim):
                        key[d // pair, o, d % pair] = k_kind
            continue
        record = v_cache + (block * kv_heads + h) * v_record
        values = carray(typed_pointer(record, v_kind), (BLOCK // pair, padded, pair))
        column = values[offset // pair, :, offset % pair]
        put_scale(v_kind, record, padded * BLOCK, offset, v_scale)
        for d in range(num_values):
            column[d] = v_codes[d]
        for d in range(num_values, padded):
            column[d] = v_kind
        if offset == 0:
            for o in range(run_of[t], BLOCK):
                put_scale(v_kind, record, padded * BLOCK, o, np.float32(0.0))
                stale = values[o // pair, :, o % pair]
                for d in range(padded):
                    stale[d] = v_kind
    keep(memory)
