"""How much the columns of a weight count: mean squares of what they meet, measured here or read from a file of llama.cpp's.

The K-quants' search (quant/gguf_encode.py) weighs squared errors by them, and so puts its few codes where activations are large.
Other types have no use for them, nor have the embedding, which is looked up, and the head where it is the embedding.
"""

from __future__ import annotations

import torch

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quantization.calibration import parts_reading
from nanovllm_cli.quantization.plan import Plan, Planned
from nanovllm_cli.quantization.walk import Walk
from nanovllm_cli.weights.convert_delta import columns_in_turn
from nanovllm_cli.weights.imatrix import ImportanceFile

Importance = dict[str, torch.Tensor]
"""By our names of weights, [K] in the output's order of columns."""


def weighable(plan: Plan, *, inside: bool = False) -> list[Planned]:
    """The weights that can weigh their columns. UnsupportedError where none can. inside: nor one of the layers, of which alone it
    is measured what they meet."""
    found = [item for item in plan.items if isinstance(item.format, Blocks) and item.format.weighs_columns]
    if not any(item.weight.ours.startswith("blocks.") or not inside for item in found):
        raise UnsupportedError(
            f"{plan.to}: an importance matrix weighs the columns of q2_k to q6_k, and nothing becomes one of these",
            "take such a format, or another --algorithm",
        )
    return found


def measured(plan: Plan, walk: Walk, progress: LoadProgress) -> Importance:
    """By the walk's texts, in the original model."""
    items = {item.weight.ours: item for item in weighable(plan) if item.weight.ours.startswith("blocks.")}
    layers = sorted({int(ours.split(".")[1]) for ours in items})
    found: Importance = {}
    progress.stage("reading the texts", len(layers), "tensors")
    for layer in layers:
        block, slots = f"blocks.{layer}.", set(walk.enter(layer))
        for name, squares in walk.calibration.mean_squares().items():
            expert, dot, source = name.rpartition(".")
            for part in parts_reading(source, slots, expert + dot):
                if (item := items.get(f"{block}{part}.weight")) is not None:
                    dealt = item.weight.dealt
                    found[item.weight.ours] = squares if dealt is None else columns_in_turn(dealt, squares[None])[0]
        progress.advance(1)
    return found


def from_file(plan: Plan, file: ImportanceFile, progress: LoadProgress) -> Importance:
    """UsageError for a file that has none of the plan's weights, CheckpointError for one of another model."""
    items, together = weighable(plan), plan.by_output()
    found: Importance = {}
    for item in items:
        all_of_it = together[item.weight.output]
        own = file.of(item.weight.output, item.weight.shape[1], all_of_it.index(item), len(all_of_it))
        if own is not None:
            found[item.weight.ours] = own
    if not found:
        raise UsageError(f"{file.name} says nothing of this model's weights", "it is of another model, or of other names")
    lacking = [item.weight.output for item in items if item.weight.ours not in found]
    lacking = [name for name in dict.fromkeys(lacking) if name.startswith("blk.")]
    if lacking:
        names = ", ".join(lacking[:3]) + (" …" if len(lacking) > 3 else "")
        progress.note(f"{file.name} says nothing of {len(lacking)} weights, whose columns count alike: {names}")
    return found
