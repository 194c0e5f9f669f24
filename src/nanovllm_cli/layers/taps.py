"""Taps: what a model's layers read, taken beside it and made into one row a token, for what guesses by it
(`models/eagle_layer.py`)."""

from __future__ import annotations

from typing import Literal

import torch

from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.norm_spec import NormSpec

Normed = Literal["not", "each", "together"]


class Taps:
    """fuse([rows that layer `places[0]` reads, …]). places: of layers whose input is taken; the number of all is behind the last.
    width: of the model's residual stream. size: of rows that are made of it. normed: before, those of each layer by themselves or
    all as one row.

    A step begins with `begin`, takes rows in the order of the layers, and may leave some aside; `fused` is for the others."""

    def __init__(self, places: tuple[int, ...], width: int, size: int, normed: Normed, norm: NormSpec, kit: Kit) -> None:
        self.places = places
        self._width, self._dtype, self._ops = width, kit.dtype, kit.ops
        self._fuse = Linear(len(places) * width, {"fuse": size}, kit)
        self._each = [RMSNorm(norm, width, kit) for _ in places] if normed == "each" else []
        self._together = RMSNorm(norm, len(places) * width, kit) if normed == "together" else None
        self._rows = torch.empty(0)

    def begin(self, num_tokens: int) -> None:
        self._rows = self._ops.room(num_tokens, len(self.places) * self._width, self._dtype)

    def take(self, place: int, stream: torch.Tensor) -> None:
        """stream [T, width]: what that layer reads, all that is to join it having done so."""
        for i, own in enumerate(self.places):
            if own == place:
                self._ops.put_columns(self._each[i].alone(stream) if self._each else stream, self._rows, i * self._width)

    def keep(self, rows: torch.Tensor) -> None:
        """Goes on with these rows [R] alone, as the residual stream does."""
        self._rows = self._rows[rows]

    def fused(self) -> torch.Tensor:
        """[R, size] of all that was taken."""
        return self._fuse(self._rows if self._together is None else self._together.alone(self._rows))

    def slots(self) -> Slots:
        slots = self._fuse.slots()
        norms = {f"fuse_norm.{i}": norm for i, norm in enumerate(self._each)}
        norms |= {} if self._together is None else {"fuse_norm": self._together}
        return slots | {f"{name}.weight": norm.slots()["weight"] for name, norm in norms.items()}
