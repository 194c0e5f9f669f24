"""The gated delta rule on the CPU. See `delta.gated_delta` for what it does, and for the names.

A task is a sequence and one of its value heads: it goes through the step's tokens in their order, CHUNK of them at a time. Each
column of a state is a recurrence of its own: a chunk's tokens run over a few, which the L1 cache holds, then over the next.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, floats_at, keep, load, scratch, store, whole_lines
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_delta import COLUMNS, ROWS, delta_step
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares

CHUNK = 16
LENGTH_EPS = np.float32(1e-6)


@njit(inline="always")
def _silu(x):
    e = exp_not_positive(-abs(x))
    return x * (np.float32(1.0) if not x < np.float32(0.0) else e) / (np.float32(1.0) + e)


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _convolve(taps, rows, first, count, channel, offset, out):
    """out [count] = silu of the convolution of these channels; rows [width, …]: their inputs, those of the token before the last
    `width - 1` first, as a ring that begins at `first`."""
    width = len(taps)
    if width == 4:  # that of all that are published; in one pass
        a, b, c, d = taps[0], taps[1], taps[2], taps[3]
        e, f, g, h = rows[first], rows[(first + 1) % 4], rows[(first + 2) % 4], rows[(first + 3) % 4]
        for i in range(count):
            total = load(a, channel + i) * e[offset + i] + load(b, channel + i) * f[offset + i]
            total = total + load(c, channel + i) * g[offset + i] + load(d, channel + i) * h[offset + i]
            out[i] = _silu(total)
        return
    for i in range(count):
        out[i] = np.float32(0.0)
    for k in range(width):
        tap, row = taps[k], rows[(first + k) % width]
        for i in range(count):
            out[i] += load(tap, channel + i) * row[offset + i]
    for i in range(count):
        out[i] = _silu(out[i])


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _divide_by_length(x, factor):
    inverse = factor / np.sqrt(sum_of_squares(np.float32(0), x.ctypes.data, x.size) + LENGTH_EPS)
    for i in range(x.size):
        x[i] = x[i] * inverse


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _step(source, target, rows, stride, count, k, q, v, out, kept, beta, alike):
    """See `simd_delta.delta_step`, of any number of columns and rows."""
    key, query, value, found = floats_at(k, (rows,)), floats_at(q, (rows,)), floats_at(v, (count,)), floats_at(out, (count,))
    for j in range(count):
        seen = sees = np.float32(0.0)
        for i in range(rows):
            number = floats_at(source + i * stride + 4 * j, (1,))[0]
            seen += number * key[i]
            sees += number * query[i]
        change = beta * (value[j] - kept * seen)
        found[j] = alike * change + kept * sees
        for i in range(rows):
            number = floats_at(source + i * stride + 4 * j, (1,))[0]
            floats_at(target + i * stride + 4 * j, (1,))[0] = kept * number + key[i] * change


@kernel(fastmath=FAST)
def gated_delta(arguments, thread, team):
    """projected [T, channels + V * D]: q and k of K heads of E dims, v and z of V heads of D. gates [T, 2 V] fp32: b and a. taps
    [width, channels]. decay, decay_bias [V], norm [D] fp32. states [N, 2, V, E, D] fp32, inputs [N, 2, width - 1, channels],
    stamps [N, 2, V] int32. starts [B + 1], lens [B] int32; tables [B, P] int32. out [T, V * D].
    """
    (
        tag, projected, gates, num_tokens, taps, width, decay, decay_bias, norm, num_keys, key_dim, num_values, value_dim, tiled,
        states, inputs, stamps, num_blocks, block_size, starts, lens, tables, num_sequences, table_width, out, eps,
    ) = fields(arguments)  # fmt: skip
    values = num_values * value_dim
    channels = 2 * num_keys * key_dim + values
    source = carray(typed_pointer(projected, tag), (num_tokens, channels + values))
    result = carray(typed_pointer(out, tag), (num_tokens, values))
    weight = carray(typed_pointer(taps, tag), (width, channels))
    kept_inputs = carray(typed_pointer(inputs, tag), (num_blocks, 2, width - 1, channels))
    gate_of = floats_at(gates, (num_tokens, 2 * num_values))
    decay_of, bias_of, gains = floats_at(decay, (num_values,)), floats_at(decay_bias, (num_values,)), floats_at(norm, (value_dim,))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_blocks, 2, num_values))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    table_of = carray(typed_pointer(tables, np.int32(0)), (num_sequences, table_width))

    own = 2 * key_dim + value_dim  # inputs of a task: q, k and v
    state_bytes = 4 * key_dim * value_dim
    line_k, line_v = whole_lines(4 * key_dim), whole_lines(4 * value_dim)
    memory = scratch(whole_lines(4 * width * own) + CHUNK * (2 * line_k + 2 * line_v) + line_k + 3 * 4 * CHUNK)
    base = memory.ctypes.data
    ring = floats_at(base, (width, own))
    at_q = base + whole_lines(4 * width * own)
    at_k = at_q + CHUNK * line_k
    at_v = at_k + CHUNK * line_k
    at_found = at_v + CHUNK * line_v
    product = floats_at(at_found + CHUNK * line_v, (key_dim,))
    kept, beta, alike = floats_at(at_found + CHUNK * line_v + line_k, (3, CHUNK))

    for task in share(num_sequences * num_values, thread, team):
        sequence, head = task // num_values, task % num_values
        shared = num_values // num_keys
        key_head = head % num_keys if tiled else head // shared
        writes_keys = head < num_keys if tiled else head % shared == 0
        begin, end = start_of[sequence], start_of[sequence + 1]
        position = len_of[sequence] - (end - begin)
        first_of = (key_head * key_dim, (num_keys + key_head) * key_dim, 2 * num_keys * key_dim + head * value_dim)
        size_of = (key_dim, key_dim, value_dim)

        # Where the state is that the step begins with, and the inputs before it
        read_block, place = np.int64(-1), np.int64(0)
        if position > 0:
            read_block = np.int64(table_of[sequence, (position - 1) // block_size])
            place = -1
            for each in range(2):
                if stamp_of[read_block, each, head] == position:
                    place = each
        if place < 0:
            for t in range(begin, end):
                for i in range(value_dim):
                    store(result[t], head * value_dim + i, np.float32(np.nan))
            continue
        for back in range(1, width):
            row = ring[(position - back) % width]
            offset = 0
            for part in range(3):
                for i in range(size_of[part]):
                    if position > 0:
                        row[offset + i] = load(kept_inputs[read_block, place, width - 1 - back], first_of[part] + i)
                    else:
                        row[offset + i] = np.float32(0.0)
                offset += size_of[part]
        state = states + ((read_block * 2 + place) * num_values + head) * state_bytes

        t = np.int64(begin)
        while t < end:
            block = np.int64(table_of[sequence, position // block_size])
            target_place = 1 - place if block == read_block else np.int64(0)
            target = states + ((block * 2 + target_place) * num_values + head) * state_bytes
            if position == 0:
                zeros = floats_at(target, (key_dim * value_dim,))
                for i in range(key_dim * value_dim):
                    zeros[i] = np.float32(0.0)
                state = target
            count = min(min(CHUNK, end - t), block_size - position % block_size)
            for c in range(count):
                row = ring[(position + c) % width]
                offset = 0
                for part in range(3):
                    line = source[t + c]
                    for i in range(size_of[part]):
                        row[offset + i] = load(line, first_of[part] + i)
                    offset += size_of[part]
                q, k = floats_at(at_q + c * line_k, (key_dim,)), floats_at(at_k + c * line_k, (key_dim,))
                v = floats_at(at_v + c * line_v, (value_dim,))
                oldest = (position + c + 1) % width
                _convolve(weight, ring, oldest, key_dim, first_of[0], 0, q)
                _convolve(weight, ring, oldest, key_dim, first_of[1], key_dim, k)
                _convolve(weight, ring, oldest, value_dim, first_of[2], 2 * key_dim, v)
                _divide_by_length(q, np.float32(1.0) / np.sqrt(np.float32(key_dim)))
                _divide_by_length(k, np.float32(1.0))
                for i in range(key_dim):
                    product[i] = q[i] * k[i]
                alike[c] = sum_f32(product.ctypes.data, key_dim)
                b, a = gate_of[t + c, head], gate_of[t + c, num_values + head] + bias_of[head]
                beta[c] = np.float32(1.0) / (np.float32(1.0) + np.exp(-b))
                soft = max(a, np.float32(0.0)) + np.log1p(np.exp(-abs(a)))
                kept[c] = np.exp(decay_of[head] * soft)
            for strip in range(0, value_dim, COLUMNS):
                columns, seen = min(COLUMNS, value_dim - strip), state
                for c in range(count):
                    k, q, v, found = at_k + c * line_k, at_q + c * line_k, at_v + c * line_v, at_found + c * line_v
                    if columns == COLUMNS and key_dim % ROWS == 0:
                        delta_step(
                            seen + 4 * strip, target + 4 * strip, 4 * value_dim, key_dim, k, q, v + 4 * strip, found + 4 * strip,
                            kept[c], beta[c], alike[c],
                        )  # fmt: skip
                    else:
                        _step(
                            seen + 4 * strip, target + 4 * strip, key_dim, 4 * value_dim, columns, k, q, v + 4 * strip,
                            found + 4 * strip, kept[c], beta[c], alike[c],
                        )  # fmt: skip
                    seen = target
            state = target
            for c in range(count):
                found = floats_at(at_found + c * line_v, (value_dim,))
                total = sum_of_squares(np.float32(0), found.ctypes.data, value_dim)
                inverse = np.float32(1.0) / np.sqrt(total / np.float32(value_dim) + np.float32(eps))
                z, line = source[t + c], result[t + c]
                for i in range(value_dim):
                    gate = _silu(load(z, channels + head * value_dim + i))
                    store(line, head * value_dim + i, found[i] * inverse * gains[i] * gate)
            t += count
            position += count
            if position % block_size == 0 or t == end:
                for back in range(1, width):
                    row, line = ring[(position - back) % width], kept_inputs[block, target_place, width - 1 - back]
                    offset = 0
                    for part in range(3):
                        if part == 2 or writes_keys:
                            for i in range(size_of[part]):
                                store(line, first_of[part] + i, row[offset + i])
                        offset += size_of[part]
                if block != read_block:
                    stamp_of[block, 1, head] = 0
                stamp_of[block, target_place, head] = position
    keep(memory)
