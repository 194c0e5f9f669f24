"""A sound at another rate: windowed sincs, in the phases that occur (polyphase), as bounded as what they are made of.

What is above half of the lower rate would fold back, and is filtered out: a Kaiser window of 80 dB, over 24 zeros of the sinc on
either side (Oppenheim and Schafer, Discrete-Time Signal Processing, 7.6).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np

_ZEROS, _BETA, _ROLLOFF = 24, 7.865, 0.945
_BLOCK = 1 << 21  # numbers that are gathered at once


def resampled(blocks: Iterable[np.ndarray], rate: int, wanted: int) -> Iterator[np.ndarray]:
    """Blocks of float32 that follow each other at `rate` -> the same at `wanted`: of n samples ceil(n * wanted / rate). Silence
    lies before and behind. No more is held of it than two blocks."""
    if rate == wanted:
        yield from blocks
        return
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    half, kept = _half(up, down), min(up, _MOST_PHASES)
    filters = _filters(up, down, kept)
    held, begin = np.zeros(half, np.float32), 0  # begin: the place of its first, counted from the silence before
    count = made = 0
    for block in blocks:
        count += len(block)
        held = np.concatenate([held, block])
        last = max(made, -(-(begin + len(held) - 2 * half - 1) * up // down))  # which need what is still to come
        yield _at(made, last, held, begin, up, down, filters)
        made, left = last, last * down // up - begin
        held, begin = held[left:], begin + left
    yield _at(made, -(-count * up // down), np.concatenate([held, np.zeros(half + 1, np.float32)]), begin, up, down, filters)


def _at(first: int, end: int, held: np.ndarray, begin: int, up: int, down: int, filters: np.ndarray) -> np.ndarray:
    """Samples first to end of what is wanted."""
    kept, taps = len(filters) - 1, filters.shape[1]
    out = np.empty(max(0, end - first), np.float32)
    if not len(out):
        return out
    windows = np.lib.stride_tricks.sliding_window_view(held, taps)
    step = max(1, _BLOCK // taps)
    for start in range(0, len(out), step):
        places = np.arange(first + start, min(first + start + step, end), dtype=np.int64) * down
        nearest, phases = places // up - begin, places % up
        chosen, behind = np.divmod(phases * kept, up)
        made = np.einsum("nk,nk->n", windows[nearest], filters[chosen])
        if kept < up:  # between two phases
            further = np.einsum("nk,nk->n", windows[nearest], filters[chosen + 1])
            made += (behind / up).astype(np.float32) * (further - made)
        out[start : start + step] = made
    return out


_MOST_PHASES = 1 << 10
"""Whose filters are made; what lies between two of them, as at rates that have little in common, is a mean of both."""


def _half(up: int, down: int) -> int:
    """Samples on either side that count."""
    return math.ceil(_ZEROS * max(1.0, down / up))


@lru_cache(maxsize=8)
def _filters(up: int, down: int, count: int) -> np.ndarray:
    """[count + 1, taps], for what lies so many parts of a sample behind the one in the middle."""
    half, cutoff = _half(up, down), _ROLLOFF * min(1.0, up / down)
    away = np.arange(-half, half + 1) - np.arange(count + 1)[:, None] / count
    window = np.i0(_BETA * np.sqrt(np.maximum(0, 1 - (away / half) ** 2))) / np.i0(_BETA)
    taps = cutoff * np.sinc(cutoff * away) * window * (np.abs(away) <= half)
    made: np.ndarray = (taps / taps.sum(axis=1, keepdims=True)).astype(np.float32)
    return made
