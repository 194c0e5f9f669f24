"""A GPU's Ops."""

from __future__ import annotations

from functools import partial

import torch

from nanovllm_cli.kernels import gemv, norm, rope_tables, scale, sigmoid_gate
from nanovllm_cli.kernels.cuda_mixture import CudaMixture
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden, Normed


class CudaOps:
    """See `ops.Ops`. Of few rows the norm is left to the matmul behind it; a deterministic GPU has one way for any number."""

    def __init__(self, launcher: Launcher, deterministic: bool) -> None:
        self.launcher = launcher
        self.device = launcher.device
        self.deterministic = deterministic
        self.rope_tables = partial(rope_tables.rope_tables, launcher)
        self.mixture = partial(CudaMixture, launcher, deterministic)

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
    ) -> Hidden:
        if x is not None:
            return norm.add_rms_norm(self.launcher, x, residual, weight, eps, offset)
        if residual.shape[0] <= gemv.MAX_ROWS and not self.deterministic:
            return Normed(residual, weight, eps, offset)
        return norm.add_rms_norm(self.launcher, residual, None, weight, eps, offset)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return norm.add_rms_norm(self.launcher, x, None, weight, eps, offset)

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return sigmoid_gate.sigmoid_gate(self.launcher, x, gate)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.add_(y)

    def scale(self, x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
        return scale.scale(self.launcher, x, factor, cap)
