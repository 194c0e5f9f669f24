"""Attention over the paged KV cache on the CPU: one kernel for decode, prefill chunks and verification alike.

Cache of one layer, S = 16 tokens a block, e = 2 in bf16 and 1 in fp32, D, which of V may be another, padded to vectors of 16:

    K [N, kv_heads, D / e, S, e]     sixteen keys side by side: a score tile is q times a "weight" of 16 columns
    V [N, kv_heads, S / e, D16, e]   sixteen dims side by side: the output is p times a "weight" of D columns

so both products are `simd.dot_tile`, the inner loop of the matmuls. Work is split into tiles of (some tokens of one sequence) x
(one KV head); all query heads of the group share what is read. Keys come in tiles of 64 that start at multiples of 64, softmax is
folded in as they come (Milakov and Gimelshein 2018; FlashAttention). A row's arithmetic is the same whatever tile it is in:
masked keys add exact zeros, and the key tiles lie at absolute positions. Between the two products the scores of a tile stay in
registers (simd_softmax).

Every SPLIT keys, at absolute positions too, the softmax starts anew, and what it gave is folded into the row's result. So where
there are fewer tiles than threads want, as for one long conversation with a model of few KV heads, each part of a sequence is
work of its own (`splits`), and `join_parts` folds them in the same order, by the same function: the same bits.

A quantized cache (cpu_cache) has one byte for each element, in the same order. The bytes of a key tile are unpacked once, for all
rows of the work's tile; codes are exact in the compute type. A key's scale multiplies its score. A value's scale multiplies its
weight before that is rounded: put into the value, it would round that one as well.

Latent attention's values are its keys: one cache has both, as K, and its blocks are turned into V's order (simd_turn) once for
all rows of the work's tile.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_cache import BLOCK, readable, scale_by, scratch_size, take_scales
from nanovllm_cli.kernels.cpu_numbers import (
    FAST,
    dot64,
    exp_not_positive,
    floats_at,
    keep,
    paged16,
    paged64,
    scratch,
    store,
    whole_lines,
)
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import MAX_ROWS, TILE_COLUMNS, prefetch, typed_pointer
from nanovllm_cli.kernels.simd_ir import LANES
from nanovllm_cli.kernels.simd_softmax import softmax64
from nanovllm_cli.kernels.simd_turn import turn_block

KEYS = TILE_COLUMNS
BLOCKS_PER_TILE = KEYS // BLOCK
MAX_TILE_ROWS = 48
SPLIT = 512
NEG_INF = np.float32(-np.inf)


@inner(fastmath=FAST)
def _capped(scores, scale, softcap):
    """Of a row of 64, in place."""
    for c in range(KEYS):
        scores[c] = softcap * np.tanh(scores[c] * scale / softcap)


@inner(fastmath=FAST)
def _by_distance(scores, scale, distances, column, columns):
    """Of a row of 64, in place: what each key's distance gives it, from a column on. Columns that there are not are those of keys
    that the row does not see."""
    first = max(np.int64(0), min(column, columns - KEYS))
    table = carray(typed_pointer(distances + 4 * first, np.float32(0)), (KEYS,))
    for c in range(KEYS):
        scores[c] = scores[c] * scale + table[c]


@inner(fastmath=FAST)
def _raise(top, total, state, acc):
    """A row is measured by a higher score from now on. state: [max, sum]; acc: its output so far; total: its latest sum."""
    if state[0] != NEG_INF:
        shrink = exp_not_positive(state[0] - top)
        state[1] *= shrink
        for d in range(acc.size):
            acc[d] *= shrink
    state[0] = top
    state[1] += total


@inner
def _fold(total, total_state, part, state):
    """A part's sums into the row's. state: [max, sum] of each. Without fast math: two kernels do it, to the same bits."""
    top, other = total_state[0], state[0]
    if other == NEG_INF:  # the row sees nothing of it
        return
    if top == NEG_INF:
        for d in range(total.size):
            total[d] = part[d]
        total_state[0], total_state[1] = other, state[1]
        return
    highest = top if top > other else other
    mine, theirs = exp_not_positive(top - highest), exp_not_positive(other - highest)
    for d in range(total.size):
        total[d] = total[d] * mine + part[d] * theirs
    total_state[0], total_state[1] = highest, total_state[1] * mine + state[1] * theirs


@inner
def _finish(total, state, sinks, head, target):
    """A row's sums to its result."""
    if state[0] == NEG_INF:  # all that it sees is minus infinity, and nothing was folded: total is somebody else's
        nothing = np.float32(0.0) if sinks != 0 else np.float32(np.nan)
        for d in range(target.size):
            store(target, d, nothing)
        return
    weight = state[1]
    if sinks != 0:
        weight += np.exp(carray(typed_pointer(sinks, np.float32(0)), (head + 1,))[head] - state[0])
    inverse = np.float32(1.0) / weight
    for d in range(target.size):
        store(target, d, total[d] * inverse)


