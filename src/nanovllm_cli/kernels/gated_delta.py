"""The gated delta rule on a GPU (gated_delta.cu), with a decay a head or a channel, its convolution, gates and norm; and the
rule of Mamba-2, whose norm is a kernel of its own.

Legend: T tokens, B sequences, K key heads of E dims, V value heads of D, N states.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest
from nanovllm_cli.kernels.states import ByChannel, States

MAX_WIDTH = 8
"""Taps: a lane has as many inputs of its channels in registers."""
MAX_KEY_DIM, MAX_THREADS = 128, 512
"""A thread has up to 64 numbers of the state, every eighth row of up to four columns."""
LANES = 4
"""Threads of a warp side by side in a row of the state."""


def gated_delta(
    launcher: Launcher,
    projected: torch.Tensor,
    gates: torch.Tensor,
    taps: torch.Tensor,
    decay: torch.Tensor,
    decay_bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    skip: torch.Tensor | None,
    taps_bias: torch.Tensor | None,
    tiled: bool,
    states: States,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    known_lens: torch.Tensor,
    state_of: torch.Tensor,
    most: float = 1.0,
    by_channel: ByChannel | None = None,
) -> torch.Tensor:
    """projected [T, 2 * K * E + 2 * V * D] -> [T, V * D]: see `state_rules.gated_delta`, of each sequence behind what the cache
    has of it. With skip [V] float32 see `state_rules.state_space`: gates are [T, V], norm is not read, and there may be a
    taps_bias [channels]. With by_channel see `state_rules.channel_delta`: projected is [T, 2 * K * E + V * D], gates are [T, V],
    decay_bias is [V * E].

    gates [T, 2 * V], decay [V], decay_bias [V], norm [D] float32; taps [width, channels]: channels are projected's without its
    last V * D. Outputs are NaN where the state has nothing that ends at the step's first token. query_starts [B + 1], kv_lens,
    known_lens [B] int32: see `Batch`; a length of 0 is a row of padding. state_of [B] int32: which state is a sequence's.
    most: the largest beta. UnsupportedError for more than MAX_WIDTH taps, or heads larger than the registers of a block of
    threads.
    """
    (tokens, _), dtype, (width, channels), mamba = projected.shape, projected.dtype, taps.shape, skip is not None
    num_states, _, num_values, key_dim, value_dim = states.matrices.shape
    num_sequences, max_guesses, values = len(kv_lens), states.guesses.shape[2], num_values * value_dim
    num_keys, rates = (channels - values) // (2 * key_dim), num_values * key_dim
    num_gates = num_values if mamba or by_channel else 2 * num_values
    if width > MAX_WIDTH:
        found = f"a convolution over {width} tokens on a GPU"
        raise UnsupportedError(found, f"take one over at most {MAX_WIDTH}, or the CPU")
    threads = _threads(value_dim)
    if key_dim > MAX_KEY_DIM or threads > MAX_THREADS:
        most = MAX_THREADS // WARP * LANES * _vector(value_dim)
        found = f"{'a state space' if mamba else 'a delta rule'}'s heads of {key_dim} by {value_dim} on a GPU"
        raise UnsupportedError(found, f"take such of at most {MAX_KEY_DIM} by {most}, or the CPU")
    assert channels == 2 * num_keys * key_dim + values > values, (channels, num_keys)
    assert num_values % num_keys == 0, (num_keys, num_values)
    check(projected, launcher, dtype, tokens, channels + (0 if by_channel else values))
    check(gates, launcher, torch.float32, tokens, num_gates)
    check(taps, launcher, dtype, width, channels)
    check(decay, launcher, torch.float32, num_values)
    check(decay_bias, launcher, torch.float32, rates if by_channel else num_values)
    if skip is None:
        assert taps_bias is None
        check(norm, launcher, torch.float32, value_dim)
    else:
        check(skip, launcher, torch.float32, num_values)
    if by_channel is not None:
        assert not mamba
        check(by_channel.rates, launcher, torch.float32, tokens, rates)
        check(by_channel.z, launcher, dtype, tokens, values)
    if taps_bias is not None:
        check(taps_bias, launcher, dtype, channels)
    check(states.matrices, launcher, torch.float32, num_states, 2, num_values, key_dim, value_dim)
    check(states.inputs, launcher, dtype, num_states, 2, width - 1, channels)
    check(states.guesses, launcher, dtype, num_states, 2, max_guesses, channels)
    check(states.guess_gates, launcher, torch.float32, num_states, 2, max_guesses, num_gates + (rates if by_channel else 0))
    check(states.stamps, launcher, torch.int32, num_states, 2, num_values)
    check(states.reaches, launcher, torch.int32, num_states, 2, num_values)
    check(query_starts, launcher, torch.int32, num_sequences + 1)
    for lengths in (kv_lens, known_lens, state_of):
        check(lengths, launcher, torch.int32, num_sequences)
    out = torch.empty((tokens, values), dtype=dtype, device=projected.device)
    if tokens:
        weights = taps, decay, decay_bias, None if mamba else norm, skip, taps_bias
        tensors = (projected, gates, *weights, *states, query_starts, kv_lens, known_lens, state_of, out)
        sizes = (np.int32(num_keys), np.int32(max_guesses), np.int32(tiled), np.float32(eps))
        floor = 0.0 if by_channel is None else by_channel.floor
        kernel = variant(dtype, key_dim, value_dim, width, mamba, most, by_channel is not None, floor)
        apart = (None, None) if by_channel is None else (by_channel.rates, by_channel.z)
        launcher.launch(kernel, (num_sequences, num_values, 1), (threads, 1, 1), (*tensors, *sizes, *apart))
    return out


def _vector(value_dim: int) -> int:
    """Columns of the state that a thread has."""
    return widest(value_dim, torch.float32)


def _threads(value_dim: int) -> int:
    return -(-value_dim // (LANES * _vector(value_dim))) * WARP


def variant(
    dtype: torch.dtype, key_dim: int, value_dim: int, width: int, mamba: bool = False, most: float = 1.0,
    by_channel: bool = False, floor: float = 0.0,
) -> Kernel:
    piece = widest(math.gcd(key_dim, value_dim), dtype)
    dims = (("KEY_DIM", key_dim), ("VALUE_DIM", value_dim), ("WIDTH", width))
    loads = (("VECTOR", _vector(value_dim)), ("PIECE", piece))
    rule = (("MAMBA", 1),) if mamba else (("MOST", f"{most}f"),) if most != 1.0 else ()
    decays = (("BY_CHANNEL", 1), *((("FLOOR", f"{floor}f"),) if floor else ())) if by_channel else ()
    return Kernel("gated_delta", "gated_delta", (("DTYPE", type_name(dtype)), *dims, *loads, *rule, *decays))


def variants() -> list[Kernel]:
    """What the compile gate builds: Qwen3.5's, the largest heads with the most taps, and odd ones, the same with a decay of each
    channel, as Kimi Linear's are, Ling 3.0's, which have a floor, and OLMo Hybrid's, whose betas go up to 2; of Mamba-2
    Granite 4 H's, Nemotron Nano 2's, and the same."""
    shapes = ((128, 128, 4), (MAX_KEY_DIM, 256, MAX_WIDTH), (17, 31, 2))
    spaces = ((128, 64, 4), (128, 80, 4), (MAX_KEY_DIM, 256, MAX_WIDTH), (17, 31, 2))
    kinds = (torch.bfloat16, torch.float16)
    rules = [(shape, False) for shape in shapes] + [(shape, True) for shape in spaces]
    usual = [variant(dtype, *shape, mamba) for dtype in kinds for shape, mamba in rules]
    channels = [variant(dtype, *shape, by_channel=True) for dtype in kinds for shape in shapes]
    channels += [variant(dtype, *shapes[0], by_channel=True, floor=-5.0) for dtype in kinds]
    return usual + channels + [variant(dtype, 96, 192, 4, most=2.0) for dtype in kinds]
