"""Numbers that are held between two others, on a GPU (clip.cu): queries, keys and values, or what an MLP's ReLU leaves."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, type_name, widest

THREADS = 256


def clip(launcher: Launcher, x: torch.Tensor, least: float, most: float) -> torch.Tensor:
    """x [T, n] itself, which may be columns of a wider tensor, held between least and most in place; NaN stays."""
    tokens, width = x.shape
    assert x.device == launcher.device, (x.device, launcher.device)
    assert x.stride(1) == 1 or width <= 1, x.stride()
    assert least < most, (least, most)
    if x.numel():
        # Loads begin on a boundary of theirs.
        vector = widest(math.gcd(width, x.stride(0), x.storage_offset()), x.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        args = (x, np.int64(x.stride(0)), np.int32(width), np.float32(least), np.float32(most))
        launcher.launch(variant(x.dtype, vector), grid, (threads, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("clip", "clip", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
