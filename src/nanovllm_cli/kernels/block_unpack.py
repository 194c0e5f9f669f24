"""GGUF's blocks as 16-bit rows on a GPU (block_unpack.cu): for the vendor's matmul, and for embeddings."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels import block_records as records
from nanovllm_cli.kernels.block_records import TILE, PackedBlocks
from nanovllm_cli.kernels.embedding import id_args
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, check, type_name
from nanovllm_cli.kernels.record_kinds import RecordLayout

WARPS = 8
RECORDS_OF_ROWS = 8 * WARPS
"""Records that a block of `block_rows` takes: four lanes each."""


def unpack(
    launcher: Launcher, weight: PackedBlocks, first_row: int, num_rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows first_row … first_row + num_rows - 1 as numbers: [num_rows, width]."""
    layout, width = weight.layout, weight.width
    _, across, _ = records.shape(layout)
    assert 0 <= first_row <= first_row + num_rows <= weight.num_rows, (first_row, num_rows)
    check(weight.data, launcher, torch.uint8, *records.shape(layout))
    out = torch.empty(num_rows, width, dtype=dtype, device=weight.data.device)
    if num_rows:
        tiles = (first_row + num_rows - 1) // TILE - first_row // TILE + 1
        args = (weight.data, out, np.int32(first_row), np.int32(num_rows), np.int32(width))
        launcher.launch(variant(layout, dtype), (tiles, -(-across // WARPS), 1), (WARPS * WARP, 1, 1), args)
    return out


def block_rows(
    launcher: Launcher, weight: PackedBlocks, ids: torch.Tensor, dtype: torch.dtype, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows ids [T] int64 as numbers: [T, width]. With tokens [n] int64, ids are indices into it; see `embedding.embedding`."""
    layout, width, count = weight.layout, weight.width, ids.shape[0]
    _, across, _ = records.shape(layout)
    check(weight.data, launcher, torch.uint8, *records.shape(layout))
    where = id_args(launcher, ids, tokens)
    out = torch.empty(count, width, dtype=dtype, device=weight.data.device)
    if count:
        args = (*where, weight.data, out, np.int64(weight.num_rows), np.int32(width))
        grid = (count, -(-across // RECORDS_OF_ROWS), 1)
        launcher.launch(variant(layout, dtype, by_ids=True), grid, (WARPS * WARP, 1, 1), args)
    return out


def variant(layout: RecordLayout, dtype: torch.dtype, by_ids: bool = False) -> Kernel:
    constants = (("DTYPE", type_name(dtype)), *records.constants(layout))
    if by_ids:
        return Kernel("block_unpack", "block_rows", (*constants, ("IDS", 1)))
    return Kernel("block_unpack", "block_unpack", constants)


def variants() -> list[Kernel]:
    """What the compile gate builds: every kind of plane, scale and table."""
    bf16, fp16 = torch.bfloat16, torch.float16
    types = ("Q1_0", "TQ2_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4", "affine4:group=64",
             "affine8:group=64")  # fmt: skip
    return [
        *(variant(records.KINDS[name], bf16) for name in types),
        variant(records.KINDS["Q4_K"], fp16),
        *(variant(records.KINDS[name], bf16, by_ids=True) for name in ("Q4_K", "Q6_K")),
    ]
