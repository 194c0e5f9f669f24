"""The gated delta rule, and Mamba-2's, on the CPU. See `delta.gated_delta` for what they do, and for the names.

A task is a sequence and some of its value heads, side by side, that share a key head: it goes through the step's tokens in their
order, CHUNK of them at a time. Each column of a state is a recurrence of its own: a chunk's tokens run over a few, which the L1
cache holds, then over the next.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, floats_at, keep, load, scratch, store, whole_lines
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_delta import (
    COLUMNS,
    LINE,
    TOKENS,
    delta_step,
    delta_step_past,
    mamba_step,
    mamba_step_past,
    mamba_steps,
    settle,
)
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares

CHUNK = 16
LENGTH_EPS = np.float32(1e-6)


@njit(inline="always")
def _silu(x):
    e = exp_not_positive(-abs(x))
    return x * (np.float32(1.0) if not x < np.float32(0.0) else e) / (np.float32(1.0) + e)


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _convolve(taps, bias, has_bias, rows, first, count, channel, offset, out):
    """out [count] = silu of the convolution of these channels; rows [width, …]: their inputs, those of the token before the last
    `width - 1` first, as a ring that begins at `first`."""
    width = len(taps)
    if width == 4:  # that of all that are published; in one pass
        a, b, c, d = taps[0], taps[1], taps[2], taps[3]
        e, f, g, h = rows[first], rows[(first + 1) % 4], rows[(first + 2) % 4], rows[(first + 3) % 4]
        for i in range(count):
            total = load(a, channel + i) * e[offset + i] + load(b, channel + i) * f[offset + i]
            total = total + load(c, channel + i) * g[offset + i] + load(d, channel + i) * h[offset + i]
            out[i] = _silu(total + load(bias, channel + i) if has_bias else total)
        return
    for i in range(count):
        out[i] = load(bias, channel + i) if has_bias else np.float32(0.0)
    for k in range(width):
        tap, row = taps[k], rows[(first + k) % width]
        for i in range(count):
            out[i] += load(tap, channel + i) * row[offset + i]
    for i in range(count):
        out[i] = _silu(out[i])


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _gather(line, firsts, sizes, row):
    """row = a token's inputs of q, k and v, of one head each."""
    offset = 0
    for part in range(3):
        for i in range(sizes[part]):
            row[offset + i] = load(line, firsts[part] + i)
        offset += sizes[part]


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _scatter(row, firsts, sizes, with_keys, line):
    """The way back; q and k only by one of those that share them."""
    offset = 0
    for part in range(3):
        if part == 2 or with_keys:
            for i in range(sizes[part]):
                store(line, firsts[part] + i, row[offset + i])
        offset += sizes[part]


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _divide_by_length(x, factor):
    inverse = factor / np.sqrt(sum_of_squares(np.float32(0), x.ctypes.data, x.size) + LENGTH_EPS)
    for i in range(x.size):
        x[i] = x[i] * inverse


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _mix(taps, bias, has_bias, mamba, ring, oldest, firsts, sizes, q, k, v, product):
    """q, k and v of a token, by the inputs of it and those before it. Returns k . q. product [key_dim]: scratch."""
    _convolve(taps, bias, has_bias, ring, oldest, sizes[0], firsts[0], 0, q)
    _convolve(taps, bias, has_bias, ring, oldest, sizes[1], firsts[1], sizes[0], k)
    _convolve(taps, bias, has_bias, ring, oldest, sizes[2], firsts[2], sizes[0] + sizes[1], v)
    if not mamba:
        _divide_by_length(q, np.float32(1.0) / np.sqrt(np.float32(q.size)))
        _divide_by_length(k, np.float32(1.0))
    for i in range(q.size):
        product[i] = q[i] * k[i]
    return sum_f32(product.ctypes.data, q.size)


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _finish(found, gains, eps, z, first_z, line, first):
    """line[first …] = norm(found) * silu(z)."""
    total = sum_of_squares(np.float32(0), found.ctypes.data, found.size)
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(found.size) + np.float32(eps))
    for i in range(found.size):
        store(line, first + i, found[i] * inverse * gains[i] * _silu(load(z, first_z + i)))


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _finish_mamba(found, v, skip, z, first_z, line, first):
    """line[first …] = (found + skip * v) * silu(z)."""
    for i in range(found.size):
        store(line, first + i, (found[i] + skip * v[i]) * _silu(load(z, first_z + i)))


