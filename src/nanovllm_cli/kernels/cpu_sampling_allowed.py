"""Where a row of logits is large, and what a mask leaves of it: what comes before a draw.

Legend: V tokens, P blocks, N allowed tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from nanovllm_cli.kernels.cpu_numbers import bits_of, float_of
from nanovllm_cli.kernels.inner import inner

BLOCK = 64
"""Logits of which the largest is noted."""
NEG_INF = np.float32(-np.inf)

@intrinsic
def _num_bits(typing: Any, word: Any) -> Any:
    """How many bits of a uint32 are set."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint32(types.uint32), code


@intrinsic
def _lowest_bit(typing: Any, word: Any) -> Any:
    """Which bit of a uint32 other than 0 is the lowest that is set."""

    def code(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.uint32(types.uint32), code


@inner
def ordered(x):
    """Signed bits that order as float32 does (0.0 above -0.0), with NaN at the ends."""
    bits = np.int32(bits_of(x))
    return np.int32(bits ^ np.int32((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inner
def of_order(key):
    """The logit that `ordered` gave this of."""
    return float_of(np.int32(key ^ np.int32((key >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@inner
def block_peaks(logits, peaks):
    """The largest of each block to peaks [P], and of all; -inf where there is none, +inf for a row that is not finite."""
    size = len(logits)
    highest = np.int32(-0x80000000)
    lowest = np.int32(0x7FFFFFFF)
    for block in range(len(peaks)):
        top = np.int32(-0x80000000)
        start = block * BLOCK
        if start + BLOCK <= size:
            for i in range(BLOCK):
                key = ordered(logits[start + i])
                top = max(top, key)
                lowest = min(lowest, key)
        else:
            for i in range(start, size):
                key = ordered(logits[i])
                top = max(top, key)
                lowest = min(lowest, key)
        peaks[block] = of_order(top)
        highest = max(highest, top)
    if highest >= ordered(np.float32(np.inf)) or lowest < ordered(NEG_INF):
        return np.float32(np.inf)
    return of_order(highest)


@inner
def num_allowed(words, size):
    """How many of a row's tokens a mask allows."""
    count = np.int64(0)
    for w in range(min(len(words), (size + 31) // 32)):
        count += _num_bits(_word(words, w, size))
    return count


@inner
def _word(words, w, size):
    """A word of a mask, without what it says of tokens behind the row."""
    beyond = 32 * (w + 1) - size
    return words[w] if beyond <= 0 else np.uint32(words[w] & (np.uint32(0xFFFFFFFF) >> np.uint32(beyond)))


@inner
def gather_allowed(logits, words, ids, values):
    """What a mask allows, by id: ids [N] and their logits [N]."""
    n = 0
    for w in range(min(len(words), (len(logits) + 31) // 32)):
        word = _word(words, w, len(logits))
        while word != 0:
            i = 32 * w + np.int64(_lowest_bit(word))
            ids[n], values[n] = i, logits[i]
            word = np.uint32(word & (word - np.uint32(1)))
            n += 1


@inner
def copy_allowed(logits, peaks, words, copy):
    """A row under its mask to copy [V], and the largest of each block to peaks again. Blocks where nothing is allowed have -inf
    there and are not written: nobody reads them. The largest of all."""
    size, highest = len(logits), NEG_INF
    for block in range(len(peaks)):
        start, first = block * BLOCK, block * (BLOCK // 32)
        low = words[first] if first < len(words) else np.uint32(0)
        high = words[first + 1] if first + 1 < len(words) else np.uint32(0)
        if low == 0 and high == 0:
            peaks[block] = NEG_INF
            continue
        if start + BLOCK <= size:
            for j in range(32):
                copy[start + j] = logits[start + j] if (low >> np.uint32(j)) & np.uint32(1) else NEG_INF
            for j in range(32):
                copy[start + 32 + j] = logits[start + 32 + j] if (high >> np.uint32(j)) & np.uint32(1) else NEG_INF
        else:
            for i in range(start, size):
                word = low if i - start < 32 else high
                copy[i] = logits[i] if (word >> np.uint32(i % 32)) & np.uint32(1) else NEG_INF
        highest = max(highest, block_peaks(copy[start : start + BLOCK], peaks[block : block + 1]))
    return highest


@inner
def deviation(logits, peaks):
    """The standard deviation of logits [V] that are not -inf, of which there is one, summed in order of ids. What a block without
    any holds is nobody's."""
    count, total = 0, 0.0
    for block in range(len(peaks)):
        if peaks[block] != NEG_INF:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(logits))):
                if logits[i] != NEG_INF:
                    count += 1
                    total += np.float64(logits[i])
    mean, squares = total / count, 0.0
    for block in range(len(peaks)):
        if peaks[block] != NEG_INF:
            for i in range(block * BLOCK, min((block + 1) * BLOCK, len(logits))):
                if logits[i] != NEG_INF:
                    squares += (np.float64(logits[i]) - mean) ** 2
    return math.sqrt(squares / count)
