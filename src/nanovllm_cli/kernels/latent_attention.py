"""Attention over what latent attention keeps of a token, on a GPU's tensor cores (latent_attention.cu, latent_combine.cu).

`latent_attention` serves steps of decodes, whose lengths only the device knows, and any others: each token has blocks of its own,
or some tokens of a sequence share what is read of the cache (`groups_of`).

Legend: T tokens, H heads, G groups, N blocks of the cache of S tokens each, P blocks in a table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import (
    RESERVED_SHARED,
    WARP,
    Kernel,
    Launcher,
    check,
    largest_shared_bytes,
    shared_bytes_of_multiprocessor,
    type_name,
)
from nanovllm_cli.kernels.rope_cache import check_scales

OLDEST = 80
"""Capability with matrix instructions of both types, and asynchronous copies."""
KEYS = 32
"""Of a tile."""
DIM_PARTS = 4
"""In which scores are computed."""
MAX_SPLITS = 128
"""Of a token's keys."""
LEAST_SPLIT = 64
"""Keys of the smallest split: what its sums take is half of them, with 16 heads, but so small ones are for a GPU that is idle."""
FIXED_SPLIT = 512
"""Keys of a split where it follows from the length alone; more where there would be more than MAX_SPLITS."""
FIXED_BYTES = 128 << 20
"""Of these splits' sums at once."""
BLOCKS_WANTED = 2
"""For each multiprocessor. What splits leave takes time to write and to add up, so no more than run at once. An estimate."""
MAX_GRID = (1 << 16) - 1
COMBINE_THREADS = 128
"""And columns, of a block of latent_combine."""
MOST_ROWS = 64
GROUP_FIELDS = 4


class Tiling(NamedTuple):
    """Rows of a block, its warps, and tiles of keys in shared memory."""

    rows: int
    warps: int
    stages: int
    shared_bytes: int


class LatentShape(NamedTuple):
    """Of a layer."""

    heads: int
    rotary: int
    rank: int


