"""The layout of integer codes on a CPU: one for every format that has codes of 2 to 8 bits and a scale a group.

    weight[n, k] = scale[n, g] * (code[n, k] - offset) - low[n, g]                 g = k // group

(or table[code] for codes of 4 bits that stand for other numbers).
A weight [N, K] is cut into tiles of 64 rows (columns of the output) and chunks of 256 along k (the last one shorter: K rounded up
to 32). A tile's chunks lie behind each other, tiles behind each other. A (tile, chunk) is one record:

    supers   [64] f16, [64] f16            one a column: of sub scales, of sub mins; where there are any
    scales   [groups, 64]                  f32, f16, bf16, e8m0 (a power of two), ue4m3, or u8 / i8 times the super; odd numbers
                                           times the super: [groups / 2, 64], a byte for two groups
    lows     [groups, 64]                  u8 zero points, f16 mins (added), u8 times the second super; where there are any
    codes    [k / 32, bits, 64, 4] bytes   32 k's of 64 columns, as bit planes

Everything is read once, in the order in which it lies: a processor fetches such a stream ahead by itself.

Of 32 k's, four that follow each other are a unit: what `vpdpbusd` multiplies at once for one column, four bytes. Eight units are
split into planes, the widest first and with the lowest bits: 8 = {8}, 7 = {4, 2, 1}, 6 = {4, 2}, 5 = {4, 1}, 4 = {4}, 3 = {2, 1},
2 = {2}. A plane of b bits takes b of the `bits` rows of 64 x 4 bytes; a row holds 8 / b units that follow each other, the first
in the lowest bits. Unpacking is shifts, masks and ors of whole vectors, and 8 bits need none.

With a codebook (GGUF's IQ types) a record has indices of points of `length` codes each instead: 32 k's of 64 columns are

    low      [32 / length, 64] u8          the lowest 8 bits of indices. Indices of 7 bits: [7, 64], with the bits of the eighth
                                           row's on top of theirs
    high     [32 / length, more] u64       the bits above, one after another: bit c is column c's
    signs    [8, 64 * 4] bits              one a code, in the order of a unit's bytes; or a point: [32 / length] u64

Scales are as small as in the file. A scale a channel is one a chunk, repeated: under 2 % of an 8-bit weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm_cli.kernels import cpu_pack
from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.cpu import address_of, launch
from nanovllm_cli.kernels.cpu_pack_points import pack_points
from nanovllm_cli.kernels.record_kinds import (
    CHUNK,
    LOW_DTYPES,
    PLANES,
    SCALE_DTYPES,
    STEP,
    TILE,
    Codebook,
    RecordLayout,
)


@dataclass(frozen=True)
class RecordRows:
    """Rows in plain arrays: what a record is packed from. G groups, S = ceil(K / 256).

    codes u8 [n, K]; scales [n, G] in the layout's type; lows [n, G] (None where the layout has none or nibbles);
    supers, super_lows f16 [n, S] or None. kinds.NIBBLE: a scale's byte is sub scale | sub min << 4; kinds.SUB_ODD: [n, G / 2],
    two nibbles of (scale - 1) / 2. With a codebook codes are indices i16 [n, K / length], and signs u8 [n, K / 8] have a bit a
    code, lowest first, or 1 a point; None for those without.
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

    def rows_of(read: Callable[[np.ndarray], np.ndarray], width: int) -> torch.Tensor:
        tiles = [np.concatenate([read(r.codes) for r in chunks], 1) for chunks in records]
        return torch.from_numpy(np.concatenate(tiles)[: layout.num_rows, :width].copy())

    scales = whole("scales", SCALE_DTYPES[layout.scale])
    assert scales is not None
    codebook = layout.codebook
    if codebook is None:
        codes, signs = rows_of(lambda r: _from_planes(r, layout.bits), layout.width), None
    else:
        codes = rows_of(lambda r: _indices(r, codebook), layout.width // codebook.length)
        signs = rows_of(lambda r: _signs(r, codebook), layout.width // 8) if codebook.signs else None
    return RecordRows(
        codes,
        scales,
        whole("lows", LOW_DTYPES.get(layout.low, torch.uint8)),
        whole("supers", torch.float16),
        whole("super_lows", torch.float16),
        signs,
    )


def dequantize(layout: RecordLayout, rows: RecordRows) -> torch.Tensor:
    """fp32 [n, width], each step rounded as the formula at the top reads; a zero point is taken off the code, exactly."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(layout.group, 1)[:, : layout.width]

    def per_group(supers: torch.Tensor) -> torch.Tensor:
        return supers.float().repeat_interleave(CHUNK // layout.group, 1)[:, : layout.num_groups]

    codes = rows.codes.int()
    if layout.codebook is not None:
        codes = _numbers(layout.codebook, rows.codes, rows.signs)
    if layout.table is not None:
        codes = torch.tensor(layout.table, dtype=torch.int32)[codes]
    codes = codes - layout.offset
    scales, lows = rows.scales, rows.lows
    if layout.low == kinds.NIBBLE:
        scales, lows = scales & 15, scales >> 4
    if layout.scale == kinds.SUB_ODD:
        scales = torch.stack([scales & 15, scales >> 4], -1).flatten(1)[:, : layout.num_groups] * 2 + 1
    if layout.scale == kinds.E8M0:
        scale = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 128)
    elif layout.scale == kinds.UE4M3:
        exponent, fraction = scales.int() >> 3, (scales & 7).float()
        scale = torch.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * torch.exp2(exponent - 10.0)) / 2**layout.unit
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
    """Views into one record. codes: [k / 32, bytes]; the others: [groups or 1, 64, bytes of an element]."""

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
    scales = take(True, -(-width // layout.scale_span), TILE, SCALE_DTYPES[layout.scale].itemsize)
    lows = take(layout.low in LOW_DTYPES, groups, TILE, LOW_DTYPES.get(layout.low, torch.uint8).itemsize)
    codes = take(True, width // STEP, layout.step_bytes)
    assert codes is not None
    assert scales is not None
    return _Record(codes, scales, lows, supers, super_lows)


def _padded(rows: torch.Tensor, width: int) -> np.ndarray:
    """[n, width], zeros behind what is there."""
    return np.pad(rows.contiguous().numpy(), ((0, 0), (0, width - rows.shape[1])))


def _bytes(values: torch.Tensor) -> np.ndarray:
    """[n, G] -> [n, G, bytes of an element]."""
    raw: np.ndarray = values.contiguous().view(torch.uint8).numpy().reshape(*values.shape, values.itemsize)
    return raw


def _from_planes(planes: np.ndarray, bits: int) -> np.ndarray:
    """[k / 32, bits * 64 * 4] -> codes [64, k]."""
    planes = planes.reshape(-1, bits, TILE, 4)
    units = np.zeros((planes.shape[0], 8, TILE, 4), np.uint8)
    first_row = shift = 0
    for plane in PLANES[bits]:
        per_row = 8 // plane
        for unit in range(8):
            row = planes[:, first_row + unit // per_row]
            units[:, unit] |= ((row >> (unit % per_row * plane)) & ((1 << plane) - 1)) << shift
        first_row, shift = first_row + plane, shift + plane
    return units.transpose(2, 0, 1, 3).reshape(TILE, -1)


def _numbers(codebook: Codebook, index: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
    """What points stand for, int32 [n, K]."""
    points = np.frombuffer(codebook.points, np.uint8).reshape(-1, codebook.length)[index.numpy()].reshape(index.shape[0], -1)
    if signs is None:
        side = np.zeros_like(points)
    elif codebook.signs == kinds.SIGN_A_CODE:
        side = _lowest_first(signs.numpy())
    else:
        side = signs.numpy().repeat(codebook.length, 1)
    return torch.from_numpy(np.where(side == 0, *(np.array(own)[points % len(own)] for own in codebook.numbers)).astype(np.int32))


def _lowest_first(data: np.ndarray) -> np.ndarray:
    """The bits of bytes, of which there are eight times as many."""
    return np.unpackbits(data, axis=-1, bitorder="little")


def _indices(steps: np.ndarray, codebook: Codebook) -> np.ndarray:
    """[k / 32, bytes] -> i16 [64, k / length]."""
    rows, more = STEP // codebook.length, max(0, codebook.index_bits - 8)
    low_rows = rows if codebook.index_bits >= 8 else codebook.index_bits
    low = steps[:, : low_rows * TILE].reshape(-1, low_rows, TILE).astype(np.int16)
    if low_rows < rows:
        last = ((low >> 7) << np.arange(low_rows, dtype=np.int16)[:, None]).sum(1, keepdims=True, dtype=np.int16)
        low = np.concatenate([low & 127, last], 1)
    high = _lowest_first(steps[:, low_rows * TILE :][:, : 8 * rows * more].reshape(len(steps), rows, more, 8)).astype(np.int16)
    index: np.ndarray = low | (high << np.arange(8, 8 + more, dtype=np.int16)[:, None]).sum(2, dtype=np.int16)
    return index.transpose(2, 0, 1).reshape(TILE, -1)


def _signs(steps: np.ndarray, codebook: Codebook) -> np.ndarray:
    """[k / 32, bytes] -> u8 [64, k / 8]."""
    rows = STEP // codebook.length
    at = TILE * rows * codebook.index_bits // 8
    if codebook.signs == kinds.SIGN_A_POINT:
        return _lowest_first(steps[:, at:].reshape(-1, rows, 8)).transpose(2, 0, 1).reshape(TILE, -1)
    codes = _lowest_first(steps[:, at:].reshape(-1, 8, TILE // 2)).reshape(-1, 8, TILE, 4)
    return np.packbits(codes.transpose(2, 0, 1, 3).reshape(TILE, -1), axis=1, bitorder="little")
