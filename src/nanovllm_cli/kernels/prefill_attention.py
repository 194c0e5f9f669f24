"""Attention of any number of tokens a sequence over the paged cache, on a GPU (prefill_attention.cu).

`prefill_tiles` divides a step's work, once a step, from lengths that the host knows; `prefill_attention` does it, once a layer.
Decode steps whose lengths only the device looks at are `decode_attention`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import (
    OLDEST_CAPABILITY,
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

MOST_ROW_TILES = 2
MAX_HEAD_DIM = 512
MAX_OWN_DIM = 256
"""Of heads whose sums fit a warp's registers, for 16 rows."""
PARTS, WIDE_ROWS = 4, 64
"""Warps that wider heads' dims are shared out among, and rows of a block then."""
SPLIT_KEYS = 512
"""Keys of a split in deterministic mode. Smaller ones fill the GPU better when few tokens are decoded; but an item that walks
through several takes its sums to scratch and back after each, with 512 keys in about a tenth of its time (est.)."""
MIN_SPLIT_KEYS = 256
KEY_ALIGNMENT = 64  # a multiple of every `Tiling.keys`
MAX_SPLITS = 64  # one block adds them up
ITEM_FIELDS = 12
EVERY_KEY = 1 << 30
"""Keys behind its own that a query may see, where nothing but the end of its sequence bounds them."""


class Tiling(NamedTuple):
    """16 * row_tiles rows of q for each `parts` warps, and `keys` keys at a time; `blocks` fit on a multiprocessor at once."""

    row_tiles: int
    keys: int
    blocks: int
    shared_bytes: int
    parts: int = 1

    @property
    def warps(self) -> int:
        return 4 if self.parts == 1 else 8

    @property
    def few_rows(self) -> int:
        """What a block has with 16 rows for each `parts` warps."""
        return 16 * self.warps // self.parts

    @property
    def rows(self) -> int:
        return self.few_rows * self.row_tiles


class PrefillWork(NamedTuple):
    """A step's work. `items` [n, ITEM_FIELDS] int32 (struct Item in the kernel), which the caller moves to the device:
    `work._replace(items=work.items.to(device))`; an item of zeros is no work. `pieces`: scratch, in units of 16 rows and a kv
    head."""

    items: torch.Tensor
    pieces: int
    window: int
    ahead: int
    fold_keys: int


def tiling(
    capability: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, *, distances: bool = False
) -> Tiling:
    """The largest tiles of which two blocks fit on a multiprocessor, so that one's softmax runs beside the other's mma; or one of
    heads past MAX_OWN_DIM, which fills the registers. distances: scores go by these, too; rows are as many."""
    if capability < _oldest(dtype):
        raise UnsupportedError("bf16 attention needs a GPU of compute capability 8.0 or newer", "use --dtype float16")
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise UnsupportedError(f"attention heads of {head_dim} dims: an even number up to {MAX_HEAD_DIM} is supported")
    dim, quantized = _padded(head_dim), kv_dtype.itemsize == 1
    row_bytes = 2 * dim if dim % 64 == 0 else 2 * dim + 16
    memory = shared_bytes_of_multiprocessor(capability)
    reserved = memory - largest_shared_bytes(capability)
    if head_dim > MAX_OWN_DIM:
        for keys in (64, 32, 16):
            scores, corrections = 4 * PARTS * WIDE_ROWS * keys, 4 * 4 * WIDE_ROWS  # each part's; of four lanes a row
            needed = 2 * keys * row_bytes + scores + corrections
            if needed <= memory - reserved:
                return Tiling(MOST_ROW_TILES, keys, 1, needed, PARTS)
    # Turning more into 16 bits at once takes registers that are not there, and so does where their distances lie.
    widest = 32 if (quantized or distances) and dim > 96 else 64
    for blocks in (2, 1):
        for row_tiles in (MOST_ROW_TILES, 1) if dim <= 128 else (1,):  # 32 rows of 256 sums don't fit a warp's registers
            for keys in [count for count in (64, 32, 16) if count <= widest]:
                tiles = 2 * keys * row_bytes
                tile = Tiling(row_tiles, keys, blocks, 0)
                needed = tile.rows * row_bytes + tiles + (2 * keys * dim if quantized else tiles)
                if needed <= memory // blocks - reserved:
                    return tile._replace(shared_bytes=needed)
    raise AssertionError((capability, head_dim))


