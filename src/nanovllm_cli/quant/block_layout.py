"""GGUF's blocks, and codes with minima as MLX has them, as a GPU keeps them: packed once, when they are loaded (the layout:
kernels/block_records.py)."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from nanovllm_cli.kernels import block_records as records
from nanovllm_cli.kernels.block_records import SIGN, STEP, TILE, PackedBlocks
from nanovllm_cli.kernels.record_kinds import SUB_I8, RecordLayout
from nanovllm_cli.quant.cpu_integer import by_group, layout_of, record_rows
from nanovllm_cli.quant.cpu_records import RecordRows
from nanovllm_cli.quant.format import Affine, Blocks
from nanovllm_cli.quant.gguf_blocks import BLOCKS
from nanovllm_cli.quant.rows import AffineRows, BlockRows

LOOKED_UP = tuple(name for name in BLOCKS if name.startswith(("IQ1", "IQ2", "IQ3")))
"""Whose points come from tables on the host."""


def empty(form: Blocks | Affine, num_rows: int, width: int, device: torch.device) -> PackedBlocks:
    """A weight to be filled by `pack_rows`. UnsupportedError for widths that are not whole blocks or groups."""
    layout, name = layout_of(form, num_rows, width), form.type if isinstance(form, Blocks) else form.name
    return PackedBlocks(name, layout, torch.zeros(records.shape(layout), dtype=torch.uint8, device=device))


def pack_rows(weight: PackedBlocks, first_row: int, rows: BlockRows | AffineRows, on: torch.device | None = None) -> None:
    """Rows of the weight's type on any device become rows first_row …, which nobody has set before. on: which one packs them, if
    it can and that is not the weight's: a model of 8B takes a GPU a second, and 16 cores half a minute (est.)."""
    layout = weight.layout
    where = torch.device("cpu") if weight.type in LOOKED_UP else on or weight.data.device
    if isinstance(rows, AffineRows):
        plain = by_group(AffineRows(*(part.to(where) for part in rows)), layout)
    else:
        data, factors = rows.data.to(where), None if rows.factors is None else rows.factors.to(where)
        plain = record_rows(Blocks(weight.type), BlockRows(data, factors), layout)
    packed = pack(layout, plain, first_row % TILE)
    first = first_row // TILE
    weight.data[first : first + packed.shape[0]] |= packed.to(weight.data.device)


def pack(layout: RecordLayout, rows: RecordRows, above: int = 0) -> torch.Tensor:
    """Records [tiles, records, bytes], the first tile's first `above` rows and what fills the last tile up all zero bits."""
    columns, below = records.columns_of(layout), -(above + rows.codes.shape[0]) % TILE

    def tiled(values: torch.Tensor, width: int) -> torch.Tensor:
        """[n, …] -> [tiles, records, 16, width]; width: of a record."""
        padded = pad(values, (0, -values.shape[1] % width, above, below))
        return padded.view(-1, TILE, padded.shape[1] // width, width).transpose(1, 2)

    def raw(values: torch.Tensor | None, width: int) -> list[torch.Tensor]:
        if values is None:
            return []
        flat = tiled(values, width)
        return [flat.contiguous().view(torch.uint8).flatten(2)]

    codes = rows.codes if layout.bits < 8 else rows.codes - SIGN  # wraps around to what the signed byte has
    scales = rows.scales.view(torch.uint8) ^ 128 if layout.scale == SUB_I8 else rows.scales  # from -128 on
    groups = columns // layout.group
    parts = _planes(layout, _words(tiled(codes, columns)))
    parts += raw(scales, groups) + raw(rows.lows, groups) + raw(rows.supers, 1) + raw(rows.super_lows, 1)
    return torch.cat(parts, 2)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """[tiles, records, 16, columns] -> [tiles, records, steps, 32 lanes, 8 words, 4 codes]."""
    tiles, across, _, columns = codes.shape
    split = codes.reshape(tiles, across, 2, 8, columns // STEP, 2, 2, 4, 4)
    return split.permute(0, 1, 4, 3, 7, 5, 6, 2, 8).reshape(tiles, across, columns // STEP, 32, 8, 4)


def _planes(layout: RecordLayout, words: torch.Tensor) -> list[torch.Tensor]:
    """Each [tiles, records, bytes]."""
    if layout.bits == 8:
        tiles, across, steps, *_ = words.shape
        return [words.view(tiles, across, steps, 32, 2, 4, 4).transpose(3, 4).flatten(2)]
    if layout.bits == 4 and layout.table is not None:
        return [(words[..., 0::2] | words[..., 1::2] << 4).flatten(2)]
    base = 4 if layout.bits >= 4 else min(layout.bits, 2)
    high = layout.bits - base
    return [_plane(words, 0, base), *([_plane(words, base, high)] if high else [])]


def _plane(words: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """Bits `shift` … of each code: [tiles, records, bytes]."""
    fields = words >> shift & ((1 << bits) - 1)
    plane = torch.zeros_like(words[..., :bits, :])
    for i in range(8 // bits):
        plane |= fields[..., i :: 8 // bits, :] << i * bits
    return plane.flatten(2)