def tiling(capability: int, rows: int, shape: LatentShape, kv_dtype: torch.dtype) -> Tiling | None:
    """For so many rows that share keys, or as many of them as fit; None where the kernel can't be used."""
    _, rotary, rank = shape
    size, largest = kv_dtype.itemsize, largest_shared_bytes(capability)
    if capability < OLDEST or rank % 16 or rotary % (8 if size > 1 else 16):
        return None
    dim = -(-(rotary + rank) // 16) * 16
    stride = dim if dim % 64 == 0 else dim + 8

    def needed(tile_rows: int, stages: int) -> int:
        queries, scores = tile_rows * stride * 2, DIM_PARTS * tile_rows * (KEYS + 8) * 4
        first = queries + scores if tile_rows == 64 else max(queries, scores)
        tiles = stages * KEYS * stride * 2 if size > 1 else KEYS * stride * 2 + stages * KEYS * (rotary + rank)
        return first + tiles + tile_rows * ((KEYS + 8) * 2 + 3 * 4)

    for tile_rows in (64, 32, 16):
        if tile_rows > 16 and tile_rows // 2 >= rows:
            continue
        # Two blocks of 16 rows run at once, if they fit, and have as much under way as one with more stages.
        both_fit = tile_rows == 16 and 2 * (needed(16, 2) + RESERVED_SHARED) <= shared_bytes_of_multiprocessor(capability)
        for stages in (2,) if both_fit else (3, 2):
            if needed(tile_rows, stages) <= largest:
                return Tiling(tile_rows, 4 if tile_rows == 16 else 8, stages, needed(tile_rows, stages))
    return None


def tokens_of_group(capability: int, shape: LatentShape, kv_dtype: torch.dtype) -> int:
    """Tokens of a sequence whose heads fit a block's rows together; 1 where it is not worth a group."""
    tile = tiling(capability, MOST_ROWS, shape, kv_dtype)
    return max(1, tile.rows // shape.heads) if tile else 1


def groups_of(query_starts: np.ndarray, kv_lens: np.ndarray, tokens: int) -> torch.Tensor:
    """A step's tokens in groups of at most so many of a sequence, [G, GROUP_FIELDS] int32 on the host, the longest first.
    query_starts [B + 1], kv_lens [B]: the last token of sequence b has kv_lens[b] keys."""
    starts, lens = np.asarray(query_starts, np.int64), np.asarray(kv_lens, np.int64)
    queries = np.diff(starts)
    counts = -(-queries // tokens)
    sequence = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]) * tokens
    own = np.minimum(tokens, queries[sequence] - begin)
    first_len = (lens - queries)[sequence] + begin + 1
    groups = np.stack((starts[sequence] + begin, own, first_len, sequence), axis=1)
    return torch.from_numpy(groups[np.argsort(-first_len, kind="stable")].astype(np.int32))


class LatentScratch:
    """Where splits leave their sums: allocated once, for all layers of a shape and all steps, of at most max_tokens (P * S) keys
    a token. A step of up to max_batch tokens has as many splits as fill the GPU; or, with fixed, as its tokens' lengths ask for.
    """

    def __init__(
        self,
        launcher: Launcher,
        shape: LatentShape,
        kv_dtype: torch.dtype,
        max_batch: int,
        max_tokens: int,
        fixed: bool = False,
    ) -> None:
        self.fixed = fixed
        tile = tiling(launcher.capability, shape.heads, shape, kv_dtype)
        assert tile is not None
        rows = 0
        for batch in range(1, max_batch + 1):
            splits = self._wanted(launcher, batch * -(-shape.heads // tile.rows), max_tokens)
            fits = not fixed or batch == 1 or batch * shape.heads * splits * shape.rank * 4 <= FIXED_BYTES
            if splits > 1 and fits:
                rows = max(rows, batch * shape.heads * splits)
        self.partials = torch.empty(rows * shape.rank, dtype=torch.float32, device=launcher.device)
        self.sums = torch.empty(rows * 2, dtype=torch.float32, device=launcher.device)

    def division(self, launcher: Launcher, blocks: int, tokens: int, heads: int, keys: int) -> tuple[int, int]:
        """Splits of each token, and tokens of a launch. blocks: of a split. keys: of the longest token, at the most."""
        splits, room = self._wanted(launcher, blocks, keys), len(self.sums) // 2 // heads
        if splits == 1:
            return 1, MAX_GRID
        if self.fixed:
            assert room >= splits, "the scratch is for shorter sequences"
            return splits, min(MAX_GRID, room // splits)
        return max(1, min(splits, room // tokens)), MAX_GRID

    def _wanted(self, launcher: Launcher, blocks: int, keys: int) -> int:
        if self.fixed:
            return min(MAX_SPLITS, -(-keys // FIXED_SPLIT))
        most = -(-BLOCKS_WANTED * launcher.num_multiprocessors // blocks)
        return min(MAX_SPLITS, most, -(-keys // LEAST_SPLIT))


def latent_attention(
    launcher: Launcher,
    rows: torch.Tensor,
    shape: LatentShape,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    lens: torch.Tensor,
    scratch: LatentScratch,
    scale: float,
    *,
    kv_scale: torch.Tensor | None = None,
    sequences: torch.Tensor | None = None,
    groups: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """rows [T, H * (rotary + rank)] over cache [N, 1, S, rotary + rank], which has this step's rows already: [T, H * rank].

    block_tables [B, P] int32. lens [T] int32: keys that each token sees, 0 for padding, which gets zeros. sequences [T] int32:
    each token's row of block_tables, its own where None. With groups, from `groups_of` for `tokens_of_group` tokens, lens and
    sequences are not looked at. kv_scale: of a cache in eight bits, see `check_scales`. sinks [H] fp32: see
    `reference.attention`.
    """
    heads, rotary, rank = shape
    tokens, (blocks, _, block_size, dim), dtype = rows.shape[0], cache.shape, rows.dtype
    assert dim == rotary + rank, (dim, shape)
    assert cache.dtype in (dtype, torch.float8_e4m3fn, torch.int8), cache.dtype
    assert (kv_scale is None) == (cache.dtype == dtype)
    assert block_size >= 16, block_size
    assert block_size & (block_size - 1) == 0, block_size
    check(rows, launcher, dtype, tokens, heads * dim)
    check(cache, launcher, cache.dtype, blocks, 1, block_size, dim)
    check(block_tables, launcher, torch.int32, *block_tables.shape)
    check_scales(launcher, cache, kv_scale)
    if sinks is not None:
        check(sinks, launcher, torch.float32, heads)
    if groups is not None:
        check(groups, launcher, torch.int32, len(groups), GROUP_FIELDS)
        sequences = None
    else:
        check(lens, launcher, torch.int32, tokens)
        if sequences is not None:
            check(sequences, launcher, torch.int32, tokens)
        assert sequences is not None or len(block_tables) == tokens
    out = torch.empty(tokens, heads * rank, dtype=dtype, device=rows.device)
    if not tokens:
        return out
    together = 1 if groups is None else tokens_of_group(launcher.capability, shape, cache.dtype)
    tile = tiling(launcher.capability, heads * together, shape, cache.dtype)
    assert tile is not None, "see tiling"
    chunks = -(-heads // tile.rows)
    count = tokens if groups is None else len(groups)
    splits, at_once = scratch.division(launcher, count * chunks, tokens, heads, block_tables.shape[1] * block_size)
    least = FIXED_SPLIT if scratch.fixed else LEAST_SPLIT
    kernel = variant(dtype, cache.dtype, shape, block_size, tile)
    for first in range(0, count, at_once):  # once, but for many tokens in fixed splits
        part = slice(first, first + at_once)
        some, found, own_lens, own, tables, own_groups = rows, out, None, None, block_tables, None
        if groups is not None:
            own_groups = groups[part]
        else:
            some, found, own_lens = rows[part], out[part], lens[part]
            own = None if sequences is None else sequences[part]
            tables = block_tables[part] if sequences is None else block_tables
        number = min(at_once, count - first)
        sizes = (heads, -(-heads // chunks), block_tables.shape[1], least)
        tensors = (some, cache, tables, own_lens, own, own_groups, kv_scale, sinks, found, scratch.partials, scratch.sums)
        args = (*tensors, *map(np.int32, sizes), np.float32(scale))
        launcher.launch(kernel, (splits, chunks, number), (tile.warps * WARP, 1, 1), args, tile.shared_bytes)
        if splits > 1:
            of_all = None if cache.dtype == torch.int8 else kv_scale
            sums = (scratch.partials, scratch.sums, own_lens, own_groups, of_all, found, np.int32(splits), np.int32(least))
            grid = (heads * -(-rank // COMBINE_THREADS), together, number)
            launcher.launch(combine_variant(dtype, rank), grid, (COMBINE_THREADS, 1, 1), sums)
    return out


def variant(dtype: torch.dtype, kv_dtype: torch.dtype, shape: LatentShape, block_size: int, tile: Tiling) -> Kernel:
    constants = (
        ("DTYPE", type_name(dtype)), ("KV_DTYPE", type_name(kv_dtype)), ("ROTARY", shape.rotary), ("RANK", shape.rank),
        ("BLOCK_SIZE", block_size), ("ROWS", tile.rows), ("KEYS", KEYS), ("WARPS", tile.warps), ("STAGES", tile.stages),
        ("MIN_BLOCKS", 2 if tile.rows == 16 else 1),
    )  # fmt: skip
    return Kernel("latent_attention", "latent_attention", constants, _oldest(tile))


def combine_variant(dtype: torch.dtype, rank: int) -> Kernel:
    constants = (("DTYPE", type_name(dtype)), ("RANK", rank), ("MAX_SPLITS", MAX_SPLITS))
    return Kernel("latent_combine", "latent_combine", constants)


def _oldest(tile: Tiling) -> int:
    """The first GPUs that have its shared memory."""
    return OLDEST if tile.shared_bytes <= largest_shared_bytes(OLDEST) else 90


def variants() -> list[Kernel]:
    """What the compile gate builds: DeepSeek's, with 16, 20 and 128 heads, and those of half the rank, as GPUs of each size of
    shared memory take them."""
    bf16, half, fp8, int8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
    kernels: dict[Kernel, None] = {}
    for heads, rotary, rank in ((16, 64, 512), (20, 64, 512), (128, 64, 512), (32, 64, 256)):
        for dtype, kv_dtype in ((bf16, bf16), (bf16, fp8), (bf16, int8), (half, half)):
            for capability in (80, 86, 90):
                shape = LatentShape(heads, rotary, rank)
                tile = tiling(capability, heads, shape, kv_dtype)
                assert tile is not None
                if dtype == bf16 or capability == 90:
                    kernels[variant(dtype, kv_dtype, shape, 16, tile)] = None
    return [*kernels, *(combine_variant(dtype, rank) for dtype in (bf16, half) for rank in (256, 512))]
