"""Norms of heads, RoPE and the write of K and V to the cache, in one launch a layer (rope_cache.cu). In steps of decodes that
launch is `decode_attention`'s.

cos and sin come from `rope_tables`, once a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 128
BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_DIM = 512
"""Dims of a head: with 16-byte loads, two of them a lane of a warp."""
MAX_SHARED_DIM = 1024
"""Of heads whose keys another kernel has written, as latent attention's are: their queries alone are kept in registers."""


class Projected(NamedTuple):
    """q, k and v as their projection leaves them, and what becomes of their heads before attention (heads.cuh).

    qkv [T, (heads + 2 kv_heads) * dim], which may be columns of a wider tensor, behind heads * dim others; q_norm, k_norm, v_norm
    [dim] or None; cos, sin [T, rotary / 2] fp32, with no columns for no rope: see `reference.qk_norm_rope`. shared: k and v of
    these tokens, another layer's, are in the cache; qkv is [T, heads * dim]. heads 0: there are k and v alone. turned: norms come
    behind the rotation, and q_norm is [heads, dim].
    """

    qkv: torch.Tensor
    heads: int
    kv_heads: int
    dim: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    v_norm: torch.Tensor | None
    eps: float
    norm_offset: float
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    shared: bool = False
    turned: bool = False

    def check(self, launcher: Launcher) -> None:
        """Raises UnsupportedError for heads past the limit."""
        most = MAX_SHARED_DIM if self.shared else MAX_DIM
        if self.dim > most:
            reason = f"attention heads of {self.dim} dims on a GPU"
            raise UnsupportedError(reason, f"take a model with at most {most}, or the CPU")
        tokens, half = self.cos.shape
        assert self.kv_heads > 0
        assert self.heads > 0 or not self.shared
        assert self.dim >= 2 * half
        assert self.qkv.shape == (tokens, self.own_heads * self.dim), self.qkv.shape
        assert self.qkv.device == launcher.device
        assert self.qkv.stride(1) == 1
        assert self.qkv.storage_offset() % self.dim == self.qkv.stride(0) % self.dim == 0, "loads begin on a boundary of theirs"
        queries = (self.heads, self.dim) if self.turned else (self.dim,)
        for norm, shape in ((self.q_norm, queries), (self.k_norm, (self.dim,)), (self.v_norm, (self.dim,))):
            if norm is not None:
                check(norm, launcher, self.qkv.dtype, *shape)
        check(self.cos, launcher, torch.float32, tokens, half)
        check(self.sin, launcher, torch.float32, tokens, half)

    @property
    def num_tokens(self) -> int:
        return len(self.qkv)

    @property
    def own_heads(self) -> int:
        """Of a token."""
        return self.heads + (0 if self.shared else 2 * self.kv_heads)

    @property
    def row_heads(self) -> int:
        """From row to row."""
        return self.qkv.stride(0) // self.dim

    @property
    def num_angles(self) -> int:
        return self.cos.shape[1]

    @property
    def load(self) -> int:
        """Elements a load: it must not straddle the halves of the rotation, nor its end."""
        return min(widest(self.dim, torch.bfloat16), widest(self.num_angles, torch.bfloat16))


def rope_and_cache(
    launcher: Launcher,
    projected: Projected,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns q [T, heads, dim], normed and rotated; writes k, normed and rotated, and v, normed, to their slots, if they are not
    shared.

    slots [T] int64, -1 for padding. k_cache, v_cache [N, kv_heads, S, dim] of qkv's type, or in eight bits with k_scale and
    v_scale: see `check_scales`. What is stored is round(value / scale), in fp8 saturated; int8's scales are written, too.
    """
    projected.check(launcher)
    qkv, heads, kv_heads, dim, *norms, eps, norm_offset, cos, sin, interleaved, shared, turned = projected
    tokens, half = projected.num_tokens, projected.num_angles
    blocks, _, block_size, _ = k_cache.shape
    assert block_size in BLOCK_SIZES, block_size
    check(slots, launcher, torch.int64, tokens)
    check(k_cache, launcher, k_cache.dtype, blocks, kv_heads, block_size, dim)
    check(v_cache, launcher, k_cache.dtype, blocks, kv_heads, block_size, dim)
    assert k_cache.dtype == qkv.dtype or k_cache.dtype.itemsize == 1
    for scale in (k_scale, v_scale):
        assert (scale is None) == (k_cache.dtype == qkv.dtype)
        check_scales(launcher, k_cache, scale)
    q = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        units = -(-dim // (2 * projected.load))
        lane_bits = min(WARP.bit_length() - 1, (units - 1).bit_length())
        kernel = variant(qkv.dtype, k_cache.dtype, projected.load, -(-units // WARP), block_size, turned)
        grid = (tokens, -(-(projected.own_heads << lane_bits) // THREADS), 1)
        numbers = (projected.row_heads, heads, 0 if shared else kv_heads, dim, half, interleaved, lane_bits)
        sizes = (np.int32(size) for size in numbers)
        tensors = (qkv, *norms, cos, sin, slots, k_scale, v_scale, q, k_cache, v_cache)
        launcher.launch(kernel, grid, (THREADS, 1, 1), (*tensors, *sizes, np.float32(eps), np.float32(norm_offset)))
    return q


def check_scales(launcher: Launcher, cache: torch.Tensor, scales: torch.Tensor | None) -> None:
    """Of a cache [N, kv_heads, S, dim], fp32: [kv_heads] of fp8 (e4m3), [N, kv_heads, S] of int8."""
    if scales is not None:
        check(scales, launcher, torch.float32, *(cache.shape[:3] if cache.dtype == torch.int8 else cache.shape[1:2]))


def variant(
    dtype: torch.dtype, kv_dtype: torch.dtype, vector: int, units: int, block_size: int, turned: bool = False
) -> Kernel:
    """units: pairs of loads a lane."""
    types = (("DTYPE", type_name(dtype)), ("KV_DTYPE", type_name(kv_dtype)))
    sizes = (("VECTOR", vector), ("UNITS", units), ("BLOCK_SIZE", block_size), *((("TURNED", 1),) if turned else ()))
    return Kernel("rope_cache", "rope_and_cache", (*types, *sizes))


def variants() -> list[Kernel]:
    """What the compile gate builds: 16-byte loads, also of heads that are turned first, and a head of 100 dims."""
    dtypes = (torch.bfloat16, torch.float16)
    eight = torch.float8_e4m3fn, torch.int8
    kinds = [(dtype, kv_dtype) for dtype in dtypes for kv_dtype in (dtype, *eight)]
    built = [variant(dtype, kv_dtype, vector, 1, 16) for dtype, kv_dtype in kinds for vector in (8, 2)]
    return [*built, *(variant(torch.bfloat16, kv_dtype, 8, 1, 16, True) for kv_dtype in (torch.bfloat16, *eight))]
