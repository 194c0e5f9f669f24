"""The format that is none: bf16 or fp32 weights on a CPU (layouts: kernels/dense.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import dense
from nanovllm_cli.kernels.compact import Compact
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.rows import QuantizedRows


class DenseStorage(CpuStorage):
    """A WeightStorage in the compute type. One copy serves decode, prefill and embedding look-ups."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(num_rows, width, dtype)
        self._weight = dense.empty(num_rows, width, dtype)

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    @property
    def asking_bytes(self) -> int:
        return self.num_bytes if isinstance(self._weight, Compact) else 0

    @property
    def recordable(self) -> bool:
        return self._weight.recordable

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        assert isinstance(rows, torch.Tensor), "plain weights"
        self._weight.load_rows(first_row, rows.to(self._dtype).contiguous())

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "norms are kernels of their own on a CPU"
        return self._weight.matmul(x, bias, out_dtype)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        assert table is None, "a CPU's tokens are all known"
        return self._weight.rows(ids)
