"""What a selective scan's time steps, B and C are made of, apart and normed, on a GPU (scan_parts.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name


def scan_parts(
    launcher: Launcher, x: torch.Tensor, rank: int, gains: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, rank + 2 * N] fp32 -> [T, rank] of dtype, [T, 2 * N] fp32: see `state_rules.scan_parts`. gains [rank + 2 * N]."""
    tokens, width = x.shape
    check(x, launcher, torch.float32, tokens, width)
    if gains is not None:
        check(gains, launcher, torch.float32, width)
    into = torch.empty((tokens, rank), dtype=dtype, device=x.device)
    both = torch.empty((tokens, width - rank), dtype=torch.float32, device=x.device)
    if tokens:
        args = (x, gains, into, both, np.int32(rank), np.int32((width - rank) // 2), np.float32(eps))
        launcher.launch(variant(dtype), (tokens, 1, 1), (3 * WARP, 1, 1), args)
    return into, both


def variant(dtype: torch.dtype) -> Kernel:
    return Kernel("scan_parts", "scan_parts", (("DTYPE", type_name(dtype)),))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype) for dtype in (torch.bfloat16, torch.float16)]
