"""What carries numbers from token to token in a block: attention, or a short convolution."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.slots import Slots


class Mixer(ABC):
    """out(mix(x)). out: the last projection of the layer."""

    out: Linear

    @abstractmethod
    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """What the last projection reads; the layer's own past is in the cache, and what x adds to it is written there."""

    @abstractmethod
    def slots(self) -> Slots: ...

    def __call__(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        return self.out(self.mix(x, inputs, cache))

    def onto(self, residual: torch.Tensor, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor | None:
        """See `Linear.onto`."""
        return self.out.onto(residual, self.mix(x, inputs, cache))
