"""Attention over the paged KV cache on the CPU: one kernel for decode, prefill chunks and verification alike.

Cache of one layer, S = 16 tokens a block, e = 2 in bf16 and 1 in fp32, D padded to whole vectors of 16:

    K [N, kv_heads, D / e, S, e]     sixteen keys side by side: a score tile is q times a "weight" of 16 columns
    V [N, kv_heads, S / e, D16, e]   sixteen dims side by side: the output is p times a "weight" of D columns

so both products are `simd.dot_tile`, the inner loop of the matmuls. Work is split into tiles of (some tokens of one sequence) x
(one KV head); all query heads of the group share what is read. Keys come in tiles of 64 that start at multiples of 64, softmax is
folded in as they come (Milakov and Gimelshein 2018; FlashAttention). A row's arithmetic is the same whatever tile it is in:
masked keys add exact zeros, and the key tiles lie at absolute positions.

A quantized cache (cpu_cache) has one byte for each element, in the same order. The bytes of a key tile are unpacked once, for all
rows of the work's tile; codes are exact in the compute type. A key's scale multiplies its score. A value's scale multiplies its
weight before that is rounded: put into the value, it would round that one as well.

"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_cache import BLOCK, readable, scale_by, scratch_size, take_scales
from nanovllm_cli.kernels.cpu_numbers import (
    FAST,
    dot16,
    dot64,
    exp_not_positive,
    floats_at,
    keep,
    scratch,
    store,
    whole_lines,
)
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.simd import LANES, MAX_ROWS, TILE_COLUMNS, prefetch, typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32

KEYS = TILE_COLUMNS
BLOCKS_PER_TILE = KEYS // BLOCK
MAX_TILE_ROWS = 48
NEG_INF = np.float32(-np.inf)


@njit(nogil=True, error_model="numpy", fastmath=FAST)
def _softmax_row(v_kind, scores, lanes, low, high, scale, softcap, v_scales, state, acc, weights):
    """Fold 64 scores of one row into its running softmax. Visible keys: low <= c < high.

    lanes: scratch. state: [max, sum]; acc: the row's output so far, rescaled here; weights: receives
    exp(score - max), times the value's scale if it has one, in the element type.
    """
    for c in range(KEYS):
        scores[c] *= scale
    if softcap > 0:
        for c in range(KEYS):
            scores[c] = softcap * np.tanh(scores[c] / softcap)
    for c in range(KEYS):
        scores[c] = scores[c] if low <= c < high else NEG_INF
    for c in range(LANES):
        lanes[c] = scores[c]
    for v in range(LANES, KEYS, LANES):
        for c in range(LANES):
            lanes[c] = scores[v + c] if scores[v + c] > lanes[c] else lanes[c]
    top = state[0]
    for c in range(LANES):
        top = lanes[c] if lanes[c] > top else top
    if top == NEG_INF:
        for c in range(KEYS):
            store(weights, c, np.float32(0.0))
        return
    for c in range(KEYS):
        scores[c] = exp_not_positive(scores[c] - top)
    total = sum_f32(scores.ctypes.data, KEYS)
    scale_by(v_kind, scores, v_scales)
    for c in range(KEYS):
        store(weights, c, scores[c])
    if top > state[0]:
        shrink = exp_not_positive(state[0] - top)
        state[1] *= shrink
        for d in range(acc.size):
            acc[d] *= shrink
        state[0] = top
    state[1] += total


@njit(nogil=True, error_model="numpy")
def _fetch(blocks, count, size):
    """Ask for whole blocks ahead of their use: they lie anywhere, which hides them from the processor's own prefetcher."""
    for b in range(count):
        for line in range(0, size, 64):
            prefetch(blocks[b] + line)


