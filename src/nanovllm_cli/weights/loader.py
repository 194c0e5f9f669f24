"""From a checkpoint to a Decoder: which family, which tensor goes where, and a comparison of both as sets.

Tensors come in slices of a few megabytes and their file pages are let go at once, so that loading holds the model once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.model_spec import AttentionSpec, MLPSpec, ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.families import GGUF_NAMES, HF_IGNORED, HF_NAMES, spec_from_gguf, spec_from_hf
from nanovllm_cli.models.registry import gguf_family, hf_family
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.weights.checkpoint import Checkpoint

SLICE_BYTES = 16 << 20
MAX_NAMED = 5
OTHER_MODEL = "the checkpoint is incomplete, or its config belongs to another model"
# A config may describe this many times the numbers of its files, and a little more; no memory is taken for what goes further.
MAX_EXCESS, SMALL_EXCESS = 4, 1 << 24
GGUF_EXTRAS = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}


def read_spec(checkpoint: Checkpoint) -> ModelSpec:
    """The ModelSpec of a checkpoint. UnsupportedError for an unknown architecture, CheckpointError for a broken config."""
    spec = _hf_spec(checkpoint) if checkpoint.format == "hf" else _gguf_spec(checkpoint)
    _check_scale(spec, checkpoint)
    return spec


def _hf_spec(checkpoint: Checkpoint) -> ModelSpec:
    return spec_from_hf(checkpoint.config, hf_family(checkpoint.config))


def _gguf_spec(checkpoint: Checkpoint) -> ModelSpec:
    names = set(checkpoint.names())
    embedding = GGUF_NAMES["embedding.weight"]
    if embedding not in names or not checkpoint.info(embedding).shape:
        raise CheckpointError(
            f"{checkpoint.path}: tensor {embedding!r} is missing or empty",
            "the file holds a vocabulary only, or is incomplete",
        )

    def values(name: str) -> tuple[float, ...] | None:
        return tuple(checkpoint.tensor(name).flatten().tolist()) if name in names else None

    vocab_size = checkpoint.info(embedding).shape[0]
    return spec_from_gguf(checkpoint.config, gguf_family(checkpoint.config), vocab_size, names, values)


def _check_scale(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Refuses a config of a far larger model than there are weights for, before it is built. What is missing is told later."""
    wanted = spec.vocab_size * spec.hidden_size
    for block in spec.blocks:
        if isinstance(attention := block.attention, AttentionSpec):
            heads = 2 * (attention.num_heads + attention.num_kv_heads)
            wanted += spec.hidden_size * heads * attention.head_dim
        if isinstance(block.mlp, MLPSpec):
            wanted += spec.hidden_size * 3 * block.mlp.intermediate_size
    there = sum(math.prod(checkpoint.info(name).shape) for name in checkpoint.names())
    if wanted > MAX_EXCESS * there + SMALL_EXCESS:
        raise CheckpointError(
            f"{checkpoint.path}: the config describes a model of {wanted:.2g} parameters, the tensors have {there:.2g}",
            OTHER_MODEL,
        )


def _check_plain(checkpoint: Checkpoint) -> None:
    """Weights that somebody quantized say so in config.json."""
    quantization = checkpoint.config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedError(
            f"{checkpoint.path}: quantized checkpoints ({str(method)[:40]}) are not supported yet",
            "use the original weights, or a GGUF file",
        )


def load_weights(model: Decoder, checkpoint: Checkpoint, progress: LoadProgress | None = None) -> None:
    """Fill every slot of the model. CheckpointError names missing, extra and misshapen tensors, and those with NaN."""
    progress = progress or NullProgress()
    slots = model.slots()
    names = _checkpoint_names(slots, HF_NAMES if checkpoint.format == "hf" else GGUF_NAMES)
    _compare(checkpoint, {names[ours]: slot.shape for ours, slot in slots.items()}, model.spec)
    progress.stage("loading weights", checkpoint.total_bytes, "B")
    try:
        for ours, slot in slots.items():
            name = names[ours]
            for rows, first in _slices(checkpoint, name):
                _check_finite(checkpoint, name, rows)
                slot.load(rows, first)
                checkpoint.release(name)
            progress.advance(checkpoint.info(name).num_bytes)
    finally:
        progress.done()


def _checkpoint_names(slots: Slots, table: dict[str, str]) -> dict[str, str]:
    """Our slot names -> the checkpoint's, by a table of patterns with {i} for the layer."""
    names = {}
    for ours in slots:
        parts = ours.split(".")
        if parts[0] == "blocks":
            number, parts[1] = parts[1], "{i}"
            names[ours] = table[".".join(parts)].replace("{i}", number)
        else:
            names[ours] = table[ours]
    return names


def _compare(checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]], spec: ModelSpec) -> None:
    """Names and shapes of the checkpoint against those of the model, all differences at once."""
    there = set(checkpoint.names())
    ignored = {name for name in there if name in GGUF_EXTRAS or name.endswith(HF_IGNORED)}
    if spec.tied_head:
        ignored.add(HF_NAMES["head.weight"])
    problems = [
        ("missing", sorted(wanted.keys() - there)),
        ("not part of the model", sorted(there - wanted.keys() - ignored)),
    ]
    shapes = {name: checkpoint.info(name).shape for name in there & wanted.keys()}
    problems.append(
        (
            "of the wrong shape",
            [f"{n} (expected {list(wanted[n])}, found {list(s)})" for n, s in sorted(shapes.items()) if s != wanted[n]],
        )
    )
    lines = [f"{len(names)} {what}: {_some(names)}" for what, names in problems if names]
    if lines:
        raise CheckpointError(
            f"{checkpoint.path}: tensors don't match a {spec.architecture} model: {'; '.join(lines)}",
            OTHER_MODEL,
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


def _slices(checkpoint: Checkpoint, name: str) -> Iterator[tuple[torch.Tensor, int]]:
    """(rows, index of the first) of one tensor, in order."""
    info = checkpoint.info(name)
    if len(info.shape) < 2:
        yield checkpoint.tensor(name), 0
        return
    step = max(1, SLICE_BYTES // (4 * math.prod(info.shape[1:])))
    for first in range(0, info.shape[0], step):
        yield checkpoint.tensor(name, rows=(first, min(first + step, info.shape[0]))), first


def _check_finite(checkpoint: Checkpoint, name: str, rows: torch.Tensor) -> None:
    if not rows.is_floating_point():
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} holds {rows.dtype}, not numbers that a layer can use", OTHER_MODEL
        )
    if rows.dtype.itemsize < 2:
        raise UnsupportedError(
            f"{checkpoint.path}: tensor {name!r} holds {rows.dtype}, and scaled 8-bit numbers are not supported yet",
            "take the model in bfloat16, or a GGUF of it",
        )
    low, high = torch.aminmax(rows)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name!r} has values that are NaN or infinite",
            "the file is damaged; get it again",
        )
