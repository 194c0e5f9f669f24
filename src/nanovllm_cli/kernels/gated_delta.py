"""The gated delta rule on a GPU (gated_delta.cu), with its convolution, gates and norm, behind what the paged cache has; and the
rule of Mamba-2, whose norm is a kernel of its own.

Legend: T tokens, B sequences, K key heads of E dims, V value heads of D, N blocks, P blocks in a table.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

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
    states: torch.Tensor,
    inputs: torch.Tensor,
    stamps: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """projected [T, 2 * K * E + 2 * V * D] -> [T, V * D]: see `reference.gated_delta`, of each sequence behind what the cache
    has of it. With skip [V] float32 see `reference.state_space`: gates are [T, V], norm is not read, and there may be a taps_bias
    [channels].

    gates [T, 2 * V], decay [V], decay_bias [V], norm [D] float32; taps [width, channels]: channels are projected's without its
    last V * D. Of each block of the cache two places: states [N, 2, V, E, D] float32, inputs of the convolution [N, 2, width - 1,
    channels], and stamps [N, 2, V] int32: behind how many tokens of the sequence that was, for each value head. The step reads
    what was behind the token before its first (outputs are NaN where no stamp says so), and writes at the end of each block and
    of its own; done again, it gives and leaves the same. query_starts [B + 1], kv_lens [B], block_tables [B, P] int32: see
    `gated_conv`. UnsupportedError for more than MAX_WIDTH taps, or heads larger than the registers of a block of threads.
    """
    (tokens, _), dtype, (width, channels), mamba = projected.shape, projected.dtype, taps.shape, skip is not None
    num_blocks, _, num_values, key_dim, value_dim = states.shape
    num_sequences, (_, table_width) = len(kv_lens), block_tables.shape
    num_keys = (channels - num_values * value_dim) // (2 * key_dim)
    if width > MAX_WIDTH:
        found = f"a convolution over {width} tokens on a GPU"
        raise UnsupportedError(found, f"take one over at most {MAX_WIDTH}, or the CPU")
    threads = _threads(value_dim)
    if key_dim > MAX_KEY_DIM or threads > MAX_THREADS:
        most = MAX_THREADS // WARP * LANES * _vector(value_dim)
        found = f"{'a state space' if mamba else 'a delta rule'}'s heads of {key_dim} by {value_dim} on a GPU"
        raise UnsupportedError(found, f"take such of at most {MAX_KEY_DIM} by {most}, or the CPU")
    assert channels == 2 * num_keys * key_dim + num_values * value_dim > num_values * value_dim, (channels, num_keys)
    assert num_values % num_keys == 0, (num_keys, num_values)
    check(projected, launcher, dtype, tokens, channels + num_values * value_dim)
    check(gates, launcher, torch.float32, tokens, num_values if mamba else 2 * num_values)
    check(taps, launcher, dtype, width, channels)
    check(decay, launcher, torch.float32, num_values)
    check(decay_bias, launcher, torch.float32, num_values)
    if skip is None:
        assert taps_bias is None
        check(norm, launcher, torch.float32, value_dim)
    else:
        check(skip, launcher, torch.float32, num_values)
    if taps_bias is not None:
        check(taps_bias, launcher, dtype, channels)
    check(states, launcher, torch.float32, num_blocks, 2, num_values, key_dim, value_dim)
    check(inputs, launcher, dtype, num_blocks, 2, width - 1, channels)
    check(stamps, launcher, torch.int32, num_blocks, 2, num_values)
    check(query_starts, launcher, torch.int32, num_sequences + 1)
    check(kv_lens, launcher, torch.int32, num_sequences)
    check(block_tables, launcher, torch.int32, *block_tables.shape)
    out = torch.empty((tokens, num_values * value_dim), dtype=dtype, device=projected.device)
    if tokens:
        weights, cache = (taps, decay, decay_bias, None if mamba else norm, skip, taps_bias), (states, inputs, stamps)
        tensors = (projected, gates, *weights, *cache, query_starts, kv_lens, block_tables, out)
        sizes = (np.int32(num_keys), np.int32(table_width), np.int32(block_size), np.int32(tiled), np.float32(eps))
        kernel = variant(dtype, key_dim, value_dim, width, mamba)
        launcher.launch(kernel, (num_sequences, num_values, 1), (threads, 1, 1), (*tensors, *sizes))
    return out


def _vector(value_dim: int) -> int:
    """Columns of the state that a thread has."""
    return widest(value_dim, torch.float32)


def _threads(value_dim: int) -> int:
    return -(-value_dim // (LANES * _vector(value_dim))) * WARP


def variant(dtype: torch.dtype, key_dim: int, value_dim: int, width: int, mamba: bool = False) -> Kernel:
    piece = widest(math.gcd(key_dim, value_dim), dtype)
    dims = (("KEY_DIM", key_dim), ("VALUE_DIM", value_dim), ("WIDTH", width))
    loads = (("VECTOR", _vector(value_dim)), ("PIECE", piece))
    rule = (("MAMBA", 1),) if mamba else ()
    return Kernel("gated_delta", "gated_delta", (("DTYPE", type_name(dtype)), *dims, *loads, *rule))


def variants() -> list[Kernel]:
    """What the compile gate builds: Qwen3.5's, the largest heads with the most taps, and odd ones; of Mamba-2 Granite 4 H's, and
    the same."""
    shapes = ((128, 128, 4), (MAX_KEY_DIM, 256, MAX_WIDTH), (17, 31, 2))
    spaces = ((128, 64, 4), (MAX_KEY_DIM, 256, MAX_WIDTH), (17, 31, 2))
    return [
        variant(dtype, *shape, mamba)
        for dtype in (torch.bfloat16, torch.float16)
        for mamba, each in ((False, shapes), (True, spaces))
        for shape in each
    ]
