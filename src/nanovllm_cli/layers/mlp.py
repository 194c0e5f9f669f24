"""The gated MLP of a block."""

from __future__ import annotations

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu
from nanovllm_cli.layers.linear import Linear, MakeStorage
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.model_spec import MLPSpec


class MLP:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, spec: MLPSpec, hidden_size: int, make: MakeStorage, dtype: torch.dtype) -> None:
        if not spec.gated:
            raise UnsupportedError("an MLP without a gate is not supported yet")
        inner = spec.intermediate_size
        self.activation = spec.activation
        self.gate_up = Linear(hidden_size, {"gate": inner, "up": inner}, make, dtype, spec.bias)
        self.down = Linear(inner, {"down": hidden_size}, make, dtype, spec.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(cpu.gated_activation(self.gate_up(x), self.activation))

    def slots(self) -> Slots:
        return self.gate_up.slots() | self.down.slots()
