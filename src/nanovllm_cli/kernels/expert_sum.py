"""The sum of what a token's experts give, on a GPU (expert_sum.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name, widest

THREADS = 64


def expert_sum(
    launcher: Launcher,
    y: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [T * taken, width], weights [T, taken] fp32 -> [T, width]: of each token the sum of weights[t, j] * y[t * taken + j], in
    fp32 and in the order of j. A residual [T, width] has it added in place, with one rounding, and is what is returned. slots [T]
    int64: of a token without one (-1) nothing is read, and its sum is 0."""
    (tokens, taken), width = weights.shape, y.shape[1]
    check(weights, launcher, torch.float32, tokens, taken)
    check(y, launcher, y.dtype, tokens * taken, width)
    if residual is None:
        out = torch.empty(tokens, width, dtype=y.dtype, device=launcher.device)
    else:
        out = check(residual, launcher, y.dtype, tokens, width)
    if out.numel():
        vector = widest(width, y.dtype)
        threads = min(THREADS, -(-width // (vector * WARP)) * WARP)
        grid = (tokens, -(-width // (vector * threads)), 1)
        if slots is not None:
            check(slots, launcher, torch.int64, tokens)
        args = (y, weights, slots, residual, out, np.int32(taken), np.int32(width))
        launcher.launch(variant(y.dtype, vector), grid, (threads, 1, 1), args)
    return out


def variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("expert_sum", "expert_sum", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype, vector) for dtype in (torch.bfloat16, torch.float16) for vector in (8, 1)]
