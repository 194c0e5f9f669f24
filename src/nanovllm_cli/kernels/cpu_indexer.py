"""Sparse attention on the CPU: which tokens a query sees, and those tokens' keys behind each other, over which it is
cpu_attention's attention that is computed.

The keys that choose are kept like attention's (cpu_attention), dense, with one head. Scores are sums of the inner loop's
products, one token's heads after another, so that what a token chooses does not depend on what else is in the step.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.cpu_attention import BLOCKS_PER_TILE, KEYS, SPLIT
from nanovllm_cli.kernels.cpu_cache import BLOCK
from nanovllm_cli.kernels.cpu_numbers import FAST, dot64, floats_at, keep, scratch
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import MAX_ROWS, typed_pointer

_BUCKETS = 256
_SIGN = np.uint32(1 << 31)


@kernel(fastmath=FAST)
def index_scores(arguments, thread, team):
    """scores [num_rows, room] fp32: of each token up to a row's own the sum over heads of weight * max(0, query . key). Rows that
    see no more than `most` tokens have none, as they choose all.

    q [num_rows, heads, dim], weights [num_rows, heads] fp32; dim whole pairs. tiles [num_rows, 5] int64: as those of
    `paged_attention`, each of one row, of which sequence and position count. block_tables [B, table_width] int32. record: bytes
    of a block's keys.
    """
    (
        tag, pair, q, weights, num_rows, heads, dim, keys_kept, record, tiles, block_tables, table_width, scores, room, most,
    ) = fields(arguments)  # fmt: skip
    size = 4 // pair
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    tables = carray(typed_pointer(block_tables, np.int32(0)), (1 << 40, table_width))
    factors = carray(typed_pointer(weights, np.float32(0)), (num_rows, heads))
    found = carray(typed_pointer(scores, np.float32(0)), (num_rows, room))
    memory = scratch(4 * (MAX_ROWS + 1) * KEYS)
    sums_at = memory.ctypes.data
    sums, totals = floats_at(sums_at, (MAX_ROWS, KEYS)), floats_at(sums_at + 4 * MAX_ROWS * KEYS, (KEYS,))
    parts = (room + SPLIT - 1) // SPLIT
    for task in share(num_rows * parts, thread, team):
        row, part = task // parts, task % parts
        seq, count = tile_of[row, 0], tile_of[row, 3] + 1
        if count <= most:
            continue
        for base in range(part * SPLIT, min(count, (part + 1) * SPLIT), KEYS):
            first, last = base // BLOCK, (count - 1) // BLOCK
            k0 = keys_kept + np.int64(tables[seq, first]) * record
            k1 = keys_kept + np.int64(tables[seq, min(first + 1, last)]) * record
            k2 = keys_kept + np.int64(tables[seq, min(first + 2, last)]) * record
            k3 = keys_kept + np.int64(tables[seq, min(first + BLOCKS_PER_TILE - 1, last)]) * record
            for c in range(KEYS):
                totals[c] = np.float32(0.0)
            for head in range(0, heads, MAX_ROWS):
                some = min(MAX_ROWS, heads - head)
                queries = q + (row * heads + head) * dim * size
                dot64(tag, some, queries, dim * size, k0, k1, k2, k3, 64, dim // pair, sums_at, 256, 0)
                for i in range(some):
                    factor = factors[row, head + i]
                    for c in range(KEYS):
                        totals[c] += factor * max(sums[i, c], np.float32(0.0))
            for c in range(min(KEYS, count - base)):
                found[row, base + c] = totals[c]
    keep(memory)


@inner
def _in_order(bits):
    """Of an fp32's bits: such that whole numbers are ordered as the fp32 are. NaNs come last, or first."""
    return np.uint32(~bits) if bits & _SIGN else np.uint32(bits | _SIGN)