@njit(inline="always")
def _softplus(x):
    return max(x, np.float32(0.0)) + np.log1p(np.exp(-abs(x)))


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _step(source, target, stride, rows, count, k, q, v, out, kept, taken, beta, alike):
    """See `simd_delta.delta_step`, of any number of columns and rows."""
    key, query, value, found = floats_at(k, (rows,)), floats_at(q, (rows,)), floats_at(v, (count,)), floats_at(out, (count,))
    for j in range(count):
        seen = finds = np.float32(0.0)
        for i in range(rows):
            number = floats_at(source + i * stride + 4 * j, (1,))[0]
            seen += number * key[i]
            finds += number * query[i]
        change = beta * (value[j] - taken * seen)
        found[j] = alike * change + kept * finds
        for i in range(rows):
            number = floats_at(source + i * stride + 4 * j, (1,))[0]
            floats_at(target + i * stride + 4 * j, (1,))[0] = kept * number + key[i] * change


@njit(nogil=True, error_model="numpy")
def _mamba_columns(source, target, stride, rows, count, here, kept, step, past):
    """Mamba-2's rule over COLUMNS of a state and some tokens. here: addresses of k, q, v and out, bytes from token to token."""
    k, q, v, out, key_bytes, value_bytes = here
    c = np.int64(0)
    while c < count:
        at_once = TOKENS if count - c >= TOKENS else np.int64(1)
        own = (k + c * key_bytes, q + c * key_bytes, v + c * value_bytes, out + c * value_bytes)
        if at_once > 1:
            for half in range(0, 4 * COLUMNS, 2 * COLUMNS):
                mamba_steps(
                    source + half, target + half, stride, rows, own[0], own[1], own[2] + half, own[3] + half, key_bytes,
                    value_bytes, kept + 4 * c, step + 4 * c,
                )  # fmt: skip
        elif past:
            mamba_step_past(source, target, stride, rows, k, q, v, out, key_bytes, value_bytes, kept, step)
        else:
            mamba_step(
                source, target, stride, rows, own[0], own[1], own[2], own[3], key_bytes, value_bytes, kept + 4 * c, step + 4 * c
            )
        c += at_once
        source = target


