"""Matmul of one to eight rows of 8-bit codes on a GPU (scaled_gemv.cu): a bias, a residual or a gate on the way out."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.activation import ACTIVATIONS
from nanovllm_cli.kernels.gemv import LOADS, MAX_ROWS, RESIDENT, WARPS, parts_of, strips_of
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, mma_capability, type_name
from nanovllm_cli.kernels.scaled_matmul import SIZES, Scaled

STRIP = 16
"""Weight rows that a warp multiplies at once."""
STEP = 64
"""Columns of its loads, each of which has two rows of a strip."""
CAPABILITIES = {torch.int8: 75, torch.float8_e4m3fn: 89}
"""Oldest GPUs with matrix instructions of such codes."""
SUMS = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.float32}
"""What products of such codes are summed in."""


def scaled_gemv(
    launcher: Launcher,
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias for M <= 8: see `scaled_matmul.matmul`, and `product.AfterFew`. A row's bits do not
    depend on the others'."""
    (rows, width), (num_rows, _), groups = x.codes.shape, weight.codes.shape, weight.scales.shape[0]
    kind = weight.codes.dtype
    assert 0 < rows <= MAX_ROWS, rows
    assert width % SIZES == 0, width
    check(x.codes, launcher, kind, rows, width)
    check(x.scales, launcher, torch.float32, groups, rows)
    check(weight.codes, launcher, kind, num_rows, width)
    check(weight.scales, launcher, torch.float32, groups, num_rows)
    out = product.output_for(
        launcher, rows, num_rows, dtype, bias, residual=residual, activation=activation, out_dtype=out_dtype
    )
    outputs = out.shape[1]
    if outputs:
        strips = 2 if activation else 1 if groups > 1 else strips_of(outputs, STRIP, launcher.num_multiprocessors)
        warp_outputs = STRIP if activation else STRIP * strips
        unit = STEP * LOADS // (2 * strips)
        parts = parts_of(outputs, width, warp_outputs, unit, launcher.num_multiprocessors)
        panels = -(-outputs // (WARPS // parts * warp_outputs))
        grid = min(panels, launcher.num_multiprocessors * RESIDENT)
        args = (*x, *weight, bias, residual, out, np.int32(rows), np.int32(width), np.int32(outputs), np.int32(parts))
        kernel = variant(kind, dtype, out.dtype, groups > 1, strips, activation)
        launcher.launch(kernel, (grid, 1, 1), (WARPS * WARP, 1, 1), args)
    return out


def variant(
    kind: torch.dtype, dtype: torch.dtype, out_dtype: torch.dtype, grouped: bool, strips: int, activation: str | None
) -> Kernel:
    constants = (
        ("CODE", type_name(kind)), ("SUM", type_name(SUMS[kind])), ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)),
        ("GROUPED", int(grouped)), ("STRIPS", strips), ("ACTIVATION", ACTIVATIONS[activation]), ("NORM", 0), ("VECTOR", 8),
    )  # fmt: skip
    return Kernel("scaled_gemv", "scaled_gemv", constants, max(CAPABILITIES[kind], mma_capability(dtype)))


def variants() -> list[Kernel]:
    """What the compile gate builds: a layer's matmuls and the head's."""
    bf16, half = torch.bfloat16, torch.float16
    kernels = []
    for kind, grouped in ((torch.int8, False), (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True)):
        kernels += [variant(kind, bf16, bf16, grouped, strips, None) for strips in ((1,) if grouped else (1, 2))]
        kernels += [variant(kind, bf16, torch.float32, grouped, 1, None)]
        kernels += [variant(kind, dtype, dtype, grouped, 2, "silu") for dtype in (bf16, half)]
    return kernels
