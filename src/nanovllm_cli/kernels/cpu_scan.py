"""Mamba's first rule on the CPU: its convolution, the norms behind its second projection, and the scan. See `scan.py` for what
they do, and for the names.

A task of convolution and scan is a sequence and one head, which is some channels side by side: it goes through the step's tokens
in their order. The head's state lies in scratch meanwhile, a row for each of its numbers, so that channels are a vector's lanes.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_delta import silu, step_of, store_nans
from nanovllm_cli.kernels.cpu_numbers import (
    FAST,
    exp_not_positive,
    floats_at,
    keep,
    load,
    scratch,
    store,
    whole_lines,
)
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_of_squares

# log((1 + s) / (1 - s)) is 2 s times their sum, s squared to the power of 6 times the first, and so on
_TERMS = tuple(np.float32(1 / odd) for odd in (13, 11, 9, 7, 5, 3, 1))


@njit(inline="always")
def _softplus(x):
    """log(1 + e**x), relative error about 3e-7; NaN stays NaN. Straight-line code that LLVM vectorises."""
    e = exp_not_positive(-abs(x))
    s = e / (np.float32(2.0) + e)
    square = s * s
    p = _TERMS[0]
    p = p * square + _TERMS[1]
    p = p * square + _TERMS[2]
    p = p * square + _TERMS[3]
    p = p * square + _TERMS[4]
    p = p * square + _TERMS[5]
    p = p * square + _TERMS[6]
    return (x if x > np.float32(0.0) else np.float32(0.0)) + np.float32(2.0) * s * p


@kernel(fastmath=FAST)
def causal_conv(arguments, thread, team):
    """out [T, V * D] = silu of the convolution of projected [T, 2 V * D], its first half. taps [width, V * D]; bias [V * D]
    or 0. Of N states, two places: inputs [N, 2, width - 1, V * D], guesses [N, 2, G, 2 V * D], whose first half is written,
    stamps and reaches [N, 2, V] int32. starts [B + 1], lens, known_lens, state_of [B] int32.

    What a step writes is no state before the scan says so, which takes the same places.
    """
    (
        tag, projected, num_tokens, taps, width, bias, num_values, value_dim, inputs, guesses, stamps, reaches, num_states,
        max_guesses, starts, lens, known_lens, state_of, num_sequences, out,
    ) = fields(arguments)  # fmt: skip
    channels = num_values * value_dim
    source = carray(typed_pointer(projected, tag), (num_tokens, 2 * channels))
    result = carray(typed_pointer(out, tag), (num_tokens, channels))
    weight = carray(typed_pointer(taps, tag), (width, channels))
    offsets = carray(typed_pointer(bias if bias != 0 else taps, tag), (channels,))
    inputs_of = carray(typed_pointer(inputs, tag), (num_states, 2, width - 1, channels))
    guessed_of = carray(typed_pointer(guesses, tag), (num_states, 2, max_guesses, 2 * channels))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_states, 2, num_values))
    reach_of = carray(typed_pointer(reaches, np.int32(0)), (num_states, 2, num_values))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    known_of = carray(typed_pointer(known_lens, np.int32(0)), (num_sequences,))
    index_of = carray(typed_pointer(state_of, np.int32(0)), (num_sequences,))
    line = whole_lines(4 * value_dim)
    rows = whole_lines(4 * width * value_dim)
    memory = scratch(2 * rows + 2 * line)
    ring = floats_at(memory.ctypes.data, (width, value_dim))  # inputs of the token at p, p modulo width
    own_taps = floats_at(memory.ctypes.data + rows, (width, value_dim))
    start = floats_at(memory.ctypes.data + 2 * rows, (value_dim,))
    found = floats_at(memory.ctypes.data + 2 * rows + line, (value_dim,))
    for task in share(num_sequences * num_values, thread, team):
        sequence, head = task // num_values, task % num_values
        index, begin, count, position, known, place, stamp, target, first_guess = step_of(
            sequence, head, start_of, len_of, known_of, index_of, stamp_of, reach_of
        )
        first = head * value_dim
        if place < 0:
            store_nans(result, begin, count, first, value_dim)
            continue
        for p in range(position - width + 1, position):
            row = ring[p % width]
            if p < 0:
                for i in range(value_dim):
                    row[i] = np.float32(0.0)
            elif p < stamp:
                before = inputs_of[index, place, width - 1 - (stamp - p)]
                for i in range(value_dim):
                    row[i] = load(before, first + i)
            else:
                guess = guessed_of[index, place, p - stamp]
                for i in range(value_dim):
                    row[i] = load(guess, first + i)
        if known > 0:
            stamp_of[index, target, head] = 0
        for i in range(value_dim):
            start[i] = load(offsets, first + i) if bias != 0 else np.float32(0.0)
        for k in range(width):
            tap, own_tap = weight[k], own_taps[k]
            for i in range(value_dim):
                own_tap[i] = load(tap, first + i)
        for t in range(count):
            p = position + t
            row, own, to = ring[p % width], source[begin + t], result[begin + t]
            for i in range(value_dim):
                row[i] = load(own, first + i)
            for i in range(value_dim):
                found[i] = start[i]
            for k in range(width):
                tap, other = own_taps[k], ring[(p + 1 + k) % width]
                for i in range(value_dim):
                    found[i] += tap[i] * other[i]
            for i in range(value_dim):
                store(to, first + i, silu(found[i]))
            slot = p - first_guess
            if t >= known and slot < max_guesses:
                kept = guessed_of[index, target, slot]
                for i in range(value_dim):
                    store(kept, first + i, row[i])
            if t + 1 == known:
                for back in range(width - 1):
                    left, last = inputs_of[index, target, width - 2 - back], ring[(p - back) % width]
                    for i in range(value_dim):
                        store(left, first + i, last[i])
    keep(memory)


@kernel(fastmath=FAST)
def scan_parts(arguments, thread, team):
    """into [T, rank] and both [T, 2 N] fp32, of x [T, rank + 2 N] fp32: its columns, and where gains [rank + 2 N] fp32 is not 0
    each of the three parts divided by its root mean square and times its own of them."""
    tag, x, num_tokens, rank, size, gains, into, both, eps = fields(arguments)
    width = rank + 2 * size
    rows, gain = floats_at(x, (num_tokens, width)), floats_at(gains if gains != 0 else x, (width,))
    steps, others = carray(typed_pointer(into, tag), (num_tokens, rank)), floats_at(both, (num_tokens, 2 * size))
    for t in share(num_tokens, thread, team):
        first = np.int64(0)
        for part in range(3):
            count = rank if part == 0 else size
            factor = np.float32(1.0)
            if gains != 0:
                total = sum_of_squares(np.float32(0), x + 4 * (t * width + first), count)
                factor = np.float32(1.0) / np.sqrt(total / np.float32(count) + np.float32(eps))
            for i in range(count):
                number = rows[t, first + i] * factor
                number = number * gain[first + i] if gains != 0 else number
                if part == 0:
                    store(steps[t], i, number)
                else:
                    others[t, first - rank + i] = number
            first += count


@inner(fastmath=FAST)
def _advance(state, decay, rate_bias, rates, x, b, c, step, pushed, found, size, count):
    """One token of a head: state [size, count] in its place, and what it finds. All but sizes are addresses of fp32; step and
    pushed [count]: scratch."""
    state_of, decay_of = floats_at(state, (size, count)), floats_at(decay, (size, count))
    bias_of, rate_of, x_of = floats_at(rate_bias, (count,)), floats_at(rates, (count,)), floats_at(x, (count,))
    b_of, c_of = floats_at(b, (size,)), floats_at(c, (size,))
    step_of, pushed_of, out = floats_at(step, (count,)), floats_at(pushed, (count,)), floats_at(found, (count,))
    for i in range(count):
        step_of[i] = _softplus(rate_of[i] + bias_of[i])
        pushed_of[i] = step_of[i] * x_of[i]
        out[i] = np.float32(0.0)
    for n in range(size):
        of_b, of_c = b_of[n], c_of[n]
        for i in range(count):
            number = exp_not_positive(decay_of[n, i] * step_of[i]) * state_of[n, i] + pushed_of[i] * of_b
            state_of[n, i] = number
            out[i] += number * of_c


@kernel(fastmath=FAST)
def selective_scan(arguments, thread, team):
    """out [T, V * D] = (found + skip * x) * silu(z) of x [T, V * D], which `causal_conv` gave, and projected [T, 2 V * D], whose
    second half is z. rates [T, V * D], both [T, 2 N]: B and C, decay [V, N, D], rate_bias, skip [V * D] fp32. states
    [M, 2, V, N, D] fp32, guesses [M, 2, G, 2 V * D], whose second half is x, guess_gates [M, 2, G, V * D + N] fp32: rates and B.
    The rest as `causal_conv` has it."""
    (
        tag, projected, x, rates, both, num_tokens, decay, rate_bias, skip, key_dim, num_values, value_dim, states, guesses,
        guess_gates, stamps, reaches, num_states, max_guesses, starts, lens, known_lens, state_of, num_sequences, out,
    ) = fields(arguments)  # fmt: skip
    channels = num_values * value_dim
    num_gates = channels + key_dim
    gate_of = carray(typed_pointer(projected, tag), (num_tokens, 2 * channels))
    source = carray(typed_pointer(x, tag), (num_tokens, channels))
    result = carray(typed_pointer(out, tag), (num_tokens, channels))
    rate_of, both_of = floats_at(rates, (num_tokens, channels)), floats_at(both, (num_tokens, 2 * key_dim))
    skip_of = floats_at(skip, (channels,))
    guessed_of = carray(typed_pointer(guesses, tag), (num_states, 2, max_guesses, 2 * channels))
    guess_gates_of = floats_at(guess_gates, (num_states, 2, max_guesses, num_gates))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_states, 2, num_values))
    reach_of = carray(typed_pointer(reaches, np.int32(0)), (num_states, 2, num_values))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    known_of = carray(typed_pointer(known_lens, np.int32(0)), (num_sequences,))
    index_of = carray(typed_pointer(state_of, np.int32(0)), (num_sequences,))
    line, size = whole_lines(4 * value_dim), key_dim * value_dim
    memory = scratch(4 * line + 4 * size)
    at_x = memory.ctypes.data
    at_step, at_pushed, at_found = at_x + line, at_x + 2 * line, at_x + 3 * line
    at_state = at_x + 4 * line
    row, found, state = floats_at(at_x, (value_dim,)), floats_at(at_found, (value_dim,)), floats_at(at_state, (size,))
    for task in share(num_sequences * num_values, thread, team):
        sequence, head = task // num_values, task % num_values
        index, begin, count, position, known, place, stamp, target, first_guess = step_of(
            sequence, head, start_of, len_of, known_of, index_of, stamp_of, reach_of
        )
        first = head * value_dim
        if place < 0:
            store_nans(result, begin, count, first, value_dim)
            continue
        before = floats_at(states + 4 * ((index * 2 + place) * num_values + head) * size, (size,))
        for i in range(size):
            state[i] = before[i] if position > 0 else np.float32(0.0)
        for t in range(stamp - position, count):  # below 0 are guesses that held
            if t < 0:
                slot = position + t - stamp
                gates = guess_gates + 4 * ((index * 2 + place) * max_guesses + slot) * num_gates
                at_rate, at_b = gates + 4 * first, gates + 4 * channels
                at_c = at_b  # nobody reads what is found
                guess = guessed_of[index, place, slot]
                for i in range(value_dim):
                    row[i] = load(guess, channels + first + i)
            else:
                at_rate, at_b = rates + 4 * ((begin + t) * channels + first), both + 8 * (begin + t) * key_dim
                at_c = at_b + 4 * key_dim
                own = source[begin + t]
                for i in range(value_dim):
                    row[i] = load(own, first + i)
            _advance(
                at_state, decay + 4 * head * size, rate_bias + 4 * first, at_rate, at_x, at_b, at_c, at_step, at_pushed, at_found,
                key_dim, value_dim,
            )  # fmt: skip
            if t < 0:
                continue
            z, to = gate_of[begin + t], result[begin + t]
            for i in range(value_dim):
                gate = silu(load(z, channels + first + i))
                store(to, first + i, (found[i] + skip_of[first + i] * row[i]) * gate)
            slot = position + t - first_guess
            if t >= known and slot < max_guesses:
                kept, kept_gates = guessed_of[index, target, slot], guess_gates_of[index, target, slot]
                for i in range(value_dim):
                    store(kept, channels + first + i, row[i])
                    kept_gates[first + i] = rate_of[begin + t, first + i]
                if head == 0:
                    for i in range(key_dim):
                        kept_gates[channels + i] = both_of[begin + t, i]
            if t + 1 == known:
                left = floats_at(states + 4 * ((index * 2 + target) * num_values + head) * size, (size,))
                for i in range(size):
                    left[i] = state[i]
                stamp_of[index, target, head] = position + known
                if position == 0:  # what another sequence may have left there
                    stamp_of[index, place, head] = 0
        reach_of[index, target, head] = min(position + count, first_guess + max_guesses)
    keep(memory)
