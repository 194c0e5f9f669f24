"""Sparse attention on the CPU: tensors in, checks, addresses to compiled kernels (cpu_indexer.py), tensors out (see cpu.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.kernels import cpu, cpu_cache, cpu_indexer
from nanovllm_cli.kernels.cpu import BLOCK, address_of, launch, new_tensor, tags_of
from nanovllm_cli.kernels.simd import TILE_COLUMNS

ROWS = 8
"""Whose keys are gathered at once: they take some 20 MB in DeepSeek-V3.2, and bring enough work for threads."""


class Chosen(NamedTuple):
    """places [T, most] int32: which tokens of its sequence each token of a step sees; tiles [T, 5]: those of sequences made of
    these alone, ROWS of them at once. See `cpu_indexer.choose`."""

    places: torch.Tensor
    tiles: torch.Tensor


def choose(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, tiles: torch.Tensor, block_tables: torch.Tensor, most: int
) -> Chosen:
    """q [T, heads, dim], weights [T, heads] fp32; keys: the cache's, dense and of one head. tiles [T, 5]: of one token each, see
    `cpu.attention_tiles`. See `reference.index_scores`."""
    (tokens, heads, dim), width = q.shape, block_tables.shape[1]
    (shape, _), pair = cpu.cache_shapes(len(keys), 1, dim, q.dtype), keys.shape[-1]
    at = address_of(keys, q.dtype, *shape)
    room = -(-width * BLOCK // TILE_COLUMNS) * TILE_COLUMNS
    chosen = Chosen(new_tensor((tokens, most), torch.int32), new_tensor((tokens, 5), torch.int64))
    tables = address_of(block_tables, torch.int32, *block_tables.shape)
    for first in range(0, tokens, ROWS):
        some = slice(first, min(tokens, first + ROWS))
        count = some.stop - first
        scores, stride = new_tensor((count, room), torch.float32), keys.stride(0) * keys.itemsize
        of_rows, queries = address_of(tiles[some], torch.int64, count, 5), address_of(q[some], q.dtype, count, heads, dim)
        ints = (
            pair, queries, address_of(weights[some], torch.float32, count, heads), count, heads, dim,
            at, stride, of_rows, tables, width, scores.data_ptr(), room, most,
        )  # fmt: skip
        launch(cpu_indexer.index_scores, count * room * heads * dim, tags_of(q.dtype), ints)
        own = (each[some] for each in chosen)
        places, made = (address_of(each, each.dtype, count, each.shape[1]) for each in own)
        told = count, scores.data_ptr(), room, of_rows, most, places, made, ROWS
        launch(cpu_indexer.choose, 16 * count * room, "", told)
    return chosen


class Gathered:
    """Keys of what ROWS tokens have chosen, one behind the other, as a cache of its own, whose memory serves all layers."""

    def __init__(self, most: int, dim: int, dtype: torch.dtype, kept: torch.dtype) -> None:
        self.most, self.blocks = most, -(-most // BLOCK)
        (shape, _) = cpu.cache_shapes(ROWS * self.blocks, 1, dim, dtype, (kept, kept))
        self.keys = torch.empty(shape, dtype=kept)
        self.tables = torch.arange(ROWS * self.blocks, dtype=torch.int32).view(ROWS, self.blocks)
        is_dense = kept == dtype
        self._unit = 4 if is_dense else 4 // dtype.itemsize
        self._scale_bytes = 0 if is_dense else cpu_cache.SCALE_BYTES
        self._units = (self.keys[0].nbytes - self._scale_bytes) // (BLOCK * self._unit)

    def gather(self, first: int, chosen: Chosen, cache: torch.Tensor, tiles: torch.Tensor, block_tables: torch.Tensor) -> int:
        """Of the next ROWS tokens, or as many as there are. cache: attention's, of one head."""
        some = slice(first, min(len(tiles), first + ROWS))
        count = some.stop - first
        assert (cache.dtype, cache.shape[1:]) == (self.keys.dtype, self.keys.shape[1:]), (cache.dtype, cache.shape)
        assert cache.is_contiguous()
        ints = (
            count, cache.data_ptr(), cache[0].nbytes, self._units, self._unit, self._scale_bytes,
            address_of(tiles[some], torch.int64, count, 5), address_of(block_tables, torch.int32, *block_tables.shape),
            block_tables.shape[1], self.most, address_of(chosen.places[some], torch.int32, count, self.most),
            address_of(chosen.tiles[some], torch.int64, count, 5), self.keys.data_ptr(), self.blocks,
        )  # fmt: skip
        launch(cpu_indexer.gather_keys, count * self.keys.numel() // ROWS, "", ints)
        return count
