"""Gated short convolutions on a GPU (gated_conv.cu), behind what the paged cache has of their sequences.

Legend: T tokens, B sequences, N blocks of S tokens, P blocks in a table.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256
MAX_WIDTH = 8
"""Taps, which a thread has in registers."""


def gated_conv(
    launcher: Launcher,
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache: torch.Tensor,
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> torch.Tensor:
    """projected [T, 3 * channels] -> [T, channels]: see `reference.gated_conv`, of each sequence behind what cache has of it.

    weight [width, channels]; bias [channels] or None; cache [N, S, channels]: the inputs of each block's tokens. query_starts
    [B + 1], kv_lens [B], block_tables [B, P] int32: see `Batch`; a length of 0 is a row of padding, or none, and tables end with
    the last sequence that has one. UnsupportedError for more than MAX_WIDTH taps.
    """
    (tokens, _), dtype, (width, channels) = projected.shape, projected.dtype, weight.shape
    if width > MAX_WIDTH:
        raise UnsupportedError(f"a convolution over {width} tokens on a GPU", f"take one over at most {MAX_WIDTH}, or the CPU")
    num_blocks, block_size, _ = cache.shape
    num_sequences, (_, table_width) = len(kv_lens), block_tables.shape
    check(projected, launcher, dtype, tokens, 3 * channels)
    check(weight, launcher, dtype, width, channels)
    if bias is not None:
        check(bias, launcher, dtype, channels)
    check(cache, launcher, dtype, num_blocks, block_size, channels)
    check(query_starts, launcher, torch.int32, num_sequences + 1)
    check(kv_lens, launcher, torch.int32, num_sequences)
    check(block_tables, launcher, torch.int32, *block_tables.shape)
    out = torch.empty((tokens, channels), dtype=dtype, device=projected.device)
    if tokens:
        vector = widest(channels, dtype)
        threads = min(THREADS, -(-channels // (vector * WARP)) * WARP)
        tensors = (projected, weight, bias, cache, query_starts, kv_lens, block_tables, out)
        sizes = (np.int32(num_sequences), np.int32(table_width), np.int32(channels))
        grid = (tokens, -(-channels // (vector * threads)), 1)
        launcher.launch(variant(dtype, vector, width, block_size), grid, (threads, 1, 1), (*tensors, *sizes))
    return out


def variant(dtype: torch.dtype, vector: int, width: int, block_size: int) -> Kernel:
    sizes = (("VECTOR", vector), ("WIDTH", width), ("BLOCK_SIZE", block_size))
    return Kernel("gated_conv", "gated_conv", (("DTYPE", type_name(dtype)), *sizes))


def variants() -> list[Kernel]:
    """What the compile gate builds: LFM2's, the most taps, and odd channels."""
    shapes = ((8, 3, 16), (8, MAX_WIDTH, 16), (1, 3, 16))
    return [variant(dtype, *shape) for dtype in (torch.bfloat16, torch.float16) for shape in shapes]
