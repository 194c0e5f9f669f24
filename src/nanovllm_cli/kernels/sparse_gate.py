"""Gates of which few stay above 0, on a GPU (sparse_gate.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import MAX_THREADS, WARP, Kernel, Launcher, type_name, widest


def sparse_gate(launcher: Launcher, x: torch.Tensor, cutoff: float) -> torch.Tensor:
    """x [T, width] itself, which may be columns of a wider tensor; see `reference.sparse_gate`."""
    tokens, width = x.shape
    assert x.device == launcher.device, (x.device, launcher.device)
    assert x.stride(1) == 1 or width <= 1, x.stride()
    if x.numel():
        vector = widest(math.gcd(width, x.stride(0), x.storage_offset()), x.dtype)  # no load straddles a boundary of its own
        threads = min(MAX_THREADS, -(-width // (vector * WARP)) * WARP)
        args = (x, np.int32(width), np.int64(x.stride(0)), np.float32(cutoff))
        launcher.launch(variant(x.dtype, vector), (tokens, 1, 1), (threads, 1, 1), args)
    return x


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("sparse_gate", "sparse_gate", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
