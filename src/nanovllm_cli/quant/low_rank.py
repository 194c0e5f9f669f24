"""Weights with a low-rank product beside them, W x + up (down x): what an adapter adds to a weight that is stored quantized.

Its two matrices are plain storages of the compute type, so a device needs nothing new for them but an addition. Several adapters,
and those of weights whose rows lie behind each other (q, k, v), are one product: their ranks stand side by side.

Legend: N rows and K columns of a weight, R all ranks together.
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
    """down [R, K] and up [N, R], whose product is added."""

    down: torch.Tensor
    up: torch.Tensor


class LowRankStorage:
    """Most of a WeightStorage: everything of `inner` but its products."""

    def __init__(self, inner: WeightStorage, down: WeightStorage, up: WeightStorage) -> None:
        self.num_rows = inner.num_rows
        self.width = inner.width
        self._inner = inner
        self._down = down
        self._up = up

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


def side_by_side(num_rows: Sequence[int], added: Sequence[Sequence[Beside]], width: int) -> Beside:
    """One product for parts of so many rows behind each other, each with what is added to it."""
    rank = padded(sum(each.down.shape[0] for part in added for each in part))
    down, up = torch.zeros(rank, width), torch.zeros(sum(num_rows), rank)
    row, column = 0, 0
    for rows, part in zip(num_rows, added, strict=True):
        for each in part:
            columns = slice(column, column + each.down.shape[0])
            down[columns] = each.down
            up[row : row + rows, columns] = each.up
            column = columns.stop
        row += rows
    return Beside(down, up)
