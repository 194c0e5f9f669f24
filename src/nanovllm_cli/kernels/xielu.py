"""The activation of Apertus' MLPs on a GPU (xielu.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher, check, type_name, widest

THREADS = 256


def xielu(launcher: Launcher, x: torch.Tensor, positive: float, negative: float, slope: float, edge: float) -> torch.Tensor:
    """See `reference.xielu`; x is changed in place."""
    check(x, launcher, x.dtype, *x.shape)
    if x.numel():
        vector = widest(math.gcd(x.numel(), x.storage_offset()), x.dtype)  # some rows may begin anywhere
        grid = (-(-x.numel() // (vector * THREADS)), 1, 1)
        numbers = (np.float32(positive), np.float32(negative), np.float32(slope), np.float32(edge))
        args = (x, np.int64(x.numel()), *numbers)
        launcher.launch(variant(x.dtype, vector), grid, (THREADS, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("xielu", "xielu", (("NUMBER", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
