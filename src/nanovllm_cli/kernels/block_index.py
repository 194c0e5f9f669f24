"""Sparse attention by blocks of tokens on the CPU: tensors in, checks, addresses to compiled kernels (cpu_block_index.py),
tensors out (see cpu.py).

Legend: T tokens, B sequences, N blocks of the cache, P of them in a table, H index heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.kernels import cpu, cpu_block_index, cpu_cache, cpu_indexer
from nanovllm_cli.kernels.cpu import BLOCK, address_of, launch, new_tensor, tags_of
from nanovllm_cli.kernels.indexer import ROWS
from nanovllm_cli.kernels.simd_ir import LANES


class BlockIndexInputs(NamedTuple):
    """What chooses blocks of a step's tokens goes by: projected [T, (heads + 1) * dim], each token's queries, and its raw key
    behind them, which are yet to be normed and rotated; q_norm and k_norm [dim] are gains, eps and offset those of their norms.
    See `BlockIndexerSpec`."""

    projected: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    eps: float
    offset: float


class IndexKeys(NamedTuple):
    """Of the cache: kept [N, BLOCK, dim], raw keys of tokens and keys of blocks; angles [N, BLOCK, rotary dims]. ratio: tokens
    of a block of those that are ranked. See `cpu_block_index`."""

    kept: torch.Tensor
    angles: torch.Tensor
    ratio: int


class Where(NamedTuple):
    """tiles [T, 5] int64: of one token each, see `cpu.attention_tiles`; query_starts [B + 1], block_tables [B, P] int32: see
    `Batch`."""

    tiles: torch.Tensor
    query_starts: torch.Tensor
    block_tables: torch.Tensor


def keep_keys(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, gains: torch.Tensor, eps: float, offset: float, index: IndexKeys,
    where: Where,
) -> None:  # fmt: skip
    """keys [T, dim], which may be columns of a wider tensor, and cos, sin [T, half] of their positions go into the cache, and so
    do keys of the blocks that end here: means of raw ones, normed by gains [dim] and rotated at the position of the first."""
    (tokens, dim), half, dtype = keys.shape, cos.shape[1], keys.dtype
    num_blocks, tables = len(index.kept), where.block_tables
    ints = (
        *cpu.rows_of(keys, dtype, tokens, dim), tokens, dim, address_of(cos, torch.float32, tokens, half),
        address_of(sin, torch.float32, tokens, half), half, address_of(gains, dtype, dim),
        address_of(index.kept, dtype, num_blocks, BLOCK, dim), address_of(index.angles, dtype, num_blocks, BLOCK, 2 * half),
        address_of(where.tiles, torch.int64, tokens, 5), address_of(where.query_starts, torch.int32, len(tables) + 1),
        address_of(tables, torch.int32, *tables.shape), tables.shape[1], index.ratio,
    )  # fmt: skip
    launch(cpu_block_index.keep_keys, 8 * keys.numel(), tags_of(dtype), ints, (eps, offset))


def choose(q: torch.Tensor, index: IndexKeys, most: int, where: Where) -> torch.Tensor:
    """q [T, H, dim], normed and rotated -> [T, most] int32: of the whole blocks up to each token those that score highest,
    ascending; behind the last there is nothing. See `block_rules.block_scores`."""
    (tokens, heads, dim), (num_seqs, width) = q.shape, where.block_tables.shape
    kept = address_of(index.kept, q.dtype, len(index.kept), BLOCK, dim)
    tables = address_of(where.block_tables, torch.int32, num_seqs, width)
    room = max(1, width * BLOCK // index.ratio)
    chosen = new_tensor((tokens, most), torch.int32)
    for first in range(0, tokens, ROWS):
        some = slice(first, min(tokens, first + ROWS))
        count = some.stop - first
        scores, (blocks, made) = new_tensor((count, room), torch.float32), (new_tensor((count, 5), torch.int64) for _ in range(2))
        ints = (
            address_of(q[some], q.dtype, count, heads, dim), count, heads, dim, kept,
            address_of(where.tiles[some], torch.int64, count, 5), tables, width, index.ratio, most, scores.data_ptr(), room,
            blocks.data_ptr(),
        )  # fmt: skip
        launch(cpu_block_index.block_scores, count * room * heads * dim, tags_of(q.dtype), ints)
        places = address_of(chosen[some], torch.int32, count, most)
        told = count, scores.data_ptr(), room, blocks.data_ptr(), most, places, made.data_ptr(), ROWS
        launch(cpu_indexer.choose, 16 * count * room, "", told)
    return chosen


class Gathered:
    """Keys and values of what ROWS tokens see, one behind the other, as a cache of its own, whose memory serves all layers. most:
    blocks that are chosen, of `ratio` tokens."""

    def __init__(
        self, most: int, ratio: int, heads: int, dim: int, value_dim: int, dtype: torch.dtype, kept: cpu.CacheDTypes
    ) -> None:
        self.most, self.ratio, self.dtype = most, ratio, dtype
        self.blocks = -(-(most * ratio + ratio - 1) // BLOCK)
        shapes = cpu.cache_shapes(ROWS * self.blocks, heads, dim, dtype, kept, value_dim)
        self.keys, self.values = (torch.empty(shape, dtype=side) for shape, side in zip(shapes, kept, strict=True))
        self.tables = torch.arange(ROWS * self.blocks, dtype=torch.int32).view(ROWS, self.blocks)
        self._widths = dim, -(-value_dim // LANES) * LANES

    def gather(
        self, some: slice, chosen: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], where: Where
    ) -> torch.Tensor:
        """Of these tokens, ROWS at the most: tiles [n, 5] of sequences that are made of what each sees alone."""
        count, tables = some.stop - some.start, where.block_tables
        made = new_tensor((count, 5), torch.int64)
        for is_values, (side, own, width) in enumerate(zip(cache, (self.keys, self.values), self._widths, strict=True)):
            assert (side.dtype, side.shape[1:]) == (own.dtype, own.shape[1:]), (side.dtype, side.shape, own.shape)
            assert side.is_contiguous()
            is_dense = side.dtype == self.dtype
            ints = (
                count, side.data_ptr(), side[0, 0].nbytes, side.shape[1], side.itemsize, 4 // self.dtype.itemsize, width,
                is_values, 0 if is_dense else cpu_cache.SCALE_BYTES, address_of(where.tiles[some], torch.int64, count, 5),
                address_of(tables, torch.int32, *tables.shape), tables.shape[1], self.ratio, self.most,
                address_of(chosen[some], torch.int32, count, self.most), made.data_ptr(), own.data_ptr(), self.blocks, ROWS,
            )  # fmt: skip
            launch(cpu_block_index.gather_heads, count * own.numel() // ROWS, "", ints)
        return made
