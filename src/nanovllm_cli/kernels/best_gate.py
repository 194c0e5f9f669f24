"""What an expert reads where it is the router that scales it, on a GPU (best_gate.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 256


def best_gate(launcher: Launcher, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """x [T, n] -> [T, n], logits [T, E] fp32, see `reference.best_gate`."""
    (tokens, width), count = x.shape, logits.shape[1]
    check(x, launcher, x.dtype, tokens, width)
    check(logits, launcher, torch.float32, tokens, count)
    assert count > 0, logits.shape
    out = torch.empty_like(x)
    if x.numel():
        vector = widest(width, x.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        args = (x, logits, out, np.int32(width), np.int32(count))
        launcher.launch(variant(x.dtype, vector), grid, (threads, 1, 1), args)
    return out


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("best_gate", "best_gate", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
