"""Token embedding and output head, which may be one weight."""

from __future__ import annotations

import torch

from nanovllm_cli.layers.linear import MakeStorage
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.quant.storage import WeightStorage


class Embedding:
    """ids -> rows [T, hidden]. With a tied head the rows are taken from the head's weight, so that there is one copy."""

    def __init__(self, vocab_size: int, width: int, dtype: torch.dtype, tied: WeightStorage | None) -> None:
        self.shape = (vocab_size, width)
        self.tied = tied
        self.table = torch.zeros(self.shape, dtype=dtype) if tied is None else None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.table is not None:
            return self.table[ids]
        assert self.tied is not None
        return self.tied.rows(ids)

    @property
    def num_bytes(self) -> int:
        """Memory of a table of its own."""
        return 0 if self.table is None else self.table.nbytes

    def slots(self) -> Slots:
        if self.table is not None:
            return {"weight": table_slot(self.table)}
        assert self.tied is not None
        return {"weight": storage_slot(self.tied)}


class Head:
    """hidden rows -> logits [R, vocab] fp32. Tied: no slot of its own."""

    def __init__(self, vocab_size: int, width: int, make: MakeStorage, tied: bool) -> None:
        self.weight = make(vocab_size, width)
        self.tied = tied

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.matmul(x, None, torch.float32)

    def slots(self) -> Slots:
        if self.tied:
            return {}
        return {"weight": storage_slot(self.weight)}


def storage_slot(weight: WeightStorage) -> WeightSlot:
    """A slot for the whole of one weight."""
    return WeightSlot((weight.num_rows, weight.width), lambda rows, first: weight.load_rows(first, rows))
