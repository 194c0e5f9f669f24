"""Outputs of attention and of shared experts times the sigmoid of their gates, on a GPU (sigmoid_gate.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256


def sigmoid_gate(launcher: Launcher, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `reference.sigmoid_gate`; x [T, n] is changed in place. gate: [T, n] of x's type, which may be columns of a wider
    tensor, or [T, 1] float32."""
    tokens, width = x.shape
    check(x, launcher, x.dtype, tokens, width)
    by_rows, stride = gate.dtype == torch.float32, gate.stride(0)
    if by_rows:
        check(gate, launcher, torch.float32, tokens, 1)
    else:
        assert gate.dtype == x.dtype, (gate.dtype, x.dtype)
        assert gate.shape == x.shape, (gate.shape, x.shape)
        assert gate.device == launcher.device, (gate.device, launcher.device)
        assert gate.stride(1) == 1 or width <= 1, gate.stride()
    if x.numel():
        # Loads begin on a boundary of theirs.
        vector = widest(width if by_rows else math.gcd(width, stride, gate.storage_offset()), x.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        args = (x, gate, np.int32(width), np.int64(stride))
        launcher.launch(variant(x.dtype, vector, by_rows), grid, (threads, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int, by_rows: bool) -> Kernel:
    constants = (("DTYPE", type_name(dtype)), ("VECTOR", vector), ("GATE_ROWS", int(by_rows)))
    return Kernel("sigmoid_gate", "sigmoid_gate", constants)


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [
        variant(dtype, vector, by_rows)
        for dtype in (torch.bfloat16, torch.float16)
        for vector in (8, 1)
        for by_rows in (False, True)
    ]
