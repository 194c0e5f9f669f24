"""Activations rounded to eight bits on a GPU, normalised first where they are to be (quantize_activations.cu)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.kernel import Kernel, Launcher, check, type_name, widest
from nanovllm_cli.kernels.ops import Hidden

THREADS = 256
SPAN = 8 * THREADS
"""Columns that a block takes at a time."""
GROUPS = (16, 32, 64, 128, 256)


class Rounded(NamedTuple):
    """x = codes * scale. codes [T, width]; scales fp32 [T, groups], a transposed view of [groups, T], which is how `_scaled_mm`
    wants them."""

    codes: torch.Tensor
    scales: torch.Tensor


class RoundedBlocks(NamedTuple):
    """Rows for block_gemv.cu: codes int8 [T, padded], each 64 in the order of the matrix instructions; factors fp32
    [T, groups, 2], a group's scale and the sum of its codes."""

    codes: torch.Tensor
    factors: torch.Tensor


def to_int8(launcher: Launcher, x: Hidden, group: int = 0) -> Rounded:
    """x [T, width] by the CPU's rule (kernels/cpu_integer.py): a scale is the largest magnitude / 127 of `group` columns, or of
    the row (0). A NaN or an infinity makes its scale NaN."""
    return _round(launcher, x, torch.int8, group, None)


def to_e4m3(launcher: Launcher, x: Hidden, group: int = 0, fixed: torch.Tensor | None = None) -> Rounded:
    """x [T, width] by the CPU's rule (kernels/cpu_values.py): a scale is the largest magnitude / 448, or `fixed` fp32 [1], and
    what it does not reach saturates."""
    return _round(launcher, x, torch.float8_e4m3fn, group, fixed)


def to_blocks(launcher: Launcher, x: Hidden, group: int, padded: int) -> RoundedBlocks:
    """x [T, width] for a matmul of blocks whose scales cover 16 or 32 columns, with zeros up to the width of its records."""
    source, gain, eps, offset = product.checked_input(launcher, x)
    (rows, width), dtype = source.shape, source.dtype
    assert group in (16, 32), group
    assert padded >= width, (width, padded)
    assert padded % 128 == 0, padded
    codes = torch.empty(rows, padded, dtype=torch.int8, device=source.device)
    factors = torch.empty(rows, padded // group, 2, dtype=torch.float32, device=source.device)
    if rows:
        args = (
            source, gain, codes, factors, np.int32(width), np.int32(padded), np.int32(group), np.float32(eps), np.float32(offset)
        )  # fmt: skip
        grid = (rows, 1 if gain is not None else -(-padded // SPAN), 1)
        launcher.launch(blocks_variant(dtype, widest(width, dtype)), grid, (THREADS, 1, 1), args)
    return RoundedBlocks(codes, factors)


def _round(launcher: Launcher, x: Hidden, code: torch.dtype, group: int, fixed: torch.Tensor | None) -> Rounded:
    source, gain, eps, offset = product.checked_input(launcher, x)
    (rows, width), dtype = source.shape, source.dtype
    assert group == 0 or group in GROUPS, group
    if fixed is not None:
        check(fixed, launcher, torch.float32, 1)
    codes = torch.empty(rows, width, dtype=code, device=source.device)
    groups = -(-width // group) if group else 1
    scales = torch.empty(groups, rows, dtype=torch.float32, device=source.device)
    if codes.numel():
        args = (
            source, gain, fixed, codes, scales, np.int32(width), np.int32(group), np.float32(eps), np.float32(offset)
        )  # fmt: skip
        whole = gain is not None or (group == 0 and fixed is None)
        grid = (rows, 1 if whole else -(-width // SPAN), 1)
        launcher.launch(rows_variant(dtype, code, widest(width, dtype)), grid, (THREADS, 1, 1), args)
    return Rounded(codes, scales.t())


def rows_variant(dtype: torch.dtype, code: torch.dtype, vector: int) -> Kernel:
    constants = (("DTYPE", type_name(dtype)), ("VECTOR", vector), ("CODE", type_name(code)))
    return Kernel("quantize_activations", "round_rows", constants)


def blocks_variant(dtype: torch.dtype, vector: int) -> Kernel:
    return Kernel("quantize_activations", "round_blocks", (("DTYPE", type_name(dtype)), ("VECTOR", vector)))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    kernels = []
    for dtype in (torch.bfloat16, torch.float16):
        kernels += [rows_variant(dtype, code, 8) for code in (torch.int8, torch.float8_e4m3fn)] + [blocks_variant(dtype, 8)]
    return [*kernels, rows_variant(torch.bfloat16, torch.int8, 1)]
