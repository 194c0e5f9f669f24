"""Matmul of one to eight rows of 8-bit codes on a GPU (scaled_gemv.cu): a bias, a residual or a gate on the way out."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.activation import ACTIVATIONS, has_gate
from nanovllm_cli.kernels.experts import Tasks, blocks_of, check_rows, from_tasks
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
        strips, parts, panels = _division(launcher, outputs, width, groups > 1, has_gate(activation))
        grid = min(panels, launcher.num_multiprocessors * RESIDENT)
        sizes = (np.int32(rows), np.int32(width), np.int32(outputs), np.int32(parts), np.int32(1))
        args = (None, *x, *weight, bias, residual, out, *sizes)
        kernel = variant(kind, dtype, out.dtype, groups > 1, strips, activation)
        launcher.launch(kernel, (grid, 1, 1), (WARPS * WARP, 1, 1), args)
    return out


def expert_gemv(
    launcher: Launcher,
    x: Scaled,
    weight: Scaled,
    tasks: Tasks,
    matrix: int,
    *,
    dtype: torch.dtype,
    activation: str | None = None,
) -> torch.Tensor:
    """See `gemv.expert_gemv`."""
    (num_rows, width), groups, kind = weight.codes.shape, weight.scales.shape[0], weight.codes.dtype
    assert width % SIZES == 0, width
    check_rows(launcher, x.codes, tasks, matrix, width)
    check(x.codes, launcher, kind, *x.codes.shape)
    check(x.scales, launcher, torch.float32, groups, x.codes.shape[0])
    check(weight.codes, launcher, kind, num_rows, width)
    check(weight.scales, launcher, torch.float32, groups, num_rows)
    out = product.output_for(launcher, tasks.num_pairs, num_rows, dtype, None, activation=activation)
    outputs = out.shape[1]
    strips, parts, panels = _division(launcher, outputs, width, groups > 1, has_gate(activation))
    sizes = (np.int32(x.codes.shape[0]), np.int32(width), np.int32(outputs), np.int32(parts), np.int32(tasks.taken))
    args = (tasks.words, *x, None, None, None, None, out, *sizes)
    kernel = from_tasks(variant(kind, dtype, dtype, groups > 1, strips, activation), matrix)
    blocks = blocks_of(tasks, panels, launcher.num_multiprocessors * RESIDENT)
    launcher.launch(kernel, (tasks.words.shape[0], blocks, 1), (WARPS * WARP, 1, 1), args)
    return out


def _division(launcher: Launcher, outputs: int, width: int, grouped: bool, gated: bool) -> tuple[int, int, int]:
    """Strips of a warp, warps that share a row, and panels."""
    strips = 2 if gated else 1 if grouped else strips_of(outputs, STRIP, launcher.num_multiprocessors)
    warp_outputs = STRIP if gated else STRIP * strips
    parts = parts_of(outputs, width, warp_outputs, STEP * LOADS // (2 * strips), launcher.num_multiprocessors)
    return strips, parts, -(-outputs // (WARPS // parts * warp_outputs))


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
        without_gate = variant(kind, bf16, bf16, grouped, 1, "relu2")
        kernels += [variant(kind, bf16, bf16, grouped, strips, "lone_gelu") for strips in ((1,) if grouped else (1, 2))]
        kernels += [without_gate, from_tasks(without_gate, 0), from_tasks(variant(kind, bf16, bf16, grouped, 2, "silu"), 0)]
        kernels += [from_tasks(variant(kind, bf16, bf16, grouped, 1, None), 1)]
    return kernels
