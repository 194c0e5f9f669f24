"""The convolution before a selective scan on a GPU (causal_conv.cu), behind what states have of their sequences.

Legend: T tokens, B sequences, V heads of D channels.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.states import States

MAX_WIDTH = 8
"""Taps, which a thread has in registers."""


def causal_conv(
    launcher: Launcher,
    projected: torch.Tensor,
    taps: torch.Tensor,
    taps_bias: torch.Tensor | None,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
) -> torch.Tensor:
    """projected [T, 2 * channels], whose first half counts -> [T, channels]: see `state_rules.causal_conv`, of each sequence
    behind what its state has of it, NaN where it has nothing. `selective_scan` has to follow with the same step.

    taps [width, channels]; taps_bias [channels] or None; states: see `kernels.scan`. query_starts [B + 1], kv_lens, known_lens
    [B] int32: see `Batch`; a length of 0 is a row of padding. state_of [B] int32: which state is a sequence's. UnsupportedError
    for more than MAX_WIDTH taps.
    """
    (tokens, _), dtype, (width, channels) = projected.shape, projected.dtype, taps.shape
    if width > MAX_WIDTH:
        raise UnsupportedError(f"a convolution over {width} tokens on a GPU", f"take one over at most {MAX_WIDTH}, or the CPU")
    check(projected, launcher, dtype, tokens, 2 * channels)
    check(taps, launcher, dtype, width, channels)
    if taps_bias is not None:
        check(taps_bias, launcher, dtype, channels)
    num_values, value_dim = check_states(launcher, states, dtype, channels, width)
    check_step(launcher, query_starts, kv_lens, known_lens, state_of)
    out = torch.empty((tokens, channels), dtype=dtype, device=projected.device)
    if tokens:
        own = states.inputs, states.guesses, states.stamps, states.reaches
        tensors = (projected, taps, taps_bias, *own, query_starts, kv_lens, known_lens, state_of, out)
        sizes = np.int32(value_dim), np.int32(states.guesses.shape[2])
        threads = -(-value_dim // WARP) * WARP
        launcher.launch(variant(dtype, width), (len(kv_lens), num_values, 1), (threads, 1, 1), (*tensors, *sizes))
    return out


def check_states(launcher: Launcher, states: States, dtype: torch.dtype, channels: int, width: int) -> tuple[int, int]:
    """Heads, and channels of each."""
    num_states, _, num_values, key_dim, value_dim = states.matrices.shape
    max_guesses = states.guesses.shape[2]
    assert num_values * value_dim == channels, (num_values, value_dim, channels)
    check(states.matrices, launcher, torch.float32, num_states, 2, num_values, key_dim, value_dim)
    check(states.inputs, launcher, dtype, num_states, 2, width - 1, channels)
    check(states.guesses, launcher, dtype, num_states, 2, max_guesses, 2 * channels)
    check(states.guess_gates, launcher, torch.float32, num_states, 2, max_guesses, channels + key_dim)
    check(states.stamps, launcher, torch.int32, num_states, 2, num_values)
    check(states.reaches, launcher, torch.int32, num_states, 2, num_values)
    return num_values, value_dim


def check_step(launcher: Launcher, query_starts: torch.Tensor, *lengths: torch.Tensor) -> None:
    check(query_starts, launcher, torch.int32, len(lengths[0]) + 1)
    for each in lengths:
        check(each, launcher, torch.int32, len(lengths[0]))


def variant(dtype: torch.dtype, width: int) -> Kernel:
    return Kernel("causal_conv", "causal_conv", (("DTYPE", type_name(dtype)), ("WIDTH", width)))


def variants() -> list[Kernel]:
    """What the compile gate builds: that of all that are published, and the most taps."""
    return [variant(dtype, width) for dtype in (torch.bfloat16, torch.float16) for width in (4, MAX_WIDTH)]
