"""Token embedding and output head, which may be one weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.rescaling import Scales
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.quant.storage import WeightStorage


class Embedding:
    """ids -> rows [T, hidden] of a weight, which with a tied head is the head's: there is one copy."""

    def __init__(self, weight: WeightStorage) -> None:
        self.weight = weight

    def __call__(self, ids: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """ids [T]; with a table, indices into it, which has the ids."""
        return self.weight.rows(ids, table)

    def slots(self) -> Slots:
        return {"weight": storage_slot(self.weight)}


class Head:
    """hidden rows -> logits [R, vocab] fp32. Tied: no weight of its own."""

    def __init__(
        self, vocab_size: int, width: int, kit: Kit, tied: bool, bias: bool = False, factor: float | None = None
    ) -> None:
        cut = Cut((vocab_size,), gathers="first")  # only that one draws
        self.weight = kit.weight({"embedding" if tied else "head": vocab_size}, width, cut)
        self.bias = kit.zeros(vocab_size, dtype=torch.float32) if bias else None  # as logits are
        self.has_bias = bias
        self.scales = None if factor is None else Scales({"head": vocab_size}, factor, kit)
        self.tied, self.device = tied, kit.ops.device

    def __call__(self, x: Hidden) -> torch.Tensor:
        logits = self.weight.matmul(x, self.bias, torch.float32)
        return logits if self.scales is None else self.scales(logits)

    def slots(self) -> Slots:
        slots: Slots = {} if self.tied else {"weight": storage_slot(self.weight)}
        slots |= {} if self.scales is None else {"scales": self.scales.slots()["head_scales"]}
        return slots | ({"bias": table_slot(self.bias)} if self.has_bias and self.bias is not None else {})

    def silence(self, ids: Sequence[int]) -> None:
        """These are never drawn, whatever is asked for, and no log-probability knows them."""
        if self.bias is None:
            self.bias = torch.zeros(self.weight.num_rows, device=self.device)
        self.bias[list(ids)] = -math.inf


def storage_slot(weight: WeightStorage) -> WeightSlot:
    """A slot for all rows of a weight."""
    return WeightSlot((weight.num_rows, weight.width), lambda rows, first: weight.load_rows(first, rows))
