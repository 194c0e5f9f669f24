"""The CPU's Ops."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu


class CpuOps:
    """See `ops.Ops`. Norms are kernels of their own: a matmul never gets `Normed`."""

    device = torch.device("cpu")

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> torch.Tensor:
        if x is None:
            return cpu.add_rms_norm(residual, None, weight, eps, offset)
        return cpu.add_rms_norm(x, residual, weight, eps, offset)

    def rope_tables(
        self,
        positions: torch.Tensor,
        frequencies: torch.Tensor,
        attention_factor: float,
        lengths: torch.Tensor | None,
        long_frequencies: torch.Tensor | None,
        original_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if lengths is not None and long_frequencies is not None:
            frequencies = torch.where((lengths > original_len)[:, None], long_frequencies, frequencies)
        angles = positions.float()[:, None] * frequencies
        return angles.cos() * attention_factor, angles.sin() * attention_factor

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return cpu.add_rms_norm(x, None, weight, eps, offset)
