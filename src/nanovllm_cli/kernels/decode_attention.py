"""Paged attention of decode steps on a GPU, from the projection of q, k and v on: decode_attention.cu, on tensor cores, and
decode_attention_any.cu for the rest.

Legend: B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, P blocks in a table.
"""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import NEWEST_CAPABILITY, OLDEST_CAPABILITY, Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.rope_cache import Projected

THREADS = 128
MAX_SPLITS = 64
"""Of a sequence; as in decode_split.cuh."""
LEAST_SPLIT = 128
"""Tokens of the smallest split. Smaller ones cost more to combine than they save."""
BLOCKS_WANTED = 12
"""For each multiprocessor: two to three run at once, and a few rounds of them even out sequences of unequal length."""
MAX_TENSOR_CORE_DIM = 256
LARGE_DIM, LARGE_DIM_CAPABILITY = 192, 90
"""A 16-bit cache of larger heads fills a thread's registers. Newer GPUs' compilers want more: there it goes to CUDA cores."""
BF16_CAPABILITY = 80
"""Of tensor cores that multiply bf16."""


class DecodeScratch:
    """Where the splits of a step leave their results: allocated once, for all layers and steps of at most max_batch sequences of
    at most max_tokens (P * S) tokens. A sequence is cut into as many splits as fill the GPU, which depends on B and P."""

    def __init__(
        self, launcher: Launcher, max_batch: int, num_heads: int, kv_heads: int, head_dim: int, max_tokens: int
    ) -> None:
        rows = 0
        for batch in range(1, max_batch + 1):
            splits = num_splits(launcher, batch * kv_heads, max_tokens)
            if splits > 1:
                rows = max(rows, batch * num_heads * splits)
        self.partials = torch.empty(rows * head_dim, dtype=torch.float32, device=launcher.device)
        self.sums = torch.empty(rows * 2, dtype=torch.float32, device=launcher.device)
        # Zero between launches: the kernel sees to it.
        self.counters = torch.zeros(max_batch * num_heads, dtype=torch.int32, device=launcher.device)


