"""The gated short convolution of a block: projections around a backend that keeps what it read before."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.state_spec import ConvSpec


class ShortConv(Projected):
    """See `ConvSpec`. weight [width, channels]: channels lie side by side, as in what it is multiplied with; checkpoints have it
    the other way."""

    def __init__(self, spec: ConvSpec, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.backend = kit.backend
        self.projection = Linear(hidden_size, {"conv_in": 3 * spec.channels}, kit, spec.bias)
        self.weight = kit.zeros(spec.width, spec.channels)
        self.bias = kit.zeros(spec.channels) if spec.bias else None
        self.out = Linear(spec.channels, {"conv_out": hidden_size}, kit, spec.bias)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        return self.backend.convolve(self.spec, self.projection(x), self.weight, self.bias, cache, inputs.step)

    def slots(self) -> Slots:
        slots = self.projection.slots() | {"conv.weight": table_slot(self.weight.T)} | self.out.slots()
        return slots if self.bias is None else slots | {"conv.bias": table_slot(self.bias)}
