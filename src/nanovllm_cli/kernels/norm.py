"""RMS norm and layer norm on a GPU (norm.cu)."""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm_cli.kernels.kernel import MAX_THREADS, WARP, Kernel, Launcher, check, type_name, widest


def add_rms_norm(
    launcher: Launcher,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    centered: bool = False,
    shift: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.add_rms_norm`; residual [T, width] is changed in place. weight [G * width]: row i has the gains i modulo
    G."""
    assert shift is None or centered
    tokens, width = x.shape
    check(x, launcher, x.dtype, tokens, width)
    check(weight, launcher, x.dtype, weight.shape[0] // width * width)
    if shift is not None:
        check(shift, launcher, x.dtype, width)
    if residual is not None:
        check(residual, launcher, x.dtype, tokens, width)
    out = torch.empty_like(x)
    _launch(launcher, x, residual, (weight, shift), out, (eps, offset), centered)
    return out


def norm_sum(
    launcher: Launcher, x: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> None:
    """stream [T, width] becomes the layer norm of stream + x, in place. See `reference.norm_sum`."""
    for rows in (stream, stream if x is None else x):
        check(rows, launcher, stream.dtype, *stream.shape)
    for table in (weight, weight if shift is None else shift):
        check(table, launcher, stream.dtype, stream.shape[1])
    onto = None if x is None else stream
    _launch(launcher, stream if x is None else x, onto, (weight, shift), stream, (eps, 0.0), True)


def norm_columns(launcher: Launcher, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """The norm of x [T, width], which may be columns of a wider tensor, in its place."""
    assert x.stride(1) == 1
    assert x.device == launcher.device
    check(weight, launcher, x.dtype, x.shape[1])
    _launch(launcher, x, None, (weight, None), x, (eps, offset), False)
    return x


def _launch(
    launcher: Launcher,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    tables: tuple[torch.Tensor, torch.Tensor | None],
    out: torch.Tensor,
    numbers: tuple[float, float],
    centered: bool,
) -> None:
    (tokens, width), (weight, shift) = x.shape, tables
    groups = weight.shape[0] // width
    assert groups, (weight.shape, width)
    assert tokens % groups == 0, (tokens, groups)
    if tokens:
        vector = widest(math.gcd(width, x.stride(0), x.storage_offset()), x.dtype)  # no load straddles a boundary of its own
        threads = min(MAX_THREADS, -(-width // (vector * WARP)) * WARP)
        sizes, floats = map(np.int32, (width, x.stride(0))), map(np.float32, numbers)
        kernel = variant(x.dtype, vector, centered)
        args = (x, residual, weight, shift, out, *sizes, *floats)
        launcher.launch(kernel, (tokens // groups, groups, 1), (threads, 1, 1), args)


def variant(dtype: torch.dtype, vector: int, centered: bool) -> Kernel:
    return Kernel("norm", "add_rms_norm", (("DTYPE", type_name(dtype)), ("VECTOR", vector), ("CENTERED", int(centered))))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [
        variant(dtype, vector, centered)
        for dtype in (torch.bfloat16, torch.float16)
        for vector in (8, 1)
        for centered in (False, True)
    ]
