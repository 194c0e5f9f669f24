"""Linear layers. Several matrices that read the same input are one weight (q, k, v; gate, up), filled part by part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.quant.rows import QuantizedRows


class Linear:
    """y = x @ weight.T + bias, where weight's rows are the parts behind each other.

    parts: name -> rows. The slots are "<name>.weight" and, with bias, "<name>.bias". cut: see `Kit.weight`.
    """

    def __init__(self, width: int, parts: dict[str, int], kit: Kit, bias: bool = False, cut: Cut | None = None) -> None:
        self.width = width
        self.parts = parts
        self.dtype = kit.dtype
        self.weight = kit.weight(parts, width, cut)
        self.bias = kit.zeros(self.weight.num_rows) if bias else None

    def __call__(self, x: Hidden) -> torch.Tensor:
        return self.weight.matmul(x, self.bias, self.dtype)

    def gated(self, x: Hidden, activation: str) -> torch.Tensor:
        """act(y's first half) * y's second half; of relu2, relu(y) ** 2."""
        return self.weight.gated_matmul(x, self.bias, activation)

    def onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """residual += y: None where that is done, else y, which whoever normalises next has to add."""
        return self.weight.add_matmul(x, self.bias, residual)

    def slots(self) -> Slots:
        slots: Slots = {}
        first = 0
        for name, rows in self.parts.items():
            slots[f"{name}.weight"] = WeightSlot((rows, self.width), self._loader(first))
            if self.bias is not None:
                slots[f"{name}.bias"] = table_slot(self.bias[first : first + rows])
            first += rows
        return slots

    def _loader(self, offset: int) -> Callable[[torch.Tensor | QuantizedRows, int], None]:
        return lambda rows, first: self.weight.load_rows(offset + first, rows)
