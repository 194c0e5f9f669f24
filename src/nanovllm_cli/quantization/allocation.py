"""`--target-bpw`: formats for the layers' weights, so that all weights together have so many bits on average.

What each format costs each weight's outputs is measured with the calibration texts in the original model, block by block; then
`quant/sensitivity.py` divides the bits. Weights that one kernel multiplies together (q, k, v; gate, up) share a format, and so do
all experts of a layer, whose costs count by the tokens that take them.
Embedding, head, and what `--tensor-type` names have theirs already, and their bits count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.format import Blocks, Format, Integer
from nanovllm_cli.quant.sensitivity import Candidate, allocate, candidates
from nanovllm_cli.quantization.calibration import EVERY_INPUT, parts_reading
from nanovllm_cli.quantization.plan import Kind, Plan, Planned
from nanovllm_cli.quantization.walk import Walk

FORMATS: dict[Kind, tuple[Format, ...]] = {
    "hf": (Integer(4, 128), Integer(4, 64), Integer(4, 32), Integer(8, activation="none")),
    "gguf": tuple(Blocks(name) for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0")),
}
"""What is chosen from: in a folder, what one loader keeps in one way."""


def with_target(plan: Plan, bits_a_weight: float, walk: Walk, progress: LoadProgress) -> Plan:
    """The plan with other formats for the layers' weights that are not fixed. UsageError where the target can't be reached."""
    free = {item.weight.ours: item for item in plan.items if item.weight.ours.startswith("blocks.") and not item.fixed}
    if not free:
        raise UsageError("--target-bpw has nothing to choose", "leave out the --tensor-type that names all weights")
    taken = 8 * sum(item.num_bytes for item in plan.items if item.weight.ours not in free)
    formats = FORMATS[plan.kind]
    choices: dict[str, list[Candidate]] = {}
    layers = sorted({int(ours.split(".")[1]) for ours in free})
    progress.stage("measuring formats", len(layers), "tensors")
    for layer in layers:
        choices |= _measured(layer, free, formats, walk)
        progress.advance(1)
    least = (taken + sum(min(found.num_bits for found in each) for each in choices.values())) / plan.num_weights
    if bits_a_weight < least:
        raise UsageError(
            f"--target-bpw {bits_a_weight:g} can't be reached: the least is {least:.2f} bits a weight",
            "embedding and head count too: see --head, --embedding and --dry-run",
        )
    chosen = allocate(choices, bits_a_weight * plan.num_weights - taken)
    return replace(plan, items=tuple(_with_format(item, free, chosen) for item in plan.items))


def _measured(
    layer: int, free: dict[str, Planned], formats: tuple[Format, ...], walk: Walk
) -> dict[str, list[Candidate]]:
    weights = walk.enter(layer)
    seen = walk.calibration.observe()
    found: dict[str, list[Candidate]] = {}
    for source in EVERY_INPUT:
        rows = _rows_reading(source, "", layer, free, weights)
        if rows is not None:
            found[f"blocks.{layer}.{source}"] = candidates(rows, seen[source], _fitting(formats, rows))
    for source in ("gate_up", "down") if walk.calibration.num_experts else ():
        every: list[tuple[int, list[Candidate]]] = []
        for expert in range(walk.calibration.num_experts):
            rows = _rows_reading(source, f"experts.{expert}.", layer, free, weights)
            if rows is not None:
                own = walk.calibration.observe_expert(expert, source, walk.routed)
                every.append((walk.routed.num_taken_by(expert), candidates(rows, own, _fitting(formats, rows))))
        if every:
            found[f"blocks.{layer}.experts.{source}"] = _together(every)
        rows = _rows_reading(source, "shared.", layer, free, weights)
        if rows is not None:
            own = walk.calibration.observe_expert(None, source, walk.routed)
            found[f"blocks.{layer}.shared.{source}"] = candidates(rows, own, _fitting(formats, rows))
    return found


def _rows_reading(
    source: str, expert: str, layer: int, free: dict[str, Planned], weights: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Of weights that are to be chosen for, those that read an input, together."""
    slots = [f"{part}.weight" for part in parts_reading(source, weights, expert)]
    together = [weights[slot] for slot in slots if f"blocks.{layer}.{slot}" in free]
    return torch.cat(together) if together else None


def _fitting(formats: tuple[Format, ...], rows: torch.Tensor) -> list[Format]:
    fitting = [form for form in formats if _fits(form, rows.shape[1])]
    if not fitting:
        raise UnsupportedError(f"no format of --target-bpw has rows of {rows.shape[1]}", "leave it out")
    return fitting


def _together(every: list[tuple[int, list[Candidate]]]) -> list[Candidate]:
    """Candidates for all of a layer's experts, by how many tokens take each."""
    taken = sum(count for count, _ in every) or 1
    return [
        Candidate(
            each[0].form,
            sum(one.num_bits for one in each),
            sum(count * one.error for (count, _), one in zip(every, each, strict=True)) / taken,
        )
        for each in zip(*(found for _, found in every), strict=True)
    ]


def _with_format(item: Planned, free: dict[str, Planned], chosen: dict[str, Format]) -> Planned:
    if item.weight.ours not in free:
        return item
    _, layer, *between, part, _ = item.weight.ours.split(".")
    source = next((source for source, parts in EVERY_INPUT.items() if part in parts), part)
    return item._replace(format=chosen[".".join(["blocks", layer, *between[:1], source])])


def _fits(form: Format, width: int) -> bool:
    try:
        form.check_width(width)
    except UnsupportedError:
        return False
    return True
