"""Sparse attention by blocks of tokens (Qwen4-Exp) on the CPU: what ranks blocks, and keys and values of all heads of the tokens
that a query sees, behind each other, over which it is cpu_attention's attention that is computed.

Of each token a raw key is kept, and the angles of its position, as rows [N, 16, …] of the cache's blocks. The last token of a
block of `ratio` tokens has the block's own key in its place, as soon as it is there: the mean of the raw keys, normed, and
rotated at the position of the first. So a step that comes again, or other tokens in place of guesses, find what they need: raw
keys of tokens before the last.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_cache import BLOCK
from nanovllm_cli.kernels.cpu_indexer import copy_units
from nanovllm_cli.kernels.cpu_numbers import FAST, floats_at, keep, load, scratch, store, whole_lines
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares

PART = 64
"""Blocks of a row that a task scores."""


@kernel(fastmath=FAST)
def keep_keys(arguments, thread, team):
    """kept [N, 16, dim] and angles [N, 16, 2 * half]: rows of a step's tokens. keys [num_rows, dim], rows lie stride numbers
    apart. cos, sin [num_rows, half] fp32. gains [dim], offset apart, of the norm of means. tiles [num_rows, 5] int64: as those
    of `paged_attention`, each of one row, of which sequence and position count. starts [B + 1] int32: the sequences' first rows.
    block_tables [B, table_width] int32. Work is split by rows: a block's key is made by its last token, which reads raw keys of
    this step where they come from."""
    (
        tag, keys, stride, num_rows, dim, cos, sin, half, gains, kept, angles, tiles, starts, block_tables, table_width, ratio,
        eps, offset,
    ) = fields(arguments)  # fmt: skip
    lines = carray(typed_pointer(keys, tag), (num_rows, stride))
    cos_of, sin_of = floats_at(cos, (num_rows, half)), floats_at(sin, (num_rows, half))
    factor = carray(typed_pointer(gains, tag), (dim,))
    kept_of = carray(typed_pointer(kept, tag), (1 << 40, dim))
    angle_of = carray(typed_pointer(angles, tag), (1 << 40, 2 * half))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    start_of = carray(typed_pointer(starts, np.int32(0)), (1 << 40,))
    tables = carray(typed_pointer(block_tables, np.int32(0)), (1 << 40, table_width))
    line = whole_lines(4 * max(dim, 2 * half))
    memory = scratch(3 * line)
    total = floats_at(memory.ctypes.data, (dim,))
    mean = carray(typed_pointer(memory.ctypes.data + line, tag), (dim,))
    turn = carray(typed_pointer(memory.ctypes.data + 2 * line, tag), (2 * half,))
    for r in share(num_rows, thread, team):
        sequence, position = tile_of[r, 0], tile_of[r, 3]
        first = position - (r - np.int64(start_of[sequence]))  # of the step
        own_row = np.int64(tables[sequence, position // BLOCK]) * BLOCK + position % BLOCK
        own, angle, source = kept_of[own_row], angle_of[own_row], lines[r]
        for i in range(half):
            store(angle, i, cos_of[r, i])
            store(angle, half + i, sin_of[r, i])
        if (position + 1) % ratio != 0:
            for i in range(dim):
                own[i] = source[i]
            continue
        for i in range(dim):
            total[i] = np.float32(0.0)
        begin = position + 1 - ratio
        for p in range(begin, position + 1):
            if p >= first:
                raw = lines[r - (position - p)]
                for i in range(dim):
                    total[i] += load(raw, i)
            else:
                earlier = kept_of[np.int64(tables[sequence, p // BLOCK]) * BLOCK + p % BLOCK]
                for i in range(dim):
                    total[i] += load(earlier, i)
        if begin >= first:
            row = r - (position - begin)
            for i in range(half):
                store(turn, i, cos_of[row, i])
                store(turn, half + i, sin_of[row, i])
        else:
            there = angle_of[np.int64(tables[sequence, begin // BLOCK]) * BLOCK + begin % BLOCK]
            for i in range(2 * half):
                turn[i] = there[i]
        for i in range(dim):
            store(mean, i, total[i] / np.float32(ratio))
        square = sum_of_squares(tag, mean.ctypes.data, dim)
        inverse = np.float32(1.0) / np.sqrt(square / np.float32(dim) + np.float32(eps))
        for i in range(dim):
            store(mean, i, load(mean, i) * inverse * (np.float32(offset) + load(factor, i)))
        for i in range(half):
            a, b, c, s = load(mean, i), load(mean, half + i), load(turn, i), load(turn, half + i)
            store(own, i, a * c - b * s)
            store(own, half + i, b * c + a * s)
        for i in range(2 * half, dim):
            own[i] = mean[i]
    keep(memory)


@kernel(fastmath=FAST)
def block_scores(arguments, thread, team):
    """scores [num_rows, room] fp32: of each whole block up to a row's token the sum over heads of max(0, query . key). Rows that
    have no more than `most` such blocks have none, as they see all. blocks [num_rows, 5] int64: tiles whose position is that of
    the last whole block, as `cpu_indexer.choose` reads them. q [num_rows, heads, dim]. The others: see `keep_keys`."""
    (
        tag, q, num_rows, heads, dim, kept, tiles, block_tables, table_width, ratio, most, scores, room, blocks,
    ) = fields(arguments)  # fmt: skip
    queries = carray(typed_pointer(q, tag), (num_rows, heads, dim))
    kept_of = carray(typed_pointer(kept, tag), (1 << 40, dim))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    tables = carray(typed_pointer(block_tables, np.int32(0)), (1 << 40, table_width))
    found = floats_at(scores, (num_rows, room))
    told = carray(typed_pointer(blocks, np.int64(0)), (num_rows, 5))
    line = whole_lines(4 * dim)
    memory = scratch((heads + 1) * line)
    product, at_queries = floats_at(memory.ctypes.data, (dim,)), memory.ctypes.data + line
    parts = (room + PART - 1) // PART
    for task in share(num_rows * parts, thread, team):
        r, part = task // parts, task % parts
        sequence, count = tile_of[r, 0], (tile_of[r, 3] + 1) // ratio
        if part == 0:
            told[r, 0], told[r, 1], told[r, 2], told[r, 3], told[r, 4] = sequence, r, 1, count - 1, count
        if count <= most or part * PART >= count:
            continue
        for h in range(heads):
            query, own = queries[r, h], floats_at(at_queries + h * line, (dim,))
            for i in range(dim):
                own[i] = load(query, i)
        for block in range(part * PART, min(count, (part + 1) * PART)):
            place = block * ratio + ratio - 1
            key = kept_of[np.int64(tables[sequence, place // BLOCK]) * BLOCK + place % BLOCK]
            total = np.float32(0.0)
            for h in range(heads):
                own = floats_at(at_queries + h * line, (dim,))
                for i in range(dim):
                    product[i] = own[i] * load(key, i)
                total += max(sum_f32(product.ctypes.data, dim), np.float32(0.0))
            found[r, block] = total
    keep(memory)


@inner
def _copy_row(source, source_at, target, target_at, count, apart, size):
    """count numbers of 4, 2 or 1 bytes, each `apart` of them behind the one before."""
    if size == 4:
        a, b = typed_pointer(source, np.uint32(0)), typed_pointer(target, np.uint32(0))
        words, copies = carray(a, (source_at + count * apart,)), carray(b, (target_at + count * apart,))
        for i in range(count):
            copies[target_at + i * apart] = words[source_at + i * apart]
    elif size == 2:
        c, d = typed_pointer(source, np.uint16(0)), typed_pointer(target, np.uint16(0))
        halves, half_copies = carray(c, (source_at + count * apart,)), carray(d, (target_at + count * apart,))
        for i in range(count):
            half_copies[target_at + i * apart] = halves[source_at + i * apart]
    else:
        e, f = typed_pointer(source, np.uint8(0)), typed_pointer(target, np.uint8(0))
        codes, code_copies = carray(e, (source_at + count * apart,)), carray(f, (target_at + count * apart,))
        for i in range(count):
            code_copies[target_at + i * apart] = codes[source_at + i * apart]


@kernel()
def gather_heads(arguments, thread, team):
    """target [num_rows, blocks, kv_heads, record bytes] = keys, or values, of the tokens that rows see of a cache: those of
    chosen [num_rows, most] int32 blocks of `ratio` tokens, ascending, and those behind the last whole block. size: bytes of a
    number; pair: numbers that lie together, see `cpu_attention`; width: numbers of a head's row there. scale_bytes: of a block's
    scales, behind its numbers. What lies behind the last token is zeros, as attention multiplies what it does not see by 0. seqs
    [num_rows, 5] int64: tiles of the sequences that these are, one a row, of which `group` are attended to at once. tiles: see
    `keep_keys`. Work is split by rows, blocks and heads."""
    (
        num_rows, kept, record, kv_heads, size, pair, width, is_values, scale_bytes, tiles, block_tables, table_width, ratio,
        most, chosen, seqs, target, blocks, group,
    ) = fields(arguments)  # fmt: skip
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    made = carray(typed_pointer(seqs, np.int64(0)), (num_rows, 5))
    tables = carray(typed_pointer(block_tables, np.int32(0)), (1 << 40, table_width))
    places = carray(typed_pointer(chosen, np.int32(0)), (num_rows, most))
    codes = width * BLOCK * size
    for task in share(num_rows * blocks * kv_heads, thread, team):
        row, block, head = task // kv_heads // blocks, task // kv_heads % blocks, task % kv_heads
        sequence, there = tile_of[row, 0], tile_of[row, 3] + 1
        of_blocks = min(there // ratio, most) * ratio
        behind = there // ratio * ratio  # the first token that no whole block has
        taken = of_blocks + there - behind
        if block == 0 and head == 0:
            made[row, 0], made[row, 1], made[row, 2], made[row, 3], made[row, 4] = row % group, row % group, 1, taken - 1, taken
        if block * BLOCK >= taken:
            continue
        own = target + task * record
        if (block + 1) * BLOCK > taken:
            zeros = carray(typed_pointer(own, np.uint8(0)), (record,))
            for byte in range(record):
                zeros[byte] = 0
        for j in range(min(BLOCK, taken - block * BLOCK)):
            at = block * BLOCK + j
            place = behind + at - of_blocks
            if at < of_blocks:
                place = np.int64(places[row, at // ratio]) * ratio + at % ratio
            source, slot = kept + (np.int64(tables[sequence, place // BLOCK]) * kv_heads + head) * record, place % BLOCK
            if is_values != 0:
                from_at, to_at = slot // pair * width * pair + slot % pair, j // pair * width * pair + j % pair
                _copy_row(source, from_at, own, to_at, width, pair, size)
            else:
                copy_units(source + slot * pair * size, own + j * pair * size, width // pair, pair * size)
            if scale_bytes > 0:
                copy_units(source + codes + slot * 4, own + codes + j * 4, 1, 4)
