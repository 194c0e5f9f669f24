"""GGUF's blocks, and codes with minima as MLX has them, on a GPU: sizes and places in a packed weight, shared by its kernels
(block_records.cuh) and by what fills it (quant/block_layout.py).

A weight [N, K] is cut into tiles of 16 rows (outputs) and records of 256 columns, or 128 where a block has no more; the last ones
are filled up with zeros. Records lie along K, then along N, and one is read from its begin to its end:

    codes        bit planes, in steps of 64 columns
    scales       [16, groups] of 16 to 256 columns: f16, bf16, f32, e8m0, or a byte that an f16 of the row multiplies (a signed
                 one as b + 128), ue4m3 an f32
    lows         [16, groups]: of the type of the scales, added, or bytes; where there are any
    supers       [16] f16 or f32, and [16] f16 for the lows; where there are any

A step's codes are those that a warp multiplies by two mma.m16n8k32 (PTX ISA; the weight is their A): lane 4 r + c has rows r and
r + 8, and of each 16 columns 4 c … 4 c + 3. A word is four such codes, and a lane has eight words: [32 columns][16 columns][row].
Planes hold words beside each other, so that a shift and a mask give one: 8 = {8}, 6 = {4, 2}, 5 = {4, 1}, 4 = {4}, 3 = {2, 1},
2 = {2}, 1 = {1}. A plane of b bits has b words a lane, its word j the words of 8 / b codes j * 8 / b …, lowest bits first; 8 bits
are two planes of four words. Codes of 4 bits that stand for numbers of a table lie as nibbles, the even word's in the lower half:
what a byte permutation takes as selectors. A single bit stands for -1 or 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.record_kinds import SCALE_DTYPES, RecordLayout

TILE = 16
STEP = 64
SHORT, LONG = 128, 256
"""Columns of a record."""
SIGN = 128
"""What is taken off codes of eight bits where they lie, so that they have a sign."""


class PackedBlocks(NamedTuple):
    """type: GGUF's name of it, or the format's. layout: what codes and scales mean (the CPU's records are of the same kinds).
    data: uint8 [tiles, records, bytes]."""

    type: str
    layout: RecordLayout
    data: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.layout.num_rows

    @property
    def width(self) -> int:
        return self.layout.width


def columns_of(layout: RecordLayout) -> int:
    return LONG if layout.has_supers or layout.group > SHORT else SHORT


def rounding_group(layout: RecordLayout) -> int:
    """Columns of x that share a scale: as many as of the weight do, but no more than a matrix instruction multiplies."""
    return min(layout.group, 32)


def padded_width(layout: RecordLayout) -> int:
    return -(-layout.width // columns_of(layout)) * columns_of(layout)


def record_bytes(layout: RecordLayout) -> int:
    columns = columns_of(layout)
    a_row = columns // layout.group * (SCALE_DTYPES[layout.scale].itemsize + layout.low_bytes)
    return TILE * (columns * layout.bits // 8 + a_row + layout.super_bytes)


def shape(layout: RecordLayout) -> tuple[int, int, int]:
    """Of the data."""
    return -(-layout.num_rows // TILE), padded_width(layout) // columns_of(layout), record_bytes(layout)


def signed_table(layout: RecordLayout) -> list[int] | None:
    """What codes of up to four bits stand for, where not for themselves."""
    return None if layout.table is None else [value - layout.offset for value in layout.table]


def constants(layout: RecordLayout) -> tuple[tuple[str, str | int], ...]:
    """What block_records.cuh is compiled with."""
    assert layout.scale != kinds.SUB_ODD, layout
    table = signed_table(layout)
    # Eight bits have a sign as they lie, and so do the numbers of a table. A single bit is unpacked to 0 or 2 without one.
    table = None if layout.bits == 1 else table
    offset = 0 if table is not None else layout.offset - SIGN * (layout.bits == 8)
    found: list[tuple[str, str | int]] = [
        ("BITS", layout.bits), ("GROUP", rounding_group(layout)), ("SPAN", layout.group), ("SCALE", layout.scale),
        ("LOW", layout.low), ("OFFSET", offset), ("UNIT", layout.unit),
    ]  # fmt: skip
    if table is not None:
        words = [int.from_bytes(bytes(value & 255 for value in table[i : i + 4]), "little") for i in range(0, 16, 4)]
        found += [(f"TABLE{i}", f"{word:#010x}u") for i, word in enumerate(words)]
    return tuple(found)


def _kind(
    bits: int, group: int, scale: int, low: int = kinds.NO_LOW, offset: int = 0, table: tuple[int, ...] = (), unit: int = 0
) -> RecordLayout:
    """table: signed."""
    offset = -min(table) if table else offset
    return RecordLayout(1, 256, bits, group, scale, low, offset, unit, tuple(value + offset for value in table) or None)


_SIGNS = (-1, 1, *(0,) * 14)

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
KINDS = {
    "Q4_0": _kind(4, 32, kinds.F16, offset=8),
    "Q4_1": _kind(4, 32, kinds.F16, kinds.MIN),
    "Q5_0": _kind(5, 32, kinds.F16, offset=16),
    "Q5_1": _kind(5, 32, kinds.F16, kinds.MIN),
    "Q8_0": _kind(8, 32, kinds.F16, offset=128),
    "Q2_K": _kind(2, 16, kinds.SUB_U8, kinds.NIBBLE),
    "Q3_K": _kind(3, 16, kinds.SUB_I8, offset=4),
    "Q4_K": _kind(4, 32, kinds.SUB_U8, kinds.SUB_MIN),
    "Q5_K": _kind(5, 32, kinds.SUB_U8, kinds.SUB_MIN),
    "Q6_K": _kind(6, 16, kinds.SUB_I8, offset=32),
    "Q1_0": _kind(1, 128, kinds.F16, table=_SIGNS),
    "Q2_0": _kind(2, 64, kinds.F16, offset=1),
    "TQ2_0": _kind(2, 256, kinds.F16, offset=1),
    "IQ4_NL": _kind(4, 32, kinds.F16, table=_IQ4),
    "IQ4_XS": _kind(4, 32, kinds.SUB_I8, table=_IQ4),
    "MXFP4": _kind(4, 32, kinds.E8M0, table=_FP4),
    "NVFP4": _kind(4, 16, kinds.UE4M3, table=_FP4, unit=1),
    **{f"affine{bits}:group=64": _kind(bits, 64, kinds.BF16, kinds.MIN) for bits in (4, 8)},
    "affine4:group=32": _kind(4, 32, kinds.BF16, kinds.MIN),
}
"""Layouts of the common types, and of what MLX writes, one row each: what the compile gate builds kernels of. What storages take
comes from the formats themselves (quant/block_layout.py), and is the same."""
