"""RMS norm on a GPU (norm.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import MAX_THREADS, WARP, Kernel, Launcher, check, type_name, widest


def add_rms_norm(
    launcher: Launcher, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """See `reference.add_rms_norm`; residual [T, width] is changed in place."""
    tokens, width = x.shape
    check(x, launcher, x.dtype, tokens, width)
    check(weight, launcher, x.dtype, width)
    if residual is not None:
        check(residual, launcher, x.dtype, tokens, width)
    out = torch.empty_like(x)
    if tokens:
        vector = widest(width, x.dtype)
        threads = min(MAX_THREADS, -(-width // (vector * WARP)) * WARP)
        args = (x, residual, weight, out, np.int32(width), np.float32(eps), np.float32(offset))
        launcher.launch(variant(x.dtype, vector), (tokens, 1, 1), (threads, 1, 1), args)
    return out


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("norm", "add_rms_norm", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
