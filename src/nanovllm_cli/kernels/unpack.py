"""Packed weights as 16-bit rows on a GPU (unpack.cu): for the vendor's matmul, and for embeddings."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels.embedding import id_args
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, type_name, widest
from nanovllm_cli.kernels.packed import TILE_OUTPUTS, Kind, Packed, empty

WARPS = 8
TILES_OF_ROWS = 8 * WARPS
"""Tiles along the columns that a block of `packed_rows` takes: four lanes each."""


def unpack(launcher: Launcher, weight: Packed, first_row: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows first_row … first_row + num_rows - 1 as numbers, columns in their own order: [num_rows, K]."""
    assert 0 <= first_row <= first_row + num_rows <= weight.num_rows, (first_row, num_rows)
    weight.check(launcher)
    out = torch.empty(num_rows, weight.width, dtype=dtype, device=weight.codes.device)
    if out.numel():
        strips = (first_row + num_rows - 1) // TILE_OUTPUTS - first_row // TILE_OUTPUTS + 1
        args = (
            weight.codes, weight.scales, weight.zeros, weight.order, out,
            np.int32(first_row), np.int32(num_rows), np.int32(weight.width),
        )  # fmt: skip
        grid = (strips, -(-weight.codes.shape[1] // WARPS), 1)
        launcher.launch(variant(weight, dtype), grid, (WARPS * WARP, 1, 1), args)
    return out


def packed_rows(
    launcher: Launcher, weight: Packed, ids: torch.Tensor, dtype: torch.dtype, tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows ids [T] int64 as numbers: [T, K]. With tokens [n] int64, ids are indices into it; see `embedding.embedding`."""
    count, width = ids.shape[0], weight.width
    weight.check(launcher)
    where = id_args(launcher, ids, tokens)
    out = torch.empty(count, width, dtype=dtype, device=weight.codes.device)
    if out.numel():
        args = (
            *where, weight.codes, weight.scales, weight.zeros, weight.order, out, np.int64(weight.num_rows), np.int32(width)
        )  # fmt: skip
        grid = (count, -(-weight.codes.shape[1] // TILES_OF_ROWS), 1)
        launcher.launch(variant(weight, dtype, by_ids=True), grid, (WARPS * WARP, 1, 1), args)
    return out


def variant(weight: Packed, dtype: torch.dtype, by_ids: bool = False) -> Kernel:
    ordered = weight.order is not None
    constants = (
        ("DTYPE", type_name(dtype)), *weight.constants, ("ORDERED", int(ordered)),
        ("VECTOR", 1 if ordered else widest(weight.width, dtype)),
    )  # fmt: skip
    if by_ids:
        return Kernel("unpack", "packed_rows", (*constants, ("IDS", 1)))
    return Kernel("unpack", "unpack", constants)


def variants() -> list[Kernel]:
    """What the compile gate builds: every kind, and what is not plain of some."""
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32

    def of(kind: Kind, group: int, scale: torch.dtype, zeros: bool = False, ordered: bool = False, width: int = 64) -> Packed:
        return empty(kind, 16, width, group, scale, zeros=zeros, ordered=ordered, device="meta")

    int4, int8 = of("int4", 128, bf16), of("int8", 0, single, width=33)
    hard, fp8, nf4 = of("int4", 32, half, zeros=True, ordered=True), of("fp8", 128, single), of("nf4", 64, single)
    plain = [variant(weight, bf16) for weight in (int4, hard, int8, fp8, nf4)]
    rows = [variant(weight, bf16, by_ids=True) for weight in (int4, hard, fp8)] + [variant(hard, half, by_ids=True)]
    return [*plain, variant(hard, half), *rows]