@kernel()
def paged_attention(arguments, thread, team):
    """out [T, heads, dim] = attention of q [T, heads, dim] over each token's own sequence, causal.

    k_kind, v_kind: what K and V are kept as (cpu_cache); k_record, v_record: bytes of one head's part of a block.
    tiles [num_tiles, 4] int64: sequence, first token's row in T, tokens, first token's position. block_tables [B, P] int32.
    window: keys a query sees, itself included; 0 for all. softcap: 0 for none. sinks: address of [heads] fp32 logits that
    take part in the softmax's sum without a value, or 0.
    """
    (
        tag, k_kind, v_kind, pair, q, num_tokens, heads, kv_heads, dim, padded, k_cache, v_cache, k_record, v_record, tiles,
        num_tiles, block_tables, table_width, window, sinks, out, scale, softcap,
    ) = fields(arguments)  # fmt: skip
    size = 4 // pair
    queries = carray(typed_pointer(q, tag), (num_tokens, heads, dim))
    result = carray(typed_pointer(out, tag), (num_tokens, heads, dim))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_tiles, 4))
    tables = carray(typed_pointer(block_tables, np.int32(0)), (1 << 40, table_width))
    sink_of = carray(typed_pointer(sinks, np.float32(0)), (heads,))
    group = heads // kv_heads
    k_codes, v_codes, most_rows = dim * BLOCK, padded * BLOCK, max(MAX_TILE_ROWS, group)
    k_bytes = whole_lines(size * scratch_size(k_kind, BLOCKS_PER_TILE * k_codes))
    v_bytes = whole_lines(size * scratch_size(v_kind, BLOCKS_PER_TILE * v_codes))
    acc_bytes, row_bytes, state_bytes = 4 * most_rows * padded, whole_lines(size * most_rows * dim), whole_lines(8 * most_rows)
    memory = scratch(k_bytes + v_bytes + acc_bytes + row_bytes + state_bytes + (4 + size) * MAX_ROWS * KEYS + 8 * KEYS + 256)
    k_scratch = memory.ctypes.data
    v_scratch = k_scratch + k_bytes
    acc_at = v_scratch + v_bytes
    rows_at = acc_at + acc_bytes
    state_at = rows_at + row_bytes
    scores_at = state_at + state_bytes
    weights_at = scores_at + 4 * MAX_ROWS * KEYS
    rest = weights_at + size * MAX_ROWS * KEYS
    all_acc, state = floats_at(acc_at, (most_rows, padded)), floats_at(state_at, (most_rows, 2))
    rows = carray(typed_pointer(rows_at, tag), (most_rows, dim))
    scores, weights = floats_at(scores_at, (MAX_ROWS, KEYS)), carray(typed_pointer(weights_at, tag), (MAX_ROWS, KEYS))
    k_scales, v_scales = floats_at(rest, (KEYS,)), floats_at(rest + 4 * KEYS, (KEYS,))
    lanes = floats_at(rest + 8 * KEYS, (LANES,))
    keys = carray(typed_pointer(rest + 8 * KEYS + 64, np.int64(0)), (BLOCKS_PER_TILE,))
    values = carray(typed_pointer(rest + 8 * KEYS + 128, np.int64(0)), (BLOCKS_PER_TILE,))
    for task in share(num_tiles * kv_heads, thread, team):
        kv_head = task // num_tiles
        seq, first_row, count, first_position = tile_of[task % num_tiles]
        num_rows = count * group
        acc = all_acc[:num_rows]
        acc[:] = np.float32(0.0)
        k_scales[:] = np.float32(0.0)
        v_scales[:] = np.float32(0.0)
        for r in range(num_rows):
            query = queries[first_row + r // group, kv_head * group + r % group]
            for d in range(dim):  # a whole row would bring numba's messages about shapes, which take seconds to compile
                rows[r, d] = query[d]
            state[r, 0], state[r, 1] = NEG_INF, np.float32(0.0)
        end = first_position + count
        begin = max(0, first_position - window + 1) if window > 0 else 0
        for tile in range(begin // KEYS, (end + KEYS - 1) // KEYS):
            base = tile * KEYS
            blocks = min(BLOCKS_PER_TILE, (end - base + BLOCK - 1) // BLOCK)
            for b in range(BLOCKS_PER_TILE):
                record = np.int64(tables[seq, tile * BLOCKS_PER_TILE + min(b, blocks - 1)]) * kv_heads + kv_head
                keys[b], values[b] = k_cache + record * k_record, v_cache + record * v_record
            if num_rows <= MAX_ROWS:
                _fetch(values, blocks, v_record)
            for b in range(blocks):
                # Its place in the next tile: what is read there is on its way by then.
                later = np.int64(tables[seq, min((tile + 1) * BLOCKS_PER_TILE + b, (end - 1) // BLOCK)]) * kv_heads + kv_head
                k_ahead, v_ahead = k_cache + later * k_record, v_cache + later * v_record
                of_block = slice(b * BLOCK, (b + 1) * BLOCK)
                take_scales(k_kind, keys[b], k_codes, k_scales[of_block])
                keys[b] = readable(tag, k_kind, keys[b], k_codes, k_scratch + b * k_codes * size, k_ahead)
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
                    position = first_position + (r + i) // group
                    low = position - window + 1 - base if window > 0 else 0
                    _softmax_row(
                        v_kind, scores[i], lanes, low, position + 1 - base, np.float32(scale), np.float32(softcap),
                        v_scales, state[r + i], acc[r + i], weights[i],
                    )  # fmt: skip
                for b in range(blocks):
                    p, o = weights_at + b * BLOCK * size, acc_at + r * padded * 4
                    step, steps, stride = padded * 4, BLOCK // pair, padded * 4
                    d = 0
                    while d + TILE_COLUMNS <= padded:
                        w = values[b] + d * 4
                        dot64(tag, some, p, KEYS * size, w, w + 64, w + 128, w + 192, step, steps, o + d * 4, stride, 1)
                        d += TILE_COLUMNS
                    while d < padded:
                        dot16(tag, some, p, KEYS * size, values[b] + d * 4, step, steps, o + d * 4, stride, 1)
                        d += LANES
        for r in range(num_rows):
            head = kv_head * group + r % group
            total = state[r, 1]
            if sinks != 0:
                total += np.exp(sink_of[head] - state[r, 0])
            inverse = np.float32(1.0) / total
            target = result[first_row + r // group, head]
            for d in range(dim):
                store(target, d, acc[r, d] * inverse)
    keep(memory)
