"""Gated activations of an MLP on a GPU (activation.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256
ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "swiglu_oai": 4}
"""By name, as in activation.cuh."""


def gated_activation(launcher: Launcher, x: torch.Tensor, activation: str) -> torch.Tensor:
    """x [T, 2 width] -> [T, width], see `reference.gated_activation`."""
    tokens, columns = x.shape
    width = columns // 2
    check(x, launcher, x.dtype, tokens, 2 * width)
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if out.numel():
        vector = widest(width, x.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        args = (x, out, np.int32(width), np.int32(ACTIVATIONS[activation]))
        launcher.launch(variant(x.dtype, vector), grid, (threads, 1, 1), args)
    return out


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("activation", "gated_activation", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
