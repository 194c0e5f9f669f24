"""Multiplying by a weight that is unpacked for the purpose, a piece at a time: what serves many rows of x."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.kernels import gemm, library, product
from nanovllm_cli.kernels.kernel import Launcher

SCRATCH_BYTES = 128 << 20
"""A piece of a weight in 16 bits: any layer's matrix whole, and an eighth of a large head."""
TILE = 16
"""Weight rows that are unpacked together."""

Unpack = Callable[[int, int], torch.Tensor]
"""(first row, how many) -> these rows of the weight [n, K] in x's type."""


def matmul(
    launcher: Launcher,
    x: torch.Tensor,
    num_rows: int,
    unpack: Unpack,
    bias: torch.Tensor | None,
    *,
    deterministic: bool,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [num_rows, K].T + bias, as `library.matmul` has it; deterministic: as `gemm.gemm`, a row of the same bits
    at every M."""
    rows, width = x.shape
    step = max(TILE, SCRATCH_BYTES // (2 * width) // TILE * TILE)
    multiply = gemm.gemm if deterministic else library.matmul
    if num_rows <= step:
        return multiply(launcher, x, unpack(0, num_rows), bias, residual=residual, out_dtype=out_dtype)
    out = product.output_for(launcher, rows, num_rows, x.dtype, bias, residual=residual, out_dtype=out_dtype)
    for first in range(0, num_rows, step):
        columns = slice(first, min(first + step, num_rows))
        own_bias = None if bias is None else bias[columns]
        piece = multiply(launcher, x, unpack(first, columns.stop - first), own_bias, out_dtype=out_dtype)
        _put(launcher, out[:, columns], piece, residual is not None)
    return out


def _put(launcher: Launcher, target: torch.Tensor, piece: torch.Tensor, add: bool) -> None:
    launcher.torch_op(lambda: target.add_(piece) if add else target.copy_(piece))
