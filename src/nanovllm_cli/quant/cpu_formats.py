"""Which storage keeps which format on a CPU."""

from __future__ import annotations

import torch

from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quant.format import Blocks, Format, Integer
from nanovllm_cli.quant.rows import QuantizedRows
from nanovllm_cli.quant.storage import WeightStorage


def make_storage(form: Format, num_rows: int, width: int, dtype: torch.dtype) -> WeightStorage:
    """An empty weight in a format; dtype is what is computed in. In float32 activations are never rounded to int8."""
    rounds = isinstance(form, Blocks) or (isinstance(form, Integer) and form.activation == "int8")
    if rounds and dtype == torch.bfloat16:
        assert isinstance(form, Integer | Blocks)
        return CpuInteger(form, num_rows, width, dtype)
    return _Dequantized(form, num_rows, width, dtype)


class _Dequantized(DenseStorage):
    """The format's numbers, in the compute type."""

    def __init__(self, form: Format, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(num_rows, width, dtype)
        self._form = form

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        quantized = self._form.quantize(rows) if isinstance(rows, torch.Tensor) else rows
        super().load_rows(first_row, self._form.dequantize(quantized))
