"""bf16 and fp32 weights on a CPU: bf16 in 12 bits a number where the processor can (compact.py), anything else as it is."""

from __future__ import annotations

from typing import Protocol

import torch

from nanovllm_cli.kernels import compact, cpu


class DenseWeight(Protocol):
    """A weight [num_rows, width] whose numbers are not rounded any further. All zeros at first."""

    num_rows: int
    width: int

    @property
    def num_bytes(self) -> int:
        """Memory it holds."""

    @property
    def recordable(self) -> bool:
        """True if `matmul` and `rows` are kernels alone, without a padded copy of their input."""

    def load_rows(self, first_row: int, rows: torch.Tensor) -> None:
        """rows [n, width] of its type, contiguous, become rows first_row … first_row + n - 1."""

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, width] of its type times it, transposed: [T, num_rows] in out_dtype, its type or float32. bias [num_rows] in
        out_dtype."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [n] int64, as [n, width]. The caller has checked the ids."""


def empty(num_rows: int, width: int, dtype: torch.dtype) -> DenseWeight:
    """The smallest form that this processor multiplies at full speed."""
    if _can_be_compact(width, dtype):
        return compact.Compact(num_rows, width)
    return Plain(num_rows, width, dtype)


def num_bytes(num_rows: int, width: int, dtype: torch.dtype) -> int:
    """What `empty` will take when it is full."""
    if _can_be_compact(width, dtype):
        return compact.num_bytes(num_rows, width)
    return cpu.packed_size(num_rows, width, dtype) * dtype.itemsize


def _can_be_compact(width: int, dtype: torch.dtype) -> bool:
    return compact.AVAILABLE and dtype == torch.bfloat16 and width % 2 == 0


class Plain:
    """One copy serves decode, prefill and embedding look-ups (layout: cpu_matmul)."""

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

    def load_rows(self, first_row: int, rows: torch.Tensor) -> None:
        cpu.pack_rows(self._packed, first_row, rows)

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        return cpu.matmul(x, self._packed, self.num_rows, bias, out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return cpu.unpack_rows(self._packed, ids, self.width)
