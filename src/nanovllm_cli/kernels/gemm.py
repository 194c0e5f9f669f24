"""Matmul on a GPU whose rows' bits do not depend on how many there are (gemm.cu)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.experts import MANY_ROWS, Tasks, check_rows, from_tasks
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, mma_capability, type_name, widest

DEPTH = 64
"""Columns that a block holds of both operands at once, a stage."""


class Tile(NamedTuple):
    """What one block computes, rows by columns, by how many warps, with how many stages in shared memory."""

    rows: int
    columns: int
    warps_down: int
    warps_across: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        return (self.rows + self.columns) * DEPTH * 2 * self.stages

    def needed(self, rows: int, columns: int) -> int:
        """Tiles in so many rows and columns."""
        return -(-rows // self.rows) * -(-columns // self.columns)


# The small one waits for memory, and has much of it under way. All have the same bits.
SMALL, MEDIUM, LARGE = Tile(16, 16, 1, 2, 12), Tile(64, 64, 2, 2, 4), Tile(128, 128, 2, 4, 3)
WIDE = Tile(MANY_ROWS, 128, 2, 4, 4)
"""For tasks of experts."""


def gemm(
    launcher: Launcher,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N]; residual, out_dtype: see `product.After`. A row has the same bits at every M. tile:
    which way to compute the same bits; None chooses the fastest."""
    rows, width = x.shape
    outputs, dtype = weight.shape[0], x.dtype
    product.check_tensor_cores(launcher, dtype)
    check(x, launcher, dtype, rows, width)
    check(weight, launcher, dtype, outputs, width)
    out = product.output_for(launcher, rows, outputs, dtype, bias, residual=residual, out_dtype=out_dtype)
    if out.numel():
        tile = tile or tile_for(rows, outputs, launcher)
        sizes = (np.int32(rows), np.int32(width), np.int32(outputs), np.int32(1))
        args = (None, x, weight, bias, residual, out, *sizes)
        threads = tile.warps_down * tile.warps_across * WARP
        kernel = variant(dtype, out.dtype, widest(width, dtype), tile)
        launcher.launch(kernel, (tile.needed(rows, outputs), 1, 1), (threads, 1, 1), args, tile.shared_bytes)
    return out


def expert_gemm(launcher: Launcher, x: torch.Tensor, weight: torch.Tensor, tasks: Tasks, matrix: int) -> torch.Tensor:
    """See `gemv.expert_gemv`, of tasks of MANY_ROWS rows and without an activation. A row's bits are what `gemm` gives it."""
    (outputs, width), dtype = weight.shape, x.dtype
    product.check_tensor_cores(launcher, dtype)
    check_rows(launcher, x, tasks, matrix, width)
    check(weight, launcher, dtype, outputs, width)
    out = torch.empty(tasks.num_pairs, outputs, dtype=dtype, device=launcher.device)
    tile = MEDIUM if launcher.capability < 80 else WIDE
    assert tile.rows == tasks.rows, tasks.rows
    sizes = (np.int32(0), np.int32(width), np.int32(outputs), np.int32(tasks.taken))
    args = (tasks.words, x, None, None, None, out, *sizes)
    kernel = from_tasks(variant(dtype, dtype, widest(width, dtype), tile), matrix)
    grid = (tasks.words.shape[0], tile.needed(1, outputs), 1)
    launcher.launch(kernel, grid, (tile.warps_down * tile.warps_across * WARP, 1, 1), args, tile.shared_bytes)
    return out


def tile_for(rows: int, outputs: int, launcher: Launcher) -> Tile:
    """The largest tile that leaves no SM idle, and fits its shared memory; the small one for the rows of one mma."""
    if rows <= SMALL.rows:
        return SMALL
    if LARGE.needed(rows, outputs) < launcher.num_multiprocessors or launcher.capability < 80:
        return MEDIUM
    return LARGE


def variant(dtype: torch.dtype, out_dtype: torch.dtype, vector: int, tile: Tile) -> Kernel:
    constants = (
        ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)), ("VECTOR", vector), ("TILE_M", tile.rows),
        ("TILE_N", tile.columns), ("WARPS_M", tile.warps_down), ("WARPS_N", tile.warps_across), ("STAGES", tile.stages),
    )  # fmt: skip
    return Kernel("gemm", "gemm", constants, mma_capability(dtype))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    kernels = []
    for dtype in (torch.bfloat16, torch.float16):
        kernels += [variant(dtype, dtype, 8, tile) for tile in (SMALL, MEDIUM, LARGE)]
        kernels += [variant(dtype, torch.float32, 8, tile) for tile in (SMALL, LARGE)]
        kernels.append(variant(dtype, dtype, 1, MEDIUM))
        kernels += [from_tasks(variant(dtype, dtype, 8, tile), matrix) for tile in (MEDIUM, WIDE) for matrix in (0, 1)]
    return kernels
