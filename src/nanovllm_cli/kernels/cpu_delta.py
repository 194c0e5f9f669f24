"""The gated delta rule, with a decay a head or a channel, and Mamba-2's, on the CPU. See `delta.gated_delta` for what they do,
and for the names.

A task is a sequence and some of its value heads, side by side, that share a key head: it goes through the step's tokens in their
order, CHUNK of them at a time. Each column of a state is a recurrence of its own: a chunk's tokens run over a few, which the L1
cache holds, then over the next.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_numbers import (
    FAST,
    exp_not_positive,
    floats_at,
    keep,
    load,
    scratch,
    softplus,
    store,
    whole_lines,
)
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_delta import (
    COLUMNS,
    LINE,
    TOKENS,
    channel_step,
    channel_step_past,
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
def silu(x):
    e = exp_not_positive(-abs(x))
    return x * (np.float32(1.0) if not x < np.float32(0.0) else e) / (np.float32(1.0) + e)


@inner(fastmath=FAST)
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
            out[i] = silu(total + load(bias, channel + i) if has_bias else total)
        return
    for i in range(count):
        out[i] = load(bias, channel + i) if has_bias else np.float32(0.0)
    for k in range(width):
        tap, row = taps[k], rows[(first + k) % width]
        for i in range(count):
            out[i] += load(tap, channel + i) * row[offset + i]
    for i in range(count):
        out[i] = silu(out[i])


@inner(fastmath=FAST)
def _gather(line, firsts, sizes, row):
    """row = a token's inputs of q, k and v, of one head each."""
    offset = 0
    for part in range(3):
        for i in range(sizes[part]):
            row[offset + i] = load(line, firsts[part] + i)
        offset += sizes[part]


@inner(fastmath=FAST)
def _scatter(row, firsts, sizes, with_keys, line):
    """The way back; q and k only by one of those that share them."""
    offset = 0
    for part in range(3):
        if part == 2 or with_keys:
            for i in range(sizes[part]):
                store(line, firsts[part] + i, row[offset + i])
        offset += sizes[part]


@inner(fastmath=FAST)
def _divide_by_length(x, factor):
    inverse = factor / np.sqrt(sum_of_squares(np.float32(0), x.ctypes.data, x.size) + LENGTH_EPS)
    for i in range(x.size):
        x[i] = x[i] * inverse


@inner(fastmath=FAST)
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


@inner(fastmath=FAST)
def _finish(found, gains, eps, z, first_z, line, first):
    """line[first …] = norm(found) * silu(z)."""
    total = sum_of_squares(np.float32(0), found.ctypes.data, found.size)
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(found.size) + np.float32(eps))
    for i in range(found.size):
        store(line, first + i, found[i] * inverse * gains[i] * silu(load(z, first_z + i)))


@inner(fastmath=FAST)
def _finish_by_sigmoid(found, gains, eps, z, first_z, line, first):
    """line[first …] = norm(found) * sigmoid(z)."""
    total = sum_of_squares(np.float32(0), found.ctypes.data, found.size)
    inverse = np.float32(1.0) / np.sqrt(total / np.float32(found.size) + np.float32(eps))
    for i in range(found.size):
        gate = np.float32(1.0) / (np.float32(1.0) + np.exp(-load(z, first_z + i)))
        store(line, first + i, found[i] * inverse * gains[i] * gate)


@inner(fastmath=FAST)
def _finish_mamba(found, v, skip, z, first_z, line, first):
    """line[first …] = (found + skip * v) * silu(z)."""
    for i in range(found.size):
        store(line, first + i, (found[i] + skip * v[i]) * silu(load(z, first_z + i)))


@inner(fastmath=FAST)
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


