"""Mamba's first rule on a GPU (selective_scan.cu), behind the convolution (causal_conv.cu).

Legend: T tokens, B sequences, V heads of D channels, N numbers of a channel's state.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.causal_conv import check_states, check_step
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.states import States

MAX_KEY_DIM = 32
"""Numbers of a channel's state, which a thread has in registers, and as many decays."""


def selective_scan(
    launcher: Launcher,
    projected: torch.Tensor,
    x: torch.Tensor,
    rates: torch.Tensor,
    both: torch.Tensor,
    decay: torch.Tensor,
    rate_bias: torch.Tensor,
    skip: torch.Tensor,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """projected [T, 2 * channels], whose second half is z, x [T, channels], rates [T, channels] and both [T, 2 * N] fp32 ->
    [T, channels]: see `state_rules.selective_scan`, of each sequence behind what its state has of it, NaN where it has nothing.

    decay [V, N, D], rate_bias, skip [channels] fp32. The others: see `causal_conv`, which comes first. UnsupportedError for
    states of more than MAX_KEY_DIM numbers.
    """
    (tokens, channels), dtype, f32 = x.shape, x.dtype, torch.float32
    key_dim = states.matrices.shape[3]
    if key_dim > MAX_KEY_DIM:
        hint = f"take such of at most {MAX_KEY_DIM}, or the CPU"
        raise UnsupportedError(f"a selective scan's states of {key_dim} numbers on a GPU", hint)
    num_values, value_dim = check_states(launcher, states, dtype, channels, states.inputs.shape[2] + 1)
    check(projected, launcher, dtype, tokens, 2 * channels)
    check(x, launcher, dtype, tokens, channels)
    check(rates, launcher, f32, tokens, channels)
    check(both, launcher, f32, tokens, 2 * key_dim)
    check(decay, launcher, f32, num_values, key_dim, value_dim)
    check(rate_bias, launcher, f32, channels)
    check(skip, launcher, f32, channels)
    check_step(launcher, query_starts, kv_lens, known_lens, state_of)
    out = torch.empty((tokens, channels), dtype=dtype, device=x.device)
    if tokens:
        own = states.matrices, states.guesses, states.guess_gates, states.stamps, states.reaches
        tensors = (projected, x, rates, both, decay, rate_bias, skip, *own, query_starts, kv_lens, known_lens, state_of, out)
        sizes = np.int32(value_dim), np.int32(states.guesses.shape[2])
        threads = -(-value_dim // WARP) * WARP
        launcher.launch(variant(dtype, key_dim), (len(kv_lens), num_values, 1), (threads, 1, 1), (*tensors, *sizes))
    return out


def variant(dtype: torch.dtype, key_dim: int) -> Kernel:
    return Kernel("selective_scan", "selective_scan", (("DTYPE", type_name(dtype)), ("KEY_DIM", key_dim)))


def variants() -> list[Kernel]:
    """What the compile gate builds: that of all that are published, the largest, and an odd one."""
    return [variant(dtype, size) for dtype in (torch.bfloat16, torch.float16) for size in (16, MAX_KEY_DIM, 7)]
