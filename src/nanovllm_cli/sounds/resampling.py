"""A sound at another rate: windowed sincs, in the phases that occur (polyphase), as bounded as what they are made of.

What is above half of the lower rate would fold back, and is filtered out: a Kaiser window of 80 dB, over 24 zeros of the sinc on
either side (Oppenheim and Schafer, Discrete-Time Signal Processing, 7.6).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

_ZEROS, _BETA, _ROLLOFF = 24, 7.865, 0.945
_BLOCK = 1 << 21  # numbers that are gathered at once


def resampled(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """[n] float32 at `rate` -> [ceil(n * wanted / rate)] float32. Silence lies before and behind."""
    if rate == wanted or not len(samples):
        return samples
    common = math.gcd(rate, wanted)
    up, down = wanted // common, rate // common
    half = _half(up, down)
    count = -(-len(samples) * up // down)
    padded = np.concatenate([np.zeros(half, np.float32), samples, np.zeros(half + 1, np.float32)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    out = np.empty(count, np.float32)
    step = max(1, _BLOCK // (2 * half + 1))
    kept = min(up, _MOST_PHASES)
    filters = _filters(up, down, kept)
    for first in range(0, count, step):
        places = np.arange(first, min(first + step, count), dtype=np.int64) * down
        nearest, phases = places // up, places % up
        chosen, behind = np.divmod(phases * kept, up)
        out[first : first + step] = np.einsum("nk,nk->n", windows[nearest], filters[chosen])
        if kept < up:  # between two phases
            further = np.einsum("nk,nk->n", windows[nearest], filters[chosen + 1])
            out[first : first + step] += (behind / up).astype(np.float32) * (further - out[first : first + step])
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
