"""Adapters on the model that they are for: which of its weights they change, and a checkpoint in which those are changed.

An adapter may be called and ordered as the other format has it: a folder of PEFT's for a GGUF file, llama.cpp's for a folder.
Weights that are plain numbers are added to, which costs nothing later. What is stored quantized stays so, as steps between its
values are wider than most of what an adapter adds; its products get the adapter's beside them (`quant/low_rank.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from nanovllm_cli.config import Lora, LoraModule
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.mixer_spec import PairSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import MISTRAL, MIXTRAL
from nanovllm_cli.models.registry_gguf import GGUF_ARCHITECTURES
from nanovllm_cli.weights.adapter import MERGE_FIRST, Adapter, LowRank, open_adapter
from nanovllm_cli.weights.checkpoint import Checkpoint, CheckpointView, as_bytes
from nanovllm_cli.weights.convert_names import (
    attention_of,
    halves_to_pairs,
    pairs_to_halves,
    rotary_dims,
    tensor_shapes,
)
from nanovllm_cli.weights.convert_tensors import is_blocks, mirrored
from nanovllm_cli.weights.files import some
from nanovllm_cli.weights.folded import folded
from nanovllm_cli.weights.key_heads import qkv_rows
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.mapped import DOWNLOAD_AGAIN
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.saved_names import in_one_row
from nanovllm_cli.weights.stacked import holds_several, unstacked
from nanovllm_cli.weights.tensor_names import checkpoint_name, family_of, names_of
from nanovllm_cli.weights.vision import is_of_tower
from nanovllm_cli.weights.weight_reader import WeightReader

Sums = Mapping[str, Sequence[LowRank]]
"""What is added to weights, by their names in the checkpoint."""

_COMPARED_ROWS = 1024
_MOST_NOISE = 0.3
"""Of blocks, relative: what two bits a number lose."""

_BY_HEAD = (".kv_b.", ".k_b.", ".v_b.", ".o_a.")
_NOT_BESIDE = {".experts.": "experts"} | dict.fromkeys(_BY_HEAD, "weights that are taken apart by head")
_NOT_CHOSEN = _NOT_BESIDE | {"head.weight": "the head"}
_PARTS = ("model.language_model.", "language_model.model.", "language_model.", "model.text_model.")
"""Where a model that also sees has the one that writes text."""
_TRUNK = "backbone."
"""What folders of a Nemotron have in place of "model.", which adapters call it."""


class Adapted(NamedTuple):
    """checkpoint: with all that could be added to it; beside: what its quantized weights get at run time, and those that
    requests choose adapters for, by our names."""

    checkpoint: Checkpoint
    beside: Sums


def adapt(
    checkpoint: Checkpoint,
    reader: WeightReader,
    spec: ModelSpec,
    lora: Iterable[Lora],
    modules: Sequence[LoraModule] = (),
) -> Adapted:
    """`checkpoint` of a model of `spec`, as `reader` reads it, with adapters that are paths on this machine. modules: those that
    requests choose, of which nothing can be in the weights. What changed is float32 at the least, whatever it is stored as.

    Raises what `open_adapter` raises, and UsageError where an adapter is for another model.
    """
    shapes = tensor_shapes(spec, names_of(checkpoint))
    ours = dict(zip(shapes, tensor_shapes(spec, {name: name for name in names_of(checkpoint)}), strict=True))
    plain: dict[str, list[LowRank]] = {}
    beside: dict[str, list[LowRank]] = {}
    for each in lora:
        for name, added in _fitted(open_adapter(Path(each.name), each.scale), checkpoint, spec, shapes, ours).items():
            if reader.stored_as(name) is None:
                plain.setdefault(name, []).append(added)
            elif (what := next((what for part, what in _NOT_BESIDE.items() if part in ours[name]), None)) is not None:
                raise UnsupportedError(f"{each.name}: an adapter of quantized {what} ({name})", "take the unquantized model")
            else:
                beside.setdefault(ours[name], []).append(added)
    if modules and folded(checkpoint) is not checkpoint:
        what = f"{checkpoint.path}: requests can't choose adapters of a model whose config has factors of its weights"
        raise UnsupportedError(what, "--lora takes them, for all requests")
    for number, module in enumerate(modules):
        for name, added in _fitted(open_adapter(Path(module.path), 1.0), checkpoint, spec, shapes, ours).items():
            if (what := next((what for part, what in _NOT_CHOSEN.items() if part in ours[name]), None)) is not None:
                raise UnsupportedError(
                    f"{module.path}: requests can't choose an adapter of {what} ({name})", "--lora takes it, for all requests"
                )
            beside.setdefault(ours[name], []).append(added._replace(module=number))
    apart = unstacked(checkpoint) if holds_several(checkpoint) else checkpoint
    return Adapted(_Sum(apart, plain) if plain else checkpoint, beside)


def merged(checkpoint: Checkpoint, lora: Sequence[Lora]) -> Checkpoint:
    """`checkpoint` with adapters in it, for writing, which rounds once: to the type that is written. Raises as `adapt`, and
    UnsupportedError where weights are quantized, or a tensor holds all experts."""
    reader = open_reader(checkpoint)
    adapted = adapt(checkpoint, reader, read_spec(checkpoint, reader), lora)
    if adapted.beside:
        raise UnsupportedError(
            f"{checkpoint.path}: an adapter is not written into weights that are quantized: most of it would be rounded away",
            "take the original, and quantize what comes out",
        )
    if holds_several(checkpoint):
        raise UnsupportedError(f"{checkpoint.path}: an adapter is not written into a file that stacks or turns matrices")
    return adapted.checkpoint


def _fitted(
    adapter: Adapter, checkpoint: Checkpoint, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], ours: Mapping[str, str]
) -> dict[str, LowRank]:
    """What the adapter adds, by the checkpoint's names, which have these shapes and are ours, and in the order of its rows."""
    family = family_of(checkpoint)
    if adapter.architecture is not None and adapter.architecture not in (archs := _architectures(checkpoint, spec)):
        of = " or ".join(archs)
        raise UsageError(f"{adapter.path}: an adapter of {adapter.architecture} models, and {checkpoint.path} is {of}")
    if family.folding is not None and adapter.format != checkpoint.format:
        what = f"{adapter.path}: an adapter of a {family.name} model whose weights have its config's factors here, and not there"
        raise UnsupportedError(what, "take the model that it was trained on")
    if adapter.turned_over and not family.turned_over:
        raise UnsupportedError(f"{adapter.path}: fan_in_fan_out is set, and {checkpoint.path} has no such matrices", MERGE_FIRST)
    theirs = _names(ours, family.names(adapter.format))
    if adapter.format == "hf":
        theirs |= _names(ours, family.peft_names)

    def known_as(name: str) -> str | None:
        name = in_one_row(name, spec)
        part = next((part for part in _PARTS if name.startswith(part)), "")
        inner = name.removeprefix(part)
        if (trunk := f"{_TRUNK}{name.removeprefix('model.')}") in theirs:
            return theirs[trunk]
        return theirs.get(name) or theirs.get(inner if part == _PARTS[-1] else f"model.{inner}")

    fitted: dict[str, LowRank] = {}
    strangers = []
    for name, added in adapter.weights.items():
        known = known_as(name)
        if known is None or len(shapes[known]) != 2:
            strangers.append(name)
        elif ours[known] in ("embedding.weight", "per_layer_embedding.weight", "positions.weight"):
            raise UnsupportedError(f"{adapter.path}: an adapter of the embedding ({name})", MERGE_FIRST)
        elif _is_shared(ours[known], spec):
            what = f"{adapter.path}: an adapter of one layer's use of weights that several layers share ({name})"
            raise UnsupportedError(what, "take one that leaves these as they are")
        elif (shape := (added.up.shape[0], added.down.shape[1])) != shapes[known]:
            raise UsageError(f"{adapter.path}: {name} is {list(shape)}, and in the model {list(shapes[known])}", _other(adapter))
        elif known in fitted:
            raise CheckpointError(f"{adapter.path}: what is added to {known} is there twice", DOWNLOAD_AGAIN)
        else:
            fitted[known] = added._replace(up=_reordered(added.up, ours[known], adapter, checkpoint, spec))
    seeing = [name for name in strangers if is_of_tower(name)]
    if seeing and any(map(is_of_tower, checkpoint.names())):
        raise UnsupportedError(f"{adapter.path}: an adapter of what images are read by ({seeing[0]})", MERGE_FIRST)
    if strangers:
        raise UsageError(f"{adapter.path}: no such weights in {checkpoint.path}: {some(strangers)}", _other(adapter))
    for name, whole in adapter.copies.items():
        there = known_as(name)
        if there is None or shapes[there] != whole.shape or not _is_copy(whole, checkpoint, there):
            raise UnsupportedError(f"{adapter.path}: it brings another {name} than the model's", MERGE_FIRST)
    return fitted


