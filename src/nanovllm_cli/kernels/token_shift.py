"""Rows that take a share of the row before them, on a GPU (token_shift.cu), behind what states have of their sequences.

Legend: T tokens, B sequences, V heads of D numbers, C = V * D, P mixtures.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.causal_conv import check_step
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.states import States

THREADS = 256


def token_shift(
    launcher: Launcher,
    x: torch.Tensor,
    shares: torch.Tensor,
    part: int,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """See `wkv.token_shift`, of tensors on the GPU; a length of 0 is a row of padding, which gets zeros."""
    (tokens, channels), num_shares = x.shape, len(shares)
    num_values, value_dim = check_wkv_states(launcher, states, x.dtype, channels)
    check(x, launcher, x.dtype, tokens, channels)
    check(shares, launcher, torch.float32, num_shares, channels)
    check_step(launcher, query_starts, kv_lens, known_lens, state_of)
    out = torch.empty((num_shares, tokens, channels), dtype=x.dtype, device=x.device)
    if tokens:
        own = states.inputs, states.guesses, states.stamps, states.reaches
        tensors = (x, shares, *own, query_starts, kv_lens, known_lens, state_of, out)
        columns = min(THREADS, -(-value_dim // WARP) * WARP)
        sizes = map(np.int32, (tokens, part, value_dim, columns, states.guesses.shape[2]))
        threads = THREADS // columns * columns
        launcher.launch(variant(x.dtype, num_shares), (len(kv_lens), num_values, 1), (threads, 1, 1), (*tensors, *sizes))
    return out


def check_wkv_states(launcher: Launcher, states: States, dtype: torch.dtype, channels: int) -> tuple[int, int]:
    """Heads, and numbers of each."""
    num_states, _, num_values, dim, _ = states.matrices.shape
    max_guesses = states.guesses.shape[2]
    assert num_values * dim == channels, (num_values, dim, channels)
    check(states.matrices, launcher, torch.float32, num_states, 2, num_values, dim, dim)
    check(states.inputs, launcher, dtype, num_states, 2, 1, 2 * channels)
    check(states.guesses, launcher, dtype, num_states, 2, max_guesses, 2 * channels)
    check(states.guess_gates, launcher, torch.float32, num_states, 2, max_guesses, 5 * channels)
    check(states.stamps, launcher, torch.int32, num_states, 2, num_values)
    check(states.reaches, launcher, torch.int32, num_states, 2, num_values)
    return num_values, dim


def variant(dtype: torch.dtype, num_shares: int) -> Kernel:
    return Kernel("token_shift", "token_shift", (("DTYPE", type_name(dtype)), ("SHARES", num_shares)))


def variants() -> list[Kernel]:
    """What the compile gate builds: those of both mixings."""
    return [variant(dtype, shares) for dtype in (torch.bfloat16, torch.float16) for shares in (6, 1)]
