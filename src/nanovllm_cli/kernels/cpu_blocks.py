"""Codes of GGUF's blocks on the CPU: eight at a time, by all threads, as a model is loaded."""

from __future__ import annotations

import numpy as np
from numba import carray

from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer

TOGETHER = 64
"""Blocks of a task."""
_EACH = np.uint64(0x0101010101010101)


@kernel()
def unpack_blocks(arguments, thread, team):
    """codes u8 [count, block_len] of blocks [count, block_bytes], which have their bits in two fields: at, size, bits, stride,
    shift and flip, as `quant.gguf_fields.Field` has them. A size of 0 is none."""
    (
        blocks, count, block_bytes, codes, block_len,
        at, size, bits, stride, shift, flip, more_at, more_size, more_bits, more_stride, more_shift, more_flip,
    ) = fields(arguments)  # fmt: skip
    for task in share((count + TOGETHER - 1) // TOGETHER, thread, team):
        for block in range(task * TOGETHER, min(count, (task + 1) * TOGETHER)):
            source, target = blocks + block * block_bytes, codes + block * block_len
            _spread(source + at, size, bits, stride, shift, flip, target, False)
            _spread(source + more_at, more_size, more_bits, more_stride, more_shift, more_flip, target, True)


@inner
def _spread(source, size, bits, stride, shift, flip, target, added):
    """A field's numbers of `bits` bits, set or added to what is there. Unaligned words are as good as others."""
    mask, flips, up = _EACH * np.uint64((1 << bits) - 1), _EACH * np.uint64(flip), np.uint64(shift)
    target_words = carray(typed_pointer(target, np.uint64(0)), (size // bits,))
    if stride % 8 == 0:
        parts, words = 8 // bits, stride // 8
        given = carray(typed_pointer(source, np.uint64(0)), (size // 8,))
        for run in range(size // stride):
            for part in range(parts):
                first, down = (run * parts + part) * words, np.uint64(part * bits)
                for word in range(words):
                    value = ((given[run * words + word] >> down & mask) << up) ^ flips
                    target_words[first + word] = target_words[first + word] | value if added else value
        return
    narrow = carray(typed_pointer(source, np.uint8(0)), (size,))
    for word in range(size // bits):  # codes lie behind each other here, eight in `bits` bytes
        together, value = np.uint64(0), np.uint64(0)
        for byte in range(bits):
            together |= np.uint64(narrow[word * bits + byte]) << np.uint64(8 * byte)
        for code in range(8):
            value |= (together >> np.uint64(bits * code) & mask & np.uint64(255)) << np.uint64(8 * code)
        value = (value << up) ^ flips
        target_words[word] = target_words[word] | value if added else value
