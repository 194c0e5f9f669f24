"""AttentionBackend: what a layer asks of the code that knows the cache's layout. One file a backend."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.model_spec import AttentionSpec


class QKNorm(NamedTuple):
    """Weights [D] of the norms over each head of q and k."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class AttentionBackend(Protocol):
    """Everything between a layer's qkv projection and its output projection."""

    def prepare(self, batch: Batch) -> Any:
        """What depends on the batch alone, once a step; handed to every layer's `attend`."""

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
