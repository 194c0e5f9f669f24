"""Integer codes and GGUF blocks on a CPU that rounds activations to int8: packed in records (cpu_records.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import cpu, integer
from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.integer import Packed, Rounded, Rounding
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.record_kinds import CHUNK, GROUPS, RecordLayout
from nanovllm_cli.quant import gguf_blocks
from nanovllm_cli.quant.cpu_records import RecordRows, pack_rows
from nanovllm_cli.quant.format import Blocks, Integer
from nanovllm_cli.quant.rows import BlockRows, IntegerRows, QuantizedRows

_SCALES = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16}


class CpuInteger:
    """A WeightStorage of one format. dtype: what is computed in outside of matmuls. UnsupportedError for groups that don't
    fit."""

    recordable = True

    def __init__(self, form: Integer | Blocks, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows
        self.width = width
        self._form = form
        self._dtype = dtype
        layout = layout_of(form, num_rows, width)
        table = None if layout.table is None else torch.tensor(layout.table, dtype=torch.uint8)
        self._weight = Packed(layout, cpu.zeros(layout.num_bytes, torch.uint8, huge_pages=True), table)
        per_row = isinstance(form, Integer) and form.group == 0
        self.rounding = Rounding(layout.group, per_row, None)

    @property
    def num_bytes(self) -> int:
        return self._weight.data.nbytes

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

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return cpu.gated_activation(self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, bias, self._dtype)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        assert table is None, "a CPU's tokens are all known"
        return integer.rows(self._weight, ids, self.rounding.order, self._dtype)

    def _take_order(self, order: torch.Tensor) -> None:
        known = self.rounding.order
        if known is None:
            self.rounding = self.rounding._replace(order=order.int().contiguous())
        else:
            assert torch.equal(known, order.int()), "one order for all rows of a weight"


def layout_of(form: Integer | Blocks, num_rows: int, width: int) -> RecordLayout:
    """How a weight of a format is packed. UnsupportedError for widths and groups that don't fit."""
    form.check_width(width)
    if isinstance(form, Integer):
        group = form.group or CHUNK
        if group not in GROUPS and group % CHUNK:
            raise UnsupportedError(
                f"{form.name}: groups of {group} columns on a CPU; known: {', '.join(map(str, GROUPS))} and multiples of {CHUNK}",
                "quantize the weights again with another group size",
            )
        low, offset = (kinds.ZERO, 0) if form.zeros else (kinds.NO_LOW, form.middle)
        return RecordLayout(num_rows, width, form.bits, min(group, CHUNK), _SCALES[form.scales], low, offset)
    kind = gguf_blocks.block_type(form.type)
    low = kinds.NO_LOW
    if kind.has_minimum:
        low = kinds.MIN if kind.sub is None else (kinds.NIBBLE if kind.code_bits == 2 else kinds.SUB_MIN)
    if kind.sub is None:
        scale = kinds.F16 if kind.d == torch.float16 else kinds.E8M0
    else:
        scale = kinds.SUB_U8 if kind.sub == torch.uint8 else kinds.SUB_I8
    table, offset = None, kind.offset
    if kind.table is not None:
        offset = -min(kind.table)
        table = tuple(value + offset for value in kind.table)
    unit = round(1 / kind.unit).bit_length() - 1
    return RecordLayout(num_rows, width, kind.code_bits, kind.group, scale, low, offset, unit, table)


def record_rows(form: Integer | Blocks, rows: QuantizedRows, layout: RecordLayout) -> RecordRows:
    """The format's rows as `pack_rows` takes them, columns in the order of the groups."""
    if isinstance(form, Integer):
        assert isinstance(rows, IntegerRows)
        codes = rows.codes if rows.order is None else rows.codes[:, rows.order.long()]
        repeat = layout.num_groups // rows.scales.shape[1]
        scales, zeros = (
            None if t is None else t.repeat_interleave(repeat, 1)[:, : layout.num_groups]
            for t in (rows.scales, rows.zeros)
        )
        assert scales is not None
        assert scales.dtype == kinds.SCALE_DTYPES[layout.scale]
        return RecordRows(codes, scales, zeros)
    assert isinstance(rows, BlockRows)
    parts = gguf_blocks.decompose(form.type, rows.data)
    if parts.sub is None:
        return RecordRows(parts.codes, parts.d, None if parts.dmin is None else -parts.dmin)
    if layout.low == kinds.NIBBLE:
        assert parts.sub_min is not None
        return RecordRows(parts.codes, parts.sub | parts.sub_min << 4, None, parts.d, parts.dmin)
    return RecordRows(parts.codes, parts.sub, parts.sub_min, parts.d, parts.dmin)