@kernel()
def choose(arguments, thread, team):
    """chosen [num_rows, most] int32: positions of those tokens that score highest, ascending; of equal ones the first. Behind the
    last one there is nothing. seqs [num_rows, 5] int64: tiles of the sequences that these are, one a row, of which `group` are
    attended to at once. scores, tiles: as of `index_scores`."""
    num_rows, scores, room, tiles, most, chosen, seqs, group = fields(arguments)
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    all_bits = carray(typed_pointer(scores, np.uint32(0)), (num_rows, room))
    places = carray(typed_pointer(chosen, np.int32(0)), (num_rows, most))
    made = carray(typed_pointer(seqs, np.int64(0)), (num_rows, 5))
    memory = scratch(8 * _BUCKETS)
    counts = carray(typed_pointer(memory.ctypes.data, np.int64(0)), (_BUCKETS,))
    for row in share(num_rows, thread, team):
        there = tile_of[row, 3] + 1
        taken = min(there, most)
        made[row, 0], made[row, 1], made[row, 2], made[row, 3], made[row, 4] = row % group, row % group, 1, taken - 1, taken
        if there <= most:
            for i in range(there):
                places[row, i] = i
            continue
        # The least number that is taken, eight bits at a time from the highest: how many lie above decides the next ones.
        least, left = np.uint32(0), most
        for shift in (24, 16, 8, 0):
            for b in range(_BUCKETS):
                counts[b] = 0
            for i in range(there):
                number = _in_order(all_bits[row, i])
                if shift == 24 or (number ^ least) >> np.uint32(shift + 8) == 0:
                    counts[(number >> np.uint32(shift)) & np.uint32(255)] += 1
            bucket = _BUCKETS - 1
            while counts[bucket] < left:
                left -= counts[bucket]
                bucket -= 1
            least |= np.uint32(bucket << shift)
        n = 0
        for i in range(there):
            number = _in_order(all_bits[row, i])
            if number > least or (number == least and left > 0):
                left -= number == least
                places[row, n] = i
                n += 1
    keep(memory)


@inner
def copy_units(source, target, count, unit):
    """count times a unit of 4, 2 or 1 bytes, each BLOCK of them behind the one before."""
    if unit == 4:
        a, b = typed_pointer(source, np.uint32(0)), typed_pointer(target, np.uint32(0))
        words, copies = carray(a, (count * BLOCK,)), carray(b, (count * BLOCK,))
        for i in range(count):
            copies[i * BLOCK] = words[i * BLOCK]
    elif unit == 2:
        c, d = typed_pointer(source, np.uint16(0)), typed_pointer(target, np.uint16(0))
        halves, half_copies = carray(c, (count * BLOCK,)), carray(d, (count * BLOCK,))
        for i in range(count):
            half_copies[i * BLOCK] = halves[i * BLOCK]
    else:
        e, f = typed_pointer(source, np.uint8(0)), typed_pointer(target, np.uint8(0))
        codes, code_copies = carray(e, (count * BLOCK,)), carray(f, (count * BLOCK,))
        for i in range(count):
            code_copies[i * BLOCK] = codes[i * BLOCK]


@kernel()
def gather_keys(arguments, thread, team):
    """target [num_rows, blocks, record bytes] = the keys of chosen tokens of a cache with one head, in blocks like its own.
    units: of a key, each of `unit` bytes; scale_bytes: of a block's scales, behind its keys. Keys behind the last one are
    zeros, as attention multiplies what it does not see by 0. tiles: as of `index_scores`; chosen, seqs: as of `choose`."""
    (
        num_rows, kept, record, units, unit, scale_bytes, tiles, block_tables, table_width, most, chosen, seqs, target, blocks,
    ) = fields(arguments)  # fmt: skip
    tile_of = carray(typed_pointer(tiles, np.int64(0)), (num_rows, 5))
    made = carray(typed_pointer(seqs, np.int64(0)), (num_rows, 5))
    tables = carray(typed_pointer(block_tables, np.int32(0)), (1 << 40, table_width))
    places = carray(typed_pointer(chosen, np.int32(0)), (num_rows, most))
    for task in share(num_rows * blocks, thread, team):
        row, block = task // blocks, task % blocks
        seq, taken = tile_of[row, 0], made[row, 4]
        if block * BLOCK >= taken:
            continue
        own = target + task * record
        for j in range(BLOCK):
            if block * BLOCK + j >= taken:
                zeros = carray(typed_pointer(own, np.uint8(0)), (record,))
                for d in range(units):
                    for byte in range(unit):
                        zeros[(d * BLOCK + j) * unit + byte] = 0
                for byte in range(scale_bytes // BLOCK):
                    zeros[units * BLOCK * unit + j * (scale_bytes // BLOCK) + byte] = 0
                continue
            place = np.int64(places[row, block * BLOCK + j])
            source = kept + np.int64(tables[seq, place // BLOCK]) * record
            copy_units(source + place % BLOCK * unit, own + j * unit, units, unit)
            if scale_bytes > 0:
                behind = units * BLOCK * unit
                copy_units(source + behind + place % BLOCK * 4, own + behind + j * 4, 1, 4)
