"""The paged KV cache: per layer two tensors of blocks, in the layout of the attention backend that reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class LayerCache(NamedTuple):
    """Keys and values of one layer; the first axis counts blocks."""

    k: torch.Tensor
    v: torch.Tensor


class CacheLayout(Protocol):
    """The part of an AttentionBackend that says what its cache looks like."""

    cache_dtype: torch.dtype

    def cache_shapes(self, num_blocks: int, kv_heads: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]: ...

    def empty_cache(self, numel: int) -> torch.Tensor: ...

    def block_copier(self, layers: list[LayerCache]) -> Callable[[list[tuple[int, int]]], None]: ...


class KVCache:
    """num_blocks blocks for every layer, in one allocation. heads_and_dims: of each layer's keys."""

    def __init__(self, num_blocks: int, heads_and_dims: list[tuple[int, int]], layout: CacheLayout) -> None:
        self.num_blocks = num_blocks
        shapes = [shape for heads, dim in heads_and_dims for shape in layout.cache_shapes(num_blocks, heads, dim)]
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.split(layout.empty_cache(sum(sizes)), sizes)
        tensors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.layers = [LayerCache(k, v) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]
        self._copy = layout.block_copier(self.layers)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in all layers: copy-on-write."""
        if pairs:
            self._copy(pairs)


def block_bytes(heads_and_dims: list[tuple[int, int]], layout: CacheLayout) -> int:
    """Memory of one block over all layers."""
    itemsize = layout.cache_dtype.itemsize
    return sum(
        math.prod(shape) * itemsize for heads, dim in heads_and_dims for shape in layout.cache_shapes(1, heads, dim)
    )
