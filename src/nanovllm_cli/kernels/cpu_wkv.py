"""RWKV-7's time mixing on the CPU: rows that take a share of the row before, what is made of a narrow matrix's numbers, and the
rule itself. See `wkv.py` for what they do, and for the names.

A task is a sequence and one head's columns: it goes through the step's tokens in their order. The head's state lies in scratch
meanwhile, where it stays in a core's first cache.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_delta import step_of, store_nans
from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, floats_at, keep, load, scratch, store, whole_lines
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares
from nanovllm_cli.kernels.simd_wkv import COLUMNS, wkv_step
from nanovllm_cli.kernels.wkv_rules import LEAST_LOG_DECAY

TANH, SIGMOID = 0, 1
SHORTEST = np.float32(1e-12)
_LEAST = np.float32(LEAST_LOG_DECAY)
_PARTS = 5
"""Of what a guess leaves: what is kept, keys, values, what is taken off, what is put there."""


@njit(inline="always")
def _sigmoid(x):
    e = exp_not_positive(-abs(x))
    return (np.float32(1.0) if not x < np.float32(0.0) else e) / (np.float32(1.0) + e)


@inner
def _finish(stamp_of, reach_of, index, place, target, head, position, count, known, first_guess, max_guesses):
    """The last kernel of a layer that takes a state's places says that one is there."""
    if known > 0:
        stamp_of[index, target, head] = position + known
        if position == 0:  # what another sequence may have left there
            stamp_of[index, place, head] = 0
    reach_of[index, target, head] = min(position + count, first_guess + max_guesses)


@kernel(fastmath=FAST)
def token_shift(arguments, thread, team):
    """out [P, T, V * D] = x + (before - x) * shares, of x [T, V * D] and shares [P, V * D] fp32. Of N states, two places: inputs
    [N, 2, 1, 2 V * D] and guesses [N, 2, G, 2 V * D], whose half `part` is of such x; stamps and reaches [N, 2, V] int32. starts
    [B + 1], lens, known_lens, state_of [B] int32.

    What a step writes is no state before the last kernel of the layer says so: part 0 is the first one, part 1 the last.
    """
    (
        tag, x, num_tokens, shares, num_shares, part, num_values, value_dim, inputs, guesses, stamps, reaches, num_states,
        max_guesses, starts, lens, known_lens, state_of, num_sequences, out,
    ) = fields(arguments)  # fmt: skip
    channels = num_values * value_dim
    source = carray(typed_pointer(x, tag), (num_tokens, channels))
    result = carray(typed_pointer(out, tag), (num_shares, num_tokens, channels))
    share_of = floats_at(shares, (num_shares, channels))
    inputs_of = carray(typed_pointer(inputs, tag), (num_states, 2, 1, 2 * channels))
    guessed_of = carray(typed_pointer(guesses, tag), (num_states, 2, max_guesses, 2 * channels))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_states, 2, num_values))
    reach_of = carray(typed_pointer(reaches, np.int32(0)), (num_states, 2, num_values))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    known_of = carray(typed_pointer(known_lens, np.int32(0)), (num_sequences,))
    index_of = carray(typed_pointer(state_of, np.int32(0)), (num_sequences,))
    line = whole_lines(4 * value_dim)
    memory = scratch(3 * line)
    own = floats_at(memory.ctypes.data, (value_dim,))
    before = floats_at(memory.ctypes.data + line, (value_dim,))
    away = floats_at(memory.ctypes.data + 2 * line, (value_dim,))
    for task in share(num_sequences * num_values, thread, team):
        sequence, head = task // num_values, task % num_values
        index, begin, count, position, known, place, stamp, target, first_guess = step_of(
            sequence, head, start_of, len_of, known_of, index_of, stamp_of, reach_of
        )
        first = head * value_dim
        kept_at = part * channels + first
        if place < 0:
            for p in range(num_shares):
                store_nans(result[p], begin, count, first, value_dim)
            continue
        if position == 0:
            for i in range(value_dim):
                before[i] = np.float32(0.0)
        elif stamp == position:
            last = inputs_of[index, place, 0]
            for i in range(value_dim):
                before[i] = load(last, kept_at + i)
        else:
            last = guessed_of[index, place, position - 1 - stamp]
            for i in range(value_dim):
                before[i] = load(last, kept_at + i)
        if known > 0 and part == 0:
            stamp_of[index, target, head] = 0
        for t in range(count):
            row = source[begin + t]
            for i in range(value_dim):
                own[i] = load(row, first + i)
                away[i] = before[i] - own[i]
                before[i] = own[i]
            for p in range(num_shares):
                to, of = result[p, begin + t], share_of[p]
                for i in range(value_dim):
                    store(to, first + i, own[i] + away[i] * of[first + i])
            slot = position + t - first_guess
            if t >= known and slot < max_guesses:
                kept = guessed_of[index, target, slot]
                for i in range(value_dim):
                    store(kept, kept_at + i, own[i])
            if t + 1 == known:
                left = inputs_of[index, target, 0]
                for i in range(value_dim):
                    store(left, kept_at + i, own[i])
        if part == 1:
            _finish(stamp_of, reach_of, index, place, target, head, position, count, known, first_guess, max_guesses)
    keep(memory)


