"""Paged attention of decode steps on a GPU, from the projection of q, k and v on: decode_attention.cu, on tensor cores, and
decode_attention_any.cu for the rest.

Legend: B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, P blocks in a table.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import NEWEST_CAPABILITY, OLDEST_CAPABILITY, Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.rope_cache import Projected, check_scales

THREADS = 128
MAX_SPLITS = 64
"""Of a sequence; as in decode_split.cuh."""
LEAST_SPLIT = 128
"""Tokens of the smallest split. Smaller ones cost more to combine than they save."""
FIXED_SPLIT = 512
"""Tokens of a split where it follows from the sequence's length alone; more where there would be more than MAX_SPLITS."""
FIXED_BYTES = 128 << 20
"""Of these splits' results at once: they are as many for a batch of any size."""
MAX_GRID = (1 << 16) - 1
BLOCKS_WANTED = 12
"""For each multiprocessor: two to three run at once, and a few rounds of them even out sequences of unequal length."""
MAX_TENSOR_CORE_DIM = 256
LARGE_DIM, LARGE_DIM_CAPABILITY = 192, 90
"""A 16-bit cache of larger heads fills a thread's registers. Newer GPUs' compilers want more: there it goes to CUDA cores."""
BF16_CAPABILITY = 80
"""Of tensor cores that multiply bf16."""
FP8_CAPABILITY = 89
"""Of an instruction for fp8. Without it what becomes of a large head's takes the registers of half the queries; of int8, too."""
MOST_ELEMENTS = 64
"""Of all its queries, in a lane of decode_attention_any: what fits the registers."""


