"""Factors of embeddings, of sums, of what joins the residual stream and of logits, and the cap on these, on a GPU (scale.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher, check, type_name, widest

THREADS = 256


def scale(launcher: Launcher, x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
    """See `reference.scale`; x is changed in place."""
    check(x, launcher, x.dtype, *x.shape)
    _launch(launcher, x, factor, cap, None)
    return x


def add(launcher: Launcher, x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """(x + y) * factor, rounded once; x is changed in place."""
    check(x, launcher, x.dtype, *x.shape)
    check(y, launcher, x.dtype, *x.shape)
    _launch(launcher, x, factor, 0.0, y)
    return x


def _launch(launcher: Launcher, x: torch.Tensor, factor: float, cap: float, y: torch.Tensor | None) -> None:
    if x.numel():
        others = (x if y is None else y).storage_offset()
        vector = widest(math.gcd(x.numel(), x.storage_offset(), others), x.dtype)  # some rows may begin anywhere
        grid = (-(-x.numel() // (vector * THREADS)), 1, 1)
        args = (x, np.int64(x.numel()), np.float32(factor), np.float32(cap), *(() if y is None else (y,)))
        launcher.launch(variant(x.dtype, vector, y is not None), grid, (THREADS, 1, 1), args)


def variant(dtype: torch.dtype, vector: int, adds: bool = False) -> Kernel:
    constants = (("NUMBER", type_name(dtype)), ("VECTOR", vector))
    return Kernel("scale", "scale", (*constants, ("ADDS", 1)) if adds else constants)


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [
        variant(dtype, vector, adds)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for vector in (16 // dtype.itemsize, 1)
        for adds in (False, True)
    ]