def _padded(head_dim: int) -> int:
    """Dims in shared memory, and of sums in scratch."""
    grain = 16 if head_dim <= MAX_OWN_DIM else 16 * PARTS
    return -(-head_dim // grain) * grain


def _oldest(dtype: torch.dtype, tile: Tiling | None = None) -> int:
    """The first GPUs whose tensor cores multiply this type and, of those with more than 64 KiB, whose shared memory has the
    blocks of the tiling."""
    if tile is not None and tile.blocks * (tile.shared_bytes + RESERVED_SHARED) > shared_bytes_of_multiprocessor(80):
        return 90
    return 80 if dtype == torch.bfloat16 else OLDEST_CAPABILITY


def prefill_tiles(
    launcher: Launcher,
    query_starts: np.ndarray,
    kv_lens: np.ndarray,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    window: int = 0,
    chunk: int = 0,
    both_ways: bool = False,
    deterministic: bool = False,
    split_keys: int = SPLIT_KEYS,
) -> PrefillWork:
    """Divide a step: query_starts [B + 1], kv_lens [B] int32 on the host; the last query of sequence b has position
    kv_lens[b] - 1. Layers with the same window, chunk, heads, dims, types and directions share it. both_ways: a query sees all
    keys of its sequence, or fewer than `window` on either side of its own. chunk: a query sees none before its own chunk of so
    many, a multiple of KEY_ALIGNMENT; 0: all.

    deterministic: a row's bits depend on its sequence and position only, not on the batch, nor on how the prompt was
    chunked; keys are then summed in ranges of split_keys (a multiple of KEY_ALIGNMENT).
    """
    assert heads % kv_heads == 0
    assert split_keys % KEY_ALIGNMENT == chunk % KEY_ALIGNMENT == 0
    assert not (chunk and (window or both_ways)), "no model has both"
    tile = tiling(launcher.capability, head_dim, dtype, kv_dtype)
    group, slots = heads // kv_heads, tile.blocks * launcher.num_multiprocessors
    runs = _runs(np.asarray(query_starts, np.int64), np.asarray(kv_lens, np.int64), chunk)
    assert int(runs.queries.max(initial=0)) * group * group < 1 << 32  # the kernel divides by a product with 2^32 / group
    run, number = _numbered(-(-runs.queries * group // tile.rows))
    seq, token, position, queries, least, length = (each[run] for each in runs)
    first_row = number * tile.rows
    rows = np.minimum(tile.rows, queries * group - first_row)
    ahead = 0 if not both_ways else window - 1 if window else EVERY_KEY
    end = np.maximum(0, np.minimum(position + (first_row + rows - 1) // group + 1 + ahead, length))
    begin = np.maximum(0, position + first_row // group + 1 - window) if window else least

    if deterministic:
        longest = _longest_range(end - begin, kv_heads, slots)
        size = np.full_like(end, split_keys)
        origin = begin // size * size
        splits = np.maximum(1, -(-(end - origin) // size))
        # Each split of its own leaves all its rows' sums in scratch: many rows rather take twice the time.
        folded = (splits > 1) & (end - begin <= longest * np.where(rows > tile.few_rows, 2, 1))
    else:
        origin = begin // KEY_ALIGNMENT * KEY_ALIGNMENT
        longest = _longest_range(end - origin, kv_heads, slots)
        splits = np.clip(-(-(end - origin) // longest), 1, MAX_SPLITS)
        size = -(-(end - origin) // (splits * KEY_ALIGNMENT)) * KEY_ALIGNMENT
        splits = np.maximum(1, -(-(end - origin) // np.maximum(1, size)))
        folded = np.zeros_like(end, bool)

    blocks = np.where(folded, 1, splits)
    pieces = -(-rows // 16) * np.where(folded | (splits > 1), blocks, 0)
    index, split = _numbered(blocks)
    low = np.maximum(begin[index], origin[index] + split * size[index])
    high = np.where(folded[index], end[index], np.minimum(end[index], origin[index] + (split + 1) * size[index]))
    fields = (
        seq[index], token[index], position[index], first_row[index], rows[index], low, high,
        (np.cumsum(pieces) - pieces)[index], split, blocks[index], (np.cumsum(blocks > 1) - (blocks > 1))[index],
        length[index] - 1,
    )  # fmt: skip
    items = np.stack(fields, axis=1)[np.argsort(low - high, kind="stable")]  # the longest first
    return PrefillWork(
        torch.from_numpy(items.astype(np.int32)), int(pieces.sum()), window, ahead, split_keys if deterministic else 0
    )


class Runs(NamedTuple):
    """Queries that follow each other, of which each sees the keys from `least` on. Of each: the sequence, its first row of q and
    that one's position, how many queries, and the keys of the sequence."""

    sequences: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    queries: np.ndarray
    least: np.ndarray
    lens: np.ndarray


def _runs(starts: np.ndarray, lens: np.ndarray, chunk: int) -> Runs:
    """A sequence's of a step, or those that it has in each chunk."""
    queries = np.diff(starts)
    first = lens - queries
    if not chunk:
        return Runs(np.arange(len(lens)), starts[:-1], first, queries, np.zeros_like(lens), lens)
    seq, number = _numbered(np.where(queries > 0, (lens - 1) // chunk - first // chunk + 1, 0))
    least = (first[seq] // chunk + number) * chunk
    begin, end = np.maximum(first[seq], least), np.minimum(lens[seq], least + chunk)
    return Runs(seq, starts[seq] + begin - first[seq], begin, end - begin, least, lens[seq])


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[2, 0, 3] -> [0, 0, 2, 2, 2], [0, 1, 0, 1, 2]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]


def _longest_range(keys: np.ndarray, kv_heads: int, slots: int) -> int:
    """Most keys that one block should walk through. keys: of each tile. slots: blocks that run at once.

    Tiles that fill the slots more than once keep them busy while no tile is longer than the average slot's work. Fewer are
    divided as finely as fits the slots at once: one block more would be a second round.
    """
    if len(keys) * kv_heads > slots:
        average = -(-int(keys.sum()) * kv_heads // slots)
        return max(MIN_SPLIT_KEYS, -(-average // KEY_ALIGNMENT) * KEY_ALIGNMENT)
    low, high = MIN_SPLIT_KEYS // KEY_ALIGNMENT, max(MIN_SPLIT_KEYS, int(keys.max(initial=0))) // KEY_ALIGNMENT + 1
    while low < high:
        middle = (low + high) // 2
        if int((-(-keys // (middle * KEY_ALIGNMENT))).sum()) * kv_heads <= slots:
            high = middle
        else:
            low = middle + 1
    return low * KEY_ALIGNMENT


def new_counters(launcher: Launcher) -> torch.Tensor:
    """What `prefill_attention` counts finished blocks in: zeros, zeros again after each launch. One for all layers.

    Only tiles longer than the average slot's work are divided, so there are at most as many as slots (of 2 a multiprocessor).
    """
    return torch.zeros(2 * launcher.num_multiprocessors, dtype=torch.int32, device=launcher.device)


def most_pieces(rows: int, head_dim: int) -> int:
    """Of an item that has so many rows of a sequence, or as many of them as fit one of the largest tiles."""
    return min(-(-rows // 16), 4 * MOST_ROW_TILES if head_dim <= MAX_OWN_DIM else WIDE_ROWS // 16)


def piece_bytes(head_dim: int) -> int:
    """Of the sums of 16 rows and a kv head."""
    return 4 * 16 * (_padded(head_dim) + 8)


def prefill_attention(
    launcher: Launcher,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work: PrefillWork,
    block_tables: torch.Tensor,
    counters: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    distances: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, H, D] over k_cache, v_cache [N, KH, S, D], which hold this step's keys already: [T, H * D]. See
    `reference.attention`.

    work: from `prefill_tiles` for these heads, dims and types, on the device. block_tables [B, P] int32. counters: from
    `new_counters`. sinks [H], distances [H, columns] float32; k_scale and v_scale with an 8-bit cache only, see `check_scales`.
    """
    tokens, heads, dim = q.shape
    blocks, kv_heads, block_size, _ = k_cache.shape
    tile = tiling(launcher.capability, dim, q.dtype, k_cache.dtype, distances=distances is not None)
    assert heads % kv_heads == 0
    assert scale > 0
    assert (k_scale is None) == (v_scale is None) == (k_cache.dtype.itemsize > 1)
    check(q, launcher, q.dtype, tokens, heads, dim)
    check(k_cache, launcher, k_cache.dtype, blocks, kv_heads, block_size, dim)
    check(v_cache, launcher, k_cache.dtype, blocks, kv_heads, block_size, dim)
    check(work.items, launcher, torch.int32, work.items.shape[0], ITEM_FIELDS)
    check(block_tables, launcher, torch.int32, *block_tables.shape)
    check(counters, launcher, torch.int32, 2 * launcher.num_multiprocessors)
    for scales in (k_scale, v_scale):
        check_scales(launcher, k_cache, scales)
    if sinks is not None:
        check(sinks, launcher, torch.float32, heads)
    if distances is not None:
        assert not softcap, "no model has both"
        check(distances, launcher, torch.float32, heads, distances.shape[1])
    out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    scratch = torch.empty(work.pieces * kv_heads * piece_bytes(dim), dtype=torch.uint8, device=q.device)
    args = (
        q, k_cache, v_cache, work.items, block_tables, sinks, k_scale, v_scale, out, scratch, counters,
        np.int32(kv_heads), np.int32(heads // kv_heads), np.int32(block_tables.shape[1]), np.int32(work.window),
        np.int32(work.ahead), np.int32(work.fold_keys), np.float32(scale), np.float32(softcap),
    )  # fmt: skip
    by_distance = () if distances is None else (distances, np.int32(distances.shape[1]))
    kernel = variant(q.dtype, k_cache.dtype, dim, block_size, tile, distances is not None)
    grid, threads = (work.items.shape[0], kv_heads, 1), (tile.warps * WARP, 1, 1)
    launcher.launch(kernel, grid, threads, (*args, *by_distance), tile.shared_bytes)
    return out


def variant(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, block_size: int, tile: Tiling, distances: bool = False
) -> Kernel:
    assert kv_dtype in (dtype, torch.float8_e4m3fn, torch.int8), kv_dtype
    assert block_size >= 16, block_size
    assert block_size & (block_size - 1) == 0, block_size
    constants: tuple[tuple[str, str | int], ...] = (
        ("DTYPE", type_name(dtype)), ("KV_DTYPE", type_name(kv_dtype)), ("HEAD_DIM", head_dim), ("BLOCK_SIZE", block_size),
        ("ROW_TILES", tile.row_tiles), ("KEYS", tile.keys), ("WARPS", tile.warps), ("PARTS", tile.parts),
        *((("DISTANCES", 1),) if distances else ()),
    )  # fmt: skip
    return Kernel("prefill_attention", "prefill_attention", constants, _oldest(dtype, tile))


def variants() -> list[Kernel]:
    """What the compile gate builds: the tilings of Hopper, Ampere, and cards with 100 KiB of shared memory."""
    bf16, half, fp8, int8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
    built = [
        (90, bf16, bf16, 64),
        (90, bf16, bf16, 128),
        (90, bf16, bf16, 256),
        (90, bf16, bf16, 80),
        (90, bf16, fp8, 128),
        *((90, bf16, int8, dim) for dim in (64, 100, 128, 256)),
        (75, half, int8, 128),
    ]
    built += [(80, bf16, bf16, 128), (86, bf16, bf16, 128), (75, half, half, 128)]
    built += [(capability, bf16, kv, 512) for capability in (86, 90) for kv in (bf16, fp8, int8)]
    built += [(75, half, half, 512), (75, half, fp8, 512), (75, half, int8, 512), (90, half, half, 512), (80, bf16, bf16, 320)]
    plain = [
        variant(dtype, kv_dtype, dim, 16, tiling(capability, dim, dtype, kv_dtype))
        for capability, dtype, kv_dtype, dim in built
    ]
    by_distance = (
        (90, bf16, bf16, 64), (90, bf16, bf16, 96), (90, bf16, bf16, 128), (90, bf16, fp8, 128), (90, bf16, int8, 128),
        (75, half, half, 64),
    )  # fmt: skip
    return plain + [
        variant(dtype, kv_dtype, dim, 16, tiling(capability, dim, dtype, kv_dtype, distances=True), distances=True)
        for capability, dtype, kv_dtype, dim in by_distance
    ]
