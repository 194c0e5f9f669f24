"""What carries numbers from token to token in a block: attention, a short convolution, a state, or two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.slots import Slots


class Mixer(ABC):
    """Reads what the block's norm gives, or the residual stream."""

    @abstractmethod
    def __call__(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """What joins the residual stream. The layer's own past is in the cache, and what x adds to it is written there."""

    def onto(self, residual: torch.Tensor, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor | None:
        """See `Linear.onto`."""
        return self(x, inputs, cache)

    @abstractmethod
    def slots(self) -> Slots: ...

    @property
    def head_bytes(self) -> int:
        """Memory of matrices that each head has its own of, which are in no `WeightStorage`."""
        return 0


class Projected(Mixer):
    """out(mix(x)). out: the last projection of the layer."""

    out: Linear

    @abstractmethod
    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """What the last projection reads; see `Mixer`."""

    def __call__(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        return self.out(self.mix(x, inputs, cache))

    def onto(self, residual: torch.Tensor, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor | None:
        return self.out.onto(residual, self.mix(x, inputs, cache))
