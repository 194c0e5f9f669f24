"""WeightSlot: a place in the model that wants one tensor of a checkpoint. The loader fills slots; layers know no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm_cli.quant.rows import QuantizedRows


class WeightSlot(NamedTuple):
    """shape: what the checkpoint's tensor must have. load(rows, first): rows of it, of any float type or in the matrix's own
    format, from row `first` on; a matrix may come in several slices, so that nobody holds it twice. plain: it takes numbers
    alone, also of a matrix that has a format. stays: it takes the whole as a view of the mapped file, of which nothing is
    read. counts: it takes whole numbers."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor | QuantizedRows, int], None]
    plain: bool = False
    stays: bool = False
    counts: bool = False


Slots = dict[str, WeightSlot]


def number_slot(take: Callable[[float], None]) -> WeightSlot:
    """A slot for a tensor of one number, which `take` gets."""

    def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        take(float(rows))

    return WeightSlot((1,), load)


def table_slot(table: torch.Tensor, taken_off: float = 0.0) -> WeightSlot:
    """A slot for a plain tensor, less taken_off, converted to its type. A file may have rounded it like a matrix."""

    def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        table[first : first + rows.shape[0]].copy_(rows.float() - taken_off if taken_off else rows)

    return WeightSlot(tuple(table.shape), load, plain=True)
