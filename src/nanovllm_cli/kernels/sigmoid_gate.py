"""Outputs of attention and of shared experts times the sigmoid of their gates, or the softplus, on a GPU (sigmoid_gate.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256


def sigmoid_gate(launcher: Launcher, x: torch.Tensor, gate: torch.Tensor, *, softplus: bool = False) -> torch.Tensor:
    """See `reference.sigmoid_gate`; x [T, n] is changed in place. gate: [T, c] of x's type, c dividing n, which may be columns of
    a wider tensor, or [T, 1] float32."""
    tokens, width = x.shape
    check(x, launcher, x.dtype, tokens, width)
    by_rows, stride, columns = gate.dtype == torch.float32, gate.stride(0), gate.shape[1]
    if by_rows:
        check(gate, launcher, torch.float32, tokens, 1)
    else:
        assert gate.dtype == x.dtype, (gate.dtype, x.dtype)
        assert len(gate) == tokens, (gate.shape, x.shape)
        assert columns, "a gate of no columns"
        assert width % columns == 0, (gate.shape, x.shape)
        assert gate.device == launcher.device, (gate.device, launcher.device)
        assert gate.stride(1) == 1 or columns == 1, gate.stride()
    if x.numel():
        each = width // columns
        # Loads begin on a boundary of theirs.
        vector = widest(each if by_rows or each > 1 else math.gcd(width, stride, gate.storage_offset()), x.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        args = (x, gate, np.int32(width), np.int64(stride), np.int32(each))
        kind = 1 if by_rows else 2 if each > 1 else 0
        launcher.launch(variant(x.dtype, vector, kind, softplus), grid, (threads, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int, gate_rows: int, softplus: bool) -> Kernel:
    sizes = (("VECTOR", vector), ("GATE_ROWS", gate_rows), ("SOFTPLUS", int(softplus)))
    return Kernel("sigmoid_gate", "sigmoid_gate", (("DTYPE", type_name(dtype)), *sizes))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [
        variant(dtype, vector, gate_rows, softplus)
        for dtype in (torch.bfloat16, torch.float16)
        for vector in (8, 1)
        for gate_rows, softplus in ((0, False), (1, False), (2, False), (0, True), (2, True))
    ]
