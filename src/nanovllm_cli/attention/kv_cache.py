"""The paged KV cache: per layer two tensors of blocks, in the layout of the attention backend that reads them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from nanovllm_cli.kernels import cpu


class LayerCache(NamedTuple):
    """Keys and values of one layer; the first axis counts blocks."""

    k: torch.Tensor
    v: torch.Tensor


class KVCache:
    """num_blocks blocks of 16 tokens for every layer.

    One allocation for all; memory is resident only once it is written.
    """

    def __init__(self, num_blocks: int, heads_and_dims: list[tuple[int, int]], dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        shapes = [shape for heads, dim in heads_and_dims for shape in cpu.cache_shapes(num_blocks, heads, dim, dtype)]
        sizes = [math.prod(shape) for shape in shapes]
        parts = torch.split(cpu.zeros(sum(sizes), dtype), sizes)
        tensors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.layers = [LayerCache(k, v) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in all layers: copy-on-write."""
        if not pairs:
            return
        source, target = (torch.tensor(side) for side in zip(*pairs, strict=True))
        for layer in self.layers:
            for cache in layer:
                cache[target] = cache[source]


def block_bytes(heads_and_dims: list[tuple[int, int]], dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return sum(
        math.prod(shape) * dtype.itemsize
        for heads, dim in heads_and_dims
        for shape in cpu.cache_shapes(1, heads, dim, dtype)
    )
