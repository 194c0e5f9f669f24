"""The format that is none: bf16 or fp32 weights on a CPU (layouts: kernels/dense.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu, dense
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.rows import QuantizedRows


class DenseStorage:
    """A WeightStorage in the compute type. One copy serves decode, prefill and embedding look-ups."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows
        self.width = width
        self._dtype = dtype
        self._weight = dense.empty(num_rows, width, dtype)

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    @property
    def recordable(self) -> bool:
        return self._weight.recordable

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        assert isinstance(rows, torch.Tensor), "plain weights"
        self._weight.load_rows(first_row, rows.to(self._dtype).contiguous())

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "norms are kernels of their own on a CPU"
        return self._weight.matmul(x, bias, out_dtype)

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return cpu.gated_activation(self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, bias, self._dtype)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        assert table is None, "a CPU's tokens are all known"
        return self._weight.rows(ids)
