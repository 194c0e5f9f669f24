"""Weights that others quantized as one matrix, where a model has several, or the same rows in another order (`stacked.py`).

    Qwen3-Next's in_proj_qkvz, InternLM2's wqkv, …      in_proj_qkv and in_proj_z, wq, wk and wv, …
    GPT-NeoX', Falcon's and BLOOM's query_key_value     the same, q, k and v of all heads behind each other

Codes, scales and zero points of a row go with it, whatever they are packed into. Rows of FP8 that share a scale stay together, or
are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nanovllm_cli.models.family import ANOTHER
from nanovllm_cli.quant.format import Format, Fp8
from nanovllm_cli.quant.rows import QuantizedRows, take_rows
from nanovllm_cli.weights.quantized_weight import InNumbers, Part, QuantizedWeight
from nanovllm_cli.weights.stacked import rows_apart
from nanovllm_cli.weights.weight_reader import ROWS_TOGETHER


@dataclass(frozen=True)
class RowsOf:
    """Rows `which` [n] int64 of `whole`, in this order. name: of that weight."""

    name: str
    whole: QuantizedWeight
    which: torch.Tensor

    @property
    def format(self) -> Format | None:
        return self.whole.format

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.which), self.whole.shape[1]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.whole.parts

    @property
    def stored_as(self) -> str:
        if isinstance(self.whole, InNumbers):
            return self.whole.stored_as
        assert self.whole.format is not None
        return self.whole.format.name

    def rows(self, first: int, end: int) -> QuantizedRows | torch.Tensor:
        which = self.which[first:end]
        low = int(which.min()) // ROWS_TOGETHER * ROWS_TOGETHER
        return take_rows(self.whole.rows(low, int(which.max()) + 1), which - low)


def whole_of(weight: QuantizedWeight) -> QuantizedWeight:
    """What it is some rows of; itself where it is none."""
    return weight.whole if isinstance(weight, RowsOf) else weight


def stored_bytes(weight: QuantizedWeight) -> int:
    """Of its parts what is its own."""
    total = sum(part.num_bytes for part in weight.parts)
    return total * len(weight.which) // weight.whole.shape[0] if isinstance(weight, RowsOf) else total


def apart(weights: Mapping[str, QuantizedWeight], config: Mapping[str, Any]) -> dict[str, QuantizedWeight]:
    """By the names that a model's weights have. UnsupportedError for rows that can't be taken from those that they share a scale
    with."""
    found: dict[str, QuantizedWeight] = {}
    for name, weight in weights.items():
        parts = rows_apart(name, weight.shape, config)
        found |= {own: _some(name, weight, rows) for own, rows in parts.items()} or {name: weight}
    return found


def _some(name: str, weight: QuantizedWeight, rows: slice | tuple[int, ...]) -> QuantizedWeight:
    every = torch.arange(weight.shape[0])
    which = every[rows] if isinstance(rows, slice) else torch.tensor(rows)
    if torch.equal(which, every):
        return weight
    if isinstance(weight.format, Fp8) and (block := weight.format.block):
        starts = which[::block]
        whole = torch.cat([every[start : start + block] for start in starts.tolist()])
        if bool((starts % block > 0).any()) or not torch.equal(whole, which):
            raise weight.parts[0].unsupported("has scales of rows that belong to several heads, or parts", ANOTHER)
    return RowsOf(name, weight, which)
