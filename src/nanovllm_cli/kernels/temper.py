"""Queries that grow with their position, on a GPU (temper.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256


def temper(
    launcher: Launcher, x: torch.Tensor, positions: torch.Tensor, length: int, scale: float, offset: int
) -> torch.Tensor:
    """See `reference.temper`; x [T, n], which may be columns of a wider tensor, is changed in place."""
    tokens, width = x.shape
    check(positions, launcher, torch.int64, tokens)
    assert x.device == launcher.device, (x.device, launcher.device)
    assert x.stride(1) == 1 or width <= 1, x.stride()
    assert length > 0 <= offset, (length, offset)
    if x.numel():
        # Loads begin on a boundary of theirs.
        vector = widest(math.gcd(width, x.stride(0), x.storage_offset()), x.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        args = (x, positions, np.int64(x.stride(0)), np.int32(width), np.int64(length), np.int64(offset), np.float32(scale))
        launcher.launch(variant(x.dtype, vector), grid, (threads, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("temper", "temper", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
