"""Drawing for all rows of a step at once, rows dealt to the threads. What is computed stands in `cpu_sampling`'s docstring.

A row is one task and sees no other, so a draw cannot depend on the batch. Its bits depend on the processor no more: a weight is a
fixed chain of float32 operations, and what follows is integers, or float64 in order.

A row is first cut into blocks of 64 logits, of which the largest are noted (finding NaN and infinity on the way). A shortlist
then reads only blocks that hold something of it, and the k-th largest block is a bound for top_k. Where weights have to add up
to a share, a radix selection by key finds the last entry that counts, and nothing is sorted.

Legend: V tokens, P blocks, C candidates. Addresses and counts only; the caller has checked them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from nanovllm_cli.kernels.cpu_numbers import float_of
from nanovllm_cli.kernels.cpu_sampling_allowed import (
    BLOCK,
    NEG_INF,
    block_peaks,
    copy_allowed,
    deviation,
    gather_allowed,
    num_allowed,
    of_order,
    ordered,
)
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer

TEMPERATURE, MIN_P_GAP, TOP_N_SIGMA, TOP_K, TYPICAL_P, TOP_P, XTC_THRESHOLD, UNIFORM, SETTINGS = range(9)
"""Columns of a row's settings, float64. MIN_P_GAP: temperature * log(min_p). Off is temperature 0 (the largest wins), MIN_P_GAP
-inf, TOP_N_SIGMA and TOP_K 0, TYPICAL_P and TOP_P 1, XTC_THRESHOLD 0."""

NOTHING_LEFT, NOT_FINITE = -1, -2
"""In place of an id: every logit is -inf; NaN or +inf among them."""
LISTED = 16
NUM_KEPT, TOTAL, WEAKEST, KEPT_IDS, KEPT_WEIGHTS, KEPT = 0, 1, 2, 3, 3 + LISTED, 3 + 2 * LISTED
"""Columns of what filters kept of a row, int64. NUM_KEPT: how many tokens, or 0 where they are more than LISTED or are not told.
TOTAL: the weight that top_p was a share of. WEAKEST: the least weight that top_k let through, if it kept any out. Ids and weights
of the kept, the most likely first."""

_DIGIT = 11
_LOWEST = np.float32(np.finfo(np.float32).min)
_ONE = np.float32(2.0**40)
_NEGLIGIBLE = np.float32(-40.0)
_WEIGHTLESS = np.float32(-28.0)

@intrinsic
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32 with one rounding, also on a processor without the instruction."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), code


@inner
def weight(gap):
    """floor(2**40 * e**gap) for gap <= 0, with numpy's float32 exponential bit for bit where numpy has FMA.

    Formula and coefficients: numpy's `simd_exp_FLOAT`, e**r on |r| <= log(2) / 2 as a quotient of polynomials.
    """
    x = max(gap, _NEGLIGIBLE)
    rounding = np.float32(12582912.0)  # 1.5 * 2**23: a sum with it has no fraction
    n = np.float32(np.float32(np.float32(x * np.float32(1.44269504088896341)) + rounding) - rounding)
    r = _fma(n, np.float32(-6.93145752e-1), x)
    r = _fma(n, np.float32(-1.42860677e-6), r)
    over = _fma(np.float32(5.082762527590693718096e-04), r, np.float32(6.757896990527504603057e-03))
    over = _fma(over, r, np.float32(5.114512081637298353406e-02))
    over = _fma(over, r, np.float32(2.473615434895520810817e-01))
    over = _fma(over, r, np.float32(7.257664613233124478488e-01))
    over = _fma(over, r, np.float32(9.999999999980870924916e-01))
    under = _fma(np.float32(2.159509375685829852307e-02), r, np.float32(-2.742335390411667452936e-01))
    under = _fma(under, r, np.float32(1.0))
    power = float_of(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    return np.int64(np.float32(np.float32(over / under) * power) * _ONE)


@inner
def _sum(values, count):
    total = np.int64(0)
    for i in range(count):
        total += values[i]
    return total


@inner
def _first_largest(logits, peaks, peak):
    block = 0
    while peaks[block] != peak:
        block += 1
    i = block * BLOCK
    while logits[i] != peak:
        i += 1
    return i


@inner
def _at_least(logits, peaks, floor, ids):
    """Ids, ascending, of the logits that reach floor, to ids; how many."""
    count = 0
    for block in range(len(peaks)):
        if peaks[block] >= floor:
            for i in range(block * BLOCK, min(len(logits), (block + 1) * BLOCK)):
                ids[count] = i
                count += logits[i] >= floor
    return count


@inner
def _keys_of_float32(values):
    """Unsigned keys that order as the values do, 0.0 and -0.0 as one."""
    keys = np.empty(len(values), np.uint64)
    for i in range(len(values)):
        keys[i] = np.uint64(np.int64(ordered(values[i] + np.float32(0.0))) + np.int64(0x80000000))
    return keys


@inner
def _last_that_counts(keys, weights, target, bits):
    """Where the fewest entries with the largest keys reach `target` in weight: the lowest key of them, and how much is needed of
    those that have it (they count in order). Keys of `bits` bits; one digit at a time, from the highest."""
    count = len(keys)
    alive = np.empty(count, np.int64)
    for i in range(count):
        alive[i] = i
    held = np.empty(1 << _DIGIT, np.int64)
    prefix, shift = np.uint64(0), bits
    while shift > 0 and count > 0:
        width = min(_DIGIT, shift)
        shift -= width
        mask = np.uint64((1 << width) - 1)
        for digit in range(len(held)):
            held[digit] = 0
        low, high = np.int64(mask), np.int64(0)
        for j in range(count):
            digit = np.int64((keys[alive[j]] >> np.uint64(shift)) & mask)
            held[digit] += weights[alive[j]]
            low, high = min(low, digit), max(high, digit)
        digit = high
        while digit > low and held[digit] < target:
            target -= held[digit]
            digit -= 1
        left = 0
        for j in range(count):
            i = alive[j]
            alive[left] = i
            left += np.int64((keys[i] >> np.uint64(shift)) & mask) == digit
        count = left
        prefix = (prefix << np.uint64(width)) | np.uint64(digit)
    return prefix, target


@inner
def _keep_until(keys, bits, ids, gaps, weights, count, target):
    """Keep, in their order, the fewest of `count` candidates with the largest keys whose weights reach target (at least 1)."""
    last, missing = _last_that_counts(keys[:count], weights[:count], max(np.int64(1), target), bits)
    kept = 0
    for i in range(count):
        key, weight = keys[i], weights[i]
        if key > last or (key == last and missing > 0):
            if key == last:
                missing -= weight
            ids[kept], gaps[kept], weights[kept] = ids[i], gaps[i], weight
            kept += 1
    return kept


@inner
def _most_likely(logits, peaks, floor, limit, ids):
    """Ids, ascending, of the `limit` (0: all) most likely tokens of those that reach floor, to ids; how many."""
    if 0 < limit < len(peaks):
        bound, _ = _last_that_counts(_keys_of_float32(peaks), np.ones(len(peaks), np.int64), limit, np.int64(32))
        floor = max(floor, of_order(np.int32(np.int64(bound) - np.int64(0x80000000))))
    count = _at_least(logits, peaks, floor, ids)
    if 0 < limit < count:
        values = np.empty(count, np.float32)
        for i in range(count):
            values[i] = logits[ids[i]]
        ones = np.ones(count, np.int64)
        count = _keep_until(_keys_of_float32(values), np.int64(32), ids, values, ones, count, limit)
    return count


@inner
def _weigh(logits, peak, temperature, ids, gaps, weights, count):
    """Gaps and weights of `count` candidates; their total."""
    total = np.int64(0)
    for i in range(count):
        gaps[i] = np.float32(np.float32(logits[ids[i]] - peak) / temperature)
        weights[i] = weight(gaps[i])
        total += weights[i]
    return total


@inner
def _typical_keys(gaps, weights, count, total):
    """Keys that are largest where a token's surprise is nearest to the expected one. Below e**-1000 nothing is rarer."""
    expected = 0.0
    for i in range(count):
        expected += np.float64(weights[i]) * min(-np.float64(gaps[i]), 1e3)
    expected /= np.float64(total)
    keys = np.empty(count, np.uint64)
    for i in range(count):
        distance = abs(min(-np.float64(gaps[i]), 1e3) - expected)
        keys[i] = ~np.float64(distance).view(np.uint64)
    return keys


