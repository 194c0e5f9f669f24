"""The format that is none: bf16 or fp32 weights, packed for the CPU's matmul (layout: kernels/cpu_matmul.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.rows import QuantizedRows


class DenseStorage:
    """A WeightStorage in the compute type. One copy serves decode, prefill and embedding look-ups."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows
        self.width = width
        self._packed = cpu.zeros(cpu.packed_size(num_rows, width, dtype), dtype, huge_pages=True)

    @property
    def num_bytes(self) -> int:
        return self._packed.nbytes

    @property
    def recordable(self) -> bool:
        return cpu.recordable(self.width, self._packed.dtype)

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        assert isinstance(rows, torch.Tensor), "plain weights"
        cpu.pack_rows(self._packed, first_row, rows.to(self._packed.dtype).contiguous())

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "norms are kernels of their own on a CPU"
        return cpu.matmul(x, self._packed, self.num_rows, bias, out_dtype)

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return cpu.gated_activation(self.matmul(x, bias, self._packed.dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, bias, self._packed.dtype)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        assert table is None, "a CPU's tokens are all known"
        return cpu.unpack_rows(self._packed, ids, self.width)
