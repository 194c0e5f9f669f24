"""A mixture of experts in a block's place for an MLP: a router chooses some of them for each token, and only those compute.

Each expert is an `MLP` of its own, with weights in whatever format they have; the router's stay plain. How they are run and added
is in `kernels/mixture.py`.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Hidden, plain
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.mlp import MLP
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.model_spec import MoESpec


class MoE:
    """sum over a token's experts of weight * expert(x)."""

    def __init__(self, spec: MoESpec, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.ops = kit.ops
        self.router = kit.weight({"router": spec.num_experts}, hidden_size)
        self.router_bias = kit.zeros(spec.num_experts, dtype=torch.float32) if spec.router_bias else None
        self.experts = [MLP(spec.expert, hidden_size, kit.at(f"experts.{e}")) for e in range(spec.num_experts)]
        self.mixture = kit.ops.mixture(self.experts, spec.experts_per_token, spec.norm_topk)

    def __call__(self, x: Hidden, slots: torch.Tensor | None = None) -> torch.Tensor:
        """slots [T]: the batch's. Of rows without one anything may come out."""
        x = plain(x, self.ops)
        return self.mixture(x, self._logits(x), slots)

    def onto(self, residual: torch.Tensor, x: Hidden, slots: torch.Tensor | None = None) -> torch.Tensor | None:
        """See `Linear.onto`."""
        x = plain(x, self.ops)
        return self.mixture.onto(residual, x, self._logits(x), slots)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.router.matmul(x, self.router_bias, torch.float32)

    @property
    def expert_bytes(self) -> int:
        """Memory of the experts' matrices."""
        return sum(linear.weight.num_bytes for expert in self.experts for linear in (expert.gate_up, expert.down))

    def slots(self) -> Slots:
        width = self.router.width
        slots: Slots = {
            "router.weight": WeightSlot((self.spec.num_experts, width), lambda rows, first: self.router.load_rows(first, rows))
        }
        if self.router_bias is not None:
            slots["router.bias"] = table_slot(self.router_bias)
        for e, expert in enumerate(self.experts):
            slots |= {f"experts.{e}.{name}": slot for name, slot in expert.slots().items()}
        return slots

