"""RWKV-7's rule on a GPU (wkv7.cu), between the two that token_shift.py has.

Legend: T tokens, B sequences, V heads of D numbers, C = V * D.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.causal_conv import check_step
from nanovllm_cli.kernels.kernel import Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.states import States
from nanovllm_cli.kernels.token_shift import check_wkv_states
from nanovllm_cli.kernels.wkv import WkvInputs

MAX_HEAD_DIM = 96
"""A thread has a fourth of a column of the state in registers."""
LANES = 4


def wkv7(
    launcher: Launcher,
    inputs: WkvInputs,
    tables: torch.Tensor,
    eps: float,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """See `wkv.wkv7`, of tensors on the GPU; a length of 0 is a row of padding, which gets zeros. UnsupportedError for heads of
    more than MAX_HEAD_DIM numbers."""
    (tokens, channels), dtype, f32 = inputs.r.shape, inputs.r.dtype, torch.float32
    num_values, dim = check_wkv_states(launcher, states, dtype, channels)
    if dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"RWKV's heads of {dim} numbers on a GPU", f"take such of at most {MAX_HEAD_DIM}, or the CPU")
    mixes, first = inputs.mixes, inputs.first
    assert (mixes is None) == (first is None), "the first layer has neither"
    for each in (inputs.r, inputs.k, inputs.v, inputs.gates, *(() if first is None else (first,))):
        check(each, launcher, dtype, tokens, channels)
    for each in (inputs.decays, inputs.rates, *(() if mixes is None else (mixes,))):
        check(each, launcher, f32, tokens, channels)
    check(tables, launcher, f32, 8, channels)
    check_step(launcher, query_starts, kv_lens, known_lens, state_of)
    out = torch.empty((tokens, channels), dtype=dtype, device=inputs.r.device)
    if tokens:
        own = states.matrices, states.guess_gates, states.stamps, states.reaches
        tensors = (*inputs, tables, *own, query_starts, kv_lens, known_lens, state_of, out)
        sizes = np.int32(states.guesses.shape[2]), np.float32(eps)
        threads = -(-dim // 8) * 8 * LANES
        launcher.launch(variant(dtype, dim), (len(kv_lens), num_values, 1), (threads, 1, 1), (*tensors, *sizes))
    return out


def variant(dtype: torch.dtype, dim: int) -> Kernel:
    return Kernel("wkv7", "wkv7", (("DTYPE", type_name(dtype)), ("HEAD_DIM", dim)))


def variants() -> list[Kernel]:
    """What the compile gate builds: that of all that are published, the largest, and an odd one."""
    return [variant(dtype, dim) for dtype in (torch.bfloat16, torch.float16) for dim in (64, MAX_HEAD_DIM, 17)]
