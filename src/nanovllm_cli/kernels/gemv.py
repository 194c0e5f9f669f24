"""Matmul of one to eight rows on a GPU (gemv.cu): a norm on the way in; a bias, a residual or a gate on the way out."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.activation import ACTIVATIONS, has_gate
from nanovllm_cli.kernels.experts import Tasks, blocks_of, check_rows, from_tasks
from nanovllm_cli.kernels.kernel import (
    WARP,
    Kernel,
    Launcher,
    check,
    largest_shared_bytes,
    mma_capability,
    type_name,
    widest,
)
from nanovllm_cli.kernels.ops import Hidden

MAX_ROWS = 8
WARPS = 8
STRIP = 8
"""Weight rows that a warp multiplies at once."""
LOADS = 4
"""16-byte loads of a lane that make a unit, as gemv.cu has it; of STEP columns each."""
STEP = 32
RESIDENT = 2
"""Blocks an SM holds, by the kernel's launch bounds."""
STATIC_SHARED = 12 << 10


def gemv(
    launcher: Launcher,
    x: Hidden,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] for M <= 8; residual, activation, out_dtype: see `product.AfterFew`. A row's bits do
    not depend on the others'."""
    source, gain, eps, offset = product.checked_input(launcher, x)
    (rows, width), dtype, num_rows = source.shape, source.dtype, weight.shape[0]
    assert 0 < rows <= MAX_ROWS, rows
    product.check_tensor_cores(launcher, dtype)
    check(weight, launcher, dtype, num_rows, width)
    out = product.output_for(
        launcher, rows, num_rows, dtype, bias, residual=residual, activation=activation, out_dtype=out_dtype
    )
    outputs = out.shape[1]
    if not outputs:
        return out

    strips, parts, tiles = _division(launcher, outputs, width, has_gate(activation))
    grid = min(tiles, launcher.num_multiprocessors * RESIDENT)
    has_norm = gain is not None
    kernel = variant(dtype, out.dtype, widest(width, dtype), strips, has_norm, activation)
    at_once = rows_at_once(padded(width), launcher.capability) if has_norm else rows
    for first in range(0, rows, at_once):  # once, but for very wide rows
        last = min(rows, first + at_once)
        target = out[first:last]
        args = (
            None, source[first:last], gain, weight, bias, None if residual is None else target, target,
            np.int32(last - first), np.int32(width), np.int32(outputs), np.int32(parts), np.float32(eps), np.float32(offset),
            np.int32(1),
        )  # fmt: skip
        shared = (last - first + 1) * padded(width) * 2 if has_norm else 0
        launcher.launch(kernel, (grid, 1, 1), (WARPS * WARP, 1, 1), args, shared)
    return out


def expert_gemv(
    launcher: Launcher,
    x: torch.Tensor,
    weight: torch.Tensor,
    tasks: Tasks,
    matrix: int,
    *,
    activation: str | None = None,
) -> torch.Tensor:
    """Rows of x [T, K], of the second matrix [P, K], each multiplied with the weight of its task's expert, whose bias, if it
    has any, is added: [P, N] or, with a gate, [P, N / 2]. weight [N, K]: any of the experts, which are alike. A row's
    bits are what `gemv` gives it."""
    (num_rows, width), dtype = weight.shape, x.dtype
    check_rows(launcher, x, tasks, matrix, width)
    product.check_tensor_cores(launcher, dtype)
    check(weight, launcher, dtype, num_rows, width)
    out = product.output_for(launcher, tasks.num_pairs, num_rows, dtype, None, activation=activation)
    outputs = out.shape[1]
    strips, parts, tiles = _division(launcher, outputs, width, has_gate(activation))
    args = (
        tasks.words, x, None, None, None, None, out, np.int32(0), np.int32(width), np.int32(outputs), np.int32(parts),
        np.float32(0), np.float32(0), np.int32(tasks.taken),
    )  # fmt: skip
    kernel = from_tasks(variant(dtype, dtype, widest(width, dtype), strips, False, activation), matrix)
    blocks = blocks_of(tasks, tiles, launcher.num_multiprocessors * RESIDENT)
    launcher.launch(kernel, (tasks.words.shape[0], blocks, 1), (WARPS * WARP, 1, 1), args)
    return out


