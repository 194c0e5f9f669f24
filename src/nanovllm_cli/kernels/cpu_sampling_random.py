"""Philox4x32-10 (Salmon et al., SC 2011) for all rows of a step; `engine.sampling_random` says what its numbers are used for.

Addresses and counts only; the caller has checked them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types

from nanovllm_cli.kernels.compiled import compile_once
from nanovllm_cli.kernels.entry import PROTOTYPE
from nanovllm_cli.kernels.simd import typed_pointer

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counters: int, keys: int, count: int) -> None:
    """counters [4, B], 32-bit words in uint64, become the result; keys [2, B] likewise."""
    call, _ = _compiled()
    call(counters, keys, count)


@cache
def _compiled() -> tuple[Any, Any]:
    """What calls it, and what must live as long as that."""
    made = compile_once(_philox4x32, types.void(types.int64, types.int64, types.int64), error_model="numpy")
    return PROTOTYPE(made.address), made


def _philox4x32(counters, keys, count):
    words = carray(typed_pointer(counters, np.uint64(0)), (4, count))
    key = carray(typed_pointer(keys, np.uint64(0)), (2, count))
    for i in range(count):
        a, b, c, d = words[0, i], words[1, i], words[2, i], words[3, i]
        first, second = key[0, i], key[1, i]
        for _ in range(_ROUNDS):
            left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
            a, b, c, d = (right >> _32) ^ b ^ first, right & _LOW, (left >> _32) ^ d ^ second, left & _LOW
            first, second = (first + np.uint64(0x9E3779B9)) & _LOW, (second + np.uint64(0xBB67AE85)) & _LOW
        words[0, i], words[1, i], words[2, i], words[3, i] = a, b, c, d
