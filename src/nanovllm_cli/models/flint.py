"""Flint (RecursiveSI 2026): Qwen3's attention with a learned logit a head that takes part in its softmax, positions in layers
with a window alone, experts by sigmoids, and one that every token takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys, with_shared
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import Family, no_file
from nanovllm_cli.models.names import QWEN_NAMES, projections


def with_kinds(config: Mapping[str, Any], sees_all: Callable[[int, int], bool]) -> Mapping[str, Any]:
    """The same with the kinds of its layers. sees_all: whether one of so many has no window, where the config says nothing."""
    layers = config.get("num_hidden_layers")
    if config.get("layer_types") is not None or type(layers) is not int or layers > MAX_LAYERS:
        return config
    return {**config, "layer_types": [FULL if sees_all(layer, layers) else SLIDING for layer in range(layers)]}


def turning_in_windows(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """The same without positions where there is no window. CheckpointError for a config that has none at all."""
    read.integer("sliding_window")
    return spec.each_attention(lambda layer, own: own if own.window is not None else replace(own, rope=None))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = with_shared(spec, read.integer("shared_expert_intermediate_size"))
    return turning_in_windows(spec, read)


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = with_kinds(config, lambda layer, layers: layer < 2 or layer % 4 == 1 or layer == layers - 1)
    dense = found.get("mlp_only_layers")
    return {**found, "mlp_bias": False, "mlp_only_layers": [0, 1] if dense is None else dense}


FLINT = Family(
    "flint",
    attention={"sinks": True},
    qk_norm=True,
    has_window=True,
    experts=ExpertKeys(
        ("num_experts", "num_local_experts"), "moe_intermediate_size", "norm_topk_prob", scoring="sigmoid",
    ),
    config=_config,
    defaults={
        "vocab_size": 150144, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 49, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 262144, "sliding_window": 513, "num_experts": 256,
        "num_experts_per_tok": 6, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "norm_topk_prob": True,
    },
    hf_names={
        **QWEN_NAMES,
        "blocks.{i}.sinks": "model.layers.{i}.self_attn.softmax_offset",
        **projections("blocks.{i}.shared.", "model.layers.{i}.mlp.shared_expert."),
    },
    hf=_from_hf,
    gguf_like=no_file("Flint"),
)  # fmt: skip
