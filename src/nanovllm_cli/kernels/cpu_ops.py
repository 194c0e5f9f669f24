"""The CPU's Ops."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, gates, reference
from nanovllm_cli.kernels.cpu_mixture import CpuMixture, add_onto


class CpuOps:
    """See `ops.Ops`. Norms are kernels of their own: a matmul never gets `Normed`."""

    device = torch.device("cpu")
    rope_tables = staticmethod(reference.rope_tables)
    mixture = CpuMixture
    add = staticmethod(add_onto)

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        if x is None:
            return cpu.add_rms_norm(residual, None, weight, eps, offset)
        return cpu.add_rms_norm(x, residual, weight, eps, offset)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return cpu.add_rms_norm(x, None, weight, eps, offset)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gates.sigmoid_gate(x, gate)

    def scale(self, x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
        return cpu.scale(x, factor, cap)
