"""A list of kernels, run by compiled code: kernels of a small model take less time than a call from Python does.

A row of the list is a kind, its whole-number arguments (addresses, counts) and its fp32 arguments. The table of kinds stands
twice, here and in `cpu.launch`: compiled code cannot look a function up. CALL is for kernels that not every model needs: its
first argument is the address of one (entry.py), which gets the others.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from nanovllm_cli.kernels.cpu_attention import paged_attention
from nanovllm_cli.kernels.cpu_fused import add_rms_norm, gated_activation, rope_and_cache
from nanovllm_cli.kernels.cpu_matmul import matmul, unpack_rows
from nanovllm_cli.kernels.entry import call_address
from nanovllm_cli.kernels.simd import typed_pointer

MATMUL, MATMUL_FLOAT, ROWS, NORM, ACTIVATION, ROPE, ATTENTION, CALL = range(8)
INTS, FLOATS = 24, 2


@njit(nogil=True, cache=True, error_model="numpy")
def replay(tag, k_kind, v_kind, ints, floats, count):
    """Run `count` rows. ints: address of [count, INTS] int64, the kind first; floats: of [count, FLOATS] fp64. k_kind, v_kind:
    what the KV cache keeps (cpu_cache)."""
    table = carray(typed_pointer(ints, np.int64(0)), (count, INTS))
    numbers = carray(typed_pointer(floats, np.float64(0)), (count, FLOATS))
    for i in range(count):
        a, f = table[i], numbers[i]
        if a[0] == MATMUL:
            matmul(tag, tag, a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8])
        elif a[0] == CALL:
            call_address(a[1], ints + (i * INTS + 2) * 8)
        elif a[0] == NORM:
            add_rms_norm(tag, a[1], a[2], a[3], a[4], a[5], a[6], f[0], f[1])
        elif a[0] == ROPE:
            rope_and_cache(
                tag, k_kind, v_kind, a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14],
                a[15], a[16], a[17], a[18], a[19], a[20], f[0],
            )  # fmt: skip
        elif a[0] == ATTENTION:
            paged_attention(
                tag, k_kind, v_kind, a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14],
                a[15], a[16], a[17], a[18], f[0], f[1],
            )  # fmt: skip
        elif a[0] == ACTIVATION:
            gated_activation(tag, a[1], a[2], a[3], a[4], a[5])
        elif a[0] == ROWS:
            unpack_rows(tag, a[1], a[2], a[3], a[4], a[5], a[6])
        else:
            matmul(tag, np.float32(0), a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8])
