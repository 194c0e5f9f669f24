"""QK norm, RoPE and the write of K and V to the cache, in one launch a layer (rope_cache.cu).

cos and sin come from `rope_tables`, once a step.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 128
BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_DIM = 512
"""Dims of a head: with 16-byte loads, two of them a lane of a warp."""


def rope_and_cache(
    launcher: Launcher,
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns q [T, heads, dim], normed and rotated; writes k, normed and rotated, and v to their slots.

    qkv [T, (heads + 2 kv_heads) * dim]; q_norm, k_norm [dim] or None; cos, sin [T, rotary / 2] fp32, with no columns for no
    rope; slots [T] int64, -1 for padding. k_cache, v_cache [N, kv_heads, S, dim] of qkv's type, or fp8 (e4m3) with k_scale and
    v_scale [kv_heads] fp32: what is stored is round(value / scale), saturated. See `reference.qk_norm_rope`.
    """
    if dim > MAX_DIM:
        raise UnsupportedError(f"attention heads of {dim} dims on a GPU", f"take a model with at most {MAX_DIM}, or the CPU")
    tokens, half = cos.shape
    blocks, _, block_size, _ = k_cache.shape
    assert min(heads, kv_heads) > 0
    assert dim >= 2 * half
    assert block_size in BLOCK_SIZES, block_size
    check(qkv, launcher, qkv.dtype, tokens, (heads + 2 * kv_heads) * dim)
    for norm in (q_norm, k_norm):
        if norm is not None:
            check(norm, launcher, qkv.dtype, dim)
    check(cos, launcher, torch.float32, tokens, half)
    check(sin, launcher, torch.float32, tokens, half)
    check(slots, launcher, torch.int64, tokens)
    check(k_cache, launcher, k_cache.dtype, blocks, kv_heads, block_size, dim)
    check(v_cache, launcher, k_cache.dtype, blocks, kv_heads, block_size, dim)
    if k_cache.dtype == torch.float8_e4m3fn:
        for scale in (k_scale, v_scale):
            assert scale is not None
            check(scale, launcher, torch.float32, kv_heads)
    else:
        assert k_cache.dtype == qkv.dtype
        assert k_scale is v_scale is None
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        vector = vector_of(dim, half)
        units = -(-dim // (2 * vector))
        lane_bits = min(WARP.bit_length() - 1, (units - 1).bit_length())
        kernel = variant(qkv.dtype, k_cache.dtype, vector, -(-units // WARP), block_size)
        grid = (tokens, -(-((heads + 2 * kv_heads) << lane_bits) // THREADS), 1)
        sizes = (np.int32(size) for size in (heads, kv_heads, dim, half, interleaved, lane_bits))
        tensors = (qkv, q_norm, k_norm, cos, sin, slots, k_scale, v_scale, q, k_cache, v_cache)
        launcher.launch(kernel, grid, (THREADS, 1, 1), (*tensors, *sizes, np.float32(eps)))
    return q


def vector_of(dim: int, half: int) -> int:
    """Elements a load: it must not straddle the halves of the rotation, nor its end."""
    return min(widest(dim, torch.bfloat16), widest(half, torch.bfloat16))


def variant(dtype: torch.dtype, kv_dtype: torch.dtype, vector: int, units: int, block_size: int) -> Kernel:
    """units: pairs of loads a lane."""
    types = (("DTYPE", type_name(dtype)), ("KV_DTYPE", type_name(kv_dtype)))
    return Kernel("rope_cache", "rope_and_cache", (*types, ("VECTOR", vector), ("UNITS", units), ("BLOCK_SIZE", block_size)))


def variants() -> list[Kernel]:
    """What the compile gate builds: 16-byte loads, and a head of 100 dims."""
    dtypes = (torch.bfloat16, torch.float16)
    kinds = [(dtype, kv_dtype) for dtype in dtypes for kv_dtype in (dtype, torch.float8_e4m3fn)]
    return [variant(dtype, kv_dtype, vector, 1, 16) for dtype, kv_dtype in kinds for vector in (8, 2)]
