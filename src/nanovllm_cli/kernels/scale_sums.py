"""Scales, bias and residual behind a matmul of 8-bit codes on a GPU (scale_sums.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name

VECTOR = 4
THREADS = 256


def scale_sums(
    launcher: Launcher,
    sums: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """sums [M, N] int32 or float32 * row_scales [1, M] * column_scales [1, N] + bias [N]: [M, N] in out_dtype, dtype or float32.

    residual [M, N]: the result is added to it in place, and it is what is returned. dtype: of bias and residual.
    """
    rows, columns = sums.shape
    assert columns % VECTOR == 0, columns
    check(sums, launcher, sums.dtype, rows, columns)
    check(row_scales, launcher, torch.float32, 1, rows)
    check(column_scales, launcher, torch.float32, 1, columns)
    out = product.output_for(launcher, rows, columns, dtype, bias, residual=residual, out_dtype=out_dtype)
    if out.numel():
        threads = min(THREADS, -(-columns // (VECTOR * WARP)) * WARP)
        args = (sums, row_scales, column_scales, bias, residual, out, np.int32(columns))
        grid = (rows, -(-columns // (VECTOR * threads)), 1)
        launcher.launch(variant(sums.dtype, dtype, out_dtype), grid, (threads, 1, 1), args)
    return out


def variant(sums: torch.dtype, dtype: torch.dtype, out_dtype: torch.dtype) -> Kernel:
    constants = (("SUM", type_name(sums)), ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)))
    return Kernel("scale_sums", "scale_sums", constants)


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [
        variant(sums, dtype, out_dtype)
        for sums in (torch.int32, torch.float32)
        for dtype in (torch.bfloat16, torch.float16)
        for out_dtype in (dtype, torch.float32)
    ]
