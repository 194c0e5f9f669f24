"""The Hugging Face folder of a quantized model: shards and index, config.json, and everything else as the original has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quantization.compressed_tensors import encode, quantization_config, tensors_of
from nanovllm_cli.quantization.original import Original
from nanovllm_cli.quantization.parts import Parts
from nanovllm_cli.quantization.plan import Plan, Planned
from nanovllm_cli.weights.files import beside_weights
from nanovllm_cli.weights.folder_config import as_published
from nanovllm_cli.weights.loader import PLAIN
from nanovllm_cli.weights.tensor_names import left_aside, names_of
from nanovllm_cli.weights.weight_reader import float_slices
from nanovllm_cli.weights.writer import OutputFolder, TensorOut, as_json, write_shards

# What is written anew, and two that say how an original was quantized.
_OTHERS = ("config.json", "README.md", "quality.json", "quantize_config.json", "quant_config.json")


def write_folder(original: Original, plan: Plan, parts: Parts, folder: OutputFolder, progress: LoadProgress) -> None:
    """Everything but the model card. The units of the plan are finished."""
    writer = _Tensors(original, plan, parts)
    progress.stage("writing", sum(out.num_bytes for out in writer.outs), "B")
    write_shards(folder, writer.outs, writer.slices, progress)
    folder.write("config.json", as_json(_config(original, plan)))
    for path, name in beside_weights(original.folder).kept:
        if name not in _OTHERS:
            folder.copy(path, name)


class _Tensors:
    """The tensors of the folder in the original's order, a weight's codes and scales behind each other. Of an original that is
    quantized itself, no codes and scales: the plan replaces all of them."""

    def __init__(self, original: Original, plan: Plan, parts: Parts) -> None:
        self._checkpoint = original.checkpoint
        self._parts = parts
        self._items = {item.weight.output: item for item in plan.items if item.format is not None}
        self._changed = parts.changed_floats(plan.units(), names_of(original.checkpoint))
        self._of: dict[str, str] = {}
        self._encoded: dict[str, torch.Tensor] = {}
        self.outs: list[TensorOut] = []
        weights = original.reader.names()
        plain = (name for name in original.checkpoint.names() if name in weights)
        for name in dict.fromkeys((*plain, *self._items)):
            outs = self._outs(name)
            self._of |= {out.name: name for out in outs}
            self.outs += outs

    def slices(self, out: TensorOut) -> Iterator[torch.Tensor]:
        """Of the next tensor, in the order of `outs`."""
        name = self._of[out.name]
        if name in self._items:
            if out.name not in self._encoded:
                self._encoded = self._encode(self._items[name])
            yield self._encoded.pop(out.name)
        elif name in self._changed:
            rows = self._parts.read(self._changed[name][0])[self._changed[name][1]]
            assert isinstance(rows, torch.Tensor)
            yield rows.to(out.dtype)
        else:
            for rows, _ in float_slices(self._checkpoint, name):
                yield rows

    def _outs(self, name: str) -> list[TensorOut]:
        item = self._items.get(name)
        if item is not None:
            assert item.format is not None
            return tensors_of(item.format, name, item.weight.shape)
        return [TensorOut(name, self._checkpoint.info(name).shape, self._checkpoint.tensor(name).dtype)]

    def _encode(self, item: Planned) -> dict[str, torch.Tensor]:
        assert item.format is not None
        rows = self._parts.read(item.weight.unit)[item.weight.ours]
        assert not isinstance(rows, torch.Tensor)
        outs = tensors_of(item.format, item.weight.output, item.weight.shape)
        return {out.name: tensor for out, tensor in zip(outs, encode(item.format, rows), strict=True)}

def _config(original: Original, plan: Plan) -> dict[str, Any]:
    names = names_of(original.checkpoint)
    patterns = [names[slot] for slot in PLAIN if slot in names]
    kept = (pattern.format(i=i) for i in range(original.spec.num_layers) for pattern in patterns)
    there = set(original.checkpoint.names())
    formats: dict[str, Format | None] = {name.removesuffix(".weight"): None for name in kept if name in there}
    formats |= {
        item.weight.output.removesuffix(".weight"): item.format
        for item in plan.items
        if item.weight.unit != "embedding"
    }
    checkpoint = original.checkpoint
    others = left_aside(checkpoint, (name for name in checkpoint.names() if len(checkpoint.info(name).shape) == 2))
    formats |= {name.removesuffix(".weight"): None for name in sorted(others)}
    config = dict(as_published(checkpoint.config))
    if original.spec.tied_head and "lm_head" in formats:
        config["tie_word_embeddings"] = False  # the head has numbers of its own now
        if isinstance(llm := config.get("llm_config"), dict):
            config["llm_config"] = llm | {"tie_word_embeddings": False}
    return config | {"quantization_config": quantization_config({**formats, "lm_head": formats.get("lm_head")})}
