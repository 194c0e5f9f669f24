"""How the numbers of a weight are chosen, behind one protocol: units go in, in the model's order, quantized rows come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.rows import QuantizedRows
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.quantization.parts import Rows
from nanovllm_cli.quantization.plan import Planned
from nanovllm_cli.weights.convert_delta import columns_in_turn


class Algorithm(Protocol):
    """Units come in the order of `Plan.units`, each to `quantize` or, where an earlier run finished it, to `resume`."""

    def quantize(self, unit: str, items: list[Planned]) -> dict[str, Rows]:
        """Rows by our names, in the planned formats; and other weights of the unit that have to change with them."""

    def resume(self, unit: str, rows: dict[str, Rows]) -> None:
        """What `quantize` gave for this unit before."""


class RoundToNearest:
    """Every weight by itself, some MiB of floats at a time. importance: by our names, how much the squared error of each column
    counts, [K], in the output's order of columns; for formats that have a use for it."""

    def __init__(self, original: Original, importance: Mapping[str, torch.Tensor] | None = None) -> None:
        self._original = original
        self._importance = importance or {}

    def quantize(self, unit: str, items: list[Planned]) -> dict[str, Rows]:
        return {item.weight.ours: self._rounded(item) for item in items}

    def resume(self, unit: str, rows: dict[str, Rows]) -> None:
        pass

    def _rounded(self, item: Planned) -> QuantizedRows:
        form, dealt = item.format, item.weight.dealt
        assert form is not None
        pieces = self._original.rows(item.weight.source)
        if dealt is not None:
            pieces = (columns_in_turn(dealt, rows) for rows in pieces)
        if (importance := self._importance.get(item.weight.ours)) is not None:
            assert isinstance(form, Blocks)
            return joined([form.quantize(rows, importance) for rows in pieces])
        return joined([form.quantize(rows) for rows in pieces])


def joined(pieces: Sequence[QuantizedRows]) -> QuantizedRows:
    """Rows of one weight, one after the other."""
    first: Any = pieces[0]
    fields = {
        name: None if value is None else torch.cat([getattr(piece, name) for piece in pieces])
        for name, value in first._asdict().items()
    }
    rows: QuantizedRows = type(first)(**fields)
    return rows
