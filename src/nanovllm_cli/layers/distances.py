"""What a score gets by how far its key lies from its query, in models that know positions by that: one table for all layers, or
each layer's own."""

from __future__ import annotations

import math

import torch

from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.slots import Slots, WeightSlot
from nanovllm_cli.model_spec import DistanceSpec
from nanovllm_cli.quant.rows import QuantizedRows

BEYOND = 64
"""Numbers behind those of the farthest key: a kernel reads whole tiles of keys."""


class Distances:
    """table [heads, 2 * reach + BEYOND] fp32: in column reach + d what a key d places behind its query gets."""

    def __init__(self, spec: DistanceSpec, num_heads: int, kit: Kit) -> None:
        self.spec = spec
        self.places = torch.arange(-spec.reach, spec.reach + BEYOND)
        self.table = kit.zeros(num_heads, len(self.places), dtype=torch.float32)
        if not spec.buckets:
            self.table.copy_(-alibi_slopes(num_heads)[:, None] * self.places.abs())

    def slots(self) -> Slots:
        """Their names in a model, all of it."""
        if not self.spec.buckets:
            return {}
        return {"distances.weight": WeightSlot((self.spec.buckets, len(self.table)), self._load, plain=True)}

    def _load(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        of = buckets(self.places, self.spec.buckets, self.spec.farthest, both_ways=self.spec.both_ways)
        ours = (of >= first) & (of < first + len(rows))
        device = self.table.device
        self.table[:, ours.to(device)] = rows.float()[of[ours] - first].T.to(device)


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """Of each head, [num_heads] fp32: powers of 2^(-8/n), n being the power of two below num_heads; the heads beyond have those
    between (Press et al. 2022, and its authors' code)."""
    whole = 1 << (num_heads.bit_length() - 1)
    exponents = [-8.0 * (head + 1) / whole for head in range(whole)]
    exponents += [-4.0 * (2 * head + 1) / whole for head in range(num_heads - whole)]
    return torch.tensor([2.0**exponent for exponent in exponents])


def buckets(places: torch.Tensor, count: int, farthest: int, *, both_ways: bool = True) -> torch.Tensor:
    """The bucket of each distance, int64. The first half is of keys before their query, and of its own: one for each of count / 4
    places, wider and wider ones up to `farthest`, the last for all beyond (Raffel et al. 2020, as MPNet has it). Without
    both_ways all are of these, and keys behind their query, which nobody sees, are in the first."""
    half = count // 2 if both_ways else count
    exact = half // 2
    away = places.abs() if both_ways else (-places).clamp(min=0)
    grown = torch.log(away.clamp(min=1).float() / exact) / math.log(farthest / exact) * (half - exact)
    far = (exact + grown.long()).clamp(max=half - 1)
    return torch.where(away < exact, away, far) + both_ways * half * (places > 0)
