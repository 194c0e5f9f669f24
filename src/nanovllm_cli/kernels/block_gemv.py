"""Matmul of GGUF's blocks with few rows on a GPU (block_gemv.cu): a norm on the way in; bias, residual or gate on the way out."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import block_records as records
from nanovllm_cli.kernels import product
from nanovllm_cli.kernels import quantize_activations as rounding
from nanovllm_cli.kernels.activation import ACTIVATIONS, gated_activation, has_gate
from nanovllm_cli.kernels.block_records import TILE, PackedBlocks
from nanovllm_cli.kernels.experts import Tasks, blocks_of, check_rows, from_tasks
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, largest_shared_bytes, type_name
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.record_kinds import RecordLayout

FUSED_ROWS = 2
"""Rows that every block rounds for itself; of more, a kernel before does it."""
WARPS = 8
RESIDENT = 2
"""Blocks an SM holds, by the kernel's launch bounds."""
RING_BYTES = 7 << 10
"""For a warp's records, at the least three: with 16 warps an SM two to three times what an H200 needs under way."""


def block_gemv(
    launcher: Launcher,
    x: Hidden,
    weight: PackedBlocks,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K], rounded to int8, @ weight [N, K].T + bias [N]; residual, activation, out_dtype: see `product.AfterFew`. Rounding:
    a scale for each row and group of the weight's, or 32 columns, by the CPU's rule. A launch takes at most 32 rows, and each
    reads the weight. A row's bits depend neither on the others nor, without a gate, on how many they are."""
    source, gain, eps, offset = product.checked_input(launcher, x)
    (rows, width), dtype, layout, num_rows = source.shape, source.dtype, weight.layout, weight.num_rows
    assert width == weight.width, (width, weight.width)
    check(weight.data, launcher, torch.uint8, *records.shape(layout))
    if has_gate(activation) and (num_rows // 2 % TILE or rows > 8):  # up begins within a tile, or partial sums of both are many
        return gated_activation(launcher, block_gemv(launcher, x, weight, bias), activation)
    out = product.output_for(
        launcher, rows, num_rows, dtype, bias, residual=residual, activation=activation, out_dtype=out_dtype
    )
    outputs = out.shape[1]
    if not rows:
        return out

    across = records.padded_width(layout) // records.columns_of(layout)
    parts = parts_of(outputs, across, launcher.num_multiprocessors)
    grid = min(-(-outputs // (WARPS // parts * TILE)), launcher.num_multiprocessors * RESIDENT)
    capability = launcher.capability
    fused = rows <= FUSED_ROWS and fits(layout, rows, 1, has_gate(activation), capability)
    rounded = None if fused else rounding.to_blocks(launcher, x, records.rounding_group(layout), records.padded_width(layout))
    at_once = rows if fused else rows_at_once(layout, rows, has_gate(activation), capability)
    for first in range(0, rows, at_once):
        last = min(rows, first + at_once)
        lane_rows = lane_rows_of(last - first)
        part = slice(first, last)
        target = out[part]
        args = (
            None, weight.data, source if fused else None, gain if fused else None,
            rounded.codes[part] if rounded else None, rounded.factors[part] if rounded else None,
            bias, None if residual is None else target, target, np.int32(last - first), np.int32(width), np.int32(outputs),
            np.int32(parts), np.float32(eps), np.float32(offset), np.int32(1),
        )  # fmt: skip
        kernel = variant(layout, dtype, out.dtype, lane_rows, fused, activation, stages_of(layout, capability))
        shared = ring_bytes(layout, capability) + (rounded_bytes(layout, rows) if fused else 0)
        launcher.launch(kernel, (grid, 1, 1), (WARPS * WARP, 1, 1), args, shared)
    return out


def expert_gemv(
    launcher: Launcher, x: torch.Tensor, weight: PackedBlocks, tasks: Tasks, matrix: int, *, activation: str | None = None
) -> torch.Tensor:
    """See `gemv.expert_gemv`, of x rounded to int8."""
    width, layout, num_rows, dtype = weight.width, weight.layout, weight.num_rows, x.dtype
    check_rows(launcher, x, tasks, matrix, width)
    check(weight.data, launcher, torch.uint8, *records.shape(layout))
    if has_gate(activation) and num_rows // 2 % TILE:  # up begins within a tile
        return gated_activation(launcher, expert_gemv(launcher, x, weight, tasks, matrix), activation)
    out = product.output_for(launcher, tasks.num_pairs, num_rows, dtype, None, activation=activation)
    outputs, capability = out.shape[1], launcher.capability
    lane_rows = lane_rows_of(tasks.most_rows)
    assert fits(layout, 0, lane_rows, has_gate(activation), capability)
    across = records.padded_width(layout) // records.columns_of(layout)
    parts = parts_of(outputs, across, launcher.num_multiprocessors)
    rounded = rounding.to_blocks(launcher, x, records.rounding_group(layout), records.padded_width(layout))
    args = (
        tasks.words, None, None, None, rounded.codes, rounded.factors, None, None, out, np.int32(0), np.int32(width),
        np.int32(outputs), np.int32(parts), np.float32(0), np.float32(0), np.int32(tasks.taken),
    )  # fmt: skip
    plain = variant(layout, dtype, dtype, lane_rows, False, activation, stages_of(layout, capability))
    tiles = -(-outputs // (WARPS // parts * TILE))
    blocks = blocks_of(tasks, tiles, launcher.num_multiprocessors * RESIDENT)
    shared = ring_bytes(layout, capability)
    launcher.launch(from_tasks(plain, matrix), (tasks.words.shape[0], blocks, 1), (WARPS * WARP, 1, 1), args, shared)
    return out


def stages_of(layout: RecordLayout, capability: int) -> int:
    """Records a warp has room for; two where copies are not asynchronous."""
    return 2 if capability < 80 else min(8, max(3, RING_BYTES // records.record_bytes(layout)))


def lane_rows_of(rows: int) -> int:
    """Rows that a lane sums: 1, 2, 4 or 8, for launches of up to 4, 8, 16 or 32."""
    return next(lane_rows for lane_rows in (1, 2, 4, 8) if rows <= 4 * lane_rows)


def ring_bytes(layout: RecordLayout, capability: int) -> int:
    return WARPS * stages_of(layout, capability) * records.record_bytes(layout)


def rounded_bytes(layout: RecordLayout, rows: int) -> int:
    """Of rows that a block rounds for itself: codes, and two floats a group."""
    padded = records.padded_width(layout)
    return rows * (padded + padded // records.rounding_group(layout) * 8)


def fits(layout: RecordLayout, fused_rows: int, lane_rows: int, gated: bool, capability: int) -> bool:
    """Whether a block has shared memory for the rings, what it rounds, and the partial sums."""
    partial = WARPS * (1 + gated) * TILE * 4 * lane_rows * 4
    return ring_bytes(layout, capability) + rounded_bytes(layout, fused_rows) + partial <= largest_shared_bytes(capability)


def rows_at_once(layout: RecordLayout, rows: int, gated: bool, capability: int) -> int:
    """Rows that a launch takes: 32, or fewer where partial sums do not fit beside the rings."""
    for lane_rows in (8, 4, 2, 1):
        if fits(layout, 0, lane_rows, gated, capability):
            return min(rows, 4 * lane_rows)
    raise UnsupportedError("this GPU's shared memory is too small for blocks", "use --device cpu")


def parts_of(outputs: int, across: int, num_multiprocessors: int) -> int:
    """Warps that share a row's records: all of a block's, or fewer where they would meet after a few records each, and there are
    tiles enough for each block to have several."""
    parts = WARPS
    while parts > 1:
        tiles = -(-outputs // (TILE * WARPS // (parts // 2)))
        if across >= parts and (across >= 4 * parts or tiles < 4 * RESIDENT * num_multiprocessors):
            break
        parts //= 2
    return parts


def variant(
    layout: RecordLayout,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    lane_rows: int,
    fused: bool,
    activation: str | None,
    stages: int,
) -> Kernel:
    constants: tuple[tuple[str, str | int], ...] = (
        ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)), ("VECTOR", 8), ("LANE_ROWS", lane_rows),
        ("FUSED", int(fused)), ("ACTIVATION", ACTIVATIONS[activation]), ("STAGES", stages),
        *records.constants(layout),
    )  # fmt: skip
    return Kernel("block_gemv", "block_gemv", constants)


def variants() -> list[Kernel]:
    """What the compile gate builds: every type at one row, and for some what else there is."""
    bf16, fp16, kinds = torch.bfloat16, torch.float16, records.KINDS

    def of(
        name: str,
        lane_rows: int = 1,
        fused: bool = True,
        activation: str | None = None,
        dtype: torch.dtype = bf16,
        out: torch.dtype = bf16,
        capability: int = 80,
    ) -> Kernel:
        layout = kinds[name]
        return variant(layout, dtype, out, lane_rows, fused, activation, stages_of(layout, capability))

    return [
        *(of(name) for name in kinds),
        *(of("Q4_K", lane_rows, False) for lane_rows in (1, 2, 4, 8)),
        *(of(name, 8, False) for name in ("Q1_0", "Q2_K", "Q5_1", "Q6_K", "IQ4_XS")),
        of("Q4_K", activation="silu"), of("Q4_K", 2, False, "silu"), of("Q6_K", out=torch.float32),
        of("Q4_K", activation="relu2"), of("Q6_K", 8, False, "relu2"),
        *(of("Q4_K", rows, fused, "lone_gelu") for rows, fused in ((1, True), (2, False), (8, False))),
        of("Q8_0", activation="lone_gelu"),
        of("Q4_K", dtype=fp16, out=fp16), of("Q4_K", dtype=fp16, out=fp16, capability=75),
        *(from_tasks(of(name, rows, False, "silu"), 0) for name in ("Q4_K", "MXFP4") for rows in (1, 2)),
        *(from_tasks(of(name, rows, False), 1) for name in ("Q6_K", "MXFP4") for rows in (1, 2)),
        from_tasks(of("MXFP4", 2, False, "swiglu_oai"), 0), from_tasks(of("Q4_K", 2, False, "relu2"), 0),
    ]  # fmt: skip
