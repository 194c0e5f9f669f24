"""Linear layers. Several matrices that read the same input are one weight (q, k, v; gate, up), filled part by part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.quant.storage import WeightStorage

MakeStorage = Callable[[int, int], WeightStorage]
"""(num_rows, width) -> an empty weight in the format that was chosen."""


class Linear:
    """y = x @ weight.T + bias, where weight's rows are the parts behind each other.

    parts: name -> rows. The slots are "<name>.weight" and, with bias, "<name>.bias".
    """

    def __init__(
        self, width: int, parts: dict[str, int], make: MakeStorage, dtype: torch.dtype, bias: bool = False
    ) -> None:
        self.width = width
        self.parts = parts
        self.dtype = dtype
        self.weight = make(sum(parts.values()), width)
        self.bias = torch.zeros(self.weight.num_rows, dtype=dtype) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.matmul(x, self.bias, self.dtype)

    def slots(self) -> Slots:
        slots: Slots = {}
        first = 0
        for name, rows in self.parts.items():
            slots[f"{name}.weight"] = WeightSlot((rows, self.width), self._loader(first))
            if self.bias is not None:
                slots[f"{name}.bias"] = table_slot(self.bias[first : first + rows])
            first += rows
        return slots

    def _loader(self, offset: int) -> Callable[[torch.Tensor, int], None]:
        return lambda rows, first: self.weight.load_rows(offset + first, rows)
