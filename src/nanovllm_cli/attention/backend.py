"""AttentionBackend: what a layer asks of the code that knows the cache's layout. One file a backend."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from nanovllm_cli.attention.kv_cache import BlockMover, LayerCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.model_spec import AttentionSpec


class QKNorm(NamedTuple):
    """Weights [D] of the norms over each head of q and k."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class AttentionBackend(Protocol):
    """Everything between a layer's qkv projection and its output projection."""

    cache_dtypes: tuple[torch.dtype, torch.dtype]
    """Of K's and V's tensors."""

    def cache_shapes(self, num_blocks: int, kv_heads: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one layer's K and V; the first axis counts blocks."""

    def empty_cache(self, num_bytes: int) -> torch.Tensor:
        """Zeroed memory for a cache, as uint8."""

    def block_mover(self, layers: list[LayerCache]) -> BlockMover:
        """What copies whole blocks in all layers of this cache, and takes them out and in."""

    def prepare(self, host: Batch, batch: Batch) -> Any:
        """What depends on the batch alone, once a step; handed to every layer's `attend`. The batch as it is on the host and
        on the device, which may be one."""

    def attend(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        norm: QKNorm | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None,
        cache: LayerCache,
        step: Any,
    ) -> torch.Tensor:
        """qkv [T, (H + 2K) * D] -> [T, H * D]: norm and rotate q and k, write k and v to the cache, attend over each
        token's sequence. angles: cos, sin [T, rotary / 2]."""
