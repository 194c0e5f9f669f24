"""Shifts and factors of each column: of what joins the residual stream, of the stream itself, and of embeddings (ZAYA1)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Addend
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.slots import Slots, table_slot


class Rescaling:
    """(x + shift) * gains, in the place of x [T, width]."""

    def __init__(self, width: int, kit: Kit) -> None:
        self.ops = kit.ops
        self.shift = kit.zeros(width, dtype=torch.float32)
        self.gains = kit.zeros(width, dtype=torch.float32).fill_(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rescale(x, self.shift, self.gains)

    def slots(self) -> Slots:
        return {"shift": table_slot(self.shift), "gains": table_slot(self.gains)}


class RescaledEntry(Rescaling):
    """The same of embeddings; see `Entry`."""

    def __call__(self, x: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
        return super().__call__(x)

    def slots(self) -> Slots:
        return {f"entry.{name}": slot for name, slot in super().slots().items()}


class RescaledJoin:
    """What a part of a block has found joins the residual stream, both rescaled. kind: the part."""

    def __init__(self, kind: str, width: int, kit: Kit) -> None:
        self.kind, self.found, self.stream = kind, Rescaling(width, kit), Rescaling(width, kit)

    def __call__(self, found: torch.Tensor, residual: torch.Tensor) -> Addend:
        """Nobody reads the stream as it was any more."""
        self.stream(residual)
        return Addend(self.found(found))

    def slots(self) -> Slots:
        parts = {f"{self.kind}_found": self.found, f"{self.kind}_stream": self.stream}
        return {f"{place}.{name}": slot for place, part in parts.items() for name, slot in part.slots().items()}
