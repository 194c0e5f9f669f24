"""Random numbers without a state: Philox4x32-10, a function from (seed, counter) to bits.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is a sequence's seed; the counter says
which token of its answer is drawn, and what for. Nothing is stored between two tokens, so that preemption, batching and
the order of the draws cannot change them, and a GPU kernel can produce the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanovllm_cli.kernels import cpu_sampling_random

DRAW_TOKEN = 0
EXCLUDE_TOP_CHOICES = 1
DRAW_AGAIN = 2

_32 = np.uint64(32)


def philox_uniforms(seeds: Sequence[int], positions: Sequence[int], purpose: int) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position).

    seeds: the lowest 64 bits count. positions: index of the token in its answer. purpose: one of this file's names;
    streams of different purposes have nothing to do with each other.
    """
    count = len(seeds)
    key = np.zeros((2, count), dtype=np.uint64)
    key[0] = [seed & 0xFFFFFFFF for seed in seeds]
    key[1] = [seed >> 32 & 0xFFFFFFFF for seed in seeds]
    counter = np.zeros((4, count), dtype=np.uint64)
    counter[0] = [position & 0xFFFFFFFF for position in positions]
    counter[1] = [position >> 32 for position in positions]
    counter[2] = purpose
    words = philox4x32(counter, key)
    bits = (words[0] << _32 | words[1]) >> np.uint64(11)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds. counter [4, B] and key [2, B] hold 32-bit words; so does the result [4, B]."""
    words, key = np.array(counter, order="C"), np.ascontiguousarray(key)
    assert words.dtype == key.dtype == np.uint64
    assert (words.shape, key.shape) == ((4, words.shape[1]), (2, words.shape[1]))
    cpu_sampling_random.philox4x32(words.ctypes.data, key.ctypes.data, words.shape[1])
    return words
