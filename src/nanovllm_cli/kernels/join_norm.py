"""What joins the residual stream through a norm of its own, and the norm behind it, on a GPU (join_norm.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import MAX_THREADS, WARP, Kernel, Launcher, check, type_name, widest
from nanovllm_cli.kernels.ops import Normed


def join_and_norm(
    launcher: Launcher,
    x: Normed,
    residual: torch.Tensor,
    factor: float,
    weight: torch.Tensor,
    eps: float,
    offset: float,
) -> torch.Tensor:
    """See `reference.join_and_norm`; residual [T, width] is changed in place."""
    check(weight, launcher, residual.dtype, residual.shape[1])
    out = torch.empty_like(residual)
    _launch(launcher, x, residual, factor, weight, out, (eps, offset))
    return out


def join(launcher: Launcher, x: Normed, residual: torch.Tensor, factor: float) -> None:
    """The same without a norm behind it."""
    _launch(launcher, x, residual, factor, None, None, (0.0, 0.0))


def _launch(
    launcher: Launcher,
    x: Normed,
    residual: torch.Tensor,
    factor: float,
    weight: torch.Tensor | None,
    out: torch.Tensor | None,
    numbers: tuple[float, float],
) -> None:
    tokens, width = residual.shape
    check(residual, launcher, residual.dtype, tokens, width)
    check(x.rows, launcher, residual.dtype, tokens, width)
    check(x.weight, launcher, residual.dtype, width)
    if tokens:
        vector = widest(width, residual.dtype)
        threads = min(MAX_THREADS, -(-width // (vector * WARP)) * WARP)
        floats = (np.float32(number) for number in (x.eps, x.offset, factor, *numbers))
        args = (x.rows, x.weight, residual, weight, out, np.int32(width), *floats)
        launcher.launch(variant(residual.dtype, vector, out is not None), (tokens, 1, 1), (threads, 1, 1), args)


def variant(dtype: torch.dtype, vector: int, norms: bool) -> Kernel:
    return Kernel("join_norm", "join_norm", (("DTYPE", type_name(dtype)), ("VECTOR", vector), ("NORMS", int(norms))))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [
        variant(dtype, vector, norms)
        for dtype in (torch.bfloat16, torch.float16)
        for vector in (8, 1)
        for norms in (False, True)
    ]