@kernel(fastmath=FAST)
def gated_delta(arguments, thread, team):
    """projected [T, channels + V * D]: q and k of K heads of E dims, v and z of V heads of D. gates [T, 2 V] fp32: b and a. taps
    [width, channels]. decay, decay_bias [V], norm [D] fp32. states [N, 2, V, E, D] fp32, inputs [N, 2, width - 1, channels],
    stamps [N, 2, V] int32. starts [B + 1], lens [B] int32; tables [B, P] int32. out [T, V * D].
    Where skip is not 0, [V] fp32, the rule is Mamba-2's: gates [T, V]. taps_bias [channels], or 0 for none. together: value
    heads a task.
    """
    (
        tag, projected, gates, num_tokens, taps, width, decay, decay_bias, norm, skip, taps_bias, num_keys, key_dim, num_values,
        value_dim, together, tiled, states, inputs, stamps, num_blocks, block_size, starts, lens, tables, num_sequences,
        table_width, out, eps,
    ) = fields(arguments)  # fmt: skip
    values = num_values * value_dim
    channels = 2 * num_keys * key_dim + values
    source = carray(typed_pointer(projected, tag), (num_tokens, channels + values))
    result = carray(typed_pointer(out, tag), (num_tokens, values))
    weight = carray(typed_pointer(taps, tag), (width, channels))
    inputs_of = carray(typed_pointer(inputs, tag), (num_blocks, 2, width - 1, channels))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_blocks, 2, num_values))
    mamba, has_bias = skip != 0, taps_bias != 0
    bias = carray(typed_pointer(taps_bias if has_bias else taps, tag), (channels,))
    gate_of, gains = floats_at(gates, (num_tokens, num_values if mamba else 2 * num_values)), floats_at(norm, (value_dim,))
    skip_of = floats_at(skip if mamba else decay, (num_values,))
    decay_of, bias_of = floats_at(decay, (num_values,)), floats_at(decay_bias, (num_values,))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    table_of = carray(typed_pointer(tables, np.int32(0)), (num_sequences, table_width))

    sizes, own = (key_dim, key_dim, together * value_dim), 2 * key_dim + together * value_dim
    line_k, line_v = whole_lines(4 * key_dim), whole_lines(4 * together * value_dim)
    memory = scratch(whole_lines(4 * width * own) + CHUNK * (2 * line_k + 2 * line_v) + line_k + 4 * 4 * CHUNK)
    ring = floats_at(memory.ctypes.data, (width, own))  # inputs of the token at p, p modulo width
    at_q = memory.ctypes.data + whole_lines(4 * width * own)
    at_k = at_q + CHUNK * line_k
    at_v = at_k + CHUNK * line_k
    at_found = at_v + CHUNK * line_v
    product = floats_at(at_found + CHUNK * line_v, (key_dim,))
    kept, taken, beta, alike = floats_at(at_found + CHUNK * line_v + line_k, (4, CHUNK))

    tasks = num_values // together
    for task in share(num_sequences * tasks, thread, team):
        sequence, head = task // tasks, task % tasks * together
        group = num_values // num_keys
        key_head = head % num_keys if tiled else head // group
        keeps_keys = head < num_keys if tiled else head % group == 0
        firsts = (key_head * key_dim, (num_keys + key_head) * key_dim, 2 * num_keys * key_dim + head * value_dim)
        begin, end = start_of[sequence], start_of[sequence + 1]
        position = np.int64(len_of[sequence] - (end - begin))

        # The block and the place in it that the step begins with
        read_block, place = np.int64(-1), np.int64(0)
        if position > 0:
            read_block, place = np.int64(table_of[sequence, (position - 1) // block_size]), np.int64(-1)
            for each in range(2):
                if stamp_of[read_block, each, head] == position:
                    place = np.int64(each)
        if place < 0:
            for t in range(begin, end):
                for i in range(together * value_dim):
                    store(result[t], head * value_dim + i, np.float32(np.nan))
            continue
        for back in range(1, width):
            row = ring[(position - back) % width]
            if position > 0:
                _gather(inputs_of[read_block, place, width - 1 - back], firsts, sizes, row)
            else:
                for i in range(own):
                    row[i] = np.float32(0.0)
        past = end - begin == 1 and states % LINE == 0 and 4 * value_dim % LINE == 0
        state = states + ((read_block * 2 + place) * num_values + head) * 4 * key_dim * value_dim

        t = np.int64(begin)
        while t < end:
            block = np.int64(table_of[sequence, position // block_size])
            target_place = 1 - place if block == read_block else np.int64(0)
            target = states + ((block * 2 + target_place) * num_values + head) * 4 * key_dim * value_dim
            if position == 0:
                zeros = floats_at(target, (together * key_dim * value_dim,))
                for i in range(together * key_dim * value_dim):
                    zeros[i] = np.float32(0.0)
                state = target
            count = min(min(CHUNK, end - t), block_size - position % block_size)
            for c in range(count):
                _gather(source[t + c], firsts, sizes, ring[(position + c) % width])
                q, k = floats_at(at_q + c * line_k, (key_dim,)), floats_at(at_k + c * line_k, (key_dim,))
                v = floats_at(at_v + c * line_v, (together * value_dim,))
                oldest = (position + c + 1) % width
                alike[c] = _mix(weight, bias, has_bias, mamba, ring, oldest, firsts, sizes, q, k, v, product)
            for h in range(head, head + together):
                for c in range(count):
                    if mamba:
                        beta[c] = _softplus(gate_of[t + c, h] + bias_of[h])
                        kept[c], taken[c] = np.exp(decay_of[h] * beta[c]), np.float32(0.0)
                    else:
                        beta[c] = np.float32(1.0) / (np.float32(1.0) + np.exp(-gate_of[t + c, h]))
                        kept[c] = np.exp(decay_of[h] * _softplus(gate_of[t + c, num_values + h] + bias_of[h]))
                        taken[c] = kept[c]
                behind, beside = 4 * (h - head) * key_dim * value_dim, 4 * (h - head) * value_dim
                for first in range(0, value_dim, COLUMNS):
                    columns, offset = min(COLUMNS, value_dim - first), beside + 4 * first
                    seen, at = state + behind + 4 * first, target + behind + 4 * first
                    if mamba and columns == COLUMNS:
                        here = (at_k, at_q, at_v + offset, at_found + offset, line_k, line_v)
                        _mamba_columns(seen, at, 4 * value_dim, key_dim, count, here, kept.ctypes.data, beta.ctypes.data, past)
                        continue
                    for c in range(count):
                        q, k = at_q + c * line_k, at_k + c * line_k
                        v, found = at_v + c * line_v + offset, at_found + c * line_v + offset
                        gate = kept[c], taken[c], beta[c], alike[c]
                        if past and columns == COLUMNS:
                            delta_step_past(seen, at, 4 * value_dim, key_dim, k, q, v, found, *gate)
                        elif columns == COLUMNS:
                            delta_step(seen, at, 4 * value_dim, key_dim, k, q, v, found, *gate)
                        else:
                            _step(seen, at, 4 * value_dim, key_dim, columns, k, q, v, found, *gate)
                        seen = at
                for c in range(count):
                    found, first = floats_at(at_found + c * line_v + beside, (value_dim,)), h * value_dim
                    if mamba:
                        v = floats_at(at_v + c * line_v + beside, (value_dim,))
                        _finish_mamba(found, v, skip_of[h], source[t + c], channels + first, result[t + c], first)
                    else:
                        _finish(found, gains, eps, source[t + c], channels + first, result[t + c], first)
            state = target
            t += count
            position += count
            if position % block_size == 0 or t == end:
                for back in range(1, width):
                    line = inputs_of[block, target_place, width - 1 - back]
                    _scatter(ring[(position - back) % width], firsts, sizes, keeps_keys, line)
                for h in range(head, head + together):
                    if block != read_block:
                        stamp_of[block, 1, h] = 0
                    stamp_of[block, target_place, h] = position
    settle()
    keep(memory)