class DecodeScratch:
    """Where the splits of a step leave their results: allocated once, for all layers and steps of at most max_batch sequences of
    at most max_tokens (P * S) tokens. A sequence is cut into as many splits as fill the GPU, which depends on B and P; or, with
    fixed, by its length alone; those of fewer sequences may have room at once then."""

    def __init__(
        self,
        launcher: Launcher,
        max_batch: int,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        max_tokens: int,
        fixed: bool = False,
    ) -> None:
        self.fixed = fixed
        rows = 0
        for batch in range(1, max_batch + 1):
            splits = self.num_splits(launcher, batch * kv_heads, max_tokens)
            fits = not fixed or batch == 1 or batch * num_heads * splits * head_dim * 4 <= FIXED_BYTES
            if splits > 1 and fits:
                rows = max(rows, batch * num_heads * splits)
        self.partials = torch.empty(rows * head_dim, dtype=torch.float32, device=launcher.device)
        self.sums = torch.empty(rows * 2, dtype=torch.float32, device=launcher.device)
        # Zero between launches: the kernel sees to it.
        self.counters = torch.zeros(max_batch * num_heads, dtype=torch.int32, device=launcher.device)

    def num_splits(self, launcher: Launcher, pairs: int, tokens: int) -> int:
        """See there. With fixed the kernel takes a split as long as the grid has room for it, and tokens are never fewer than a
        sequence's: so each has FIXED_SPLIT tokens, or where there are MAX_SPLITS of them, what the sequence's length asks for."""
        return min(MAX_SPLITS, -(-tokens // FIXED_SPLIT)) if self.fixed else num_splits(launcher, pairs, tokens)

    def rows_at_once(self, heads: int, grid_heads: int, dim: int, splits: int) -> int:
        """Of q, in one launch with so many splits."""
        if splits == 1:
            return MAX_GRID
        rows = min(self.partials.numel() // (heads * splits * dim), self.counters.numel() // grid_heads)
        assert rows > 0, "the scratch is for shorter sequences"
        return min(MAX_GRID, rows)


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
    sequences: torch.Tensor | None = None,
    distances: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_and_cache` of one token a sequence, its last, to where its table has it, then `reference.attention`, in one launch.
    Returns [B, H * D].

    Caches [N, K, S, D]; block_tables [B, P] and kv_lens [B] int32 (0 for padding, which writes nothing and gets zeros); sinks
    [H], distances [H, columns] fp32; k_scale and v_scale: see `check_scales`.

    With projected.shared nothing is written. B is of any size, in as many launches as the scratch asks for. Where it is
    decode_attention_any's, the kernel ahead may be the one that wrote the newest k and v, and rows may be several tokens of a
    sequence: sequences [B] int32 is the row of block_tables that each has.
    """
    projected.check(launcher)
    qkv, heads, kv_heads, dim, q_norm, k_norm, v_norm, eps, norm_offset, cos, sin, interleaved, shared, turned = projected
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
    check(block_tables, launcher, torch.int32, batch if sequences is None else len(block_tables), width)
    check(kv_lens, launcher, torch.int32, batch)
    for scales in (k_scale, v_scale):
        assert scales is not None or k_cache.dtype != torch.int8
        check_scales(launcher, k_cache, scales)
    if sinks is not None:
        check(sinks, launcher, torch.float32, heads)
    if distances is not None:
        assert not shared, "no model has both"
        assert not softcap, "no model has both"
        check(distances, launcher, torch.float32, heads, distances.shape[1])
    if sequences is not None:
        assert shared
        check(sequences, launcher, torch.int32, batch)
    out = torch.empty(batch, heads * dim, dtype=qkv.dtype, device=qkv.device)
    if batch:
        gated = projected.row_heads == heads + projected.own_heads
        assert gated or projected.row_heads == projected.own_heads, "as many numbers before q as in it, or none"
        form = Form(projected.load, gated, v_norm is not None and not shared, shared, turned, distances is not None)
        by_number = sequences is not None
        kernel, rows = choose(launcher.capability, qkv.dtype, k_cache.dtype, dim, group, block_size, form, by_number)
        takes_sequences = shared and kernel.stem == "decode_attention_any"
        grid_heads = kv_heads * -(-group // rows)
        splits = scratch.num_splits(launcher, batch * grid_heads, width * block_size)
        at_once = scratch.rows_at_once(heads, grid_heads, dim, splits)
        assert shared or batch <= at_once, "the scratch is for fewer, or shorter, sequences"
        least_split = FIXED_SPLIT if scratch.fixed else LEAST_SPLIT
        sizes = (kv_heads, group, projected.num_angles, interleaved, width, window, least_split)
        settings = (*map(np.int32, sizes), *map(np.float32, (eps, norm_offset, scale, softcap)))
        own = (qkv, cos, sin, kv_lens, out, block_tables if sequences is None else sequences)
        for first in range(0, batch, at_once):
            mine = own if batch <= at_once else [each[first : first + at_once] for each in own]
            q, cosines, sines, lens, found, which = mine
            tables, numbers = (which, None) if sequences is None else (block_tables, which)
            tensors = (q, q_norm, k_norm, cosines, sines, k_cache, v_cache, tables, lens, sinks, k_scale, v_scale)
            results = (scratch.partials, scratch.sums, scratch.counters, found)
            more = (numbers,) if takes_sequences else (v_norm,) if form.value_norm else ()
            by_distance = () if distances is None else (distances, np.int32(distances.shape[1]))
            args = (*tensors, *results, *settings, *more, *by_distance)
            launcher.launch(kernel, (splits, grid_heads, len(lens)), (THREADS, 1, 1), args)
    return out


class Form(NamedTuple):
    """What else a kernel is compiled for. rope_load: `Projected.load`. The others: see decode_split.cuh and heads.cuh."""

    rope_load: int = 8
    gated: bool = False
    value_norm: bool = False
    shared: bool = False
    turned: bool = False
    distances: bool = False

    @property
    def constants(self) -> tuple[tuple[str, int], ...]:
        names = ("GATED", "VALUE_NORM", "SHARED", "TURNED", "DISTANCES")
        return (("ROPE_LOAD", self.rope_load), *((name, 1) for name, is_set in zip(names, self[1:], strict=True) if is_set))


def choose(
    capability: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    group: int,
    block_size: int,
    form: Form = Form(),
    by_number: bool = False,
) -> tuple[Kernel, int]:
    """The kernel, and how many query heads a block of it takes. by_number: rows say which table is theirs."""
    if capability < OLDEST_CAPABILITY:
        raise UnsupportedError(f"the GPU's compute capability {capability / 10} is below 7.5", "run with --device cpu")
    tensor_cores = (
        not by_number
        and dim % 16 == 0
        and dim <= MAX_TENSOR_CORE_DIM
        and (kv_dtype == dtype or kv_dtype.itemsize == 1)
        and (dim <= LARGE_DIM or kv_dtype.itemsize == 1 or capability <= LARGE_DIM_CAPABILITY)
        and (capability >= BF16_CAPABILITY or kv_dtype != torch.bfloat16)
    )
    if tensor_cores:
        rows = 8 if group <= 8 else 16
        return variant("decode_attention", dtype, kv_dtype, dim, rows, block_size, form), rows
    elements = _elements(dim)
    slow = kv_dtype.itemsize == 1 and capability < FP8_CAPABILITY
    rows = 1
    while rows < min(4, group) and 2 * rows * elements <= MOST_ELEMENTS // (1 + slow):
        rows *= 2
    return variant("decode_attention_any", dtype, kv_dtype, dim, rows, block_size, form), rows


def _elements(dim: int) -> int:
    """Of a query in a lane of decode_attention_any."""
    vector = min(8, dim & -dim)
    return vector * -(-dim // (32 * vector))


def variant(
    stem: str,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    rows: int,
    block_size: int,
    form: Form = Form(),
) -> Kernel:
    types = (("DTYPE", type_name(dtype)), ("KV_DTYPE", type_name(kv_dtype)))
    sizes = (("HEAD_DIM", dim), ("ROWS", rows), ("BLOCK_SIZE", block_size))
    constants: tuple[tuple[str, str | int], ...] = (*types, *sizes, *form.constants)
    oldest, newest = OLDEST_CAPABILITY, NEWEST_CAPABILITY
    if stem == "decode_attention_any":
        if kv_dtype.itemsize == 1 and rows * _elements(dim) > MOST_ELEMENTS // 2:
            oldest = FP8_CAPABILITY
    else:
        oldest = BF16_CAPABILITY if kv_dtype == torch.bfloat16 else oldest
        newest = LARGE_DIM_CAPABILITY if dim > LARGE_DIM and kv_dtype.itemsize > 1 else newest
    return Kernel(stem, stem, constants, oldest, newest)


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    bf16, half, fp8, int8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
    small = [
        variant("decode_attention", dtype, kv_dtype, dim, 8, 16)
        for dtype, kv_dtype in ((bf16, bf16), (bf16, fp8), (bf16, int8), (half, half))
        for dim in (64, 80, 96, 128, 192, 256)
    ]
    kinds = bf16, fp8, int8
    large = [variant("decode_attention", bf16, kv_dtype, dim, 16, 16) for kv_dtype in kinds for dim in (64, 128, 256)]
    partly_rotated = [variant("decode_attention", bf16, bf16, dim, 8, 16, Form(2)) for dim in (80, 256)]
    behind = [variant("decode_attention", bf16, kv, 256, rows, 16, Form(gated=True)) for kv in kinds for rows in (8, 16)]
    behind += [variant("decode_attention", bf16, kv, 128, 8, 16, Form(turned=True)) for kv in kinds]
    behind += [variant("decode_attention", bf16, kv, dim, 8, 16, Form(distances=True)) for kv in kinds for dim in (64, 128)]
    others = [variant("decode_attention_any", bf16, bf16, 128, rows, 16) for rows in (1, 2, 4)]
    others += [variant("decode_attention_any", bf16, bf16, 128, 1, 16, Form(distances=True))]
    others += [variant("decode_attention_any", bf16, bf16, 256, rows, 16) for rows in (1, 4)]
    normed, reading = Form(value_norm=True), Form(shared=True)
    others += [variant("decode_attention", bf16, kv, dim, 8, 16, reading) for kv in kinds for dim in (64, 128)]
    for kv, form in itertools.product(kinds, (normed, reading)):
        others += [variant("decode_attention", bf16, kv, 256, rows, 16, form) for rows in (8, 16)]
        others += [variant("decode_attention_any", bf16, kv, 512, rows, 16, form) for rows in (1, 2, 4)]
    others += [variant("decode_attention_any", half, half, 512, 4, 16, form) for form in (normed, reading)]
    others += [variant("decode_attention_any", bf16, bf16, 256, 4, 16, form) for form in (normed, reading)]
    for dtype, kv in ((half, half), (bf16, bf16), (bf16, fp8), (bf16, int8)):  # latent attention's, where it has no tensor cores
        others += [variant("decode_attention_any", dtype, kv, 576, rows, 16, reading) for rows in (1, 2)]
    odd = [variant("decode_attention_any", bf16, kv, 100, 4, 16, Form(2)) for kv in (fp8, int8)]
    return [*small, *large, *partly_rotated, *behind, *others, *odd]
