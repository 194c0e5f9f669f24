"""Several weights that read the same input, each in a format of its own: q, k and v of a Q4_K_M file, say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm_cli.kernels import cpu, integer
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.cpu_values import CpuValues
from nanovllm_cli.quant.rows import QuantizedRows, num_rows
from nanovllm_cli.quant.storage import WeightStorage


class CpuStacked:
    """A WeightStorage on a CPU whose rows are its parts' rows behind each other. dtype: what is computed in.

    Parts that round activations alike share the rounding, and write their columns of the result in place.
    """

    def __init__(self, parts: Sequence[WeightStorage], dtype: torch.dtype) -> None:
        self.num_rows = sum(part.num_rows for part in parts)
        self.width = parts[0].width
        self._parts = parts
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def recordable(self) -> bool:
        return all(part.recordable and isinstance(part, CpuInteger | CpuValues) for part in self._parts)

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        for part in self._parts:
            if first_row < part.num_rows:
                assert first_row + num_rows(rows) <= part.num_rows, "rows of one part at a time"
                part.load_rows(first_row, rows)
                return
            first_row -= part.num_rows
        raise AssertionError("rows beyond the last part")

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "norms are kernels of their own on a CPU"
        out = cpu.new_tensor((x.shape[0], self.num_rows), out_dtype)
        first = 0
        rounded: list[integer.Rounded] = []
        for part in self._parts:
            columns = slice(first, first + part.num_rows)
            own_bias = None if bias is None else bias[columns]
            if isinstance(part, CpuInteger):
                fitting = [r for r in rounded if r.rounding.same(part.rounding)]
                if not fitting:
                    fitting = [integer.quantize(x, part.rounding)]
                    rounded += fitting
                part.multiply(fitting[0], own_bias, out[:, columns])
            elif isinstance(part, CpuValues):
                part.multiply(x, own_bias, out[:, columns])
            else:
                out[:, columns] = part.matmul(x, own_bias, out_dtype)
            first += part.num_rows
        return out

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return cpu.gated_activation(self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        return self.matmul(x, bias, self._dtype)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("an embedding has one part")
