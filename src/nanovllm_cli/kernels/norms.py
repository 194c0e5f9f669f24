"""Norms on either side of the residual stream on the CPU: tensors in, checks, addresses to the compiled kernel (cpu_fused.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_fused
from nanovllm_cli.kernels.ops import Normed


def join_and_norm(
    x: Normed, residual: torch.Tensor, factor: float, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """residual [T, width] = (residual + the normed rows) * factor, in place; returns its norm. See `reference.join_and_norm`."""
    out = cpu.new_tensor((residual.shape[0], residual.shape[1]), residual.dtype)
    _launch(x, residual, factor, (cpu.address_of(weight, residual.dtype, residual.shape[1]), out.data_ptr()), (eps, offset))
    return out


def join(x: Normed, residual: torch.Tensor, factor: float) -> None:
    """The same without a norm behind it."""
    _launch(x, residual, factor, (0, 0), (0.0, 0.0))


def _launch(x: Normed, residual: torch.Tensor, factor: float, out: tuple[int, int], floats: tuple[float, float]) -> None:
    dtype, shape = residual.dtype, residual.shape
    rows, stream = (cpu.address_of(side, dtype, *shape) for side in (x.rows, residual))
    ints = (rows, stream, cpu.address_of(x.weight, dtype, shape[1]), *out, *shape)
    cpu.launch(cpu_fused.join_and_norm, 6 * residual.numel(), cpu.tags_of(dtype), ints, (x.eps, x.offset, factor, *floats))
