"""bf16 and fp32 weights on a CPU: bf16 in 12 bits a number where the processor can (compact.py), anything else as it is."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import compact, cpu


def empty(num_rows: int, width: int, dtype: torch.dtype) -> compact.Compact | Plain:
    """All zeros, in the smallest form that this processor multiplies at full speed."""
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
    """A weight [num_rows, width] as it is, behind the same doors as `Compact` (layout: cpu_matmul)."""

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
