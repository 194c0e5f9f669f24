"""Matmul of packed weights by Hopper's warpgroup products, for many rows (packed_wgmma.cu)."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, largest_shared_bytes, type_name, widest
from nanovllm_cli.kernels.packed import TILE_COLUMNS, Kind, Packed, empty
from nanovllm_cli.kernels.packed_gemm import Shape, in_order, stage_bytes

CAPABILITY = 90
"""The one that has wgmma."""
SHAPES = (Shape(16, 1, 128), Shape(12, 1, 128), Shape(8, 2, 128), Shape(8, 2, 96), Shape(8, 2, 64), Shape(4, 4, 64))
"""What a block may multiply at once, the first of equals."""
MAX_STAGES, LEAST_STAGES = 6, 3
PATTERN = 1 << 10
"""Bytes that a stage is a multiple of."""
# Of a multiprocessor, each cycle; the L2 for all of them.
PRODUCTS, L2_BYTES, ALL_L2_BYTES = 2048, 64, 4000
CONVERSIONS: dict[Kind, int] = {"int4": 26, "int8": 24, "fp8": 19, "nf4": 15}
"""Weights, by the machine code's instructions."""
EDGES = 6000
"""Cycles of a tile before its first product and behind its last."""


def packed_wgmma(
    launcher: Launcher,
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N]; residual, out_dtype: see `product.After`. shape: of blocks, for tests; None chooses.

    UnsupportedError on all but Hopper.
    """
    if launcher.capability != CAPABILITY:
        raise UnsupportedError("wgmma is in GPUs of compute capability 9.0 only", "take another way to multiply")
    rows, width = x.shape
    dtype, outputs = x.dtype, weight.num_rows
    check(x, launcher, dtype, rows, width)
    weight.check(launcher)
    assert width == weight.width, (width, weight.width)
    out = product.output_for(launcher, rows, outputs, dtype, bias, residual=residual, out_dtype=out_dtype)
    if not out.numel():
        return out
    if weight.order is not None:
        x = in_order(launcher, x, weight.order)
    shape = shape or shape_of(rows, weight, launcher.num_multiprocessors)
    stages = stages_of(shape, weight)
    kernel = variant(dtype, out.dtype, weight, widest(width, dtype), shape, stages)
    args = (
        x, weight.codes, weight.scales, weight.zeros, bias, None if residual is None else out, out,
        np.int32(rows), np.int32(width), np.int32(outputs),
    )  # fmt: skip
    grid = (num_tiles(shape, rows, outputs), 1, 1)
    launcher.launch(kernel, grid, (shape.warps * WARP, 1, 1), args, shared_bytes(shape, weight, stages))
    return out


def shape_of(rows: int, weight: Packed, num_multiprocessors: int) -> Shape:
    """The one that should take the least time: waves of blocks, each as long as what it waits for most."""

    def cycles(shape: Shape) -> float:
        tiles = num_tiles(shape, rows, weight.num_rows)
        active = min(tiles, num_multiprocessors)
        numbers, size = shape.outputs * TILE_COLUMNS, stage_bytes(shape, weight) / shape.along
        of_slice = max(
            numbers * shape.rows / PRODUCTS, numbers / CONVERSIONS[weight.kind], size / L2_BYTES, size * active / ALL_L2_BYTES
        )
        return -(-tiles // num_multiprocessors) * (weight.codes.shape[1] * of_slice + EDGES)

    return min(SHAPES, key=cycles)


def num_tiles(shape: Shape, rows: int, outputs: int) -> int:
    return -(-outputs // shape.outputs) * -(-rows // shape.rows)


def stages_of(shape: Shape, weight: Packed) -> int:
    """As many as there is room for."""
    room = largest_shared_bytes(CAPABILITY) - PATTERN
    stages = min(MAX_STAGES, room // _whole_patterns(stage_bytes(shape, weight)))
    assert stages >= LEAST_STAGES, (shape, weight.kind)
    return stages


def shared_bytes(shape: Shape, weight: Packed, stages: int) -> int:
    """Of stages, or of the sums that meet where they were; and what aligning them may cost."""
    meeting = shape.rows * (shape.outputs + 4) * 4
    return max(stages * _whole_patterns(stage_bytes(shape, weight)), meeting) + PATTERN


def _whole_patterns(size: int) -> int:
    return -(-size // PATTERN) * PATTERN


def variant(dtype: torch.dtype, out_dtype: torch.dtype, weight: Packed, vector: int, shape: Shape, stages: int) -> Kernel:
    constants = (
        ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)), *weight.constants, ("VECTOR", vector),
        ("TOKENS", shape.rows), ("ACROSS", shape.across), ("ALONG", shape.along), ("STRIPS", shape.strips), ("STAGES", stages),
    )  # fmt: skip
    return Kernel("packed_wgmma", "packed_wgmma", constants, CAPABILITY, CAPABILITY)


def variants() -> list[Kernel]:
    """What the compile gate builds: int4 in every shape, the other kinds in the largest and in the smallest."""
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32

    def of(
        dtype: torch.dtype, kind: Kind, group: int, scale: torch.dtype, shape: Shape, zeros: bool = False,
        out: torch.dtype | None = None, vector: int = 8,
    ) -> Kernel:  # fmt: skip
        weight = empty(kind, 16, 1024, group, scale, zeros=zeros, ordered=False, device="meta")
        return variant(dtype, out or dtype, weight, vector, shape, stages_of(shape, weight))

    largest, smallest = SHAPES[0], SHAPES[-1]
    return [
        *(of(bf16, "int4", 128, bf16, shape) for shape in SHAPES),
        of(bf16, "int4", 32, half, largest, zeros=True), of(half, "int4", 32, half, smallest, zeros=True),
        of(bf16, "int8", 0, single, largest, out=single), of(half, "int8", 64, bf16, largest, zeros=True, vector=1),
        of(bf16, "int8", 32, single, smallest, zeros=True), of(bf16, "fp8", 128, single, largest),
        of(half, "fp8", 0, single, smallest), of(bf16, "nf4", 64, single, largest), of(half, "nf4", 64, single, smallest),
    ]  # fmt: skip
