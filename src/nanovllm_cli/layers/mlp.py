"""The MLP of a block, with a gate in most models."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.rescaling import Scales
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.norm_spec import NormSpec


class MLP:
    """down(act(gate(x)) * up(x)); see `MLPSpec`. Without a gate `gate_up` is up alone. width: of what it gives."""

    def __init__(self, spec: MLPSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        inner = spec.intermediate_size
        self.activation, self.cutoff, self.num_gates = spec.activation, spec.cutoff, inner
        self.limit, self._most_gate = spec.limit, spec.limit or math.inf
        if spec.limit is not None and not spec.gate_held:
            self._most_gate = _silu_inverse(spec.limit)
        self.curve = None if spec.curve is None else spec.curve.factors
        self.ops, self.norm = kit.ops, norm.at(inner)
        self.gains = kit.zeros(inner).fill_(norm.first_gain) if spec.normed else None
        self.scales = None if spec.factor is None else Scales(spec.parts, spec.factor, kit)
        assert spec.cutoff is None or spec.gated, "no model has few of what is not gated"
        assert spec.limit is None or (spec.activation == "silu" and spec.cutoff is None), "no model holds others"
        assert spec.factor is None or (spec.activation == "silu" and spec.limit is None), "nor has these there"
        sections = (inner, inner) if spec.gated else (inner,)
        self.gate_up = Linear(hidden_size, spec.parts, kit, spec.bias, Cut(sections))
        self.down = Linear(inner, {"down": hidden_size}, kit, spec.bias or spec.down_bias) if spec.down else None
        self.width = hidden_size if spec.down else inner
        assert spec.down or (spec.activation == "lone_silu" and not spec.normed), "nothing else ends there"

    def __call__(self, x: Hidden) -> torch.Tensor:
        inner = self.inner(x)
        return inner if self.down is None else self.down(inner)

    def onto(self, residual: torch.Tensor, x: Hidden) -> torch.Tensor | None:
        """See `Linear.onto`."""
        assert self.down is not None, "experts alone end there"
        return self.down.onto(residual, self.inner(x))

    def inner(self, x: Hidden) -> torch.Tensor:
        """What `down` reads."""
        found = self._activated(x)
        if self.gains is not None:
            self.ops.norm_columns(found, self.gains, self.norm.eps, self.norm.offset)
        return found

    def _activated(self, x: Hidden) -> torch.Tensor:
        if self.curve is not None:
            return self.ops.xielu(self.gate_up(x), *self.curve)
        if self.activation == "lone_relu":
            return self.ops.clip(self.gate_up(x), 0.0, math.inf)
        if self.activation == "lone_silu":
            return self._silu(self.gate_up(x))
        if self.cutoff is None and self.limit is None and self.scales is None:
            return self.gate_up.gated(x, self.activation)
        both = self.gate_up(x)
        if self.limit is not None:
            return self._held(both)
        gate, up = both[:, : self.num_gates], both[:, self.num_gates :]
        if self.scales is not None:
            self.scales(both)
            return self.ops.gated(gate, up, self.activation)
        assert self.cutoff is not None
        return self.ops.gated(self.ops.sparse_gate(gate, self.cutoff), up, self.activation)

    @property
    def held(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """See `mixture.Expert`."""
        return self._silu if self.activation == "lone_silu" else None if self.limit is None else self._held

    def _silu(self, x: torch.Tensor) -> torch.Tensor:
        """x itself, times its own sigmoids."""
        return self.ops.sigmoid_gate(x, x)

    def _held(self, both: torch.Tensor) -> torch.Tensor:
        """SiLU grows wherever it is above 0, so its argument may be held in its place."""
        assert self.limit is not None
        gate, up = both[:, : self.num_gates], both[:, self.num_gates :]
        self.ops.clip(gate, -math.inf, self._most_gate)
        self.ops.clip(up, -self.limit, self.limit)
        return self.ops.gated(gate, up, self.activation)

    def slots(self) -> Slots:
        slots = self.gate_up.slots() | ({} if self.scales is None else self.scales.slots())
        slots |= {} if self.down is None else self.down.slots()
        if self.gains is not None and self.norm.gains:
            slots["inner_norm.weight"] = table_slot(self.gains, self.norm.stored_offset)
        return slots


def _silu_inverse(y: float) -> float:
    """x above 0 with silu(x) = y, by halving: x - silu(x) is at most 0.2785."""
    low, high = 0.0, y + 0.3
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / (1 + math.exp(-middle)) < y else (low, middle)
    return high
