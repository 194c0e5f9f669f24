"""EAGLE-3: a small model that guesses for a large one, out of what layers of that one read (Li et al. 2025, and with norms of
theirs version 3.1, 2026).

It is one layer of attention (`eagle_layer.py`), which reads two rows of a token side by side, both normed: the token's embedding,
and what the large model's taps made of the token before it (`layers/taps.py`). Where the large model has not been yet, its own
output stands in for that. Its head has the most frequent tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import LLAMA
from nanovllm_cli.models.names import HF_NAMES

_OF_ITS_OWN = "a drafter guesses for the model that it was trained with; name that one"
OWN_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator")
INNER, OWN = "transformer_layer_config", "eagle_config"
"""Sections of a config: what the layer is made of, and what NVIDIA's say of the rest."""
PLACES = "eagle_aux_hidden_state_layer_ids"


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether a folder is one that calls itself a Llama: the first were published so."""
    return config.get("architectures") == ["LlamaForCausalLM"] and "draft_vocab_size" in config


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    inner, own = (config.get(name) or {} for name in (INNER, OWN))
    if not (isinstance(inner, Mapping) and isinstance(own, Mapping)):
        raise CheckpointError(f"config.json: {INNER!r} and {OWN!r} must be objects", BROKEN)
    flat = {**inner, **{name: value for name, value in config.items() if name not in (INNER, OWN)}, **own}
    flat = {name: value for name, value in flat.items() if value is not None}
    return flat | {"tie_word_embeddings": False, "vocab_size": flat.get("draft_vocab_size") or flat.get("vocab_size")}


_LAYER = "midlayer."
_OUTER = {"fuse.weight": "fc.weight", "fuse_norm.weight": "input_norm.weight", "fuse_norm.{e}.weight": "fc_norm.{e}.weight"}
EAGLE3 = replace(
    LLAMA, name="eagle3", assists="rows", config=_flat,
    hf_names={ours: theirs.replace("model.layers.{i}.", _LAYER).removeprefix("model.") for ours, theirs in HF_NAMES.items()}
    | _OUTER | {"blocks.{i}.attention_norm.weight": f"{_LAYER}hidden_norm.weight",
                "embedding_norm.weight": f"{_LAYER}input_layernorm.weight"},
    gguf_names=_OUTER | {"blocks.{i}.attention_norm.weight": "blk.{i}.attn_norm_2.weight",
                         "embedding_norm.weight": "blk.0.attn_norm.weight", "fuse_norm.weight": "enc.output_norm.weight"},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """spec: of the layer, whose vocabulary is what it guesses among. places, width, normed: see `Taps`. stream_normed: the
    residual stream begins with the normed row; else with the row as it is. output_normed: what stands in for the taps' rows is
    behind the last norm; else before it. own_embedding, own_head: it has them, and not the model's."""

    spec: ModelSpec
    places: tuple[int, ...]
    width: int
    normed: Literal["not", "each", "together"]
    stream_normed: bool
    output_normed: bool
    own_embedding: bool
    own_head: bool


def eagle_spec(own: ModelSpec, read: ConfigReader, model: ModelSpec, *, own_embedding: bool, own_head: bool) -> EagleSpec:
    """own: what the drafter's config says of its layer; read: what it says beside that, by the names that folders have for it.
    UnsupportedError where it was made for another model, or is made of more."""
    if own.num_layers != 1:
        raise UnsupportedError(f"EAGLE-3 of {own.num_layers} layers is not supported", "take a drafter of one")
    if own.attention.both_ways:
        raise UnsupportedError("EAGLE-3 that guesses several tokens at once is not supported", "take another drafter")
    if not read.flag("use_aux_hidden_state", True):
        raise UnsupportedError("EAGLE-3 that reads one layer of the model alone is not supported", "take another drafter")
    if model.streams is not None:
        raise UnsupportedError(f"nobody can guess by the layers of {model.architecture} models", "leave --draft-model out")
    layers = model.num_layers
    places = _places(read, layers)
    width = read.integer("target_hidden_size", own.hidden_size)
    same_width = own.hidden_size == model.hidden_size
    if width != model.hidden_size or not (own_embedding or same_width) or not all(0 <= place <= layers for place in places):
        theirs = f"{layers} layers and rows of {model.hidden_size}"
        raise UnsupportedError(
            f"the drafter reads rows of {width} of the layers {', '.join(map(str, places))}; the model has {theirs}", _OF_ITS_OWN
        )
    if not own_head and (not same_width or own.vocab_size != model.num_drawn):
        raise UnsupportedError(f"the drafter has no head, and the model's is not for its {own.vocab_size:,} tokens", _OF_ITS_OWN)
    together, each = read.flag("norm_before_fc", False), read.flag("fc_norm", False)
    if together and each:
        raise UnsupportedError("EAGLE-3 whose rows are normed twice is not supported", "take another drafter")
    spec = replace(own.with_attention(read_size=2 * own.hidden_size), max_position=model.max_position)
    return EagleSpec(
        spec, places, width, "together" if together else "each" if each else "not",
        stream_normed=read.flag("norm_before_residual", False), output_normed=read.flag("norm_output", False),
        own_embedding=own_embedding, own_head=own_head,
    )  # fmt: skip


def _places(read: ConfigReader, layers: int) -> tuple[int, ...]:
    if not read.has(PLACES):
        return 2, layers // 2, layers - 3
    places = read.values[PLACES]
    if not isinstance(places, list) or not places or not all(type(place) is int for place in places):
        raise CheckpointError(f"{read.where}: {PLACES!r} must be a list of numbers of layers", BROKEN)
    return tuple(places)
