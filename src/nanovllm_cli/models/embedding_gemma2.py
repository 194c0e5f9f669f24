"""EmbeddingGemma 2 (the part that reads texts): Gemma 4's layers, whose tokens see those behind them, each with numbers of a
token's own that are made of its embedding alone. A vector goes through a matrix behind the pooling. What it sees and hears by is
left aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.family import ANOTHER, GGUFField, has_none
from nanovllm_cli.models.gemma4 import FULL, GEMMA4

_EVERY = 6
_USUAL = {"num_hidden_layers": 24, "sliding_window": 512, "global_head_dim": 512, "num_global_key_value_heads": 1}


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With windows on both sides together, as others of this kind say them, and heads of layers without one where it has none."""
    read = ConfigReader({**_USUAL, **config}, "config.json")
    layers, found = read.integer("num_hidden_layers"), {**config, "sliding_window": 2 * read.integer("sliding_window")}
    if found.get("per_layer_config") is None and layers <= MAX_LAYERS:
        every = read.integer("sliding_window_pattern", _EVERY)
        kinds = found.get("layer_types")
        sees_all = [
            i for i in range(layers) if (kinds[i : i + 1] == [FULL] if isinstance(kinds, list) else (i + 1) % every == 0)
        ]
        heads = {"head_dim": read.integer("global_head_dim"), "num_key_value_heads": read.integer("num_global_key_value_heads")}
        found["per_layer_config"] = {str(i): heads for i in {*sees_all, layers - 1}}
    return found


def _encodes(spec: ModelSpec) -> ModelSpec:
    return replace(spec, per_layer_embedded=False)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    for name in ("attention.shared_kv_layers", "expert_count"):
        if read.integer(key(name), 0, least=0):
            raise UnsupportedError(f"{read.where}: an EmbeddingGemma 2 with {name!r}", ANOTHER)
    return _encodes(GEMMA4.gguf(spec, read, key))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    assert GEMMA4.gguf_keys is not None
    has_none("an EmbeddingGemma 2", no_numbers_of_layers=not spec.per_layer_width)
    return {name: value for name, value in GEMMA4.gguf_keys(spec).items() if name != "attention.shared_kv_layers"}


_PLE = {
    "per_layer_projection.weight": "model.ple.per_layer_model_projection.weight",
    "per_layer_norm.weight": "model.ple.per_layer_projection_norm.weight",
    "blocks.{i}.per_layer_gate.weight": "model.layers.{i}.ple_block.per_layer_input_gate.weight",
    "blocks.{i}.per_layer_out.weight": "model.layers.{i}.ple_block.per_layer_projection.weight",
    "blocks.{i}.after_per_layer_norm.weight": "model.layers.{i}.ple_block.post_per_layer_input_norm.weight",
}
EMBEDDING_GEMMA2 = replace(
    GEMMA4,
    name="embedding_gemma2",
    halves_window=True,
    both_ways=True,
    experts=None,
    config=_config,
    defaults={
        "vocab_size": 262144, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 256, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 512,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "default", "rope_theta": 1e6},
        }, **_USUAL,
    },
    hf_names={**GEMMA4.hf_names, **_PLE},
    gguf_names={**GEMMA4.gguf_names, "head.weight": "none"},
    hf=lambda spec, read: _encodes(GEMMA4.hf(spec, read)),
    gguf=_from_gguf,
    gguf_name="gemma-embedding2",
    gguf_keys=_keys,
    vector_names={"hf": "embedding_projection.weight", "gguf": "output.weight"},
)  # fmt: skip
