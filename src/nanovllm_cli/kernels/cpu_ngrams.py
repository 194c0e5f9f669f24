"""Embeddings of n-grams (Qwen4-Exp) on the CPU: which rows of a table a token's n-grams have, gates that join them to several
residual streams, and the convolution behind those. See `ngrams.py` for what they do, and for the names.

What a sequence remembers, its last tokens and the convolution's last inputs, lies in two places beside a state of the delta rule
(`states.py`), whose kernel comes behind these in a layer: its stamps say which place is read, and it alone says that what was
written to the other is a state.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_delta import silu, step_of
from nanovllm_cli.kernels.cpu_fused import sigmoid
from nanovllm_cli.kernels.cpu_numbers import FAST, floats_at, keep, load, scratch, store
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares

COLUMNS = 512
"""Channels of a stream that a task of the convolution takes."""
LEAST_GATE = np.float32(1e-6)


@inner
def _part_with(bounds, count, number):
    """The last of `count` parts, which begin at bounds, that begins at the number or before."""
    first, behind = 0, count
    while behind - first > 1:
        middle = (first + behind) // 2
        if bounds[middle] <= number:
            first = middle
        else:
            behind = middle
    return first


@kernel(fastmath=FAST)
def gather_ngrams(arguments, thread, team):
    """out [T, (G - 1) * H * width]: of each token and each n-gram that ends with it, of 2 to G tokens, H rows of a table in
    pieces.

    ids [T] int64; an end is a token behind which n-grams begin anew: what would lie in front of it is taken to be one.
    multipliers [G], sizes and offsets [(G - 1) * H] int64: a row is (the exclusive or of an n-gram's ids, each times its
    multiplier) modulo a size, behind an offset. pieces [num_pieces] int64: addresses of rows of width numbers each, of `kept`'s
    type; firsts [num_pieces + 1]: of the table's rows the first in each, and their number; record: bytes of a row. past [N, 2, G
    - 1] int32: ids of the last tokens. Of N states: stamps and reaches [N, 2, V] int32; starts [B + 1], lens, known_lens,
    state_of [B] int32. Work is split by tokens."""
    (
        tag, kept, ids, num_tokens, longest, heads, end, multipliers, sizes, offsets, pieces, firsts, num_pieces, record, width,
        past, stamps, reaches, num_states, num_values, starts, lens, known_lens, state_of, num_sequences, out,
    ) = fields(arguments)  # fmt: skip
    every, before = (longest - 1) * heads, longest - 1
    id_of = carray(typed_pointer(ids, np.int64(0)), (num_tokens,))
    factor_of = carray(typed_pointer(multipliers, np.int64(0)), (longest,))
    size_of = carray(typed_pointer(sizes, np.int64(0)), (every,))
    offset_of = carray(typed_pointer(offsets, np.int64(0)), (every,))
    piece_of = carray(typed_pointer(pieces, np.int64(0)), (num_pieces,))
    first_of = carray(typed_pointer(firsts, np.int64(0)), (num_pieces + 1,))
    past_of = carray(typed_pointer(past, np.int32(0)), (num_states, 2, before))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_states, 2, num_values))
    reach_of = carray(typed_pointer(reaches, np.int32(0)), (num_states, 2, num_values))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    known_of = carray(typed_pointer(known_lens, np.int32(0)), (num_sequences,))
    index_of = carray(typed_pointer(state_of, np.int32(0)), (num_sequences,))
    result = carray(typed_pointer(out, tag), (num_tokens, every * width))
    for token in share(num_tokens, thread, team):
        sequence = _part_with(start_of, num_sequences, token)
        index, begin, count, position, _, place, _, target, _ = step_of(
            sequence, 0, start_of, len_of, known_of, index_of, stamp_of, reach_of
        )
        goes_on = position > 0 and place >= 0
        mixed, is_cut, line = id_of[token] * factor_of[0], False, result[token]
        for back in range(1, longest):
            at, before_it = token - begin - back, np.int64(end)
            if not is_cut:
                if at >= 0:
                    before_it = id_of[begin + at]
                elif goes_on:
                    before_it = np.int64(past_of[index, place, before + at])
                is_cut = before_it == end
            mixed ^= before_it * factor_of[back]
            for h in range((back - 1) * heads, back * heads):
                row = mixed % size_of[h] + offset_of[h]
                piece = _part_with(first_of, num_pieces, row)
                numbers = carray(typed_pointer(piece_of[piece] + (row - first_of[piece]) * record, kept), (width,))
                for i in range(width):
                    store(line, h * width + i, load(numbers, i))
        if token + 1 == begin + count:
            for head in range(num_values):
                stamp_of[index, target, head] = 0
            for j in range(before):
                at, left = count - before + j, np.int64(end)
                if at >= 0:
                    left = id_of[begin + at]
                elif goes_on:
                    left = np.int64(past_of[index, place, before + at])
                past_of[index, target, j] = left


@kernel(fastmath=FAST)
def gate_ngrams(arguments, thread, team):
    """gated [T, S * width]: value [T, width] times a gate of each of S streams, and normed, its norm. A gate is the sigmoid of
    the root of norm(key) . norm(stream) / sqrt(width), with its sign. keys [T, S * width], streams [S, T, width]; gains of the
    three norms [3, S, width], offset apart. Work is split by tokens and streams."""
    tag, keys, streams, value, count, num_rows, width, gains, gated, normed, eps, offset = fields(arguments)
    key_of = carray(typed_pointer(keys, tag), (num_rows, count, width))
    lines = carray(typed_pointer(streams, tag), (count, num_rows, width))
    value_of = carray(typed_pointer(value, tag), (num_rows, width))
    factors = carray(typed_pointer(gains, tag), (3, count, width))
    out = carray(typed_pointer(gated, tag), (num_rows, count, width))
    out_normed = carray(typed_pointer(normed, tag), (num_rows, count, width))
    memory = scratch(4 * width)
    product = floats_at(memory.ctypes.data, (width,))
    more = np.float32(offset)
    for task in share(num_rows * count, thread, team):
        r, s = task // count, task % count
        key, line, own = key_of[r, s], lines[s, r], value_of[r]
        of_keys = np.float32(1.0) / np.sqrt(sum_of_squares(tag, key.ctypes.data, width) / np.float32(width) + np.float32(eps))
        of_lines = np.float32(1.0) / np.sqrt(sum_of_squares(tag, line.ctypes.data, width) / np.float32(width) + np.float32(eps))
        key_gains, line_gains = factors[0, s], factors[1, s]
        for i in range(width):
            left = load(key, i) * of_keys * (more + load(key_gains, i))
            product[i] = left * (load(line, i) * of_lines * (more + load(line_gains, i)))
        dot = sum_f32(product.ctypes.data, width) / np.sqrt(np.float32(width))
        root = np.sqrt(max(abs(dot), LEAST_GATE))
        gate = sigmoid(root if dot > np.float32(0.0) else -root if dot < np.float32(0.0) else dot)
        target, target_normed, its_gains = out[r, s], out_normed[r, s], factors[2, s]
        for i in range(width):
            store(target, i, gate * load(own, i))
        inverse = np.float32(1.0) / np.sqrt(sum_of_squares(tag, target.ctypes.data, width) / np.float32(width) + np.float32(eps))
        for i in range(width):
            store(target_normed, i, load(target, i) * inverse * (more + load(its_gains, i)))
    keep(memory)


@kernel(fastmath=FAST)
def convolve_ngrams(arguments, thread, team):
    """streams [S, T, width] += gated + silu of the convolution of normed, both [T, S * width]: the sum of taps [taps, S * width]
    times the inputs of as many tokens, each `apart` tokens behind the one before, the token's own last. past [N, 2, L, S *
    width]: inputs of the L = (taps - 1) * apart tokens before, zeros in front of the first. The others: see `gather_ngrams`,
    which comes first. Work is split by sequences and some columns of a stream."""
    (
        tag, streams, gated, normed, num_taps, apart, taps, count, num_tokens, width, past, stamps, reaches, num_states,
        num_values, starts, lens, known_lens, state_of, num_sequences,
    ) = fields(arguments)  # fmt: skip
    channels, before = count * width, (num_taps - 1) * apart
    lines = carray(typed_pointer(streams, tag), (count, num_tokens, width))
    added = carray(typed_pointer(gated, tag), (num_tokens, channels))
    inputs = carray(typed_pointer(normed, tag), (num_tokens, channels))
    weight = carray(typed_pointer(taps, tag), (num_taps, channels))
    past_of = carray(typed_pointer(past, tag), (num_states, 2, before, channels))
    stamp_of = carray(typed_pointer(stamps, np.int32(0)), (num_states, 2, num_values))
    reach_of = carray(typed_pointer(reaches, np.int32(0)), (num_states, 2, num_values))
    start_of = carray(typed_pointer(starts, np.int32(0)), (num_sequences + 1,))
    len_of = carray(typed_pointer(lens, np.int32(0)), (num_sequences,))
    known_of = carray(typed_pointer(known_lens, np.int32(0)), (num_sequences,))
    index_of = carray(typed_pointer(state_of, np.int32(0)), (num_sequences,))
    memory = scratch(4 * COLUMNS)
    total = floats_at(memory.ctypes.data, (COLUMNS,))
    parts = (width + COLUMNS - 1) // COLUMNS
    for task in share(num_sequences * count * parts, thread, team):
        sequence, s, column = task // parts // count, task // parts % count, task % parts * COLUMNS
        some, first = min(COLUMNS, width - column), s * width + column
        index, begin, there, position, _, place, _, target, _ = step_of(
            sequence, 0, start_of, len_of, known_of, index_of, stamp_of, reach_of
        )
        goes_on = position > 0 and place >= 0
        for t in range(there):
            for i in range(some):
                total[i] = np.float32(0.0)
            for k in range(num_taps):
                at, tap = t - (num_taps - 1 - k) * apart, weight[k]
                if at >= 0:
                    row = inputs[begin + at]
                    for i in range(some):
                        total[i] += load(tap, first + i) * load(row, first + i)
                elif goes_on:
                    earlier = past_of[index, place, before + at]
                    for i in range(some):
                        total[i] += load(tap, first + i) * load(earlier, first + i)
            line, own = lines[s, begin + t], added[begin + t]
            for i in range(some):
                store(line, column + i, load(line, column + i) + load(own, first + i) + silu(total[i]))
        for j in range(before):
            at, left = there - before + j, past_of[index, target, j]
            if at >= 0:
                row = inputs[begin + at]
                for i in range(some):
                    left[first + i] = row[first + i]
            elif goes_on:
                earlier = past_of[index, place, before + at]
                for i in range(some):
                    left[first + i] = earlier[first + i]
            else:
                for i in range(some):
                    store(left, first + i, np.float32(0.0))
    keep(memory)
