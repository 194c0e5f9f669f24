"""Integer codes, with minima or not, and GGUF blocks on a CPU that rounds activations to int8: packed in records
(cpu_records.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, integer
from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.integer import Rounded, Rounding
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.record_kinds import CHUNK, GROUPS, Codebook, RecordLayout
from nanovllm_cli.quant import gguf_blocks
from nanovllm_cli.quant.cpu_records import RecordRows, pack_rows
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.format import Affine, Blocks, Integer
from nanovllm_cli.quant.gguf_blocks import BlockType
from nanovllm_cli.quant.gguf_codebooks import CODEBOOKS, codebook
from nanovllm_cli.quant.rows import AffineRows, BlockRows, IntegerRows, QuantizedRows

_TERNARY = np.array([1, 3, 9, 27], np.int16)
"""What four digits of an index are worth."""
Whole = Integer | Affine | Blocks
"""Formats whose codes are whole numbers."""
_SCALES = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16}


class CpuInteger(CpuStorage):
    """A WeightStorage of one format. dtype: what is computed in outside of matmuls. UnsupportedError for groups that don't
    fit."""

    recordable = True

    def __init__(self, form: Whole, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(num_rows, width, dtype)
        self._form = form
        layout = compact_layout_of(form, num_rows, width)
        self._weight = integer.empty(layout)
        per_row = isinstance(form, Integer) and form.group == 0
        self.rounding = Rounding(layout.group, per_row, None)

    @property
    def num_bytes(self) -> int:
        return self._weight.data.nbytes

    @property
    def asking_bytes(self) -> int:
        return self.num_bytes if integer.asks_ahead(self._weight) else 0

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        quantized = self._form.quantize(rows) if isinstance(rows, torch.Tensor) else rows
        if isinstance(quantized, IntegerRows) and quantized.order is not None:
            self._take_order(quantized.order)
        pack_rows(
            self._weight.layout, self._weight.data, first_row, record_rows(self._form, quantized, self._weight.layout)
        )

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "norms are kernels of their own on a CPU"
        out = cpu.new_tensor((x.shape[0], self.num_rows), out_dtype)
        self.multiply(integer.quantize(x, self.rounding), bias, out)
        return out

    def multiply(self, x: Rounded, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [T, num_rows], which may be columns of a wider tensor, = x @ weight.T + bias. x: rounded by `rounding`."""
        integer.matmul(x, self._weight, bias, out)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        assert table is None, "a CPU's tokens are all known"
        return integer.rows(self._weight, ids, self.rounding.order, self._dtype)

    def _take_order(self, order: torch.Tensor) -> None:
        known = self.rounding.order
        if known is None:
            self.rounding = self.rounding._replace(order=order.int().contiguous())
        else:
            assert torch.equal(known, order.int()), "one order for all rows of a weight"


def layout_of(form: Whole, num_rows: int, width: int) -> RecordLayout:
    """How a weight of a format is packed, with a code for each number. UnsupportedError for widths and groups that don't fit."""
    form.check_width(width)
    if not isinstance(form, Blocks):
        group = form.group or CHUNK
        if group not in GROUPS and group % CHUNK:
            raise UnsupportedError(
                f"{form.name}: groups of {group} columns on a CPU; known: {', '.join(map(str, GROUPS))} and multiples of {CHUNK}",
                "quantize the weights again with another group size",
            )
        if isinstance(form, Affine):
            low, offset = kinds.MIN, 0
        else:
            low, offset = (kinds.ZERO, 0) if form.zeros else (kinds.NO_LOW, form.middle)
        return RecordLayout(num_rows, width, form.bits, min(group, CHUNK), _SCALES[form.scales], low, offset)
    kind = gguf_blocks.block_type(form.type)
    low = kinds.NO_LOW
    if kind.has_minimum:
        low = kinds.MIN if kind.sub is None else (kinds.NIBBLE if kind.code_bits == 2 else kinds.SUB_MIN)
    table, offset = None, kind.offset
    if kind.table is not None:
        offset = -min(kind.table)
        table = tuple(value + offset for value in kind.table)
    unit = 1 if kind.d_values == gguf_blocks.UE4M3 else round(1 / kind.unit).bit_length() - 1
    if kind.sub is not None:
        scale = kinds.SUB_U8 if kind.sub == torch.uint8 else kinds.SUB_I8
    else:
        of_bytes = kinds.UE4M3 if kind.d_values == gguf_blocks.UE4M3 else kinds.E8M0
        scale = kinds.F16 if kind.d_values is None else of_bytes
    return RecordLayout(num_rows, width, kind.code_bits, kind.group, scale, low, offset, unit, table)


