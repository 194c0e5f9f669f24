"""How the numbers of a weight are chosen, behind one protocol: units go in, in the model's order, quantized rows come out.

    RoundToNearest      every weight by itself, its columns weighed by an importance where a format has a use for that
    Calibrated          GPTQ and AWQ, block by block, each seeing what the quantized ones before it give

GPTQ goes through a block in the order of its computation: what the MLP sees comes through the quantized attention, and experts,
one by one, see the tokens that take them then. AWQ changes the floats of a block together, norms and biases among them, and
rounds to nearest. Embedding and head are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.quant.awq import scale_and_clip
from nanovllm_cli.quant.format import Blocks, Format, Fp8, Integer
from nanovllm_cli.quant.gptq import quantize_gptq
from nanovllm_cli.quant.rows import QuantizedRows, take_rows
from nanovllm_cli.quantization.calibration import EVERY_INPUT, parts_reading
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.quantization.parts import Rows
from nanovllm_cli.quantization.plan import Plan, Planned
from nanovllm_cli.quantization.walk import Walk
from nanovllm_cli.weights.convert_delta import columns_in_turn

Block = Mapping[str, torch.Tensor]
Formats = Mapping[str, Format | None]
ChooseUnit = Callable[[Walk, str, Block, Formats, Original], dict[str, Rows]]
"""A unit's name, its block's weights by slot and the formats of its matrices -> rows by slot, and other slots that have to change
with them."""


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


class Calibrated:
    """An Algorithm over a walk: `choose` decides about the numbers of a block, or of an expert."""

    def __init__(self, original: Original, plan: Plan, walk: Walk, choose: ChooseUnit) -> None:
        self._original = original
        self._walk = walk
        self._choose = choose
        self._nearest = RoundToNearest(original)
        self._formats: dict[str, dict[str, Format | None]] = {}  # of a unit's matrices, by slot of its block
        for item in plan.items:
            unit = item.weight.unit
            self._formats.setdefault(unit, {})[item.weight.ours.removeprefix(f"{_block(unit)}.")] = item.format

    def quantize(self, unit: str, items: list[Planned]) -> dict[str, Rows]:
        if not unit.startswith("blocks."):
            return self._nearest.quantize(unit, items)
        weights = self._walk.enter(_layer(unit))
        block, formats = _block(unit), self._formats[unit]
        found = self._choose(self._walk, unit, weights, formats, self._original)
        self._walk.calibration.load(_floats(found, formats))
        return {f"{block}.{slot}": rows for slot, rows in found.items()}

    def resume(self, unit: str, rows: dict[str, Rows]) -> None:
        if unit.startswith("blocks."):
            self._walk.enter(_layer(unit))
            found = {ours.removeprefix(f"{_block(unit)}."): value for ours, value in rows.items()}
            self._walk.calibration.load(_floats(found, self._formats[unit]))


def check_gptq(plan: Plan) -> None:
    """UnsupportedError for formats that GPTQ has no grid for."""
    for item in plan.items:
        if item.weight.ours.startswith("blocks.") and not isinstance(item.format, Integer | Fp8 | None):
            raise UnsupportedError(
                f"gptq chooses codes of int and fp8 formats, and {item.weight.output} becomes {item.format.name}",
                "use --algorithm awq, or rtn",
            )


def check_awq(plan: Plan) -> None:
    """UnsupportedError for models whose matrices AWQ can't scale part by part."""
    for item in plan.items:
        if ".experts." in item.weight.ours:
            raise UnsupportedError(
                "awq of a model with experts: what goes into them goes into their router, too", "use --algorithm gptq, or rtn"
            )
        if item.weight.unit.startswith("blocks.") and item.weight.ours.split(".")[2] in ("qkv", "gate_up"):
            raise UnsupportedError(f"awq of {item.weight.source}, which is several matrices", "use --algorithm gptq, or rtn")


def by_gptq(walk: Walk, unit: str, weights: Block, formats: Formats, original: Original) -> dict[str, Rows]:
    """A ChooseUnit, for a plan that `check_gptq` has passed."""
    found: dict[str, Rows] = {}
    name = "".join(f"{part}." for part in unit.split(".")[2:])
    expert = int(name.split(".")[1]) if name else None
    for source in EVERY_INPUT:
        parts = parts_reading(source, weights, name)
        slots = [slot for part in parts if formats.get(slot := f"{part}.weight") is not None]
        if not slots:
            continue
        hessian = walk.hessian(source, expert)
        done: dict[str, Rows] = {}
        for together in _alike(slots, formats):
            form, first = formats[together[0]], 0
            assert isinstance(form, Integer | Fp8)
            rows = quantize_gptq(torch.cat([weights[slot] for slot in together]), hessian, form)
            for slot in together:
                done[slot] = take_rows(rows, slice(first, first + len(weights[slot])))
                first += len(weights[slot])
        walk.calibration.load(_floats(done, formats))
        found |= done
    return found


def _alike(slots: list[str], formats: Formats) -> list[list[str]]:
    """Those that one pass over their columns does for: of one format, whose scales are rows' own."""
    found: dict[object, list[str]] = {}
    for slot in slots:
        form = formats[slot]
        found.setdefault(slot if isinstance(form, Fp8) and form.block else form, []).append(slot)
    return list(found.values())


def by_awq(walk: Walk, unit: str, weights: Block, formats: Formats, original: Original) -> dict[str, Rows]:
    """A ChooseUnit, for a plan that `check_awq` has passed."""
    block, norm = original.spec.blocks[walk.calibration.layer], original.spec.norm
    changed = scale_and_clip(weights, walk.calibration.observe(), block, norm.offset - norm.stored_offset, formats)
    found: dict[str, Rows] = {}
    for slot, rows in changed.items():
        form = formats.get(slot)
        if form is not None:
            found[slot] = form.quantize(rows)
        elif not torch.equal(rows, weights[slot]):
            found[slot] = rows
    return found


def _floats(rows: Mapping[str, Rows], formats: Formats) -> dict[str, torch.Tensor]:
    """What the rows stand for."""
    floats = {}
    for slot, value in rows.items():
        form = formats.get(slot)
        if not isinstance(value, torch.Tensor):
            assert form is not None
            value = form.dequantize(value)
        floats[slot] = value
    return floats


def _layer(unit: str) -> int:
    return int(unit.split(".")[1])


def _block(unit: str) -> str:
    return ".".join(unit.split(".")[:2])
