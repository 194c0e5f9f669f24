"""What joins an embedding before the first layer: learned positions, segments, a norm (BERT, Devlin et al. 2018)."""

from __future__ import annotations

import torch

from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.norm import StreamNorm
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.model_spec import EntrySpec


class Entry:
    """norm(embedding + position + segment); see `EntrySpec`."""

    def __init__(self, spec: EntrySpec, width: int, kit: Kit) -> None:
        self.first_position = spec.first_position
        self.positions = kit.zeros(spec.positions, width) if spec.positions else None
        self.segments = kit.zeros(spec.segments, width) if spec.segments else None
        self.norm = StreamNorm(spec.norm, width, kit)

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        """rows [T, width] of the embedding, positions [T] int64, segments [T] int64 or None for zeros: what the first layer
        reads."""
        total = rows.float()
        if self.positions is not None:
            total = total + self.positions[positions + self.first_position]
        if self.segments is not None:
            total = total + (self.segments[0] if segments is None else self.segments[segments])
        stream = total.to(rows.dtype)
        self.norm(None, stream)
        return stream

    def slots(self) -> Slots:
        """Their names in a model, all of it."""
        tables = {"positions.weight": self.positions, "segments.weight": self.segments}
        named = {name: table_slot(table) for name, table in tables.items() if table is not None}
        return named | {f"entry_norm.{name}": slot for name, slot in self.norm.slots().items()}