@inner(fastmath=FAST)
def _channel_step(source, target, stride, rows, count, k, q, v, out, key, kept, beta, alike):
    """See `simd_delta.channel_step`, of any number of columns and rows."""
    seen_by, found_by = floats_at(k, (rows,)), floats_at(q, (rows,))
    added, keeps = floats_at(key, (rows,)), floats_at(kept, (rows,))
    value, found = floats_at(v, (count,)), floats_at(out, (count,))
    for j in range(count):
        seen = finds = np.float32(0.0)
        for i in range(rows):
            number = floats_at(source + i * stride + 4 * j, (1,))[0]
            seen += number * seen_by[i]
            finds += number * found_by[i]
        change = beta * (value[j] - seen)
        found[j] = alike * change + finds
        for i in range(rows):
            number = floats_at(source + i * stride + 4 * j, (1,))[0]
            floats_at(target + i * stride + 4 * j, (1,))[0] = keeps[i] * number + added[i] * change


@inner(fastmath=FAST)
def _decay_channels(rows, rates, bias, decay, floor, q, k, kept, kept_q, kept_k):
    """What a token keeps of each row of a head's state, and q and k times that; all but decay and floor are addresses."""
    rate, bias_of, query, key = floats_at(rates, (rows,)), floats_at(bias, (rows,)), floats_at(q, (rows,)), floats_at(k, (rows,))
    keeps, of_q, of_k = floats_at(kept, (rows,)), floats_at(kept_q, (rows,)), floats_at(kept_k, (rows,))
    if floor == 0:
        for i in range(rows):
            keeps[i] = np.exp(decay * softplus(rate[i] + bias_of[i]))
    else:
        for i in range(rows):
            keeps[i] = np.exp(floor / (np.float32(1.0) + np.exp(decay * (rate[i] + bias_of[i]))))
    for i in range(rows):
        of_q[i], of_k[i] = query[i] * keeps[i], key[i] * keeps[i]


@inner
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


@inner
def place_of(stamps, reaches, head, position):
    """Of a state's two places that from which a step goes on whose first token is at `position`: the later of those that are not
    behind it, if its guesses reach that far. -1 where none does."""
    place = np.int64(-1)
    for each in range(2):
        stamp = stamps[each, head]
        if 0 < stamp <= position and (place < 0 or stamp > stamps[place, head]):
            place = np.int64(each)
    return place if place < 0 or reaches[place, head] >= position else np.int64(-1)


@inner
def step_of(sequence, head, start_of, len_of, known_of, index_of, stamp_of, reach_of):
    """Of a sequence its state, its first row, how many rows there are, at which position, and how many are known. Of a head of it
    the place from which it goes on, -1 where there is none, and behind how many tokens that is; the place that is written, and
    the position of the first guess beside that."""
    index, begin = np.int64(index_of[sequence]), np.int64(start_of[sequence])
    count = np.int64(start_of[sequence + 1]) - begin
    position = np.int64(len_of[sequence]) - count
    known = np.int64(known_of[sequence]) - position
    place = place_of(stamp_of[index], reach_of[index], head, position) if position > 0 else np.int64(1)
    stamp = np.int64(stamp_of[index, place, head]) if position > 0 and place >= 0 else np.int64(0)
    # Known tokens go into the other place. Of a step that has none, as a model has that drafts, guesses lie behind those that are
    # there.
    target, first_guess = (1 - place, position + known) if known > 0 else (place, stamp)
    return index, begin, count, position, known, place, stamp, target, first_guess


@inner
def store_nans(rows, begin, count, first, width):
    """NaN for some columns of `count` rows."""
    for t in range(begin, begin + count):
        for i in range(first, first + width):
            store(rows[t], i, np.float32(np.nan))