def _division(launcher: Launcher, outputs: int, width: int, gated: bool) -> tuple[int, int, int]:
    """Strips of a warp, warps that share a row, and tiles."""
    strips = 2 if gated else strips_of(outputs, STRIP, launcher.num_multiprocessors)
    warp_outputs = STRIP if gated else STRIP * strips
    parts = parts_of(outputs, width, warp_outputs, STEP * LOADS // strips, launcher.num_multiprocessors)
    return strips, parts, -(-outputs // (WARPS // parts * warp_outputs))


def padded(width: int) -> int:
    """Elements from one row in shared memory to the next."""
    return -(-width // 64) * 64 + 32


def rows_at_once(stride: int, capability: int, static: int = STATIC_SHARED) -> int:
    """Normalised rows of so many elements that fit a block's shared memory, beside the gains and what is always there."""
    rows = (largest_shared_bytes(capability) - static) // (stride * 2) - 1
    if rows < 1:
        raise UnsupportedError(f"a row of {stride} elements does not fit this GPU's shared memory")
    return rows


def strips_of(outputs: int, strip: int, num_multiprocessors: int) -> int:
    """Strips a warp multiplies at once: two, or one where that divides the work among the SMs more evenly."""

    def busy(strips: int) -> float:
        tiles = -(-outputs // (strip * strips))
        return tiles / (-(-tiles // num_multiprocessors) * num_multiprocessors)

    return 1 if busy(1) > 1.05 * busy(2) else 2


def parts_of(outputs: int, width: int, warp_outputs: int, unit: int, num_multiprocessors: int) -> int:
    """Warps that share a row's width: all of a block's, or fewer where they would meet after a few units of columns each, and
    there are tiles enough for each block to have several."""
    units = -(-width // unit)
    parts = WARPS
    while parts > 1 and units < 8 * parts:
        tiles = -(-outputs // (warp_outputs * WARPS // (parts // 2)))
        if tiles < 4 * RESIDENT * num_multiprocessors:
            break
        parts //= 2
    return parts


def variant(
    dtype: torch.dtype, out_dtype: torch.dtype, vector: int, strips: int, norm: bool, activation: str | None
) -> Kernel:
    constants = (
        ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)), ("VECTOR", vector), ("STRIPS", strips),
        ("NORM", int(norm)), ("ACTIVATION", ACTIVATIONS[activation]),
    )  # fmt: skip
    return Kernel("gemv", "gemv", constants, mma_capability(dtype))


def variants() -> list[Kernel]:
    """What the compile gate builds: a layer's matmuls and the head's, and rows that have no 16-byte loads."""
    kernels = []
    for dtype in (torch.bfloat16, torch.float16):
        kernels += [variant(dtype, dtype, 8, strips, norm, None) for strips in (1, 2) for norm in (False, True)]
        kernels += [variant(dtype, dtype, 8, 2, True, activation) for activation in ("silu", "relu2")]
        kernels += [variant(dtype, dtype, 8, strips, False, "lone_gelu") for strips in (1, 2)]
        kernels += [variant(dtype, torch.float32, 8, 2, True, None)]
        kernels += [variant(dtype, dtype, 1, 2, True, None), variant(dtype, dtype, 1, 2, False, None)]
        of_experts = ("silu", "swiglu_oai", "relu2")
        kernels += [from_tasks(variant(dtype, dtype, 8, 2, False, activation), 0) for activation in of_experts]
        kernels += [from_tasks(variant(dtype, dtype, 8, strips, False, None), 1) for strips in (1, 2)]
    return kernels
