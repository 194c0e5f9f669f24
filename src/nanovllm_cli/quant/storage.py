"""WeightStorage: what a linear layer asks of the format its weight is kept in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.rows import QuantizedRows, num_rows


class WeightStorage(Protocol):
    """One weight of num_rows outputs by width inputs, in whatever form its format keeps it."""

    num_rows: int
    width: int

    @property
    def num_bytes(self) -> int:
        """Memory it holds."""

    @property
    def recordable(self) -> bool:
        """True if `matmul` and `rows` are kernels alone, so that a step may be recorded and replayed."""

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        """rows [n, width] become rows first_row … first_row + n - 1: of any float type, rounded to nearest, or already in the
        format. Slices of floats begin at multiples of 128 rows."""

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, width] @ weight.T + bias: [T, num_rows] in out_dtype. A row's bits don't depend on the other rows."""

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """y = matmul in the compute type, then act(first half of y's columns) * second half: [T, num_rows / 2]. Of relu2, which
        has no gate: relu(y) ** 2 [T, num_rows]."""

    def add_matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """residual [T, num_rows] += matmul, and None; or, where the format can't, the matmul alone, in the compute type."""

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        """Rows ids [n] int64, as [n, width] in the compute type: what an embedding takes from a tied head. With a table the
        rows are table[ids]; only a platform that feeds what nobody has read asks for that."""


class Stacked:
    """What storages have in common that are several weights which read the same input: their rows lie behind each other."""

    def __init__(self, parts: Sequence[WeightStorage]) -> None:
        self.num_rows = sum(part.num_rows for part in parts)
        self.width = parts[0].width
        self._parts = parts

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        for part, columns in self._columns():
            if first_row < columns.stop:
                assert first_row + num_rows(rows) <= columns.stop, "rows of one part at a time"
                part.load_rows(first_row - columns.start, rows)
                return
        raise AssertionError("rows beyond the last part")

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("an embedding has one part")

    def _columns(self) -> Iterator[tuple[WeightStorage, slice]]:
        """Each part, and its columns of a product."""
        first = 0
        for part in self._parts:
            yield part, slice(first, first + part.num_rows)
            first += part.num_rows