@inner
def _without_top_choices(ids, gaps, weights, count, threshold):
    """Keep all but the tokens that hold `threshold` of the weight; the least likely of those, the last of equal ones, stays."""
    limit, least = threshold * np.float64(_sum(weights, count)), -1
    for i in range(count):
        if np.float64(weights[i]) >= limit and (least < 0 or gaps[i] <= gaps[least]):
            least = i
    kept = 0
    for i in range(count):
        if np.float64(weights[i]) < limit or i == least:
            ids[kept], gaps[kept], weights[kept] = ids[i], gaps[i], weights[i]
            kept += 1
    return kept


@inner
def _total(logits, peaks, first, last, peak, temperature):
    """Weight of blocks from first to before last. What weighs nothing, by its block's largest, is not read."""
    total, block = np.int64(0), first
    while block < last:
        begin = block
        while block < last and np.float32(np.float32(peaks[block] - peak) / temperature) >= _WEIGHTLESS:
            block += 1
        stretch = logits[begin * BLOCK : block * BLOCK]
        for i in range(len(stretch)):
            total += weight(np.float32(np.float32(stretch[i] - peak) / temperature))
        block += 1
    return total


@inner
def _hit_in_row(logits, peaks, peak, temperature, uniform):
    """The draw over all tokens: by stretches of blocks first, then by blocks, then in the one that is hit."""
    stretch, num_blocks = 64, len(peaks)
    totals = np.empty((num_blocks + stretch - 1) // stretch, np.int64)
    for s in range(len(totals)):
        totals[s] = _total(logits, peaks, s * stretch, min((s + 1) * stretch, num_blocks), peak, temperature)
    aim = np.int64(uniform * np.float64(_sum(totals, len(totals))))
    s = 0
    while aim >= totals[s]:
        aim -= totals[s]
        s += 1
    block = s * stretch
    held = _total(logits, peaks, block, block + 1, peak, temperature)
    while aim >= held:
        aim -= held
        block += 1
        held = _total(logits, peaks, block, block + 1, peak, temperature)
    i = block * BLOCK
    aim -= weight(np.float32(np.float32(logits[i] - peak) / temperature))
    while aim >= 0:
        i += 1
        aim -= weight(np.float32(np.float32(logits[i] - peak) / temperature))
    return i


@inner
def _list_kept(ids, gaps, weights, count, kept):
    """The candidates to kept [KEPT], in order."""
    for i in range(count):
        place = i
        while place > 0 and gaps[kept[KEPT_IDS + place - 1]] < gaps[i]:
            kept[KEPT_IDS + place] = kept[KEPT_IDS + place - 1]
            place -= 1
        kept[KEPT_IDS + place] = i
    for place in range(count):
        i = kept[KEPT_IDS + place]
        kept[KEPT_IDS + place], kept[KEPT_WEIGHTS + place] = ids[i], weights[i]
    kept[NUM_KEPT] = count


@inner
def _drawn(logits, peaks, peak, setting, kept):
    """The place of what is drawn from logits [V] by settings [SETTINGS]; NOTHING_LEFT where all are -inf. kept [KEPT]: places."""
    size = len(logits)
    if peak == -np.inf:
        return NOTHING_LEFT
    if setting[TEMPERATURE] == 0.0:
        return _first_largest(logits, peaks, peak)
    temperature, top_k = np.float32(setting[TEMPERATURE]), np.int64(setting[TOP_K])
    limit, gap, sigmas = top_k if top_k < size else 0, setting[MIN_P_GAP], setting[TOP_N_SIGMA]
    whole = gap == -np.inf and sigmas == 0.0 and limit == 0
    typical_p, top_p, threshold = setting[TYPICAL_P], setting[TOP_P], setting[XTC_THRESHOLD]
    if whole and typical_p == 1.0 and top_p == 1.0 and threshold == 0.0:
        return _hit_in_row(logits, peaks, peak, temperature, setting[UNIFORM])
    ids, gaps, weights = np.empty(size, np.int64), np.empty(size, np.float32), np.empty(size, np.int64)
    if whole and typical_p == 1.0 and top_p < 1.0:
        # Tokens further below than `widest` cannot hold what top_p leaves out; a nearer floor mostly does.
        total = _total(logits, peaks, 0, len(peaks), peak, temperature)
        target = max(np.int64(1), np.int64(math.ceil(top_p * np.float64(total))))
        widest = math.log(np.float64(size) * 2.0**40 / max(1.0, np.float64(total - target)))
        held, count, part = np.int64(0), 0, 0.5
        while held < target:
            floor = np.float32(np.float64(peak) - part * widest * np.float64(temperature))
            count = _at_least(logits, peaks, max(floor, _LOWEST), ids)
            held = _weigh(logits, peak, temperature, ids, gaps, weights, count)
            part = part + 0.25 if part < 1.0 else np.inf
    else:
        if sigmas > 0.0:
            gap = max(gap, -sigmas * deviation(logits, peaks))
        floor = max(_LOWEST, np.float32(max(np.float64(_LOWEST), np.float64(peak) + gap)))
        count = _most_likely(logits, peaks, floor, limit, ids)
        total = _weigh(logits, peak, temperature, ids, gaps, weights, count)
        if count == limit:
            weakest = weights[0]
            for i in range(count):
                weakest = min(weakest, weights[i])
            kept[WEAKEST] = weakest
        if typical_p < 1.0:
            keys = _typical_keys(gaps, weights, count, total)
            target = np.int64(math.ceil(typical_p * np.float64(total)))
            count = _keep_until(keys, np.int64(64), ids, gaps, weights, count, target)
            total = _sum(weights, count)
    if top_p < 1.0:
        target = np.int64(math.ceil(top_p * np.float64(total)))
        count = _keep_until(_keys_of_float32(gaps[:count]), np.int64(32), ids, gaps, weights, count, target)
    if count <= LISTED and typical_p == 1.0 and threshold == 0.0 and sigmas == 0.0:
        kept[TOTAL] = total
        _list_kept(ids, gaps, weights, count, kept)
    if threshold > 0.0:
        count = _without_top_choices(ids, gaps, weights, count, threshold)
    aim = np.int64(setting[UNIFORM] * np.float64(_sum(weights, count)))
    i = 0
    aim -= weights[0]
    while aim >= 0:
        i += 1
        aim -= weights[i]
    return ids[i]


@inner
def _draw(logits, mask, num_words, copy, setting, top, kept):
    """The id drawn from logits [V] by settings [SETTINGS], or why there is none. num_words: -1 without a mask; otherwise copy [V]
    is written to, and top [1] says whether the largest logit is allowed. kept [KEPT]: what filters left."""
    size = len(logits)
    peaks = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    peak = block_peaks(logits, peaks)
    top[0], kept[NUM_KEPT], kept[WEAKEST] = 1, 0, 0
    if peak == np.inf:
        return NOT_FINITE
    if num_words < 0:
        return _drawn(logits, peaks, peak, setting, kept)
    words = carray(typed_pointer(mask, np.uint32(0)), (num_words,))
    count = num_allowed(words, size)
    if count > size // 4:
        highest = copy_allowed(logits, peaks, words, copy)
        top[0] = highest == peak
        return _drawn(copy, peaks, highest, setting, kept)
    ids, few = np.empty(count, np.int64), copy[:count]  # far fewer logits, in the same order
    gather_allowed(logits, words, ids, few)
    peaks = peaks[: (count + BLOCK - 1) // BLOCK]
    highest = block_peaks(few, peaks) if count > 0 else NEG_INF
    top[0] = highest == peak
    place = _drawn(few, peaks, highest, setting, kept)
    for i in range(kept[NUM_KEPT]):
        kept[KEPT_IDS + i] = ids[kept[KEPT_IDS + i]]
    return ids[place] if place >= 0 else place


@kernel()
def draw_rows(arguments, thread, team):
    """drawn [B] int64 from the logits at each of the addresses rows [B], by settings [B, SETTINGS] float64.

    masks [B]: addresses of mask_sizes [B] words of 32 tokens, the lowest bit first; what has no bit is not drawn. -1: no mask.
    scratch [B]: addresses of float32 [V] for rows that have a mask. tops [B] uint8: whether the largest logit is allowed.
    kept [B, KEPT] int64: what filters left.
    """
    rows, num_rows, size, settings, masks, mask_sizes, scratch, drawn, tops, kept = fields(arguments)
    addresses = carray(typed_pointer(rows, np.int64(0)), (num_rows,))
    table = carray(typed_pointer(settings, np.float64(0)), (num_rows, SETTINGS))
    words = carray(typed_pointer(masks, np.int64(0)), (num_rows,))
    num_words = carray(typed_pointer(mask_sizes, np.int64(0)), (num_rows,))
    copies = carray(typed_pointer(scratch, np.int64(0)), (num_rows,))
    out = carray(typed_pointer(drawn, np.int64(0)), (num_rows,))
    allowed = carray(typed_pointer(tops, np.uint8(0)), (num_rows,))
    left = carray(typed_pointer(kept, np.int64(0)), (num_rows, KEPT))
    for r in share(num_rows, thread, team):
        logits = carray(typed_pointer(addresses[r], np.float32(0)), (size,))
        copy = carray(typed_pointer(copies[r], np.float32(0)), (size,))
        out[r] = _draw(logits, words[r], num_words[r], copy, table[r], allowed[r : r + 1], left[r])


@kernel()
def logprob_rows(arguments, thread, team):
    """What log-probabilities of a token and of the limits[r] most likely ones are made of, for each of the addresses rows [B].

    counts [B, 3 + width] int64: the row's weight at temperature 1 (NOT_FINITE, NOTHING_LEFT), the token's rank, how many most
    likely ones, their ids by rank. logits_found [B, 2 + width] float32: the largest, the token's, theirs.
    """
    rows, num_rows, size, tokens, limits, width, counts, logits_found = fields(arguments)
    addresses = carray(typed_pointer(rows, np.int64(0)), (num_rows,))
    ids = carray(typed_pointer(tokens, np.int64(0)), (num_rows,))
    most = carray(typed_pointer(limits, np.int64(0)), (num_rows,))
    ints = carray(typed_pointer(counts, np.int64(0)), (num_rows, 3 + width))
    floats = carray(typed_pointer(logits_found, np.float32(0)), (num_rows, 2 + width))
    for r in share(num_rows, thread, team):
        _logprob_row(carray(typed_pointer(addresses[r], np.float32(0)), (size,)), ids[r], most[r], ints[r], floats[r])


@inner
def _logprob_row(logits, token, limit, ints, floats):
    size = len(logits)
    peaks = np.empty((size + BLOCK - 1) // BLOCK, np.float32)
    peak = block_peaks(logits, peaks)
    if abs(peak) == np.inf:
        ints[0] = NOT_FINITE if peak > 0 else NOTHING_LEFT
        return
    value, rank = logits[token], 1
    for i in range(size):
        rank += logits[i] > value
    for i in range(token):
        rank += logits[i] == value
    count = 0
    if limit > 0:
        likely = np.empty(size, np.int64)
        count = _most_likely(logits, peaks, _LOWEST, min(limit, size), likely)
        for i in range(count):  # few: each goes to its place behind those that are no less likely
            place = i
            while place > 0 and floats[1 + place] < logits[likely[i]]:
                ints[3 + place], floats[2 + place] = ints[2 + place], floats[1 + place]
                place -= 1
            ints[3 + place], floats[2 + place] = likely[i], logits[likely[i]]
    ints[0], ints[1], ints[2] = _total(logits, peaks, 0, len(peaks), peak, np.float32(1.0)), rank, count
    floats[0], floats[1] = peak, value
