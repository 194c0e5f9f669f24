"""Matmul of packed weights on a GPU's tensor cores, for any number of rows (packed_gemm.cu)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.kernel import (
    WARP,
    Kernel,
    Launcher,
    check,
    largest_shared_bytes,
    mma_capability,
    type_name,
    widest,
)  # fmt: skip
from nanovllm_cli.kernels.packed import BITS, TILE_COLUMNS, TILE_OUTPUTS, Kind, Packed, empty

MAX_ROW_TILES = 16
"""Of a launch."""
MAX_STAGES = 6
LEAST_UNITS = 4
"""Of a stripe: less is multiplied by one block faster than another one adds its sums."""
WIDE_STRIPES = 3
"""Blocks that share a wide tile at the most; each leaves 256 sums a row, which the last of them reads one after another."""
STATIC_SHARED = 1 << 10


class Shape(NamedTuple):
    """What a block multiplies at once: strips of 16 outputs, slices of 64 columns, rows of x; and strips of one warp.

    A wide tile takes little of x for each weight. A narrow one has slices side by side, whose sums meet in shared memory, so that
    fewer blocks have to share a tile. A row's bits depend on strips and slices.
    """

    across: int
    along: int
    rows: int = 64
    strips: int = 1

    @property
    def outputs(self) -> int:
        return self.across * TILE_OUTPUTS

    @property
    def warps(self) -> int:
        return self.across // self.strips * self.along

    def units(self, outputs: int, width: int) -> int:
        """Of all tiles."""
        return -(-outputs // self.outputs) * -(-width // (self.along * TILE_COLUMNS))

    def of_rows(self, rows: int) -> Shape:
        """For so many rows of x. Fewer warps that take two strips each read x half as often, and have more registers."""
        return self._replace(rows=rows, strips=2 if rows >= 32 else 1)


WIDE, NARROW = Shape(16, 1), Shape(4, 4)


def new_counters(launcher: Launcher) -> torch.Tensor:
    """What `packed_gemm` counts finished blocks in: zeros, zeros again after each launch. One for all weights of a stream."""
    return torch.zeros(launcher.num_multiprocessors * MAX_ROW_TILES, dtype=torch.int32, device=launcher.device)


def packed_gemm(
    launcher: Launcher,
    x: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
    counters: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N]; residual, out_dtype: see `product.After`. A row has the same bits at every M.

    counters: from `new_counters`. shape: of blocks, for tests; None chooses by the weight and the GPU.
    """
    rows, width = x.shape
    dtype, outputs = x.dtype, weight.num_rows
    product.check_tensor_cores(launcher, dtype)
    check(x, launcher, dtype, rows, width)
    weight.check(launcher)
    assert width == weight.width, (width, weight.width)
    out = product.output_for(launcher, rows, outputs, dtype, bias, residual=residual, out_dtype=out_dtype)
    check(counters, launcher, torch.int32, launcher.num_multiprocessors * MAX_ROW_TILES)
    if not out.numel():
        return out
    if weight.order is not None:
        x = in_order(launcher, x, weight.order)

    shape = shape or shape_of(outputs, launcher)
    stripes = max(1, min(launcher.num_multiprocessors, shape.units(outputs, width) // LEAST_UNITS))
    shape, stages = fitting(shape, rows, weight, launcher.capability)
    kernel = variant(dtype, out.dtype, weight, widest(width, dtype), shape, stages)
    at_once = shape.rows * MAX_ROW_TILES
    for first in range(0, rows, at_once):
        last = min(rows, first + at_once)
        blocks = stripes * -(-(last - first) // shape.rows)
        partials = torch.empty(2 * blocks * shape.outputs * shape.rows, dtype=torch.float32, device=x.device)
        target = out[first:last]
        args = (
            x[first:last], weight.codes, weight.scales, weight.zeros, bias, None if residual is None else target, target,
            partials, counters, np.int32(last - first), np.int32(width), np.int32(outputs), np.int32(stripes),
        )  # fmt: skip
        shared = stages * stage_bytes(shape, weight)
        launcher.launch(kernel, (blocks, 1, 1), (shape.warps * WARP, 1, 1), args, shared)
    return out


def shape_of(outputs: int, launcher: Launcher) -> Shape:
    """Wide where there are tiles enough for the GPU. It does not depend on the rows, for their bits depend on it."""
    wide = -(-outputs // WIDE.outputs) * WIDE_STRIPES >= launcher.num_multiprocessors
    return WIDE if wide else NARROW


def fitting(shape: Shape, rows: int, weight: Packed, capability: int) -> tuple[Shape, int]:
    """The shape with as many rows as are there, or as leave room for enough stages; and how many stages."""
    room, least = largest_shared_bytes(capability) - STATIC_SHARED, 3 if capability >= 80 else 2
    each = -(-rows // -(-rows // shape.rows))  # of a tile of rows, where all have the same
    sizes = [size for size in (64, 32, 16) if size < 2 * each and room // stage_bytes(shape.of_rows(size), weight) >= least]
    shape = shape.of_rows(max(sizes, default=8))
    return shape, min(MAX_STAGES, room // stage_bytes(shape, weight))


def stage_bytes(shape: Shape, weight: Packed) -> int:
    """As packed_gemm.cu has it: a unit of x; a tile of codes with its scales and zero points for each warp."""
    return stage_of(shape, tile_bytes(weight))


def stage_of(shape: Shape, tile: int) -> int:
    """The same for tiles of so many bytes."""
    return shape.along * (shape.rows * TILE_COLUMNS * 2 + shape.across * tile)


def tile_bytes(weight: Packed) -> int:
    """64 columns of a strip: codes, scales, zero points."""
    groups = 0 if not weight.group else max(1, TILE_COLUMNS // weight.group)
    scales = groups * TILE_OUTPUTS * weight.scales.itemsize
    zeros = max(1, groups) * TILE_OUTPUTS if weight.zeros is not None else 0
    return TILE_OUTPUTS * TILE_COLUMNS * BITS[weight.kind] // 8 + scales + zeros


def variant(dtype: torch.dtype, out_dtype: torch.dtype, weight: Packed, vector: int, shape: Shape, stages: int) -> Kernel:
    constants = (
        ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)), *weight.constants, ("VECTOR", vector),
        ("TOKENS", shape.rows), ("ACROSS", shape.across), ("ALONG", shape.along), ("STRIPS", shape.strips), ("STAGES", stages),
    )  # fmt: skip
    return Kernel("packed_gemm", "packed_gemm", constants, mma_capability(dtype))


def variants() -> list[Kernel]:
    """What the compile gate builds: the kinds with the most rows and with few, of both shapes of blocks."""
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32

    def of(
        dtype: torch.dtype, kind: Kind, group: int, scale: torch.dtype, shape: Shape, rows: int, stages: int,
        zeros: bool = False, out: torch.dtype | None = None, vector: int = 8,
    ) -> Kernel:  # fmt: skip
        weight = empty(kind, 16, 1024, group, scale, zeros=zeros, ordered=False, device="meta")
        return variant(dtype, out or dtype, weight, vector, shape.of_rows(rows), stages)

    return [
        of(bf16, "int4", 128, bf16, NARROW, 8, 6), of(bf16, "int4", 128, bf16, WIDE, 16, 6),
        of(bf16, "int4", 128, bf16, NARROW, 32, 6), of(bf16, "int4", 128, bf16, WIDE, 64, 6),
        of(bf16, "int4", 32, half, NARROW, 64, 3, zeros=True), of(half, "int4", 128, half, WIDE, 64, 3, zeros=True),
        of(bf16, "int8", 0, single, WIDE, 64, 4, out=single), of(half, "int8", 0, bf16, NARROW, 16, 2, vector=1),
        of(bf16, "fp8", 128, single, NARROW, 64, 3), of(half, "fp8", 0, single, WIDE, 16, 3),
        of(bf16, "nf4", 64, single, WIDE, 64, 5), of(half, "nf4", 64, single, NARROW, 32, 2),
    ]  # fmt: skip


def in_order(launcher: Launcher, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x's columns as the weight has them."""
    gathered = torch.empty_like(x)
    launcher.torch_op(lambda: torch.index_select(x, 1, order, out=gathered))
    return gathered
