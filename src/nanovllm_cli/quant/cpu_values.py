"""Quantized weights on a CPU whose activations are not rounded to int8: packed in records (cpu_records.py), multiplied as numbers
of the compute type (kernels/cpu_values.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, integer, values
from nanovllm_cli.kernels import record_kinds as kinds
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.record_kinds import CHUNK, RecordLayout
from nanovllm_cli.kernels.values import Scaled
from nanovllm_cli.quant.cpu_integer import compact_layout_of, record_rows
from nanovllm_cli.quant.cpu_records import RecordRows, pack_rows
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.format import NF4, Affine, Blocks, Format, Fp8, Integer, Nf4
from nanovllm_cli.quant.rows import Fp8Rows, IntegerRows, Nf4Rows, QuantizedRows


class CpuValues(CpuStorage):
    """A WeightStorage of one format. dtype: what is computed in, in which a panel's numbers are exact. rounds: activations are
    rounded to e4m3 where an fp8 format says so."""

    def __init__(self, form: Format, num_rows: int, width: int, dtype: torch.dtype, *, rounds: bool) -> None:
        form.check_width(width)
        super().__init__(num_rows, width, dtype)
        self._form = form
        self._rounds = rounds
        self._layout, self._kind = _layout(form, num_rows, width)
        self._weight = integer.empty(self._layout)
        self._numbers = torch.tensor(NF4).to(dtype).float() if self._kind == values.TABLE else None
        self._order: torch.Tensor | None = None
        self._input_scale: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return self._weight.data.nbytes

    @property
    def recordable(self) -> bool:
        return self._order is None and cpu.recordable(self.width, self._dtype)

    @property
    def asking_bytes(self) -> int:
        return self.num_bytes if values.asks_ahead(self._weight, self._kind, self._dtype) else 0

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        quantized = self._form.quantize(rows) if isinstance(rows, torch.Tensor) else rows
        if isinstance(quantized, IntegerRows) and quantized.order is not None:
            self._order = quantized.order
        if isinstance(quantized, Fp8Rows) and quantized.input_scale is not None:
            self._input_scale = quantized.input_scale.float().reshape(1)
        pack_rows(self._layout, self._weight.data, first_row, self._record_rows(quantized))

    def _record_rows(self, rows: QuantizedRows) -> RecordRows:
        if isinstance(rows, Fp8Rows):
            groups = self._layout.num_groups
            return RecordRows(rows.codes, rows.scales.repeat(1, groups) if rows.scales.shape[1] == 1 else rows.scales)
        if isinstance(rows, Nf4Rows):
            return RecordRows(rows.codes, rows.scales)
        assert isinstance(self._form, Integer | Affine | Blocks)
        return record_rows(self._form, rows, self._layout)

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "norms are kernels of their own on a CPU"
        out = cpu.new_tensor((x.shape[0], self.num_rows), out_dtype)
        self.multiply(x, bias, out)
        return out

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """out [T, num_rows], which may be columns of a wider tensor, = x @ weight.T + bias."""
        values.matmul(self._scaled(x), self._weight, self._kind, self._numbers, bias, out)

    def _scaled(self, x: torch.Tensor) -> Scaled:
        if isinstance(self._form, Fp8) and self._form.activation != "none" and self._rounds:
            assert self._form.activation == "dynamic" or self._input_scale is not None, "static activations have a scale"
            group = self._form.block or self.width
            return values.round_e4m3(x, group, self._input_scale)
        return Scaled(x if self._order is None else x[:, self._order.long()])

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        assert table is None, "a CPU's tokens are all known"
        if self._kind == values.CODE:
            return integer.rows(self._weight, ids, self._order, self._dtype)
        return values.rows(self._weight, ids, self._kind, self._numbers, self._dtype)


def _layout(form: Format, num_rows: int, width: int) -> tuple[RecordLayout, int]:
    """And what codes stand for."""
    if isinstance(form, Fp8):
        return RecordLayout(num_rows, width, 8, form.block or CHUNK, kinds.F32), values.E4M3
    if isinstance(form, Nf4):
        return RecordLayout(num_rows, width, 4, form.group, kinds.F32), values.TABLE
    assert isinstance(form, Integer | Affine | Blocks)
    return compact_layout_of(form, num_rows, width), values.CODE
