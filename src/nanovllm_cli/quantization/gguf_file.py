"""The GGUF file of a quantized model: as `convert` would write the original, with other bytes for what was quantized."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gguf.constants import GGUFValueType, Keys
from gguf.gguf_writer import GGUFValue

from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.gguf_blocks import negated
from nanovllm_cli.quant.rows import BlockRows
from nanovllm_cli.quantization.mixes import file_type
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.quantization.parts import Parts, Rows
from nanovllm_cli.quantization.plan import Plan, Planned
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.convert_gguf import QUANTIZATION_VERSION
from nanovllm_cli.weights.convert_tensors import Step, mirrored, slices, with_repeats
from nanovllm_cli.weights.gguf_writer import GGUFPartWriter
from nanovllm_cli.weights.tensor_names import names_of
from nanovllm_cli.weights.writer import OutputFile


def write_gguf(original: Original, plan: Plan, parts: Parts, output: OutputFile, progress: LoadProgress) -> convert.Plan:
    """All of the file; gives how the original would be converted. The units of the plan are finished.

    Raises UnsupportedError for what GGUF can't say of a model."""
    made = convert.plan(original.checkpoint, "gguf")
    header = made.header | {
        Keys.General.FILE_TYPE: GGUFValue(file_type(plan.to.lower()), GGUFValueType.UINT32),
        Keys.General.QUANTIZATION_VERSION: GGUFValue(QUANTIZATION_VERSION, GGUFValueType.UINT32),
    }
    items = {name: own for name, own in plan.by_output().items() if own[0].format is not None}
    untied = [name for name in items if name not in {step.name for step in made.steps}]
    steps = [_retyped(step, items.get(step.name)) for step in made.steps]
    steps += [_retyped(Step(name, None, items[name][0].weight.shape, "-", 0, "F32"), items[name]) for name in untied]
    source = _Source(original, plan, parts, items)
    progress.stage("writing", sum(step.num_bytes for step in steps), "B")
    by_name = {step.name: step for step in steps}
    writer = GGUFPartWriter(output.file, header, [step.gguf() for step in steps])
    writer.write_all(lambda tensor: source.slices(by_name[tensor.name]), progress)
    output.file.flush()
    return made


def _retyped(step: Step, items: list[Planned] | None) -> Step:
    if items is None:
        return step
    form = items[0].format
    assert isinstance(form, Blocks)
    return step._replace(after=form.type)


class _Source:
    """Where a step's bytes come from: a unit's rows, or the original."""

    def __init__(self, original: Original, plan: Plan, parts: Parts, items: dict[str, list[Planned]]) -> None:
        self._checkpoint = convert.taken_apart(original.checkpoint, "gguf")
        self._items = items
        self._parts = parts
        self._changed = parts.changed_floats(plan.units(), names_of(original.checkpoint))

    def slices(self, step: Step) -> Iterator[torch.Tensor]:
        if step.name in self._items:
            items = self._items[step.name]
            found = (self._blocks(item) if item.weight.dealt else _turned(self._blocks(item), step) for item in items)
            return with_repeats(found, step.repeats) if step.repeats else found
        if step.source in self._changed:
            rows = self._read(*self._changed[step.source])
            assert isinstance(rows, torch.Tensor)
            return iter([_turned(rows.float() + step.added, step)])
        return slices(self._checkpoint, step)

    def _blocks(self, item: Planned) -> torch.Tensor:
        rows = self._read(item.weight.unit, item.weight.ours)
        assert isinstance(rows, BlockRows)
        return rows.data

    def _read(self, unit: str, ours: str) -> Rows:
        return self._parts.read(unit)[ours]


def _turned(rows: torch.Tensor, step: Step) -> torch.Tensor:
    """Rows in GGUF's order: they are moved whole, so that blocks stay as they are, but for those that are negated."""
    rows = rows if step.reorder is None else step.reorder(rows)
    if not step.mirrors:
        return rows
    negate = torch.neg if rows.is_floating_point() else partial(negated, step.after)
    return mirrored(rows, step.mirrors, negate)
