"""Matmul of packed weights by Hopper's warpgroup products, for many rows (packed_wgmma.cu)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, largest_shared_bytes, type_name, widest
from nanovllm_cli.kernels.packed import TILE_COLUMNS, Kind, Packed, empty
from nanovllm_cli.kernels.packed_gemm import MAX_ROW_TILES, Shape, in_order, stage_bytes, stage_of, tile_bytes

CAPABILITY = 90
"""The one that has wgmma."""
SHAPES = (
    Shape(16, 1, 128), Shape(12, 1, 192), Shape(12, 1, 128), Shape(16, 1, 96), Shape(8, 2, 128), Shape(8, 2, 96), Shape(8, 2, 64),
    Shape(4, 4, 64),
)  # fmt: skip
"""What a block may multiply at once, the first of equals."""
MAX_SPLITS = 8
MAX_STAGES, LEAST_STAGES = 6, 3
PATTERN = 1 << 10
"""Bytes that a stage is a multiple of."""
# Of a multiprocessor, each cycle; the L2 for all of them.
PRODUCTS, L2_BYTES, ALL_L2_BYTES = 2048, 64, 4000
CONVERSIONS: dict[Kind, int] = {"int4": 27, "int8": 24, "fp8": 19, "nf4": 15}
"""Weights, by the machine code's instructions."""
EDGES, MEETING = 6000, 3000
"""Cycles of a block before its first product and behind its last; and to meet others, besides what their sums take."""


class Plan(NamedTuple):
    """splits: blocks that share a tile, each with a part of the columns."""

    shape: Shape
    splits: int = 1

    def tiles(self, rows: int, outputs: int) -> int:
        return -(-outputs // self.shape.outputs) * -(-rows // self.shape.rows)


def packed_wgmma(
    launcher: Launcher,
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N]; residual, out_dtype: see `product.After`. counters: from `packed_gemm.new_counters`.
    plan: of blocks, for tests; None chooses.

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
    check(counters, launcher, torch.int32, launcher.num_multiprocessors * MAX_ROW_TILES)
    if not out.numel():
        return out
    if weight.order is not None:
        x = in_order(launcher, x, weight.order)
    shape, splits = plan = plan or plan_of(rows, weight, launcher.num_multiprocessors)
    stages, tiles = stages_of(shape, weight), plan.tiles(rows, outputs)
    partials = None
    if splits > 1:
        assert tiles <= counters.numel(), (tiles, splits)
        partials = torch.empty(tiles * splits, shape.rows, shape.outputs, dtype=torch.float32, device=x.device)
    kernel = variant(dtype, out.dtype, weight, widest(width, dtype), shape, stages)
    args = (
        x, weight.codes, weight.scales, weight.zeros, bias, None if residual is None else out, out,
        partials, None if partials is None else counters, np.int32(rows), np.int32(width), np.int32(outputs), np.int32(splits),
    )  # fmt: skip
    launcher.launch(kernel, (tiles * splits, 1, 1), (shape.warps * WARP, 1, 1), args, shared_bytes(shape, weight, stages))
    return out


def plan_of(rows: int, weight: Packed, num_multiprocessors: int) -> Plan:
    """The one that should take the least time: waves of blocks, each as long as what it waits for most. Splits: within a wave."""
    slices = weight.codes.shape[1]
    return _plan_of(rows, weight.num_rows, slices, weight.kind, tile_bytes(weight), num_multiprocessors)


@functools.lru_cache(1 << 14)  # finding one takes longer than many a product
def _plan_of(rows: int, outputs: int, slices: int, kind: Kind, tile: int, num_multiprocessors: int) -> Plan:
    def cycles(plan: Plan) -> float:
        shape, splits = plan
        blocks = plan.tiles(rows, outputs) * splits
        numbers, size = shape.outputs * TILE_COLUMNS, stage_of(shape, tile) / shape.along
        of_slice = max(
            numbers * shape.rows / PRODUCTS, numbers / CONVERSIONS[kind],
            size / L2_BYTES, size * min(blocks, num_multiprocessors) / ALL_L2_BYTES,
        )  # fmt: skip
        units = -(-slices // shape.along)
        each = -(-units // splits) * shape.along * of_slice + EDGES
        if splits > 1:
            each += MEETING + (1 + splits) * 4 * shape.outputs * shape.rows / L2_BYTES
        return -(-blocks // num_multiprocessors) * each

    return min(plans(rows, outputs, num_multiprocessors), key=cycles)


def plans(rows: int, outputs: int, num_multiprocessors: int) -> list[Plan]:
    """All that may be chosen: every shape, and tiles shared by as many blocks as one wave has room for."""
    made = (Plan(shape, splits) for splits in range(1, MAX_SPLITS + 1) for shape in SHAPES)
    return [plan for plan in made if plan.splits == 1 or plan.tiles(rows, outputs) * plan.splits <= num_multiprocessors]


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
    """What the compile gate builds: int4 in every shape, the other kinds in the largest and in the smallest ones."""
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32

    def of(
        dtype: torch.dtype, kind: Kind, group: int, scale: torch.dtype, shape: Shape, zeros: bool = False,
        out: torch.dtype | None = None, vector: int = 8,
    ) -> Kernel:  # fmt: skip
        weight = empty(kind, 16, 1024, group, scale, zeros=zeros, ordered=False, device="meta")
        return variant(dtype, out or dtype, weight, vector, shape, stages_of(shape, weight))

    largest, tall, smallest = SHAPES[0], SHAPES[1], SHAPES[-1]
    return [
        *(of(bf16, "int4", 128, bf16, shape) for shape in SHAPES),
        of(bf16, "int4", 32, half, largest, zeros=True), of(half, "int4", 32, half, smallest, zeros=True),
        of(bf16, "int8", 0, single, largest, out=single), of(half, "int8", 64, bf16, largest, zeros=True, vector=1),
        of(bf16, "int8", 32, single, smallest, zeros=True), of(bf16, "fp8", 128, single, largest),
        of(bf16, "int8", 32, single, tall, zeros=True), of(bf16, "fp8", 128, single, tall), of(half, "nf4", 64, single, tall),
        of(half, "fp8", 0, single, smallest), of(bf16, "nf4", 64, single, largest), of(half, "nf4", 64, single, smallest),
    ]  # fmt: skip
