"""Mamba's first state space of a block: projections around a backend that keeps a state of each sequence."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import ScanWeights, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.mixer_spec import ScanSpec
from nanovllm_cli.model_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows


class Scan(Projected):
    """See `ScanSpec`. What time steps, B and C are made of has plain weights, of which all processes have the whole: it is
    little, and all that comes later depends on it."""

    def __init__(self, spec: ScanSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec, self.ops, self.backend = spec, kit.ops, kit.backend
        self.dtype = kit.dtype
        self.projection = Linear(hidden_size, {"scan_in": 2 * spec.channels}, kit)
        self.parts = Linear(spec.channels, {"scan_x": spec.num_parts}, kit.undivided)
        self.rates = Linear(spec.rank, {"scan_dt": spec.channels}, kit.undivided)
        self.gains = None if spec.norms == "none" else kit.zeros(spec.num_parts, dtype=torch.float32).fill_(1.0)
        self.eps = spec.eps or norm.eps
        taps_bias = kit.zeros(spec.channels) if spec.conv_bias else None
        decay = kit.zeros(spec.num_values, spec.key_dim, spec.value_dim, dtype=torch.float32)
        rate_bias, skip = kit.zeros(2, spec.channels, dtype=torch.float32)
        self.weights = ScanWeights(kit.zeros(spec.width, spec.channels), taps_bias, decay, rate_bias, skip)
        self.out = Linear(spec.channels, {"scan_out": hidden_size}, kit)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        projected = self.projection(x)
        mixed = self.backend.mix_inputs(self.spec, projected, self.weights, cache, inputs.step)
        parts = self.parts.weight.matmul(mixed, None, torch.float32)
        steps, both = self.ops.scan_parts(parts, self.spec.rank, self.gains, self.eps, self.dtype)
        rates = self.rates.weight.matmul(steps, None, torch.float32)
        return self.backend.scan(self.spec, projected, mixed, rates, both, self.weights, cache, inputs.step)

    def slots(self) -> Slots:
        spec, weights = self.spec, self.weights
        own = {
            "taps": table_slot(weights.taps.T),
            "decay": WeightSlot((spec.channels, spec.key_dim), self._load_decay),
            "rate_bias": table_slot(weights.rate_bias),
            "skip": table_slot(weights.skip),
        }
        if weights.taps_bias is not None:
            own["taps_bias"] = table_slot(weights.taps_bias)
        if spec.norms == "gains":
            assert self.gains is not None
            sizes = [spec.rank, spec.key_dim, spec.key_dim]
            for name, gains in zip(("dt", "b", "c"), torch.split(self.gains, sizes), strict=True):
                own[f"{name}_norm.weight"] = table_slot(gains)
        linears = self.projection.slots() | self.parts.slots() | self.rates.slots() | self.out.slots()
        return linears | {f"scan.{name}": slot for name, slot in own.items()}

    def _load_decay(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """As the checkpoint has it, or of its logarithm."""
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        decay = (-rows.float().exp() if self.spec.log_decay else rows.float()).to(self.weights.decay.device)
        by_channel = torch.arange(first, first + len(rows), device=decay.device)
        self.weights.decay[by_channel // self.spec.value_dim, :, by_channel % self.spec.value_dim] = decay
