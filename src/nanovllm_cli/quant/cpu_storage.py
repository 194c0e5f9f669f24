"""What all storages of a CPU have in common: a gate and a residual come behind the product, by kernels of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from nanovllm_cli.kernels import gates
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.rows import QuantizedRows


class CpuStorage(ABC):
    """Most of a WeightStorage. dtype: what is computed in outside of matmuls."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype) -> None:
        self.num_rows = num_rows
        self.width = width
        self._dtype = dtype

    @property
    def asking_bytes(self) -> int:
        """That a single row reads by kernels which ask for them ahead of their use (`kernels.ahead`)."""
        return 0

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @property
    @abstractmethod
    def recordable(self) -> bool: ...

    @abstractmethod
    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None: ...

    @abstractmethod
    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor: ...

    @abstractmethod
    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor: ...

    def multiply_one(self) -> None:
        """A row of zeros, for who measures how long it takes."""
        self.matmul(torch.zeros(1, self.width, dtype=self._dtype), None, self._dtype)

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return gates.gated_activation(self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, bias, self._dtype)
