"""Factors of embeddings, of what joins the residual stream and of logits, and the cap on these, on a GPU (scale.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher, check, type_name, widest

THREADS = 256


def scale(launcher: Launcher, x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
    """See `reference.scale`; x is changed in place."""
    check(x, launcher, x.dtype, *x.shape)
    if x.numel():
        vector = widest(x.numel(), x.dtype)
        grid = (-(-x.numel() // (vector * THREADS)), 1, 1)
        args = (x, np.int64(x.numel()), np.float32(factor), np.float32(cap))
        launcher.launch(variant(x.dtype, vector), grid, (THREADS, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("scale", "scale", (("NUMBER", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [
        variant(dtype, vector)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for vector in (16 // dtype.itemsize, 1)
    ]
