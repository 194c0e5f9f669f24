"""The paged KV cache: per layer two tensors of blocks, in the layout of the attention backend that reads them.

What belongs to a block lies in it, the scales of a quantized cache too: whoever copies or shares blocks knows nothing of formats.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch

from nanovllm_cli.errors import UnsupportedError

# What a cache can be kept as, beside the compute type.
QUANTIZED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def cache_dtypes(names: tuple[str, str], dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """What K and V are kept as, given EngineConfig's names and the compute type. UnsupportedError for another dense type."""
    computed = str(dtype).removeprefix("torch.")
    for name in names:
        if name not in ("auto", computed, *QUANTIZED):
            raise UnsupportedError(
                f"a KV cache of {name} where {computed} is computed", f"known: auto, {computed}, {', '.join(QUANTIZED)}"
            )
    k, v = (QUANTIZED.get(name, dtype) for name in names)
    return k, v


class LayerCache(NamedTuple):
    """Keys and values of one layer; the first axis counts blocks."""

    k: torch.Tensor
    v: torch.Tensor


class BlockMover(Protocol):
    """Whole blocks of one cache, in all its layers."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to), at least one; no target is a source, or twice a target."""

    def take_out(self, blocks: list[int]) -> torch.Tensor:
        """What these hold, on the host: uint8 [len(blocks), block_bytes], K and V of each layer in order."""

    def put_in(self, blocks: list[int], data: torch.Tensor) -> None:
        """Fills these, none of them twice, with what `take_out` gave of others."""


class CacheLayout(Protocol):
    """The part of an AttentionBackend that says what its cache looks like."""

    cache_dtypes: tuple[torch.dtype, torch.dtype]
    """Of K's and V's tensors."""

    def cache_shapes(self, num_blocks: int, kv_heads: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's K and V; the first axis counts blocks."""

    def empty_cache(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory for a cache, as uint8."""

    def block_mover(self, layers: list[LayerCache]) -> BlockMover:
        """What copies whole blocks in all layers of this cache, and takes them out and in."""


class KVCache:
    """num_blocks blocks for every layer, in one allocation. heads_and_dims: of each layer's keys."""

    def __init__(self, num_blocks: int, heads_and_dims: list[tuple[int, int]], layout: CacheLayout) -> None:
        self.num_blocks = num_blocks
        shapes = [shape for heads, dim in heads_and_dims for shape in layout.cache_shapes(num_blocks, heads, dim)]
        dtypes = layout.cache_dtypes * len(heads_and_dims)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        parts = torch.split(layout.empty_cache(sum(sizes)), sizes)
        tensors = [part.view(dtype).view(shape) for part, dtype, shape in zip(parts, dtypes, shapes, strict=True)]
        self.layers = [LayerCache(k, v) for k, v in zip(tensors[::2], tensors[1::2], strict=True)]
        self.blocks = layout.block_mover(self.layers)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in all layers: copy-on-write."""
        if pairs:
            self.blocks.copy(pairs)


def block_bytes(heads_and_dims: list[tuple[int, int]], layout: CacheLayout) -> int:
    """Memory of one block over all layers."""
    return sum(
        math.prod(shape) * dtype.itemsize
        for heads, dim in heads_and_dims
        for shape, dtype in zip(layout.cache_shapes(1, heads, dim), layout.cache_dtypes, strict=True)
    )
