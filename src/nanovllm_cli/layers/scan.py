"""Mamba's first state space of a block: projections around a backend that keeps a state of each sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.attention.backend import ScanWeights, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows, num_rows, take_rows
from nanovllm_cli.state_spec import ScanSpec


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


class HeadScan(Scan):
    """`ScanSpec` with heads. What channels of a head share is there as often as they are, and the checkpoint's rows lie in the
    order of other scans, so that nothing else knows."""

    def slots(self) -> Slots:
        spec = self.spec
        in_order = {
            "scan_in.weight": WeightSlot((2 * spec.channels, self.projection.width), self._load_in),
            "scan_x.weight": WeightSlot((spec.num_parts, spec.channels), self._load_parts),
            "scan_dt.weight": WeightSlot((spec.heads, spec.rank), self._load_rates),
        }
        shared = {
            "decay": self._load_decay,
            "rate_bias": self._shared_by_channels(self.weights.rate_bias),
            "skip": self._shared_by_channels(self.weights.skip),
        }
        return super().slots() | in_order | {f"scan.{name}": WeightSlot((spec.heads,), load) for name, load in shared.items()}

    @property
    def _head(self) -> int:
        """Channels of one."""
        return self.spec.channels // self.spec.heads

    def _load_in(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        size, channels = self._head, self.spec.channels
        sections = [(place + head * size, size) for head in range(self.spec.heads) for place in (channels, 0)]
        _load_sections(self.projection, sections, rows, first)

    def _load_parts(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        both, rank = 2 * self.spec.key_dim, self.spec.rank
        _load_sections(self.parts, [(rank, both), (0, rank)], rows, first)

    def _load_rates(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "they are plain numbers"
        self.rates.weight.load_rows(first * self._head, rows.repeat_interleave(self._head, 0))

    def _load_decay(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        super()._load_decay(rows.repeat_interleave(self._head)[:, None].expand(-1, self.spec.key_dim), first * self._head)

    def _shared_by_channels(self, table: torch.Tensor) -> Callable[[torch.Tensor | QuantizedRows, int], None]:
        def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
            assert isinstance(rows, torch.Tensor), "tables are plain numbers"
            table[first * self._head : (first + len(rows)) * self._head].copy_(rows.repeat_interleave(self._head))

        return load


def _load_sections(linear: Linear, sections: list[tuple[int, int]], rows: torch.Tensor | QuantizedRows, first: int) -> None:
    """rows, from the checkpoint's row `first` on. sections: of the checkpoint's, where they come to lie, and how many rows."""
    begin = 0
    for place, count in sections:
        own = range(max(begin, first), min(begin + count, first + num_rows(rows)))
        if own:
            linear.weight.load_rows(place + own.start - begin, take_rows(rows, slice(own.start - first, own.stop - first)))
        begin += count
