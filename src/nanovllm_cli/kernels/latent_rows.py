"""The rows that latent attention reads, on a GPU (latent_rows.cu).

Legend: T tokens, H heads, N blocks of the cache of S tokens each.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest
from nanovllm_cli.kernels.rope_cache import BLOCK_SIZES, check_scales

THREADS = 128


def latent_rows(
    launcher: Launcher,
    q: torch.Tensor,
    kept: torch.Tensor,
    heads: int,
    norm: torch.Tensor,
    eps: float,
    offset: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    slots: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H * (key_dim + rotary)], kept [T, rank + rotary], norm [rank], cos and sin [T, rotary / 2] fp32, with no columns for
    no rope -> rows [T, H * (rotary + rank)], of which the rotated numbers are there; what is kept goes to its slot of cache
    [N, 1, S, rotary + rank], of q's type or in eight bits with a scale, see `check_scales`. slots [T] int64, -1 for padding."""
    tokens, rank, num_angles = q.shape[0], norm.shape[0], cos.shape[1]
    dtype, (blocks, _, block_size, dim) = q.dtype, cache.shape
    rotary, half = dim - rank, (dim - rank) // 2
    key_dim = q.shape[1] // heads - rotary
    assert rotary == 2 * half, (dim, rank)
    assert num_angles in (0, half), (num_angles, rotary)
    assert block_size in BLOCK_SIZES, block_size
    assert cache.dtype in (dtype, torch.float8_e4m3fn, torch.int8), cache.dtype
    assert (scale is None) == (cache.dtype == dtype)
    check(q, launcher, dtype, tokens, heads * (key_dim + rotary))
    check(kept, launcher, dtype, tokens, dim)
    check(norm, launcher, dtype, rank)
    check(slots, launcher, torch.int64, tokens)
    check(cache, launcher, cache.dtype, blocks, 1, block_size, dim)
    check_scales(launcher, cache, scale)
    for tensor in (cos, sin):
        check(tensor, launcher, torch.float32, tokens, num_angles)
    rows = torch.empty(tokens, heads * dim, dtype=dtype, device=q.device)
    if tokens:
        vector = min(widest(size, dtype) for size in (key_dim, half, rank))  # of all places where rows and heads begin
        units = half // vector
        lane_bits = min(WARP.bit_length() - 1, (units - 1).bit_length())
        kernel = variant(dtype, cache.dtype, vector, -(-units // WARP), block_size)
        grid = (tokens, 1 + -(-(heads << lane_bits) // THREADS), 1)
        sizes = (heads, key_dim, rotary, rank, num_angles, interleaved, lane_bits)
        tensors = (q, kept, norm, cos, sin, slots, scale, rows, cache)
        args = (*tensors, *map(np.int32, sizes), np.float32(eps), np.float32(offset))
        launcher.launch(kernel, grid, (THREADS, 1, 1), args)
    return rows


def variant(dtype: torch.dtype, kv_dtype: torch.dtype, vector: int, units: int, block_size: int) -> Kernel:
    """vector: elements of a load. units: pairs of loads that a lane has of a head's rotated numbers."""
    types = (("DTYPE", type_name(dtype)), ("KV_DTYPE", type_name(kv_dtype)))
    return Kernel("latent_rows", "latent_rows", (*types, ("VECTOR", vector), ("UNITS", units), ("BLOCK_SIZE", block_size)))


def variants() -> list[Kernel]:
    """What the compile gate builds: 16-byte loads, and odd sizes."""
    dtypes = (torch.bfloat16, torch.float16)
    kinds = [(dtype, kv_dtype) for dtype in dtypes for kv_dtype in (dtype, torch.float8_e4m3fn, torch.int8)]
    return [variant(dtype, kv_dtype, vector, 1, 16) for dtype, kv_dtype in kinds for vector in (8, 2)]
