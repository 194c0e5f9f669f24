"""The paged KV cache: per layer two tensors of blocks, in the layout of the attention backend that reads them.

What belongs to a block lies in it, the scales of a quantized cache too: whoever copies or shares blocks knows nothing of formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


class CacheLayout(Protocol):
    """The part of an AttentionBackend that says what its cache looks like."""

    cache_dtypes: tuple[torch.dtype, torch.dtype]

    def cache_shapes(self, num_blocks: int, kv_heads: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]: ...

    def empty_cache(self, num_bytes: int) -> torch.Tensor: ...

    def block_copier(self, layers: list[LayerCache]) -> Callable[[list[tuple[int, int]]], None]: ...


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
        self._copy = layout.block_copier(self.layers)
        self._bytes = [tensor.view(torch.uint8).view(num_blocks, -1) for tensor in tensors]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in all layers: copy-on-write."""
        if pairs:
            self._copy(pairs)

    def read_blocks(self, blocks: list[int]) -> torch.Tensor:
        """What these blocks hold, on the host: uint8 [len(blocks), block_bytes], K and V of each layer in order."""
        index = torch.tensor(blocks, device=self._bytes[0].device)
        return torch.cat([side[index].cpu() for side in self._bytes], dim=1)

    def write_blocks(self, blocks: list[int], data: torch.Tensor) -> None:
        """Puts into these blocks what `read_blocks` gave of others."""
        index = torch.tensor(blocks, device=self._bytes[0].device)
        parts = torch.split(data, [side.shape[1] for side in self._bytes], dim=1)
        for side, part in zip(self._bytes, parts, strict=True):
            side[index] = part.to(side.device)


def block_bytes(heads_and_dims: list[tuple[int, int]], layout: CacheLayout) -> int:
    """Memory of one block over all layers."""
    return sum(
        math.prod(shape) * dtype.itemsize
        for heads, dim in heads_and_dims
        for shape, dtype in zip(layout.cache_shapes(1, heads, dim), layout.cache_dtypes, strict=True)
    )
