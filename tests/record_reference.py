"""Packed records read back, slow and straight: what tests compare the kernels with. The layout: quant/cpu_records.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.record_kinds import (
    CHUNK,
    PLANES,
    SCALE_DTYPES,
    STEP,
    TILE,
    Codebook,
    RecordLayout,
)
from nanovllm_cli.quant.cpu_records import RecordRows


def unpack(layout: RecordLayout, packed: torch.Tensor) -> RecordRows:
    """The plain arrays again, [num_rows, …]."""
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
        whole("lows", layout.low_dtype or torch.uint8),
        whole("supers", torch.float32 if layout.scale == kinds.UE4M3 else torch.float16),
        whole("super_lows", torch.float16),
        signs,
    )


def dequantize(layout: RecordLayout, rows: RecordRows) -> torch.Tensor:
    """fp32 [n, width], each step rounded as the layout's formula reads; a zero point is taken off the code, exactly."""

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
        scale = torch.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * torch.exp2(exponent - 10.0))
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

    supers = take(layout.has_supers, 1, TILE, 4 if layout.scale == kinds.UE4M3 else 2)
    super_lows = take(layout.has_super_lows, 1, TILE, 2)
    scales = take(True, -(-width // layout.scale_span), TILE, SCALE_DTYPES[layout.scale].itemsize)
    lows = take(layout.low_dtype is not None, groups, TILE, layout.low_bytes)
    codes = take(True, width // STEP, layout.step_bytes)
    assert codes is not None
    assert scales is not None
    return _Record(codes, scales, lows, supers, super_lows)


def _from_planes(planes: np.ndarray, bits: int) -> np.ndarray:
    """[k / 32, bits * 64 * 4] -> codes [64, k]."""
    read: list[int] = []
    for unit in range(8):
        before = 0
        for plane in PLANES[bits]:
            read.append(before + unit * plane // 8)
            before += plane
    planes = planes.reshape(-1, bits, TILE, 4)[:, np.argsort(list(dict.fromkeys(read)))]
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
