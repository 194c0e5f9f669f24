"""What rows take of adapters that requests choose, between the two products of these, on a GPU (ranks.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name

THREADS = 256


def scale_ranks(
    launcher: Launcher, x: torch.Tensor, scales: torch.Tensor, modules: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `reference.scale_ranks`."""
    (tokens, width), num_modules = x.shape, scales.shape[1]
    check(x, launcher, torch.float32, tokens, width)
    check(scales, launcher, torch.float32, tokens, num_modules)
    check(modules, launcher, torch.int32, width)
    out = torch.empty((tokens, width), dtype=dtype, device=x.device)
    if out.numel():
        threads = min(THREADS, -(-width // WARP) * WARP)
        args = (x, scales, modules, out, np.int32(width), np.int32(num_modules))
        launcher.launch(variant(dtype), (tokens, -(-width // threads), 1), (threads, 1, 1), args)
    return out


def variant(dtype: torch.dtype) -> Kernel:
    return Kernel("ranks", "scale_ranks", (("NUMBER", type_name(dtype)),))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant(dtype) for dtype in (torch.bfloat16, torch.float16)]
