"""What adapters add to a weight's products, on a CPU."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_fused


def add(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x + y [T, width] fp32, and bias [width] of dtype: rounded to it once."""
    out = cpu.new_tensor((x.shape[0], x.shape[1]), dtype)
    ints = (
        cpu.address_of(x, torch.float32, *out.shape), cpu.address_of(y, torch.float32, *out.shape),
        0 if bias is None else cpu.address_of(bias, dtype, out.shape[1]), out.data_ptr(), *out.shape,
    )  # fmt: skip
    cpu.launch(cpu_fused.add, out.numel(), cpu.tags_of(dtype), ints)
    return out


def scale_ranks(x: torch.Tensor, scales: torch.Tensor, modules: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `reference.scale_ranks`."""
    out, num_modules = cpu.new_tensor((x.shape[0], x.shape[1]), dtype), scales.shape[1]
    ints = (
        cpu.address_of(x, torch.float32, *out.shape), cpu.address_of(scales, torch.float32, out.shape[0], num_modules),
        cpu.address_of(modules, torch.int32, out.shape[1]), out.data_ptr(), *out.shape, num_modules,
    )  # fmt: skip
    cpu.launch(cpu_fused.scale_ranks, out.numel(), cpu.tags_of(dtype), ints)
    return out