def _is_shared(ours: str, spec: ModelSpec) -> bool:
    """Whether a weight is another layer's as well; an adapter's is of one of them."""
    place, _, part = ours.removesuffix(".weight").rpartition(".")
    mixer = spec.blocks[int(place.split(".")[1])].mixer if place.startswith("blocks.") else None
    ahead = mixer.ahead if isinstance(mixer, PairSpec) else None
    own = ".uses." in ours or part in ("mamba_in", "mamba_out", "ahead_out")
    return ahead is not None and len(ahead.uses) > 1 and not own


def _architectures(checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    """What GGUF files of such models are called."""
    if checkpoint.format == "gguf":
        return [str(checkpoint.config["general.architecture"])]
    family = family_of(checkpoint)
    family = family if family.gguf_like is None else family.gguf_like(spec)
    known = [name for name, each in GGUF_ARCHITECTURES.items() if each is family] or [family.gguf_name]
    return ["llama", *known] if family in (MISTRAL, MIXTRAL) else known


def _names(ours: Mapping[str, str], table: Mapping[str, str]) -> dict[str, str]:
    """Names by a family's other table -> the checkpoint's. One file's family may know of parts that another's does not."""
    names = {}
    for known, name in ours.items():
        with contextlib.suppress(UnsupportedError):
            names[checkpoint_name(name, table)] = known
    return names


def _is_copy(whole: torch.Tensor, checkpoint: Checkpoint, name: str) -> bool:
    """Whether rows of a weight that came along are the model's, as far as a model that is quantized lets one see."""
    rows = (0, min(_COMPARED_ROWS, whole.shape[0]))
    own, copy = checkpoint.tensor(name, rows), whole[: rows[1]]
    if checkpoint.format == "gguf" and is_blocks(checkpoint.info(name).dtype_name):
        return bool((own - copy.float()).norm() <= _MOST_NOISE * copy.float().norm())
    return torch.equal(checkpoint.tensor(name).to(whole.dtype), whole)


def _other(adapter: Adapter) -> str:
    return "it was trained on " + (repr(adapter.base[:200]) if adapter.base else "another model")


def _reordered(up: torch.Tensor, ours: str, adapter: Adapter, checkpoint: Checkpoint, spec: ModelSpec) -> torch.Tensor:
    """Rows of q and k in the order of the checkpoint's rotary pairs; a head's q, k and v together as those of all heads."""
    family = family_of(checkpoint)
    if family.qkv_by_head and adapter.format == "hf" and ours.endswith(".qkv.weight"):
        return up[list(qkv_rows(spec.attention.num_heads, spec.attention.num_kv_heads, spec.attention.head_dim))]
    interleaved = {"hf": family.interleaved, "gguf": family.interleaved_gguf}
    was, becomes = interleaved[adapter.format], interleaved[checkpoint.format]
    if adapter.format == checkpoint.format or not ours.endswith((".q.weight", ".k.weight")):
        return up
    if family.mirrored_gguf:
        return mirrored(up, spec.attention.head_dim)
    if was == becomes:
        return up
    return (halves_to_pairs if becomes else pairs_to_halves)(up, *rotary_dims(attention_of(spec)))


class _Sum(CheckpointView):
    """`added` by name."""

    def __init__(self, inner: Checkpoint, added: Sums) -> None:
        super().__init__(inner)
        self._added = added

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Added in fp32, and left so; headers say what it was stored as."""
        stored = super().tensor(name, rows)
        if name not in self._added:
            return stored
        first, end = rows or (0, stored.shape[0])
        total = stored.to(torch.promote_types(stored.dtype, torch.float32))
        for each in self._added[name]:
            total = total + each.rows(first, end)
        if bool((stored.isfinite() & ~total.isfinite()).any()):
            raise CheckpointError(f"{self.path}: with its adapter, tensor {name!r} has values that {total.dtype} cannot hold")
        return total

    def raw(self, name: str) -> torch.Tensor:
        return as_bytes(self.tensor(name)) if name in self._added else super().raw(name)