@kernel(fastmath=FAST)
def squash(arguments, thread, team):
    """out [T, n] = tanh or sigmoid, by kind, of x [T, n] fp32."""
    tag, x, num_tokens, width, kind, out = fields(arguments)
    rows, result = floats_at(x, (num_tokens, width)), carray(typed_pointer(out, tag), (num_tokens, width))
    for t in share(num_tokens, thread, team):
        for i in range(width):
            store(result[t], i, np.tanh(rows[t, i]) if kind == TANH else _sigmoid(rows[t, i]))


@inner(fastmath=FAST)
def _step(state, stride, rows, count, away, q, v, out, kept, key, put, alike, turned):
    """See `simd_wkv.wkv_step`, of any number of columns."""
    away_of, q_of, kept_of = floats_at(away, (rows,)), floats_at(q, (rows,)), floats_at(kept, (rows,))
    key_of, put_of = floats_at(key, (rows,)), floats_at(put, (rows,))
    value, found = floats_at(v, (count,)), floats_at(out, (count,))
    for j in range(count):
        taken = finds = np.float32(0.0)
        for i in range(rows):
            number = floats_at(state + i * stride + 4 * j, (1,))[0]
            taken += number * away_of[i]
            finds += number * q_of[i]
        found[j] = turned * taken + (alike * value[j] + finds)
        for i in range(rows):
            place = floats_at(state + i * stride + 4 * j, (1,))
            place[0] = put_of[i] * taken + (key_of[i] * value[j] + kept_of[i] * place[0])


@inner(fastmath=FAST)
def _product(x, y, product, count):
    """Of two rows. product: scratch; all are addresses of fp32."""
    one, other, both = floats_at(x, (count,)), floats_at(y, (count,)), floats_at(product, (count,))
    for i in range(count):
        both[i] = one[i] * other[i]
    return sum_f32(product, count)


@inner(fastmath=FAST)
def _norm(found, gains, bias, eps, count):
    """found = layer norm of it, in its place; gains and bias [count]: addresses."""
    row, gain, shift = floats_at(found, (count,)), floats_at(gains, (count,)), floats_at(bias, (count,))
    mean = sum_f32(found, count) / np.float32(count)
    for i in range(count):
        row[i] -= mean
    inverse = np.float32(1.0) / np.sqrt(sum_of_squares(np.float32(0), found, count) / np.float32(count) + np.float32(eps))
    for i in range(count):
        row[i] = row[i] * inverse * gain[i] + shift[i]


