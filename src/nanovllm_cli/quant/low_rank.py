"""Weights with low-rank products beside them, W x + up (down x): what adapters add, to a weight that is stored quantized or where
requests choose.

Of an adapter the parts of a weight whose rows lie behind each other (q, k, v) are one product: their ranks stand side by side. So
do those of adapters that all rows have. Where requests choose, down x is multiplied by what the row takes of the adapter, which
makes one batch of all of them. A step in which nobody takes any is computed as if there were none, and so, to the bit, is a row
that takes none (on a GPU where it has to be deterministic: a gate within a product may be summed in another order).

Legend: N rows and K columns of a weight, R ranks, T rows of a step, A adapters to choose from.
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


class LowRankStorage:
    """Most of a WeightStorage: everything of `inner` but its products. chosen: where requests choose."""

    def __init__(self, inner: WeightStorage, chosen: Chosen | None) -> None:
        self.num_rows = inner.num_rows
        self.width = inner.width
        self._inner = inner
        self._chosen = chosen

    @property
    def _is_idle(self) -> bool:
        """Whether nobody in the step takes any of what it adds."""
        return self._chosen is not None and self._chosen.scales is None

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        self._inner.load_rows(first_row, rows)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("an embedding has no product")


def padded(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE


def side_by_side(num_rows: Sequence[int], added: Sequence[Sequence[Beside]], width: int, module: int) -> Beside:
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
    return Beside(down, up, module)
