"""Queries, keys and values that are held between two limits, on a GPU (clip.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, type_name, widest

THREADS = 256


def clip(launcher: Launcher, x: torch.Tensor, limit: float) -> torch.Tensor:
    """x [T, n] itself, which may be columns of a wider tensor, held between -limit and limit in place; NaN stays."""
    tokens, width = x.shape
    assert x.device == launcher.device, (x.device, launcher.device)
    assert x.stride(1) == 1 or width <= 1, x.stride()
    assert limit > 0, limit
    if x.numel():
        # Loads begin on a boundary of theirs.
        vector = widest(math.gcd(width, x.stride(0), x.storage_offset()), x.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        args = (x, np.int64(x.stride(0)), np.int32(width), np.float32(limit))
        launcher.launch(variant(x.dtype, vector), grid, (threads, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("clip", "clip", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