def compact_layout_of(form: Whole, num_rows: int, width: int) -> RecordLayout:
    """The same, but as small as the file where codes for each number are more than 1.1 of it: points of codebooks, and scales of
    4 bits. A CPU looks them up while it unpacks a record."""
    layout = layout_of(form, num_rows, width)
    if not isinstance(form, Blocks):
        return layout
    kind = gguf_blocks.block_type(form.type)
    known = _codebook(kind, layout.table)
    if known is None:
        return layout
    scale = kinds.F16 if kind.sub is None else kinds.SUB_ODD
    return replace(layout, bits=0, scale=scale, table=None, codebook=known)


def _codebook(kind: BlockType, table: tuple[int, ...] | None) -> Codebook | None:
    """A type's codebook, if it has one. table: what codes with a sign on top stand for."""
    if kind.name == "TQ1_0":
        digits = (np.arange(1 << 7)[:, None] // _TERNARY % 3).astype(np.uint8)
        return Codebook(7, 4, kinds.NO_SIGNS, digits.tobytes(), ((0, 1, 2), ()))
    if kind.name not in CODEBOOKS:
        return None
    assert table is not None
    points, half = codebook(kind.name), 1 << (kind.code_bits - 1)
    signs = kinds.SIGN_A_POINT if kind.name.startswith("IQ1") else kinds.SIGN_A_CODE
    index_bits = len(points).bit_length() - 1
    return Codebook(index_bits, points.shape[1], signs, points.tobytes(), (table[:half], table[half : 2 * half]))


def record_rows(form: Whole, rows: QuantizedRows, layout: RecordLayout) -> RecordRows:
    """The format's rows as `pack_rows` takes them, columns in the order of the groups."""
    if isinstance(rows, IntegerRows | AffineRows):
        return by_group(rows, layout)
    assert isinstance(form, Blocks)
    assert isinstance(rows, BlockRows)
    if layout.codebook is not None:
        return _point_rows(form.type, rows.data)
    parts = gguf_blocks.decompose(form.type, rows.data, _unpacked)
    if layout.scale == kinds.UE4M3:
        factors = torch.ones(len(parts.d), device=parts.d.device) if rows.factors is None else rows.factors
        return RecordRows(parts.codes, parts.d, None, factors.unsqueeze(1).expand(-1, layout.num_chunks))
    if parts.sub is None:
        return RecordRows(parts.codes, parts.d, None if parts.dmin is None else -parts.dmin)
    if layout.low == kinds.NIBBLE:
        assert parts.sub_min is not None
        return RecordRows(parts.codes, parts.sub | parts.sub_min << 4, None, parts.d, parts.dmin)
    return RecordRows(parts.codes, parts.sub, parts.sub_min, parts.d, parts.dmin)


def by_group(rows: IntegerRows | AffineRows, layout: RecordLayout) -> RecordRows:
    """The same of formats whose groups may be longer than the layout's."""
    order, lows = (None, rows.minima) if isinstance(rows, AffineRows) else (rows.order, rows.zeros)
    codes = rows.codes if order is None else rows.codes[:, order.long()]
    repeat = layout.num_groups // rows.scales.shape[1]
    scales, lows = (None if t is None else t.repeat_interleave(repeat, 1)[:, : layout.num_groups] for t in (rows.scales, lows))
    assert scales is not None
    assert scales.dtype == kinds.SCALE_DTYPES[layout.scale]
    assert layout.low != kinds.MIN or (lows is not None and lows.dtype == scales.dtype)
    return RecordRows(codes, scales, lows)


def _unpacked(kind: BlockType, blocks: torch.Tensor) -> torch.Tensor:
    """As `gguf_blocks.unpacked`: by all threads of a CPU where codes are bits of a block. A GPU's blocks come here, too."""
    if blocks.device.type != "cpu" or kind.name not in gguf_blocks.CODES:
        return gguf_blocks.unpacked(kind, blocks)
    return integer.unpack(blocks, kind.block_len, gguf_blocks.CODES[kind.name])


def _point_rows(type_name: str, data: torch.Tensor) -> RecordRows:
    if type_name in CODEBOOKS:
        points = gguf_blocks.find_points(type_name, data)
        nibbles = points.sub >> 1
        return RecordRows(points.chosen, nibbles[:, ::2] | nibbles[:, 1::2] << 4, None, points.d, None, points.signs)
    parts = gguf_blocks.decompose(type_name, data)
    fours = parts.codes.view(-1, 4).short() * torch.from_numpy(_TERNARY)
    return RecordRows(fours.sum(1, dtype=torch.int16).view(len(data), -1), parts.d)
