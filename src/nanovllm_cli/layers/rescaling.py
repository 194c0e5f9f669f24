"""Shifts and factors of each column: of what joins the residual stream, of the stream itself, and of embeddings (ZAYA1); factors
alone, of what matrices make, and how far the stream goes to what joins it (nGPT, Loshchilov et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nanovllm_cli.kernels.ops import Addend, plain
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows


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


class Scales:
    """x * scales, in the place of x [T, widths behind each other], of each part by its name: the checkpoint's numbers times a
    factor; squared: the squares of these."""

    def __init__(self, widths: Mapping[str, int], factor: float, kit: Kit, *, squared: bool = False) -> None:
        self.ops, self.widths, self.factor, self.squared = kit.ops, widths, factor, squared
        self.none = kit.zeros(sum(widths.values()), dtype=torch.float32)
        self.scales = torch.ones_like(self.none)

    def __call__(self, x: torch.Tensor, own: slice = slice(None)) -> torch.Tensor:
        """own: the columns that there are."""
        return self.ops.rescale(x, self.none[own], self.scales[own])

    def slots(self) -> Slots:
        parts = torch.split(self.scales, list(self.widths.values()))
        return {f"{name}_scales": self._slot(part) for name, part in zip(self.widths, parts, strict=True)}

    def _slot(self, part: torch.Tensor) -> WeightSlot:
        def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
            assert isinstance(rows, torch.Tensor), "tables are plain numbers"
            found = rows.float() * self.factor
            part[first : first + len(rows)].copy_(found.square() if self.squared else found)

        return WeightSlot(tuple(part.shape), load)


class SphereJoin:
    """stream = norm(stream + r * (norm(x) - stream)), in its place: see `BlockSpec`. kind: of the part that found x."""

    def __init__(self, kind: str, rate: float, norm: NormSpec, width: int, kit: Kit) -> None:
        self.kind, self.ops, self.rate = kind, kit.ops, rate
        self.norm = RMSNorm(norm, width, kit)
        self.none, self.left, self.taken = (kit.zeros(width, dtype=torch.float32) for _ in range(3))

    def __call__(self, found: torch.Tensor, stream: torch.Tensor) -> None:
        found = self.ops.rescale(self.norm.alone(found), self.none, self.taken)
        self.ops.rescale(stream, self.none, self.left)
        self.ops.put_columns(plain(self.norm(Addend(found), stream), self.ops), stream, 0)

    def slots(self) -> Slots:
        return {f"{self.kind}_rates": WeightSlot(tuple(self.taken.shape), self._load)}

    def _load(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        rates = (rows.float() * self.rate).abs()
        for table, values in ((self.taken, rates), (self.left, 1 - rates)):
            table[first : first + len(rows)].copy_(values)
