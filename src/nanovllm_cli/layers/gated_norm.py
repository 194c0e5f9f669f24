"""A norm whose numbers are multiplied with gates that are made of them."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Addend, plain
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.norm_spec import NormSpec


class GatedNorm:
    """h * sigmoid(out(silu(in(h)))), h being what an RMSNorm gives: see `BlockSpec.gated_norms`. Its matrices are narrow: they
    stay plain, and every process has them whole. name: what its slots begin with."""

    def __init__(self, spec: NormSpec, rank: int, width: int, kit: Kit, name: str) -> None:
        self.name, self.ops = name, kit.ops
        self.norm = RMSNorm(spec, width, kit)
        self.narrow = Linear(width, {f"{name}.gate_in": rank}, kit.undivided)
        self.wide = Linear(rank, {f"{name}.gate_out": width}, kit.undivided)

    def __call__(self, x: Addend | None, residual: torch.Tensor) -> torch.Tensor:
        """x joins the residual stream [T, width] as in `RMSNorm`."""
        h = plain(self.norm(x, residual), self.ops)
        inner = self.narrow(h)
        gates = self.wide(self.ops.sigmoid_gate(inner, inner))  # a SiLU of each
        return self.ops.sigmoid_gate(h, gates)

    def slots(self) -> Slots:
        gains = {f"{self.name}.gated.{kind}": slot for kind, slot in self.norm.slots().items()}
        return gains | self.narrow.slots() | self.wide.slots()
