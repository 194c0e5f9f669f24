"""Norms of rows on the CPU: tensors in, checks, addresses to the compiled kernels (cpu_fused.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_fused
from nanovllm_cli.kernels.ops import Normed


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    centered: bool = False,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.add_rms_norm`; residual is changed in place. weight [G * width]: row i has the gains i modulo G."""
    assert shift is None or centered
    tokens, width = x.shape
    num_gains, shifts = weight.shape[0] // width, 0 if shift is None else cpu.address_of(shift, x.dtype, width)
    out = cpu.new_tensor((tokens, width), x.dtype)
    ints = (
        cpu.address_of(x, x.dtype, tokens, width), 0 if residual is None else cpu.address_of(residual, x.dtype, tokens, width),
        cpu.address_of(weight, x.dtype, num_gains * width), shifts, num_gains, out.data_ptr(), tokens, width, width,
        int(centered),
    )  # fmt: skip
    cpu.launch(cpu_fused.add_rms_norm, 4 * tokens * width, cpu.tags_of(x.dtype), ints, (eps, offset))
    return out


def norm_columns(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The norm of x [T, width], which may be columns of a wider tensor, in its place."""
    tokens, width = x.shape
    address, stride = cpu.rows_of(x, x.dtype, tokens, width)
    ints = (address, 0, cpu.address_of(weight, x.dtype, width), 0, 1, address, tokens, width, stride, 0)
    cpu.launch(cpu_fused.add_rms_norm, 4 * tokens * width, cpu.tags_of(x.dtype), ints, (eps, offset))
    return x


def norm_sum(x: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float) -> None:
    """stream [T, width] becomes the layer norm of stream + x, in place. See `reference.norm_sum`."""
    tokens, width = stream.shape
    address = cpu.address_of(stream, stream.dtype, tokens, width)
    added, onto = (address, 0) if x is None else (cpu.address_of(x, stream.dtype, tokens, width), address)
    gains, shifts = (0 if table is None else cpu.address_of(table, stream.dtype, width) for table in (weight, shift))
    ints = (added, onto, gains, shifts, 1, address, tokens, width, width, 1)
    cpu.launch(cpu_fused.add_rms_norm, 4 * tokens * width, cpu.tags_of(stream.dtype), ints, (eps, 0.0))


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
