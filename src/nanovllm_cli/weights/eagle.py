"""Reads what guesses by the layers of another model (`models/eagle.py`): a folder, as its trainers write them, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.layers.embedding import Embedding
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.eagle import PLACES, EagleSpec, eagle_spec
from nanovllm_cli.models.eagle_layer import Eagle
from nanovllm_cli.models.families import spec_from_gguf, spec_from_hf
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import MISSHAPEN, OTHER_MODEL, check_scale, check_tensors, fill, small_values
from nanovllm_cli.weights.tensor_names import checkpoint_name, family_of
from nanovllm_cli.weights.weight_reader import WeightReader

GUESSED, IS_GUESSED = "d2t", "t2d"
"""Which token of the model each of its own is; whether each of the model's is one of them, which the first says already."""
_GGUF_KEYS = {"target_layers": PLACES, "target_hidden_size": "target_hidden_size", "norm_before_residual": "norm_before_residual",
              "norm_before_fc": "norm_before_fc"}  # fmt: skip
_ROWS_COMPARED, _LEAST_ALIKE = 64, 0.95


def eagle_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Of our slots -> those in the file. Trainers call the layer "midlayer" or "layers.0", and put "model." in front or not."""
    names, table = set(checkpoint.names()), family_of(checkpoint).names(checkpoint.format)
    if checkpoint.format == "gguf":
        return table
    layer = "layers.0." if any(name.removeprefix("model.").startswith("layers.0.") for name in names) else "midlayer."
    found = {}
    for ours, theirs in table.items():
        named = theirs.replace("midlayer.", layer)
        found[ours] = f"model.{named}" if f"model.{named}".replace("{e}", "0") in names else named
    return found


def read_eagle(checkpoint: Checkpoint, reader: WeightReader, names: Mapping[str, str], model: Decoder) -> EagleSpec:
    """names: `eagle_names`. UnsupportedError where it was made for another model than this one, which is loaded."""
    family, there = family_of(checkpoint), reader.names()
    head, embedding = names["head.weight"], names["embedding.weight"]
    vocab_size = reader.shape(head)[0] if head in there and reader.shape(head) else model.spec.num_drawn
    if checkpoint.format == "hf":
        config = family.config(checkpoint.config)
        own = spec_from_hf({**checkpoint.config, "draft_vocab_size": vocab_size}, family)
        read = ConfigReader(config, "config.json")
    else:
        values = partial(small_values, checkpoint)
        own = spec_from_gguf(checkpoint.config, family, vocab_size, there, values)
        said = {name: checkpoint.config.get(f"{family.name}.{key}") for key, name in _GGUF_KEYS.items()}
        read = ConfigReader({name: value for name, value in said.items() if value is not None}, "GGUF metadata")
    parts = {part: checkpoint_name(f"blocks.0.{part}", names) in there for part in ("q.bias", "o.bias", "q_norm.weight")}
    own = replace(own, tied_head=False, has_head=True).with_attention(
        qkv_bias=parts["q.bias"], out_bias=parts["o.bias"], qk_norm=parts["q_norm.weight"]
    )
    own_embedding = embedding in there and not _is_models(checkpoint, embedding, own, model)
    eagle = eagle_spec(own, read, model.spec, own_embedding=own_embedding, own_head=head in there)
    check_scale(replace(eagle.spec, vocab_size=0), checkpoint, reader)
    return eagle


def guessed_ids(checkpoint: Checkpoint, eagle: EagleSpec, model: ModelSpec) -> list[int] | None:
    """The model's token for each of the drafter's; None: they are the same. CheckpointError for what is none of the model's."""
    count = eagle.spec.vocab_size
    if GUESSED not in checkpoint.names():
        if count > model.num_drawn:
            raise CheckpointError(f"{checkpoint.path}: {count} tokens, of which nothing says which the model's are", OTHER_MODEL)
        return None
    info = checkpoint.info(GUESSED)
    if info.shape != (count,) or info.dtype_name not in ("I64", "I32"):
        found = f"{info.dtype_name} {list(info.shape)}"
        raise CheckpointError(f"{checkpoint.path}: tensor {GUESSED!r} must be I64 [{count}], and is {found}", OTHER_MODEL)
    ids = checkpoint.tensor(GUESSED).long()
    if checkpoint.format == "hf":  # how far each is from its own number
        ids = ids + torch.arange(count)
    if count and not 0 <= int(ids.min()) <= int(ids.max()) < model.num_drawn:
        raise CheckpointError(
            f"{checkpoint.path}: tokens {int(ids.min())} to {int(ids.max())}, of a model of {model.num_drawn:,}", OTHER_MODEL
        )
    return [int(each) for each in ids.tolist()]


def load_eagle(
    model: Eagle, checkpoint: Checkpoint, reader: WeightReader, names: Mapping[str, str], progress: LoadProgress
) -> None:
    """Fill every slot; errors as of `load_weights`."""
    slots = model.slots()
    theirs = {ours: checkpoint_name(ours, names) for ours in slots}
    there = {name: reader.shape(name) for name in reader.names()}
    wanted = {theirs[ours]: slot.shape for ours, slot in slots.items()}
    shared = {GUESSED, IS_GUESSED, names["embedding.weight"]}
    check_tensors(checkpoint.path, model.spec, wanted, there, shared, misshapen=MISSHAPEN)
    fill(slots, theirs, reader, progress)


def _is_models(checkpoint: Checkpoint, name: str, own: ModelSpec, model: Decoder) -> bool:
    """Whether the embedding of this name is the model's once more, as far as that is rounded. Rows here and there tell."""
    shape = checkpoint.info(name).shape if name in checkpoint.names() else ()
    rows, width = shape if len(shape) == 2 else (0, 0)
    if width != model.spec.hidden_size or rows < model.spec.num_drawn or own.hidden_size != width:
        return False
    if checkpoint.info(name).dtype_name not in ("F32", "F16", "BF16"):
        return True  # nobody trains what is rounded
    ids = list(range(0, model.spec.num_drawn, -(-model.spec.num_drawn // _ROWS_COMPARED)))
    theirs = torch.cat([checkpoint.tensor(name, (row, row + 1)).float() for row in ids])
    ours = _rows(model.embedding, ids, model.device)
    alike = torch.nn.functional.cosine_similarity(theirs, ours, dim=1)
    return bool(((alike > _LEAST_ALIKE) | (theirs.abs().amax(1) == 0)).all())


def _rows(embedding: Embedding, ids: list[int], device: torch.device) -> torch.Tensor:
    with torch.inference_mode():
        return embedding(torch.tensor(ids, device=device)).float().cpu()
