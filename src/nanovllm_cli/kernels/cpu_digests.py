"""What attention with one shared key needs on the CPU (DeepSeek-V4) beside the attention of cpu_attention.py: heads whose last
numbers turn, what tokens keep for digests, digests themselves, what ranks them, and the rows that a token sees, behind each
other.

Of a token its key is kept, and with digests a raw row as well, in rows [N, 16, …] of the cache's blocks that windows need;
digests are rows [N, room, …] of blocks, that of the last token which one is made of being its place. They are made of raw rows
of the cache alone, each by its own: so a step that comes again, or other tokens in place of guesses, give the same, whatever else
is in the step.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_cache import BLOCK
from nanovllm_cli.kernels.cpu_numbers import FAST, exp_not_positive, floats_at, keep, load, scratch, store, whole_lines
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.simd_sums import sum_f32, sum_of_squares

PART = 64
"""Digests of a row that a task scores."""


@inner(fastmath=FAST)
def _turn(buffer, cos, sin, half, sign):
    """The last 2 * half numbers, whose pairs lie side by side."""
    first = buffer.size - 2 * half
    for i in range(half):
        a, b, c, s = buffer[first + 2 * i], buffer[first + 2 * i + 1], cos[i], sin[i] * sign
        buffer[first + 2 * i] = a * c - b * s
        buffer[first + 2 * i + 1] = b * c + a * s


@kernel(fastmath=FAST)
def turn_last(arguments, thread, team):
    """x [num_rows, heads, dim], in place: each head by itself over its root mean square where normed is not 0, times gains [dim]
    where these are not 0, its last numbers turned by cos, sin [num_rows, half] fp32, or with a sign below 0 back. Work is split
    by heads."""
    tag, x, num_rows, heads, dim, normed, gains, cos, sin, half, eps, offset, sign = fields(arguments)
    rows = carray(typed_pointer(x, tag), (num_rows * heads, dim))
    factors = carray(typed_pointer(gains if gains != 0 else x, tag), (dim,))
    cos_of, sin_of = floats_at(cos, (num_rows, half)), floats_at(sin, (num_rows, half))
    memory = scratch(4 * dim)
    buffer = floats_at(memory.ctypes.data, (dim,))
    for task in share(num_rows * heads, thread, team):
        line, r = rows[task], task // heads
        inverse = np.float32(1.0)
        if normed != 0:
            square = sum_of_squares(tag, line.ctypes.data, dim)
            inverse = np.float32(1.0) / np.sqrt(square / np.float32(dim) + np.float32(eps))
        for i in range(dim):
            buffer[i] = load(line, i) * inverse
        if gains != 0:
            for i in range(dim):
                buffer[i] *= np.float32(offset) + load(factors, i)
        _turn(buffer, cos_of[r], sin_of[r], half, np.float32(sign))
        for i in range(dim):
            store(line, i, buffer[i])
    keep(memory)


@kernel()
def keep_rows(arguments, thread, team):
    """kept [N * 16, width] at slots [num_rows] int64 = rows of x [num_rows, width]."""
    tag, x, num_rows, width, slots, kept = fields(arguments)
    rows = carray(typed_pointer(x, tag), (num_rows, width))
    targets = carray(typed_pointer(kept, tag), (1 << 40, width))
    slot_of = carray(typed_pointer(slots, np.int64(0)), (num_rows,))
    for r in share(num_rows, thread, team):
        source, target = rows[r], targets[slot_of[r]]
        for i in range(width):
            target[i] = source[i]


@kernel(fastmath=FAST)
def make_digests(arguments, thread, team):
    """Of each token with which `rate` of them are whole its digest [dim]: see `digest_rules.digests`.

    raw [N * 16, raw_width]: rows of tokens; of each, from column at on, what is summed, and from gates on what weighs it, `parts`
    times dim of either. parts 2: the first are for the digest behind, of which a token's own has the second. bias [rate, parts *
    dim] fp32 is added to what weighs. gains [dim], offset apart. cos, sin [num_rows, half] fp32: of the digests' positions. tiles
    [num_rows, 5] int64: as those of `paged_attention`, each of one row, of which sequence and position count. near_tables [B,
    near_width] int32: where raw rows are; tables [B, table_width]: where digests [N, room, dim] are. Work is split by rows."""
    (
        tag, raw, raw_width, at, gates, parts, dim, bias, gains, cos, sin, half, tiles, num_rows, near_tables, near_width, tables,
        table_width, rate, room, digests, eps, offset,
    ) = fields(arguments)  # fmt: skip
    rows = carray(typed_pointer(raw, tag), (1 << 40, raw_width))
    added = floats_at(bias, (rate, parts * dim))
    factors = carray(typed_pointer(gains, tag), (dim,))
    cos_of, sin_of = floats_at(cos, (num_rows, half)), floats_at(sin, (num_rows, half))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    near = carray(typed_pointer(near_tables, np.int32(0)), (1 << 40, near_width))
    table = carray(typed_pointer(tables, np.int32(0)), (1 << 40, table_width))
    made = carray(typed_pointer(digests, tag), (1 << 40, room, dim))
    line = whole_lines(4 * dim)
    memory = scratch(3 * line)
    most, weight = floats_at(memory.ctypes.data, (dim,)), floats_at(memory.ctypes.data + line, (dim,))
    total = floats_at(memory.ctypes.data + 2 * line, (dim,))
    for r in share(num_rows, thread, team):
        sequence, position = tile_of[r, 0], tile_of[r, 3]
        if (position + 1) % rate != 0:
            continue
        begin = max(0, position + 1 - parts * rate)
        for i in range(dim):
            most[i], weight[i], total[i] = np.float32(-np.inf), np.float32(0.0), np.float32(0.0)
        for p in range(begin, position + 1):
            part = dim if parts == 2 and p > position - rate else 0
            own, more = rows[np.int64(near[sequence, p // BLOCK]) * BLOCK + p % BLOCK], added[p % rate]
            for i in range(dim):
                most[i] = max(most[i], load(own, gates + part + i) + more[part + i])
        for p in range(begin, position + 1):
            part = dim if parts == 2 and p > position - rate else 0
            own, more = rows[np.int64(near[sequence, p // BLOCK]) * BLOCK + p % BLOCK], added[p % rate]
            for i in range(dim):
                e = exp_not_positive(load(own, gates + part + i) + more[part + i] - most[i])
                weight[i] += e
                total[i] += e * load(own, at + part + i)
        for i in range(dim):
            total[i] /= weight[i]
        square = sum_of_squares(np.float32(0.0), total.ctypes.data, dim)
        inverse = np.float32(1.0) / np.sqrt(square / np.float32(dim) + np.float32(eps))
        for i in range(dim):
            total[i] *= inverse * (np.float32(offset) + load(factors, i))
        _turn(total, cos_of[r], sin_of[r], half, np.float32(1.0))
        target = made[np.int64(table[sequence, position // BLOCK]), position % BLOCK // min(rate, BLOCK)]
        for i in range(dim):
            store(target, i, total[i])
    keep(memory)


@kernel(fastmath=FAST)
def digest_scores(arguments, thread, team):
    """scores [num_rows, columns] fp32: of each whole digest up to a row's token the sum over heads of weight * max(0, query .
    digest). Rows that have no more than `most` such have none, as they see all. told [num_rows, 5] int64: tiles whose position
    is that of the last whole digest, as `cpu_indexer.choose` reads them. q [num_rows, heads, dim], weights [num_rows, heads]
    fp32, digests [N, room, dim]. The others: see `make_digests`."""
    (
        tag, q, weights, num_rows, heads, dim, digests, room, tiles, tables, table_width, rate, most, scores, columns, told,
    ) = fields(arguments)  # fmt: skip
    queries = carray(typed_pointer(q, tag), (num_rows, heads, dim))
    factors = floats_at(weights, (num_rows, heads))
    made = carray(typed_pointer(digests, tag), (1 << 40, room, dim))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    table = carray(typed_pointer(tables, np.int32(0)), (1 << 40, table_width))
    found = floats_at(scores, (num_rows, columns))
    of_digests = carray(typed_pointer(told, np.int64(0)), (num_rows, 5))
    line = whole_lines(4 * dim)
    memory = scratch((heads + 2) * line)
    product, wide = floats_at(memory.ctypes.data, (dim,)), floats_at(memory.ctypes.data + line, (dim,))
    at_queries = memory.ctypes.data + 2 * line
    pieces = (columns + PART - 1) // PART
    for task in share(num_rows * pieces, thread, team):
        r, piece = task // pieces, task % pieces
        sequence, count = tile_of[r, 0], (tile_of[r, 3] + 1) // rate
        if piece == 0:
            of_digests[r, 0], of_digests[r, 1], of_digests[r, 2] = sequence, r, 1
            of_digests[r, 3], of_digests[r, 4] = count - 1, count
        if count <= most or piece * PART >= count:
            continue
        for h in range(heads):
            query, own = queries[r, h], floats_at(at_queries + h * line, (dim,))
            for i in range(dim):
                own[i] = load(query, i)
        for d in range(piece * PART, min(count, (piece + 1) * PART)):
            place = d * rate + rate - 1
            digest = made[np.int64(table[sequence, place // BLOCK]), place % BLOCK // min(rate, BLOCK)]
            for i in range(dim):
                wide[i] = load(digest, i)
            total = np.float32(0.0)
            for h in range(heads):
                own = floats_at(at_queries + h * line, (dim,))
                for i in range(dim):
                    product[i] = own[i] * wide[i]
                total += factors[r, h] * max(sum_f32(product.ctypes.data, dim), np.float32(0.0))
            found[r, d] = total
    keep(memory)


@kernel()
def gather_seen(arguments, thread, team):
    """target [num_rows, blocks, dim / pair, 16, pair] = what each row's token sees, in blocks as attention reads them: digests,
    then keys [N * 16, dim] of the tokens in its window, its own last. Behind these are zeros, as attention multiplies what it
    does not see by 0. made [num_rows, 5] int64: tiles of sequences that are made of these alone, `group` of them at once. rate 0:
    there are no digests. chosen [num_rows, most] int32: which they are, or 0: all up to the token. The others: see
    `make_digests`."""
    (
        tag, pair, digests, room, keys, dim, rate, chosen, most, tiles, num_rows, near_tables, near_width, tables, table_width,
        window, made, target, blocks, group,
    ) = fields(arguments)  # fmt: skip
    of_digests = carray(typed_pointer(digests if rate > 0 else keys, tag), (1 << 40, room, dim))
    rows = carray(typed_pointer(keys, tag), (1 << 40, dim))
    places = carray(typed_pointer(chosen, np.int32(0)), (num_rows, max(1, most)))
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    near = carray(typed_pointer(near_tables, np.int32(0)), (1 << 40, near_width))
    table = carray(typed_pointer(tables, np.int32(0)), (1 << 40, table_width))
    told = carray(typed_pointer(made, np.int64(0)), (num_rows, 5))
    out = carray(typed_pointer(target, tag), (num_rows * blocks, dim // pair, BLOCK, pair))
    for task in share(num_rows * blocks, thread, team):
        r, block = task // blocks, task % blocks
        sequence, position = tile_of[r, 0], tile_of[r, 3]
        digested = (position + 1) // rate if rate > 0 else 0
        digested = min(digested, most) if chosen != 0 else digested
        first = max(0, position + 1 - window)
        taken = digested + position + 1 - first
        if block == 0:
            told[r, 0], told[r, 1], told[r, 2], told[r, 3], told[r, 4] = r % group, r % group, 1, taken - 1, taken
        if block * BLOCK >= taken:
            continue
        own = out[task]
        for j in range(BLOCK):
            at = block * BLOCK + j
            if at >= taken:
                for p in range(dim // pair):
                    for half in range(pair):
                        own[p, j, half] = 0
                continue
            if at < digested:
                number = np.int64(places[r, at]) if chosen != 0 else np.int64(at)
                place = number * rate + rate - 1
                source = of_digests[np.int64(table[sequence, place // BLOCK]), place % BLOCK // min(rate, BLOCK)]
            else:
                place = first + at - digested
                source = rows[np.int64(near[sequence, place // BLOCK]) * BLOCK + place % BLOCK]
            if pair == 2:
                for p in range(dim // 2):
                    own[p, j, 0], own[p, j, 1] = source[2 * p], source[2 * p + 1]
            else:
                for p in range(dim):
                    own[p, j, 0] = source[p]
