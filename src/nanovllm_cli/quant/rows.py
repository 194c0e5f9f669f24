"""Quantized rows of a weight as they travel: from checkpoint readers and algorithms to writers and to what is kept in memory.

All forms are row-major, one code a byte, so that nobody has to know another's packing; what is kept in memory packs them.

Legend: n rows, K columns (inputs), G groups along a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class IntegerRows(NamedTuple):
    """weight = (code - zero) * scale. codes uint8 [n, K]; scales [n, G] float16, bfloat16 or float32; zeros uint8 [n, G], or None
    for the middle of the codes (8 of 4 bits). order int32 [K], the same for every row of a weight: column order[j] is the j-th
    along the groups, so group j // group_size holds columns order[j]; None for columns as they are. codes are in columns' order.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None


class AffineRows(NamedTuple):
    """weight = code * scale + minimum. codes uint8 [n, K]; scales and minima [n, G] of one type, float16, bfloat16 or float32, of
    any sign."""

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor


class Fp8Rows(NamedTuple):
    """weight = code * scale. codes uint8 [n, K], the bits of e4m3 (no infinities); scales float32 [n, G]. input_scale: what
    activations are divided by before they are rounded to e4m3, one number, where the format's activations are static."""

    codes: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None


class Nf4Rows(NamedTuple):
    """weight = NF4[code] * scale. codes uint8 [n, K], 0 to 15; scales float32 [n, G]."""

    codes: torch.Tensor
    scales: torch.Tensor


class BlockRows(NamedTuple):
    """GGUF blocks as in a file: data uint8 [n, bytes of a row]. factors: float32 [n], by which rows of NVFP4 are multiplied, or
    None for ones."""

    data: torch.Tensor
    factors: torch.Tensor | None = None


QuantizedRows = IntegerRows | AffineRows | Fp8Rows | Nf4Rows | BlockRows


def num_rows(rows: torch.Tensor | QuantizedRows) -> int:
    """n."""
    first = rows if isinstance(rows, torch.Tensor) else rows[0]
    assert isinstance(first, torch.Tensor)
    return first.shape[0]


def take_rows(rows: torch.Tensor | QuantizedRows, which: slice | torch.Tensor) -> torch.Tensor | QuantizedRows:
    """Some of them, or these by their numbers. What is the same for all rows stays."""
    if isinstance(rows, torch.Tensor):
        return rows[which]
    if isinstance(rows, BlockRows):
        return BlockRows(rows.data[which], None if rows.factors is None else rows.factors[which])
    taken = rows._replace(codes=rows.codes[which], scales=rows.scales[which])
    if isinstance(taken, IntegerRows) and taken.zeros is not None:
        taken = taken._replace(zeros=taken.zeros[which])
    return taken._replace(minima=taken.minima[which]) if isinstance(taken, AffineRows) else taken
