"""The gated delta rule of a block: projections around a backend that keeps a state of each sequence."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import DeltaWeights, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Mixer
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.model_spec import DeltaSpec, NormSpec
from nanovllm_cli.quant.rows import QuantizedRows


class Delta(Mixer):
    """See `DeltaSpec`. What decides how much of a state is kept and changed (b, a) has plain weights: it is little, and all that
    comes later depends on it."""

    def __init__(self, spec: DeltaSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.backend = kit.backend
        self.projection = Linear(hidden_size, {"delta_qkv": spec.channels, "delta_z": spec.values}, kit)
        self.gates = Linear(hidden_size, {"delta_b": spec.num_values, "delta_a": spec.num_values}, kit)
        decay, decay_bias = kit.zeros(2, spec.num_values, dtype=torch.float32)
        gains = kit.zeros(spec.value_dim, dtype=torch.float32)
        self.weights = DeltaWeights(kit.zeros(spec.width, spec.channels), decay, decay_bias, gains, norm.eps)
        self.out = Linear(spec.values, {"delta_out": hidden_size}, kit)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        gates = self.gates.weight.matmul(x, None, torch.float32)
        return self.backend.recur(self.spec, self.projection(x), gates, self.weights, cache, inputs.step)

    def slots(self) -> Slots:
        own = {
            "taps": table_slot(self.weights.taps.T),
            "decay": WeightSlot((self.spec.num_values,), self._load_decay),
            "decay_bias": table_slot(self.weights.decay_bias),
            "norm.weight": table_slot(self.weights.norm),
        }
        linears = self.projection.slots() | self.gates.slots() | self.out.slots()
        return linears | {f"delta.{name}": slot for name, slot in own.items()}

    def _load_decay(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        values = -rows.float().exp() if self.spec.log_decay else rows.float()
        self.weights.decay[first : first + len(rows)].copy_(values)
