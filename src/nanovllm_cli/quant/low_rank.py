"""Weights with a low-rank product beside them, W x + up (down x): what an adapter adds to a weight that is stored quantized.

Its two matrices are plain storages of the compute type, so a device needs nothing new for them but an addition. Several adapters,
and those of weights whose rows lie behind each other (q, k, v), are one product: their ranks stand side by side.

Where requests choose among adapters, each rank belongs to one, and down x is multiplied by what the row takes of that: one product
again, whoever is in the batch. Rows that take none lose nothing but time, and a step without any adapter not even that.

Legend: N rows and K columns of a weight, R all ranks together, T rows of a step, A adapters to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm_cli.quant.rows import QuantizedRows
from nanovllm_cli.quant.storage import WeightStorage

RANK_MULTIPLE = 16
"""R is a multiple of it, by zeros: rows as narrow as that suit every kernel."""


class Beside(NamedTuple):
    """down [R, K] and up [N, R], whose product is added. module: the adapter's number, where requests choose."""

    down: torch.Tensor
    up: torch.Tensor
    module: int = 0


class Chosen:
    """What the rows of the step at hand take of each adapter, scales [T, A] fp32, or None for nothing. The model says it ahead of
    the weights that read it, as layers between the two have no business with it."""

    def __init__(self) -> None:
        self.scales: torch.Tensor | None = None


class Choice(NamedTuple):
    """modules [R] int32: the adapter that each rank belongs to."""

    modules: torch.Tensor
    chosen: Chosen


class LowRankStorage:
    """Most of a WeightStorage: everything of `inner` but its products. choice: where requests choose."""

    def __init__(self, inner: WeightStorage, down: WeightStorage, up: WeightStorage, choice: Choice | None) -> None:
        self.num_rows = inner.num_rows
        self.width = inner.width
        self._inner = inner
        self._down = down
        self._up = up
        self._choice = choice

    @property
    def _is_idle(self) -> bool:
        """Whether nobody in the step takes any of what it adds."""
        return self._choice is not None and self._choice.chosen.scales is None

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes + self._down.num_bytes + self._up.num_bytes

    @property
    def recordable(self) -> bool:
        return self._inner.recordable and self._down.recordable and self._up.recordable

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        self._inner.load_rows(first_row, rows)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("an embedding has no product")


def padded(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def side_by_side(num_rows: Sequence[int], added: Sequence[Sequence[Beside]], width: int) -> tuple[Beside, torch.Tensor]:
    """One product for parts of so many rows behind each other, each with what is added to it; and the module of each rank, [R]."""
    rank = padded(sum(each.down.shape[0] for part in added for each in part))
    down, up, modules = torch.zeros(rank, width), torch.zeros(sum(num_rows), rank), torch.zeros(rank, dtype=torch.int32)
    row, column = 0, 0
    for rows, part in zip(num_rows, added, strict=True):
        for each in part:
            columns = slice(column, column + each.down.shape[0])
            down[columns] = each.down
            up[row : row + rows, columns] = each.up
            modules[columns] = each.module
            column = columns.stop
        row += rows
    return Beside(down, up), modules