def num_splits(launcher: Launcher, pairs: int, tokens: int) -> int:
    """The most that a sequence of so many tokens is cut into. pairs: of sequences and kv heads."""
    return min(MAX_SPLITS, -(-BLOCKS_WANTED * launcher.num_multiprocessors // pairs), -(-tokens // LEAST_SPLIT))


def decode_attention(
    launcher: Launcher,
    projected: Projected,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    scratch: DecodeScratch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_and_cache` of one token a sequence, its last, to where its table has it, then `reference.attention`, in one launch.
    Returns [B, H * D].

    Caches [N, K, S, D]; block_tables [B, P] and kv_lens [B] int32 (0 for padding, which writes nothing and gets zeros); sinks
    [H], k_scale and v_scale [K] fp32.
    """
    projected.check(launcher)
    qkv, heads, kv_heads, dim, q_norm, k_norm, eps, norm_offset, cos, sin, interleaved = projected
    batch = projected.num_tokens
    blocks, _, block_size, _ = k_cache.shape
    width = block_tables.shape[1]
    group = heads // kv_heads
    assert group * kv_heads == heads, (heads, kv_heads)
    assert block_size >= 16, block_size
    assert block_size & (block_size - 1) == 0, block_size
    assert qkv.dtype in (torch.bfloat16, torch.float16), qkv.dtype
    for cache in (k_cache, v_cache):
        check(cache, launcher, k_cache.dtype, blocks, kv_heads, block_size, dim)
    check(block_tables, launcher, torch.int32, batch, width)
    check(kv_lens, launcher, torch.int32, batch)
    for scales in (k_scale, v_scale):
        if scales is not None:
            check(scales, launcher, torch.float32, kv_heads)
    if sinks is not None:
        check(sinks, launcher, torch.float32, heads)
    out = torch.empty(batch, heads * dim, dtype=qkv.dtype, device=qkv.device)
    if batch:
        gated = projected.row_heads == 2 * (heads + kv_heads)
        assert gated or projected.row_heads == heads + 2 * kv_heads, "as many numbers before q as in it, or none"
        kernel, rows = choose(launcher.capability, qkv.dtype, k_cache.dtype, dim, group, block_size, projected.load, gated)
        grid_heads = kv_heads * -(-group // rows)
        splits = num_splits(launcher, batch * grid_heads, width * block_size)
        partials = batch * heads * splits * dim if splits > 1 else 0
        assert partials <= scratch.partials.numel(), "the scratch is for fewer, or shorter, sequences"
        assert batch * grid_heads <= scratch.counters.numel(), "the scratch is for fewer sequences"
        sizes = (kv_heads, group, projected.num_angles, interleaved, width, window, LEAST_SPLIT)
        numbers = (np.int32(size) for size in sizes)
        tensors = (qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, block_tables, kv_lens, sinks, k_scale, v_scale)
        results = (scratch.partials, scratch.sums, scratch.counters, out)
        args = (*tensors, *results, *numbers, np.float32(eps), np.float32(norm_offset), np.float32(scale), np.float32(softcap))
        launcher.launch(kernel, (splits, grid_heads, batch), (THREADS, 1, 1), args)
    return out


def choose(
    capability: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    group: int,
    block_size: int,
    rope_load: int = 8,
    gated: bool = False,
) -> tuple[Kernel, int]:
    """The kernel, and how many query heads a block of it takes. rope_load: `Projected.load`. gated: see decode_split.cuh."""
    if capability < OLDEST_CAPABILITY:
        raise UnsupportedError(f"the GPU's compute capability {capability / 10} is below 7.5", "run with --device cpu")
    tensor_cores = (
        dim % 16 == 0
        and dim <= MAX_TENSOR_CORE_DIM
        and (kv_dtype == dtype or kv_dtype.itemsize == 1)
        and (dim <= LARGE_DIM or kv_dtype.itemsize == 1 or capability <= LARGE_DIM_CAPABILITY)
        and (capability >= BF16_CAPABILITY or kv_dtype != torch.bfloat16)
    )
    if tensor_cores:
        rows = 8 if group <= 8 else 16
        return variant("decode_attention", dtype, kv_dtype, dim, rows, block_size, rope_load, gated), rows
    vector = min(8, dim & -dim)
    elements = vector * -(-dim // (32 * vector))  # of a lane, for each query head; 64 in all fit in the registers
    rows = 1
    while rows < min(4, group) and 2 * rows * elements <= 64:
        rows *= 2
    return variant("decode_attention_any", dtype, kv_dtype, dim, rows, block_size, rope_load, gated), rows


def variant(
    stem: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    rows: int,
    block_size: int,
    rope_load: int = 8,
    gated: bool = False,
) -> Kernel:
    types = (("DTYPE", type_name(dtype)), ("KV_DTYPE", type_name(kv_dtype)))
    sizes = (("HEAD_DIM", dim), ("ROWS", rows), ("BLOCK_SIZE", block_size), ("ROPE_LOAD", rope_load))
    constants = (*types, *sizes, *((("GATED", 1),) if gated else ()))
    bf16_products = stem == "decode_attention" and kv_dtype == torch.bfloat16
    newest = NEWEST_CAPABILITY
    if stem == "decode_attention" and dim > LARGE_DIM and kv_dtype.itemsize > 1:
        newest = LARGE_DIM_CAPABILITY
    return Kernel(stem, stem, constants, BF16_CAPABILITY if bf16_products else OLDEST_CAPABILITY, newest)


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    bf16, half, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    small = [
        variant("decode_attention", dtype, kv_dtype, dim, 8, 16)
        for dtype, kv_dtype in ((bf16, bf16), (bf16, fp8), (half, half))
        for dim in (64, 80, 96, 128, 192, 256)
    ]
    large = [variant("decode_attention", bf16, kv_dtype, dim, 16, 16) for kv_dtype in (bf16, fp8) for dim in (64, 128, 256)]
    partly_rotated = [variant("decode_attention", bf16, bf16, dim, 8, 16, 2) for dim in (80, 256)]
    behind = [variant("decode_attention", bf16, kv, 256, rows, 16, gated=True) for kv in (bf16, fp8) for rows in (8, 16)]
    others = [variant("decode_attention_any", bf16, bf16, 128, rows, 16) for rows in (1, 2, 4)]
    others += [variant("decode_attention_any", bf16, bf16, 256, rows, 16) for rows in (1, 4)]
    return [*small, *large, *partly_rotated, *behind, *others, variant("decode_attention_any", bf16, fp8, 100, 4, 16, 2)]
