"""Activations of an MLP on a GPU (activation.cu)."""

from __future__ import annotations

import math
from typing import TypeGuard

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "swiglu_oai": 4, "relu2": 5, "lone_gelu": 6, "lone_gelu_tanh": 7,
               "relu2_gated": 8, "relu_gated": 9}  # fmt: skip
_GATED = ("silu", "gelu_tanh", "gelu", "swiglu_oai", "relu2_gated", "relu_gated")
"""By name, as in activation.cuh."""


def has_gate(activation: str | None) -> TypeGuard[str]:
    """True if it is of two numbers, so that a matmul with it has half as many outputs as its weight has rows."""
    return activation in _GATED


def gated_activation(launcher: Launcher, x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [T, 2 width], or [T, width] without a gate, -> [T, width], see `reference.gated_activation`."""
    tokens, columns = x.shape
    if not has_gate(activation):
        check(x, launcher, x.dtype, tokens, columns)
        return gated(launcher, x, x, activation)
    width = columns // 2
    check(x, launcher, x.dtype, tokens, 2 * width)
    return gated(launcher, x[:, :width], x[:, width:], activation)


def gated(launcher: Launcher, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of [T, width] each, either of which may be columns of a wider tensor; they are one without a gate."""
    tokens, width = gate.shape
    gate_stride, up_stride = gate.stride(0), up.stride(0)
    assert gate.dtype == up.dtype, (gate.dtype, up.dtype)
    assert gate.shape == up.shape, (gate.shape, up.shape)
    assert has_gate(activation) or gate is up, activation
    assert gate.device == up.device == launcher.device, (gate.device, up.device, launcher.device)
    assert width <= 1 or gate.stride(1) == up.stride(1) == 1, (gate.stride(), up.stride())
    out = torch.empty((tokens, width), dtype=gate.dtype, device=gate.device)
    if out.numel():
        # Loads begin on a boundary of theirs.
        vector = widest(math.gcd(width, gate_stride, up_stride, gate.storage_offset(), up.storage_offset()), gate.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        kind = np.int32(ACTIVATIONS[activation])
        args = (gate, up, out, np.int64(gate_stride), np.int64(up_stride), np.int32(width), kind)
        launcher.launch(variant(gate.dtype, vector), grid, (threads, 1, 1), args)
    return out


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("activation", "gated_activation", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
