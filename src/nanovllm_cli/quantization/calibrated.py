"""GPTQ and AWQ in a model: block by block, each seeing what the quantized ones before it give.

GPTQ goes through a block in the order of its computation: what the MLP sees comes through the quantized attention. AWQ changes
the floats of a block together, norms and biases among them, and rounds to nearest. Embedding and head are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.quant.awq import scale_and_clip
from nanovllm_cli.quant.format import Format, Fp8, Integer
from nanovllm_cli.quant.gptq import quantize_gptq
from nanovllm_cli.quantization.algorithms import RoundToNearest
from nanovllm_cli.quantization.calibration import EVERY_INPUT, parts_reading
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.quantization.parts import Rows
from nanovllm_cli.quantization.plan import Plan, Planned
from nanovllm_cli.quantization.walk import Walk

Block = Mapping[str, torch.Tensor]
Formats = Mapping[str, Format | None]
ChooseBlock = Callable[[Walk, Block, Formats, Original], dict[str, Rows]]
"""A block's weights by slot and the formats of its matrices -> rows by slot, and other slots that have to change with them."""


class Calibrated:
    """An Algorithm over a walk: `choose` decides about the numbers of a block."""

    def __init__(self, original: Original, plan: Plan, walk: Walk, choose: ChooseBlock) -> None:
        self._original = original
        self._walk = walk
        self._choose = choose
        self._nearest = RoundToNearest(original)
        self._formats = {item.weight.ours: item.format for item in plan.items}

    def quantize(self, unit: str, items: list[Planned]) -> dict[str, Rows]:
        if not unit.startswith("blocks."):
            return self._nearest.quantize(unit, items)
        weights = self._walk.enter(_layer(unit))
        formats = {slot: self._formats[f"{unit}.{slot}"] for slot in weights if f"{unit}.{slot}" in self._formats}
        found = self._choose(self._walk, weights, formats, self._original)
        self._walk.leave(_floats(found, formats))
        return {f"{unit}.{slot}": rows for slot, rows in found.items()}

    def resume(self, unit: str, rows: dict[str, Rows]) -> None:
        if unit.startswith("blocks."):
            self._walk.enter(_layer(unit))
            found = {ours.removeprefix(f"{unit}."): value for ours, value in rows.items()}
            self._walk.leave(_floats(found, {slot: self._formats.get(f"{unit}.{slot}") for slot in found}))


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
        if item.weight.unit.startswith("blocks.") and item.weight.ours.split(".")[2] in ("qkv", "gate_up"):
            raise UnsupportedError(f"awq of {item.weight.source}, which is several matrices", "use --algorithm gptq, or rtn")


def by_gptq(walk: Walk, weights: Block, formats: Formats, original: Original) -> dict[str, Rows]:
    """A ChooseBlock, for a plan that `check_gptq` has passed."""
    found: dict[str, Rows] = {}
    for source in EVERY_INPUT:
        slots = [slot for part in parts_reading(source, weights) if formats[slot := f"{part}.weight"] is not None]
        if not slots:
            continue
        hessian = walk.calibration.observe((source,))[source].hessian
        done: dict[str, Rows] = {}
        for slot in slots:
            form = formats[slot]
            assert isinstance(form, Integer | Fp8)
            done[slot] = quantize_gptq(weights[slot], hessian, form)
        walk.calibration.load(_floats(done, formats))
        found |= done
    return found


def by_awq(walk: Walk, weights: Block, formats: Formats, original: Original) -> dict[str, Rows]:
    """A ChooseBlock."""
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
