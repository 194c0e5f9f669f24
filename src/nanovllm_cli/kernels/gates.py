"""Sigmoid gates on the CPU: tensors in, checks, addresses to the compiled kernel (cpu_fused.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, cpu_fused


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, n] itself, times the sigmoids of gate: [T, n], which may be columns of a wider tensor, or [T, 1]. See
    `reference.sigmoid_gate`."""
    tokens, width = x.shape
    columns = gate.shape[1]
    assert columns in (1, width), gate.shape
    address, stride = cpu.rows_of(gate, gate.dtype, tokens, columns)
    ints = (cpu.address_of(x, x.dtype, tokens, width), address, tokens, width, stride, int(columns != width))
    cpu.launch(cpu_fused.sigmoid_gate, 8 * x.numel(), cpu.tags_of(x.dtype, gate.dtype), ints)
    return x
