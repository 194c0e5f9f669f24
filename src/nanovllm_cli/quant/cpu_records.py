"""The layout of integer codes on a CPU: one for every format that has codes of 2 to 8 bits and a scale a group.

    weight[n, k] = scale[n, g] * (code[n, k] - offset) - low[n, g]                 g = k // group

(or table[code] for codes of 4 bits that stand for other numbers).
A weight [N, K] is cut into tiles of 64 rows (columns of the output) and chunks of 256 along k (the last one shorter: K rounded up
to 32). A tile's chunks lie behind each other, tiles behind each other. A (tile, chunk) is one record:

    supers   [64] f16, [64] f16            one a column: of sub scales (f32 of ue4m3), of sub mins; where there are any
    scales   [groups, 64]                  f32, f16, bf16, e8m0 (a power of two), or ue4m3 / u8 / i8 times the super; odd numbers
                                           times the super: [groups / 2, 64], a byte for two groups
    lows     [groups, 64]                  u8 zero points, mins (added, of the type of the scales), or u8 times the second super;
                                           where there are any
    codes    [k / 32, bits, 64, 4] bytes   32 k's of 64 columns, as bit planes

Everything is read once, in the order in which it lies: a processor fetches such a stream ahead by itself.

Of 32 k's, four that follow each other are a unit: what `vpdpbusd` multiplies at once for one column, four bytes. Eight units are
split into planes, the widest first and with the lowest bits: 8 = {8}, 7 = {4, 2, 1}, 6 = {4, 2}, 5 = {4, 1}, 4 = {4},
3 = {2, 1}, 2 = {2}, 1 = {1}. A plane of b bits takes b of the `bits` rows of 64 x 4 bytes; a row holds 8 / b units that follow
each other, the first in the lowest bits. Rows lie in the order in which units need them: of 6 bits 0 to 3 of the first plane and
4, 5 of the second as 0, 4, 1, 2, 5, 3. Unpacking is shifts, masks and ors of whole vectors, and 8 bits need none. A single bit
becomes 0 or 2.

With a codebook (GGUF's IQ types) a record has indices of points of `length` codes each instead: 32 k's of 64 columns are

    low      [32 / length, 64] u8          the lowest 8 bits of indices. Indices of 7 bits: [7, 64], with the bits of the eighth
                                           row's on top of theirs
    high     [32 / length, more] u64       the bits above, one after another: bit c is column c's
    signs    [8, 64 * 4] bits              one a code, in the order of a unit's bytes; or a point: [32 / length] u64

Scales are as small as in the file. A scale a channel is one a chunk, repeated: under 2 % of an 8-bit weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm_cli.kernels import cpu_pack
from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.cpu import address_of, launch
from nanovllm_cli.kernels.cpu_pack_points import pack_points
from nanovllm_cli.kernels.record_kinds import CHUNK, Codebook, RecordLayout


@dataclass(frozen=True)
class RecordRows:
    """Rows in plain arrays: what a record is packed from. G groups, S = ceil(K / 256).

    codes u8 [n, K]; scales [n, G] in the layout's type; lows [n, G] (None where the layout has none or nibbles);
    supers (of kinds.UE4M3: f32), super_lows f16 [n, S] or None. kinds.NIBBLE: a scale's byte is sub scale | sub min << 4;
    kinds.SUB_ODD: [n, G / 2], two nibbles of (scale - 1) / 2. With a codebook codes are indices i16 [n, K / length], and signs u8
    [n, K / 8] have a bit a code, lowest first, or 1 a point; None for those without.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor | None = None
    supers: torch.Tensor | None = None
    super_lows: torch.Tensor | None = None
    signs: torch.Tensor | None = None


def pack_rows(layout: RecordLayout, packed: torch.Tensor, first_row: int, rows: RecordRows) -> None:
    """rows become rows first_row … of packed, [layout.num_bytes] u8."""
    n, width = rows.codes.shape[0], layout.padded_width
    assert first_row + n <= layout.num_rows
    codes = _padded(rows.codes, width if layout.codebook is None else width // layout.codebook.length)
    if layout.codebook is not None:
        _pack_points(layout, layout.codebook, packed, first_row, codes, rows.signs)
    ints = (
        address_of(packed, torch.uint8, layout.num_bytes), layout.tile_bytes, layout.record_bytes(CHUNK), first_row,
        n, codes.ctypes.data, width // 4, layout.bits, layout.scale_span,
    )  # fmt: skip
    none = np.zeros((n, 0, 0), np.uint8)
    parts = [none if part is None else _bytes(part) for part in (rows.scales, rows.lows, rows.supers, rows.super_lows)]
    sides = [number for part in parts for number in (part.ctypes.data, *part.shape[1:])]
    launch(cpu_pack.pack_records, 8 * n * width, "", (*ints, *sides))


def _pack_points(
    layout: RecordLayout, codebook: Codebook, packed: torch.Tensor, first_row: int, index: np.ndarray, signs: torch.Tensor | None
) -> None:
    n, width = len(index), layout.padded_width
    assert index.dtype == np.int16
    assert (signs is None) == (codebook.signs == kinds.NO_SIGNS)
    bits = None if signs is None else _padded(signs, width // 8)
    ints = (
        address_of(packed, torch.uint8, layout.num_bytes), layout.tile_bytes, layout.record_bytes(CHUNK), layout.codes_at(CHUNK),
        layout.codes_at(layout.chunk_width(layout.num_chunks - 1)), first_row, n, width, codebook.index_bits, codebook.length,
        codebook.signs, index.ctypes.data, 0 if bits is None else bits.ctypes.data,
    )  # fmt: skip
    launch(pack_points, 8 * n * width, "", ints)


def _padded(rows: torch.Tensor, width: int) -> np.ndarray:
    """[n, width], zeros behind what is there."""
    if rows.shape[1] == width:
        whole: np.ndarray = rows.contiguous().numpy()
        return whole
    return np.pad(rows.contiguous().numpy(), ((0, 0), (0, width - rows.shape[1])))


def _bytes(values: torch.Tensor) -> np.ndarray:
    """[n, G] -> [n, G, bytes of an element]."""
    raw: np.ndarray = values.contiguous().view(torch.uint8).numpy().reshape(*values.shape, values.itemsize)
    return raw
