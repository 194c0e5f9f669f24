"""What joins an embedding before the first layer: learned positions (GPT-2), sines of them (Vaswani et al. 2017), segments and a
norm as well (BERT, Devlin et al. 2018), or a norm alone (NanoChat, BLOOM)."""

from __future__ import annotations

import torch

from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.norm import StreamNorm
from nanovllm_cli.layers.rescaling import RescaledEntry
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.model_spec import EntrySpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows


def entry_of(spec: EntrySpec, width: int, kit: Kit) -> Entry | Positions | NormedEntry | CenteredEntry | RescaledEntry:
    if spec.rescaled:
        return RescaledEntry(width, kit)
    if spec.segments:
        return Entry(spec, width, kit)
    if spec.positions and (spec.norm is None or spec.norm.centered):
        return Positions(spec, width, kit)
    assert spec.norm is not None
    return CenteredEntry(spec.norm, width, kit) if spec.norm.centered else NormedEntry(spec, width, kit)


class Positions:
    """embedding + position, or the norm of that, in steps that can be recorded. Rows in front of the first position's are left
    aside."""

    def __init__(self, spec: EntrySpec, width: int, kit: Kit) -> None:
        self.ops, self.unused, self.is_made = kit.ops, spec.first_position, spec.waves > 0
        self.weight = kit.undivided.weight({"positions": spec.positions - self.unused}, width)
        self.norm = None if spec.norm is None else StreamNorm(spec.norm, width, kit)
        if self.is_made:
            self.weight.load_rows(0, _waves(range(self.unused, spec.positions), spec.waves, width))

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        """See `Entry`."""
        found = self.weight.rows(positions, None)
        if self.norm is None:
            return self.ops.add(rows, found)
        self.norm(found, rows)
        return rows

    def slots(self) -> Slots:
        shape = self.unused + self.weight.num_rows, self.weight.width
        slots = {} if self.is_made else {"positions.weight": WeightSlot(shape, self._load)}
        norm = {} if self.norm is None else self.norm.slots()
        return slots | {f"entry_norm.{name}": slot for name, slot in norm.items()}

    def _load(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "which stays plain in all formats"
        rows, first = rows[max(0, self.unused - first) :], max(0, first - self.unused)
        if len(rows):
            self.weight.load_rows(first, rows)


class NormedEntry:
    """norm(embedding), in its place, in steps that can be recorded."""

    def __init__(self, spec: EntrySpec, width: int, kit: Kit) -> None:
        assert spec.norm is not None
        assert (spec.positions, spec.segments, spec.norm.gains) == (0, 0, False), "no decoder has these"
        self.ops, self.eps = kit.ops, spec.norm.eps
        self.weight = kit.zeros(width).fill_(1)

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        """See `Entry`."""
        return self.ops.norm_columns(rows, self.weight, self.eps, 0.0)

    def slots(self) -> Slots:
        return {}


class CenteredEntry:
    """The same of a layer norm."""

    def __init__(self, norm: NormSpec, width: int, kit: Kit) -> None:
        self.norm = StreamNorm(norm, width, kit)

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
        """See `Entry`."""
        self.norm(None, rows)
        return rows

    def slots(self) -> Slots:
        return {f"entry_norm.{name}": slot for name, slot in self.norm.slots().items()}


def _waves(positions: range, waves: int, width: int) -> torch.Tensor:
    """[positions, width]; see `EntrySpec`."""
    divisors = 1e4 ** (torch.arange(width // 2, dtype=torch.float64) / waves)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] / divisors
    return torch.cat([angles.sin(), angles.cos()], 1).float()


class Entry:
    """norm(embedding + position + segment); see `EntrySpec`."""

    def __init__(self, spec: EntrySpec, width: int, kit: Kit) -> None:
        self.first_position = spec.first_position
        self.positions = kit.zeros(spec.positions, width) if spec.positions else None
        self.segments = kit.zeros(spec.segments, width) if spec.segments else None
        assert spec.norm is not None
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