@inner
def _parts(first_position, count, length, window, both_ways):
    """First and last part, first and last key, of what a tile's tokens see: the last ones are not seen any more."""
    end = first_position + count
    if both_ways != 0:
        end = min(length, end - 1 + window) if window > 0 else length
    begin = max(0, first_position - window + 1) if window > 0 else 0
    return begin // SPLIT, (end - 1) // SPLIT + 1, begin, end


@inner
def _fetch(blocks, count, size):
    """Ask for whole blocks ahead of their use: they lie anywhere, which hides them from the processor's own prefetcher."""
    for b in range(count):
        for line in range(0, size, 64):
            prefetch(blocks[b] + line)


@kernel()
def paged_attention(arguments, thread, team):
    """out [T, heads, num_values] = attention of q [T, heads, dim] over each token's own sequence: over the keys up to its own, or
    with both_ways over all of them.

    k_kind, v_kind: what K and V are kept as (cpu_cache); k_record, v_record: bytes of one head's part of a block. unread: -1, or
    K is V as well, and so many of its first dims, a multiple of 16, are not asked for: out has zeros there.
    tiles [num_tiles, 5] int64: sequence, first token's row in T, tokens, first token's position, keys of the sequence.
    block_tables [B, P] int32. window: keys a query sees, itself included, with both_ways on either side; 0 for all. softcap: 0
    for none. sinks: address of [heads] fp32 logits that take part in the softmax's sum without a value, or 0. distances: that of
    [heads, columns] fp32, what a score gets by its key's distance: column columns / 2 - 32 is of a query's own key; or 0.
    splits: 1, or as many parts of SPLIT keys as a sequence may have, where every tile is one token: then the part of each is left
    in partials [num_tiles, kv_heads, splits, group, padded + 2] fp32, sums and state, for `join_parts`, and nothing in out.
    """
    (
        tag, k_kind, v_kind, pair, q, num_tokens, heads, kv_heads, dim, num_values, padded, k_cache, v_cache, k_record, v_record,
        tiles, num_tiles, block_tables, table_width, window, both_ways, sinks, distances, columns, out, splits, partials, unread,
        scale, softcap,
    ) = fields(arguments)  # fmt: skip
    size = 4 // pair
    queries = carray(typed_pointer(q, tag), (num_tokens, heads, dim))
    result = carray(typed_pointer(out, tag), (num_tokens, heads, num_values))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_tiles, 5))
    tables = carray(typed_pointer(block_tables, np.int32(0)), (1 << 40, table_width))
    left = carray(typed_pointer(partials, np.float32(0)), (1 << 40, padded + 2))
    group = heads // kv_heads
    k_codes, v_codes, most_rows = dim * BLOCK, padded * BLOCK, max(MAX_TILE_ROWS, group)
    k_bytes = whole_lines(size * scratch_size(k_kind, BLOCKS_PER_TILE * k_codes))
    v_bytes = whole_lines(size * (scratch_size(v_kind, BLOCKS_PER_TILE * v_codes) if unread < 0 else BLOCKS_PER_TILE * v_codes))
    acc_bytes, row_bytes, state_bytes = 4 * most_rows * padded, whole_lines(size * most_rows * dim), whole_lines(8 * most_rows)
    sum_bytes = 2 * (acc_bytes + state_bytes)
    memory = scratch(k_bytes + v_bytes + sum_bytes + row_bytes + (4 + size) * MAX_ROWS * KEYS + 8 * KEYS + 16 * most_rows + 256)
    k_scratch = memory.ctypes.data
    v_scratch = k_scratch + k_bytes
    acc_at = v_scratch + v_bytes
    totals_at = acc_at + acc_bytes
    rows_at = totals_at + acc_bytes
    state_at = rows_at + row_bytes
    total_state_at = state_at + state_bytes
    scores_at = total_state_at + state_bytes
    weights_at = scores_at + 4 * MAX_ROWS * KEYS
    rest = weights_at + size * MAX_ROWS * KEYS
    all_acc, state = floats_at(acc_at, (most_rows, padded)), floats_at(state_at, (most_rows, 2))
    totals, total_state = floats_at(totals_at, (most_rows, padded)), floats_at(total_state_at, (most_rows, 2))
    rows = carray(typed_pointer(rows_at, tag), (most_rows, dim))
    scores = floats_at(scores_at, (MAX_ROWS, KEYS))
    k_scales, v_scales = floats_at(rest, (KEYS,)), floats_at(rest + 4 * KEYS, (KEYS,))
    found_at, keys_at, bounds_at = rest + 8 * KEYS, rest + 8 * KEYS + 64, rest + 8 * KEYS + 192
    found, bounds = floats_at(found_at, (MAX_ROWS, 2)), carray(typed_pointer(bounds_at, np.int64(0)), (most_rows, 2))
    keys = carray(typed_pointer(keys_at, np.int64(0)), (BLOCKS_PER_TILE,))
    values_at, page_bits = keys_at + 64, 3 if pair == 2 else 4  # a block's pairs of keys, or keys
    values = carray(typed_pointer(values_at, np.int64(0)), (BLOCKS_PER_TILE,))
    for task in share(num_tiles * kv_heads * splits, thread, team):
        kv_head = task // splits // num_tiles
        seq, first_row, count, first_position, length = tile_of[task // splits % num_tiles]
        first_part, end_part, begin, end = _parts(first_position, count, length, window, both_ways)
        if splits > 1:
            first_part, end_part = max(first_part, task % splits), min(end_part, task % splits + 1)
            if first_part >= end_part:
                continue
        num_rows = count * group
        acc = all_acc[:num_rows]
        k_scales[:] = np.float32(0.0)
        v_scales[:] = np.float32(0.0)
        for r in range(num_rows):
            query = queries[first_row + r // group, kv_head * group + r % group]
            for d in range(dim):  # a whole row would bring numba's messages about shapes, which take seconds to compile
                rows[r, d] = query[d]
            total_state[r, 0], total_state[r, 1] = NEG_INF, np.float32(0.0)
            position = first_position + r // group
            bounds[r, 0] = position - window + 1 if window > 0 else 0
            bounds[r, 1] = position + 1 if both_ways == 0 else min(length, position + window) if window > 0 else length
        last_tile = -(-min(end, end_part * SPLIT) // KEYS)
        for tile in range(max(begin, first_part * SPLIT) // KEYS, last_tile):
            if tile * KEYS % SPLIT == 0 or tile * KEYS <= begin:
                acc[:] = np.float32(0.0)
                for r in range(num_rows):
                    state[r, 0], state[r, 1] = NEG_INF, np.float32(0.0)
            base = tile * KEYS
            blocks = min(BLOCKS_PER_TILE, (end - base + BLOCK - 1) // BLOCK)
            for b in range(BLOCKS_PER_TILE):
                record = np.int64(tables[seq, tile * BLOCKS_PER_TILE + min(b, blocks - 1)]) * kv_heads + kv_head
                keys[b], values[b] = k_cache + record * k_record, v_cache + record * v_record
            if num_rows <= MAX_ROWS and unread < 0:
                _fetch(values, blocks, v_record)
            for b in range(blocks):
                # Its place in the next tile: what is read there is on its way by then.
                later = np.int64(tables[seq, min((tile + 1) * BLOCKS_PER_TILE + b, (end - 1) // BLOCK)]) * kv_heads + kv_head
                k_ahead, v_ahead = k_cache + later * k_record, v_cache + later * v_record
                of_block = slice(b * BLOCK, (b + 1) * BLOCK)
                take_scales(k_kind, keys[b], k_codes, k_scales[of_block])
                keys[b] = readable(tag, k_kind, keys[b], k_codes, k_scratch + b * k_codes * size, k_ahead)
                if unread >= 0:
                    for i in range(b * BLOCK, (b + 1) * BLOCK):  # numba compiles seconds of messages for an assignment of slices
                        v_scales[i] = k_scales[i]
                    values[b] = v_scratch + b * v_codes * size
                    turn_block(tag, keys[b], unread, dim, values[b], padded)
                    continue
                take_scales(v_kind, values[b], v_codes, v_scales[of_block])
                values[b] = readable(tag, v_kind, values[b], v_codes, v_scratch + b * v_codes * size, v_ahead)
            keys[blocks:] = keys[blocks - 1]
            for r in range(0, num_rows, MAX_ROWS):
                some = min(MAX_ROWS, num_rows - r)
                dot64(
                    tag, some, rows_at + r * dim * size, dim * size, keys[0], keys[1], keys[2], keys[3], 64,
                    dim // pair, scores_at, 256, 0,
                )  # fmt: skip
                for i in range(some):
                    scale_by(k_kind, scores[i], k_scales)
                    if softcap > 0:
                        _capped(scores[i], np.float32(scale), np.float32(softcap))
                    if distances != 0:
                        head, position = kv_head * group + (r + i) % group, first_position + (r + i) // group
                        column = columns // 2 - KEYS // 2 + base - position
                        _by_distance(scores[i], np.float32(scale), distances + 4 * head * columns, column, columns)
                is_scaled = softcap > 0 or distances != 0
                risen = softmax64(
                    tag, v_kind, some, scores_at, bounds_at + 16 * r, base, np.float32(1.0 if is_scaled else scale),
                    state_at + 8 * r, rest + 4 * KEYS, weights_at, found_at,
                )  # fmt: skip
                if risen != 0:
                    for i in range(some):
                        if risen >> i & 1 != 0:
                            _raise(found[i, 0], found[i, 1], state[r + i], acc[r + i])
                o, step, steps, d = acc_at + r * padded * 4, padded * 4, blocks << page_bits, max(unread, 0)
                while d + TILE_COLUMNS <= padded:
                    paged64(tag, some, weights_at, KEYS * size, values_at, page_bits, d * 4, step, steps, o + d * 4, step)
                    d += TILE_COLUMNS
                while d < padded:
                    paged16(tag, some, weights_at, KEYS * size, values_at, page_bits, d * 4, step, steps, o + d * 4, step)
                    d += LANES
            if (base + KEYS) % SPLIT == 0 or tile + 1 == last_tile:
                for r in range(num_rows):
                    _fold(totals[r], total_state[r], acc[r], state[r])
        for r in range(num_rows):
            if splits == 1:
                head = kv_head * group + r % group
                _finish(totals[r], total_state[r], sinks, head, result[first_row + r // group, head])
                continue
            mine = left[task * group + r]
            for d in range(padded):
                mine[d] = totals[r, d]
            mine[padded], mine[padded + 1] = total_state[r, 0], total_state[r, 1]
    keep(memory)


@kernel()
def join_parts(arguments, thread, team):
    """out [num_tiles, heads, dim]: what `paged_attention` left in parts."""
    tag, heads, kv_heads, dim, padded, tiles, num_tiles, window, both_ways, sinks, out, splits, partials = fields(arguments)
    result = carray(typed_pointer(out, tag), (num_tiles, heads, dim))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_tiles, 5))
    group = heads // kv_heads
    left = carray(typed_pointer(partials, np.float32(0)), (1 << 40, padded + 2))
    memory = scratch(4 * padded + 64)
    total, state = floats_at(memory.ctypes.data, (padded,)), floats_at(memory.ctypes.data + 4 * padded, (2,))
    for task in share(num_tiles * heads, thread, team):
        tile, head = task // heads, task % heads
        _, row, count, first_position, length = tile_of[tile]
        first_part, end_part, _, _ = _parts(first_position, count, length, window, both_ways)
        state[0], state[1] = NEG_INF, np.float32(0.0)
        for part in range(first_part, end_part):
            task_of_part = (head // group * num_tiles + tile) * splits + part
            found = left[task_of_part * group + head % group]
            _fold(total, state, found[:padded], found[padded:])
        _finish(total, state, sinks, head, result[row, head])
    keep(memory)
