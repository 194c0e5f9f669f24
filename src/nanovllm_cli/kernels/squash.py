"""tanh and sigmoid of what RWKV-7's narrow matrices give, on a GPU (squash.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.ops import Squash

THREADS = 256


def squash(launcher: Launcher, x: torch.Tensor, kind: Squash, dtype: torch.dtype) -> torch.Tensor:
    """x [T, n] fp32 -> [T, n] of dtype."""
    check(x, launcher, torch.float32, *x.shape)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if count := x.numel():
        launcher.launch(variant(dtype, kind), (-(-count // THREADS), 1, 1), (THREADS, 1, 1), (x, out, np.int64(count)))
    return out


def variant(dtype: torch.dtype, kind: Squash) -> Kernel:
    return Kernel("squash", "squash", (("DTYPE", type_name(dtype)), ("SIGMOID", int(kind == "sigmoid"))))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    kinds: tuple[Squash, ...] = ("tanh", "sigmoid")
    return [variant(dtype, kind) for dtype in (torch.bfloat16, torch.float16) for kind in kinds]
