"""The layout of integer codes on a CPU: one for every format that has codes of 2 to 8 bits and a scale a group.

    weight[n, k] = scale[n, g] * (code[n, k] - offset) - low[n, g]                 g = k // group

(or table[code] for codes of 4 bits that stand for other numbers).
A weight [N, K] is cut into tiles of 64 rows (columns of the output) and chunks of 256 along k (the last one shorter: K rounded up
to 32). A tile's chunks lie behind each other, tiles behind each other. A (tile, chunk) is one record:

    supers   [64] f16, [64] f16            one a column: of sub scales, of sub mins; where there are any
    scales   [groups, 64]                  f32, f16, bf16, e8m0 (a power of two), or u8 / i8 times the super
    lows     [groups, 64]                  u8 zero points, f16 mins (added), u8 times the second super; where there are any
    codes    [k / 32, bits, 64, 4] bytes   32 k's of 64 columns, as bit planes

Everything is read once, in the order in which it lies: a processor fetches such a stream ahead by itself.

Of 32 k's, four that follow each other are a unit: what `vpdpbusd` multiplies at once for one column, four bytes. Eight units are
split into planes, the widest first and with the lowest bits: 8 = {8}, 7 = {4, 2, 1}, 6 = {4, 2}, 5 = {4, 1}, 4 = {4}, 3 = {2, 1},
2 = {2}. A plane of b bits takes b of the `bits` rows of 64 x 4 bytes; a row holds 8 / b units that follow each other, the first
in the lowest bits. Unpacking is shifts, masks and ors of whole vectors, and 8 bits need none.

Scales are as small as in the file. A scale a channel is one a chunk, repeated: under 2 % of an 8-bit weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nanovllm_cli.kernels import cpu_pack
from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.cpu import address_of, launch
from nanovllm_cli.kernels.record_kinds import CHUNK, LOW_DTYPES, PLANES, SCALE_DTYPES, STEP, TILE, RecordLayout


@dataclass(frozen=True)
class RecordRows:
    """Rows in plain arrays: what a record is packed from. G groups, S = ceil(K / 256).

    codes u8 [n, K]; scales [n, G] in the layout's type; lows [n, G] (None where the layout has none or nibbles);
    supers, super_lows f16 [n, S] or None. kinds.NIBBLE: a scale's byte is sub scale | sub min << 4.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    lows: torch.Tensor | None = None
    supers: torch.Tensor | None = None
    super_lows: torch.Tensor | None = None


def pack_rows(layout: RecordLayout, packed: torch.Tensor, first_row: int, rows: RecordRows) -> None:
    """rows become rows first_row … of packed, [layout.num_bytes] u8."""
    n, width = rows.codes.shape[0], layout.padded_width
    assert first_row + n <= layout.num_rows
    codes = rows.codes.contiguous().numpy()
    if width != layout.width:
        codes = np.pad(codes, ((0, 0), (0, width - layout.width)))
    ints = (
        address_of(packed, torch.uint8, layout.num_bytes), layout.tile_bytes, layout.record_bytes(CHUNK), first_row,
        n, codes.ctypes.data, width // 4, layout.bits, layout.group,
    )  # fmt: skip
    none = np.zeros((n, 0, 0), np.uint8)
    parts = [none if part is None else _bytes(part) for part in (rows.scales, rows.lows, rows.supers, rows.super_lows)]
    sides = [number for part in parts for number in (part.ctypes.data, *part.shape[1:])]
    launch(cpu_pack.pack_records, 8 * n * width, "", (*ints, *sides))


