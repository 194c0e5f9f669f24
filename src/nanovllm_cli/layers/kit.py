"""Kit: what layers are made of on one device. They get it in their constructor and know nothing else of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm_cli.attention.backend import AttentionBackend
from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.quant.storage import WeightStorage

MakeStorage = Callable[[dict[str, int], int], WeightStorage]
"""(rows of each part by its full name, width) -> an empty weight of these parts behind each other, each in its format."""


class Kit(NamedTuple):
    """dtype: of activations, norms and biases. place: what the names of weights made here begin with."""

    dtype: torch.dtype
    make: MakeStorage
    ops: Ops
    backend: AttentionBackend
    place: str = ""

    def at(self, place: str) -> Kit:
        """The kit for a part of the model."""
        return self._replace(place=f"{self.place}{place}.")

    def weight(self, parts: dict[str, int], width: int) -> WeightStorage:
        """A weight whose parts are the slots "<name>.weight" of this place."""
        return self.make({f"{self.place}{name}.weight": rows for name, rows in parts.items()}, width)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A table on the device, of the kit's dtype."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.ops.device)