@kernel(fastmath=FAST)
def wkv7(arguments, thread, team):
    """out [T, V * D], of r, k, v and gates [T, V * D]; decays, rates and, where it is not 0, mixes [T, V * D] fp32, with first
    [T, V * D] then. tables [8, V * D] fp32: see `wkv_rules.TABLES`. states [N, 2, V, D, D] fp32; guess_gates [N, 2, G, 5 V * D]
    fp32: what is kept, keys, values, what is taken off, what is put there. The rest as `token_shift` has it."""
    (
        tag, r, k, v, gates, decays, rates, mixes, first, num_tokens, tables, num_values, dim, states, guess_gates, stamps,
        reaches, num_states, max_guesses, starts, lens, known_lens, state_of, num_sequences, out, eps,
    ) = fields(arguments)  # fmt: skip
    channels = num_values * dim
    r_of = carray(typed_pointer(r, tag), (num_tokens, channels))
    k_of = carray(typed_pointer(k, tag), (num_tokens, channels))
    v_of = carray(typed_pointer(v, tag), (num_tokens, channels))
    gate_of = carray(typed_pointer(gates, tag), (num_tokens, channels))
    first_of = carray(typed_pointer(first if mixes != 0 else v, tag), (num_tokens, channels))
    result = carray(typed_pointer(out, tag), (num_tokens, channels))
    decay_of, rate_of = floats_at(decays, (num_tokens, channels)), floats_at(rates, (num_tokens, channels))
    mix_of = floats_at(mixes if mixes != 0 else decays, (num_tokens, channels))
    table = floats_at(tables, (8, channels))
    kept_of = floats_at(guess_gates, (num_states, 2, max_guesses, _PARTS, channels))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_states, 2, num_values))
    reach_of = carray(typed_pointer(reaches, np.int32(0)), (num_states, 2, num_values))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    known_of = carray(typed_pointer(known_lens, np.int32(0)), (num_sequences,))
    index_of = carray(typed_pointer(state_of, np.int32(0)), (num_sequences,))
    line, size = whole_lines(4 * dim), dim * dim
    memory = scratch((_PARTS + 4) * line + 4 * size)
    begin_at = memory.ctypes.data
    at_kept, at_key, at_value = begin_at, begin_at + line, begin_at + 2 * line
    at_away, at_put, at_r = begin_at + 3 * line, begin_at + 4 * line, begin_at + 5 * line
    at_q, at_found, at_product = begin_at + 6 * line, begin_at + 7 * line, begin_at + 8 * line
    at_state = begin_at + 9 * line
    kept, key, value = floats_at(at_kept, (dim,)), floats_at(at_key, (dim,)), floats_at(at_value, (dim,))
    away, put, reads = floats_at(at_away, (dim,)), floats_at(at_put, (dim,)), floats_at(at_r, (dim,))
    q, found, state = floats_at(at_q, (dim,)), floats_at(at_found, (dim,)), floats_at(at_state, (size,))
    for task in share(num_sequences * num_values, thread, team):
        sequence, head = task // num_values, task % num_values
        index, begin, count, position, known, place, stamp, target, first_guess = step_of(
            sequence, head, start_of, len_of, known_of, index_of, stamp_of, reach_of
        )
        c = head * dim
        if place < 0:
            store_nans(result, begin, count, c, dim)
            continue
        before = floats_at(states + 4 * ((index * 2 + place) * num_values + head) * size, (size,))
        for i in range(size):
            state[i] = before[i] if position > 0 else np.float32(0.0)
        for t in range(stamp - position, count):  # below 0 are guesses that held
            bonus = alike = turned = np.float32(0.0)
            if t < 0:
                guess = kept_of[index, place, position + t - stamp]
                for i in range(dim):
                    kept[i], key[i], value[i] = guess[0, c + i], guess[1, c + i], guess[2, c + i]
                    away[i], put[i], q[i] = guess[3, c + i], guess[4, c + i], np.float32(0.0)
            else:
                token = begin + t
                own_r, own_k, own_v = r_of[token], k_of[token], v_of[token]
                for i in range(dim):
                    kept[i] = exp_not_positive(_LEAST * _sigmoid(decay_of[token, c + i] + table[0, c + i]))
                    put[i] = _sigmoid(rate_of[token, c + i] + table[1, c + i])
                    key[i], reads[i], value[i] = load(own_k, c + i), load(own_r, c + i), load(own_v, c + i)
                    away[i] = key[i] * table[3, c + i]
                    key[i] = key[i] + (put[i] - np.float32(1.0)) * (key[i] * table[4, c + i])
                    q[i] = reads[i] * kept[i]
                if mixes != 0:
                    own_first = first_of[token]
                    for i in range(dim):
                        part = _sigmoid(mix_of[token, c + i] + table[2, c + i])
                        value[i] = value[i] + (load(own_first, c + i) - value[i]) * part
                length = np.sqrt(sum_of_squares(np.float32(0), at_away, dim))
                inverse = np.float32(1.0) / (length if not length < SHORTEST else SHORTEST)
                for i in range(dim):
                    away[i] = away[i] * inverse
                    put[i] = -away[i] * put[i]
                alike = _product(at_r, at_key, at_product, dim)
                turned = _product(at_r, at_put, at_product, dim)
                for i in range(dim):
                    reads[i] = reads[i] * table[5, c + i]
                bonus = _product(at_r, at_key, at_product, dim)
            for j in range(0, dim, COLUMNS):
                here, columns = 4 * j, min(COLUMNS, dim - j)
                if columns == COLUMNS:
                    wkv_step(
                        at_state + here, 4 * dim, dim, at_away, at_q, at_value + here, at_found + here, at_kept, at_key, at_put,
                        alike, turned,
                    )  # fmt: skip
                else:
                    _step(
                        at_state + here, 4 * dim, dim, columns, at_away, at_q, at_value + here, at_found + here, at_kept, at_key,
                        at_put, alike, turned,
                    )  # fmt: skip
            if t < 0:
                continue
            _norm(at_found, tables + 4 * (6 * channels + c), tables + 4 * (7 * channels + c), eps, dim)
            gate, to = gate_of[begin + t], result[begin + t]
            for i in range(dim):
                store(to, c + i, (found[i] + bonus * value[i]) * load(gate, c + i))
            slot = position + t - first_guess
            if t >= known and slot < max_guesses:
                guess = kept_of[index, target, slot]
                for i in range(dim):
                    guess[0, c + i], guess[1, c + i], guess[2, c + i] = kept[i], key[i], value[i]
                    guess[3, c + i], guess[4, c + i] = away[i], put[i]
            if t + 1 == known:
                left = floats_at(states + 4 * ((index * 2 + target) * num_values + head) * size, (size,))
                for i in range(size):
                    left[i] = state[i]
    keep(memory)