def unpack(layout: RecordLayout, packed: torch.Tensor) -> RecordRows:
    """The plain arrays again, [num_rows, …]: slow and straight, what tests compare the kernels with."""
    tiles = packed.numpy().reshape(layout.num_tiles, layout.tile_bytes)
    records = [[_record(layout, tile, chunk) for chunk in range(layout.num_chunks)] for tile in tiles]

    def whole(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        if getattr(records[0][0], name) is None:
            return None
        tiles = [np.concatenate([getattr(r, name) for r in chunks]).swapaxes(0, 1) for chunks in records]
        values = torch.from_numpy(np.concatenate(tiles).copy()).view(dtype).squeeze(-1)
        return values[: layout.num_rows, : layout.num_groups]

    codes = [np.concatenate([_from_planes(r.codes, layout.bits) for r in chunks], 1) for chunks in records]
    scales = whole("scales", SCALE_DTYPES[layout.scale])
    assert scales is not None
    return RecordRows(
        torch.from_numpy(np.concatenate(codes)[: layout.num_rows, : layout.width].copy()),
        scales,
        whole("lows", LOW_DTYPES.get(layout.low, torch.uint8)),
        whole("supers", torch.float16),
        whole("super_lows", torch.float16),
    )


def dequantize(layout: RecordLayout, rows: RecordRows) -> torch.Tensor:
    """fp32 [n, width], each step rounded as the formula at the top reads; a zero point is taken off the code, exactly."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(layout.group, 1)[:, : layout.width]

    def per_group(supers: torch.Tensor) -> torch.Tensor:
        return supers.float().repeat_interleave(CHUNK // layout.group, 1)[:, : layout.num_groups]

    codes = rows.codes.int()
    if layout.table is not None:
        codes = torch.tensor(layout.table, dtype=torch.int32)[codes]
    codes = codes - layout.offset
    scales, lows = rows.scales, rows.lows
    if layout.low == kinds.NIBBLE:
        scales, lows = scales & 15, scales >> 4
    if layout.scale == kinds.E8M0:
        scale = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 128)
    else:
        scale = scales.float()
    if rows.supers is not None:
        scale = per_group(rows.supers) / 2**layout.unit * scale
    if layout.low == kinds.ZERO:
        assert lows is not None
        codes = codes - spread(lows).int()
    weight = spread(scale) * codes.float()
    if layout.low == kinds.MIN:
        assert lows is not None
        weight += spread(lows.float())
    elif rows.super_lows is not None:
        assert lows is not None
        weight -= spread(per_group(rows.super_lows) * lows.float())
    return weight


@dataclass(frozen=True)
class _Record:
    """Views into one record. All but codes: [groups or 1, 64, bytes of an element]."""

    codes: np.ndarray
    scales: np.ndarray
    lows: np.ndarray | None
    supers: np.ndarray | None
    super_lows: np.ndarray | None


def _record(layout: RecordLayout, tile: np.ndarray, chunk: int) -> _Record:
    width = layout.chunk_width(chunk)
    groups = -(-width // layout.group)
    at = chunk * layout.record_bytes(CHUNK)

    def take(there: bool, *shape: int) -> np.ndarray | None:
        nonlocal at
        if not there:
            return None
        begin, at = at, at + int(np.prod(shape))
        return tile[begin:at].reshape(shape)

    supers = take(layout.has_supers, 1, TILE, 2)
    super_lows = take(layout.has_super_lows, 1, TILE, 2)
    scales = take(True, groups, TILE, SCALE_DTYPES[layout.scale].itemsize)
    lows = take(layout.low in LOW_DTYPES, groups, TILE, LOW_DTYPES.get(layout.low, torch.uint8).itemsize)
    codes = take(True, width // STEP, layout.bits, TILE, 4)
    assert codes is not None
    assert scales is not None
    return _Record(codes, scales, lows, supers, super_lows)


def _bytes(values: torch.Tensor) -> np.ndarray:
    """[n, G] -> [n, G, bytes of an element]."""
    raw: np.ndarray = values.contiguous().view(torch.uint8).numpy().reshape(*values.shape, values.itemsize)
    return raw


def _from_planes(planes: np.ndarray, bits: int) -> np.ndarray:
    """[k / 32, bits, 64, 4] -> codes [64, k]."""
    units = np.zeros((planes.shape[0], 8, TILE, 4), np.uint8)
    first_row = shift = 0
    for plane in PLANES[bits]:
        per_row = 8 // plane
        for unit in range(8):
            row = planes[:, first_row + unit // per_row]
            units[:, unit] |= ((row >> (unit % per_row * plane)) & ((1 << plane) - 1)) << shift
        first_row, shift = first_row + plane, shift + plane
    return units.transpose(2, 0, 1, 3).reshape(TILE, -1)
