"""RMS norm, alone or together with the addition to the residual stream before it."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.model_spec import NormSpec


class RMSNorm:
    """out = residual' / rms(residual') * (offset + weight), residual' = residual + x, kept in `residual`."""

    def __init__(self, spec: NormSpec, width: int, dtype: torch.dtype) -> None:
        self.spec = spec
        self.weight = torch.ones(width, dtype=dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return cpu.add_rms_norm(x, residual, self.weight, self.spec.eps, self.spec.offset)

    def slots(self) -> Slots:
        return {"weight": table_slot(self.weight)}