@kernel(fastmath=FAST)
def gated_delta(arguments, thread, team):
    """projected [T, channels + V * D]: q and k of K heads of E dims, v and z of V heads of D. gates [T, 2 V] fp32: b and a. taps
    [width, channels]. decay, decay_bias [V], norm [D] fp32. Of N states, two places: states [N, 2, V, E, D] fp32, inputs
    [N, 2, width - 1, channels], guesses [N, 2, G, channels] and guess_gates [N, 2, G, 2 V] fp32, stamps and reaches [N, 2, V]
    int32. starts [B + 1], lens, known_lens, state_of [B] int32. out [T, V * D].
    Where skip is not 0, [V] fp32, the rule is Mamba-2's: gates [T, V]. taps_bias [channels], or 0 for none. together: value
    heads a task. Where rates is not 0, [T, V, E] fp32, a state decays by channel: gates [T, V] are b, rates a, decay_bias is
    [V, E], guess_gates have b and then a; projected [T, channels] has no z, which is [T, V * D]. most: the largest beta.
    floor: see `states.ByChannel`. by_sigmoid: outputs are multiplied with sigmoids of z, as they are by channel.
    """
    (
        tag, projected, gates, num_tokens, taps, width, decay, decay_bias, norm, skip, taps_bias, num_keys, key_dim, num_values,
        value_dim, together, tiled, states, inputs, guesses, guess_gates, stamps, reaches, num_states, max_guesses, starts, lens,
        known_lens, state_of, num_sequences, rates, z, out, by_sigmoid, eps, most, floor,
    ) = fields(arguments)  # fmt: skip
    values, least = num_values * value_dim, np.float32(floor)
    channels = 2 * num_keys * key_dim + values
    mamba, has_bias, by_channel = skip != 0, taps_bias != 0, rates != 0
    own_gates = num_values if mamba or by_channel else 2 * num_values
    num_gates = own_gates + num_values * key_dim if by_channel else own_gates
    width_of, z_width, first_z = (channels, values, 0) if by_channel else (channels + values, channels + values, channels)
    source = carray(typed_pointer(projected, tag), (num_tokens, width_of))
    z_of = carray(typed_pointer(z if by_channel else projected, tag), (num_tokens, z_width))
    result = carray(typed_pointer(out, tag), (num_tokens, values))
    weight = carray(typed_pointer(taps, tag), (width, channels))
    inputs_of = carray(typed_pointer(inputs, tag), (num_states, 2, width - 1, channels))
    guessed_of = carray(typed_pointer(guesses, tag), (num_states, 2, max_guesses, channels))
    guess_gates_of = floats_at(guess_gates, (num_states, 2, max_guesses, num_gates))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_states, 2, num_values))
    reach_of = carray(typed_pointer(reaches, np.int32(0)), (num_states, 2, num_values))
    bias = carray(typed_pointer(taps_bias if has_bias else taps, tag), (channels,))
    gate_of, gains = floats_at(gates, (num_tokens, own_gates)), floats_at(norm, (value_dim,))
    skip_of = floats_at(skip if mamba else decay, (num_values,))
    decay_of, bias_of = floats_at(decay, (num_values,)), floats_at(decay_bias, (num_values,))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    known_of = carray(typed_pointer(known_lens, np.int32(0)), (num_sequences,))
    index_of = carray(typed_pointer(state_of, np.int32(0)), (num_sequences,))

    sizes, own = (key_dim, key_dim, together * value_dim), 2 * key_dim + together * value_dim
    line_k, line_v = whole_lines(4 * key_dim), whole_lines(4 * together * value_dim)
    size = 4 * key_dim * value_dim
    before = whole_lines(4 * width * own)
    tokens_end = before + CHUNK * (2 * line_k + 2 * line_v) + line_k + whole_lines(4 * 4 * CHUNK)
    passing_end = tokens_end + (together * size if max_guesses else 0)
    memory = scratch(passing_end + (3 * CHUNK * line_k if by_channel else 0))
    ring = floats_at(memory.ctypes.data, (width, own))  # inputs of the token at p, p modulo width
    at_q = memory.ctypes.data + before
    at_k = at_q + CHUNK * line_k
    at_v = at_k + CHUNK * line_k
    at_found = at_v + CHUNK * line_v
    product = floats_at(at_found + CHUNK * line_v, (key_dim,))
    kept, taken, beta, alike = floats_at(at_found + CHUNK * line_v + line_k, (4, CHUNK))
    passing = memory.ctypes.data + tokens_end  # the state behind guesses, which nothing keeps
    at_kept = memory.ctypes.data + passing_end  # of each channel, and q and k times that
    at_kept_q = at_kept + CHUNK * line_k
    at_kept_k = at_kept_q + CHUNK * line_k

    tasks = num_values // together
    for task in share(num_sequences * tasks, thread, team):
        sequence, head = task // tasks, task % tasks * together
        group = num_values // num_keys
        key_head = head % num_keys if tiled else head // group
        keeps_keys = head < num_keys if tiled else head % group == 0
        firsts = (key_head * key_dim, (num_keys + key_head) * key_dim, 2 * num_keys * key_dim + head * value_dim)
        index, begin, count, position, known, place, stamp, target_place, first_guess = step_of(
            sequence, head, start_of, len_of, known_of, index_of, stamp_of, reach_of
        )
        if place < 0:
            store_nans(result, begin, count, head * value_dim, together * value_dim)
            continue
        for back in range(1, width):
            row = ring[(stamp - back) % width]
            if stamp > 0:
                _gather(inputs_of[index, place, width - 1 - back], firsts, sizes, row)
            else:
                for i in range(own):
                    row[i] = np.float32(0.0)
        target = states + ((index * 2 + target_place) * num_values + head) * size
        state = states + ((index * 2 + place) * num_values + head) * size
        past = count == 1 and known == 1 and stamp == position and states % LINE == 0 and 4 * value_dim % LINE == 0

        t = stamp - position  # below 0 are guesses that held
        while t < count:
            is_passing = known <= 0 or t >= known
            chunk = min(CHUNK, count - t) if is_passing else min(CHUNK, known - t)
            left = passing if is_passing else target
            if position + t == 0:
                zeros = floats_at(left, (together * key_dim * value_dim,))
                for i in range(together * key_dim * value_dim):
                    zeros[i] = np.float32(0.0)
                state = left
            for c in range(chunk):
                at = position + t + c
                row = ring[at % width]
                if t + c < 0:
                    _gather(guessed_of[index, place, at - stamp], firsts, sizes, row)
                else:
                    _gather(source[begin + t + c], firsts, sizes, row)
                q, k = floats_at(at_q + c * line_k, (key_dim,)), floats_at(at_k + c * line_k, (key_dim,))
                v = floats_at(at_v + c * line_v, (together * value_dim,))
                alike[c] = _mix(weight, bias, has_bias, mamba, ring, (at + 1) % width, firsts, sizes, q, k, v, product)
                slot = at - first_guess
                if is_passing and t + c >= 0 and slot < max_guesses:
                    _scatter(row, firsts, sizes, keeps_keys, guessed_of[index, target_place, slot])
            for h in range(head, head + together):
                for c in range(chunk):
                    at = position + t + c
                    gate = guess_gates_of[index, place, at - stamp] if t + c < 0 else gate_of[begin + t + c]
                    if mamba:
                        beta[c] = softplus(gate[h] + bias_of[h])
                        kept[c], taken[c] = np.exp(decay_of[h] * beta[c]), np.float32(0.0)
                    elif by_channel:
                        beta[c] = np.float32(most) / (np.float32(1.0) + np.exp(-gate[h]))
                        rate = rates + 4 * ((begin + t + c) * num_values + h) * key_dim
                        if t + c < 0:
                            row_of = (index * 2 + place) * max_guesses + at - stamp
                            rate = guess_gates + 4 * (row_of * num_gates + num_values + h * key_dim)
                        places = at_kept + c * line_k, at_kept_q + c * line_k, at_kept_k + c * line_k
                        bias_at = decay_bias + 4 * h * key_dim
                        _decay_channels(key_dim, rate, bias_at, decay_of[h], least, at_q + c * line_k, at_k + c * line_k, *places)
                    else:
                        beta[c] = np.float32(most) / (np.float32(1.0) + np.exp(-gate[h]))
                        kept[c] = np.exp(decay_of[h] * softplus(gate[num_values + h] + bias_of[h]))
                        taken[c] = kept[c]
                    slot = at - first_guess
                    if is_passing and t + c >= 0 and slot < max_guesses:
                        for each in range(h, own_gates, num_values):
                            guess_gates_of[index, target_place, slot, each] = gate[each]
                        if by_channel:
                            rate_of = floats_at(rates + 4 * ((begin + t + c) * num_values + h) * key_dim, (key_dim,))
                            for i in range(key_dim):
                                guess_gates_of[index, target_place, slot, num_values + h * key_dim + i] = rate_of[i]
                behind, beside = (h - head) * size, 4 * (h - head) * value_dim
                for first in range(0, value_dim, COLUMNS):
                    columns, offset = min(COLUMNS, value_dim - first), beside + 4 * first
                    seen, to = state + behind + 4 * first, left + behind + 4 * first
                    if mamba and columns == COLUMNS:
                        here = (at_k, at_q, at_v + offset, at_found + offset, line_k, line_v)
                        _mamba_columns(seen, to, 4 * value_dim, key_dim, chunk, here, kept.ctypes.data, beta.ctypes.data, past)
                        continue
                    for c in range(chunk):
                        q, k = at_q + c * line_k, at_k + c * line_k
                        v, found = at_v + c * line_v + offset, at_found + c * line_v + offset
                        if by_channel:
                            of_k, of_q = at_kept_k + c * line_k, at_kept_q + c * line_k
                            keeps = k, at_kept + c * line_k, beta[c], alike[c]
                            if past and columns == COLUMNS:
                                channel_step_past(seen, to, 4 * value_dim, key_dim, of_k, of_q, v, found, *keeps)
                            elif columns == COLUMNS:
                                channel_step(seen, to, 4 * value_dim, key_dim, of_k, of_q, v, found, *keeps)
                            else:
                                _channel_step(seen, to, 4 * value_dim, key_dim, columns, of_k, of_q, v, found, *keeps)
                            seen = to
                            continue
                        weights = kept[c], taken[c], beta[c], alike[c]
                        if past and columns == COLUMNS:
                            delta_step_past(seen, to, 4 * value_dim, key_dim, k, q, v, found, *weights)
                        elif columns == COLUMNS:
                            delta_step(seen, to, 4 * value_dim, key_dim, k, q, v, found, *weights)
                        else:
                            _step(seen, to, 4 * value_dim, key_dim, columns, k, q, v, found, *weights)
                        seen = to
                for c in range(max(0, -t), chunk):
                    token = begin + t + c
                    found, first = floats_at(at_found + c * line_v + beside, (value_dim,)), h * value_dim
                    if mamba:
                        v = floats_at(at_v + c * line_v + beside, (value_dim,))
                        _finish_mamba(found, v, skip_of[h], z_of[token], first_z + first, result[token], first)
                    elif by_channel or by_sigmoid != 0:
                        _finish_by_sigmoid(found, gains, eps, z_of[token], first_z + first, result[token], first)
                    else:
                        _finish(found, gains, eps, z_of[token], first_z + first, result[token], first)
            state = left
            t += chunk
            if t == known and known > 0:
                for back in range(1, width):
                    line = inputs_of[index, target_place, width - 1 - back]
                    _scatter(ring[(position + t - back) % width], firsts, sizes, keeps_keys, line)
                for h in range(head, head + together):
                    stamp_of[index, target_place, h] = position + known
                    if position == 0:  # what another sequence may have left there
                        stamp_of[index, place, h] = 0
        for h in range(head, head + together):
            reach_of[index, target_place, h] = min(position + count, first_guess + max_guesses)
    settle()
    keep(memory)
