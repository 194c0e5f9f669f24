"""Cohere 2 with experts (Command A+, North Mini Code): attention and mixture side by side behind one norm, as in Cohere 2, a
softmax or sigmoids of the best logits as weights, and experts that all tokens take, whose sum with the others is often halved.
The first layers may have MLPs, and positions then whether they have a window or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.cohere import COHERE2
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.exaone import window_pattern
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all, has_none
from nanovllm_cli.models.names import SHARED_NAMES
from nanovllm_cli.norm_spec import NormSpec

_KINDS = ("dense", "sparse")
_DEFAULTS: dict[str, Any] = {
    "head_dim": 128, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "logit_scale": 0.0625, "sliding_window": 4096,
    "num_experts_per_tok": 2, "num_experts": 8, "num_shared_experts": 0, "expert_selection_fn": "softmax", "norm_topk_prob": True,
}  # fmt: skip


def _by_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with its layers by their numbers, and sizes by the keys that others have."""
    read = ConfigReader({**_DEFAULTS, **config}, "config.json")
    layers, first = read.integer("num_hidden_layers"), read.integer("first_k_dense_replace", 0, least=0)
    if max(layers, first) > MAX_LAYERS:
        raise CheckpointError(f"{read.where} asks for {max(layers, first)} layers; at most {MAX_LAYERS} are believed", BROKEN)
    kinds = read.values.get("mlp_layer_types") or [_KINDS[i >= first] for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise CheckpointError(f"{read.where}: 'mlp_layer_types' must be a list of {layers} of {', '.join(_KINDS)}", BROKEN)
    every = {key: read.integer(key, usual) for key, usual in (("prefix_dense_sliding_window_pattern", 1),
                                                              ("sliding_window_pattern", 4))}  # fmt: skip
    before, behind = (
        [SLIDING if (i + 1) % each else FULL for i in range(count)]
        for each, count in zip(every.values(), (first, layers - first), strict=True)
    )
    size = read.integer("intermediate_size")
    return {
        **config,
        "layer_types": before + behind if config.get("layer_types") is None else config["layer_types"],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [layer for layer, kind in enumerate(kinds) if kind == "dense"],
        "intermediate_size": read.integer("prefix_dense_intermediate_size", size),
        "moe_intermediate_size": size,
    }


def _cohere(spec: ModelSpec, logit_scale: float, turned: list[bool], *, averaged: bool) -> ModelSpec:
    """turned: of layers, whether they have positions even without a window. averaged: see `MoESpec`."""

    def mixed(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        return replace(mlp, averaged=averaged) if isinstance(mlp, MoESpec) and mlp.shared is not None else mlp

    spec = replace(spec, logit_scale=logit_scale).each_mlp(mixed)
    return spec.each_attention(lambda layer, a: a if a.window or turned[layer] else replace(a, rope=None))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if (way := read.text("shared_expert_combination_strategy", "average")) not in ("average", "sum"):
        raise UnsupportedError(f"{read.where}: shared experts that are joined by {way[:40]!r}", "known: average, sum")
    if not read.has("sliding_window"):
        raise UnsupportedError(f"{read.where}: a Cohere 2 with experts without a window", ANOTHER)
    if any(rope.dim != spec.attention.head_dim for rope in spec.ropes):
        raise UnsupportedError(f"{read.where}: a Cohere 2 with experts whose heads turn in part", ANOTHER)
    if read.has("rms_norm_eps"):
        spec = replace(spec, norm=NormSpec(read.number("rms_norm_eps")))
    if (mixture := spec.mixture) is not None and mixture.scoring == "softmax":  # of the best logits alone
        spec = spec.with_mlps(MoESpec, norm_topk=True)
    always = read.integer("prefix_dense_sliding_window_pattern", 1) == 1
    turned = [always and isinstance(block.mlp, MLPSpec) for block in spec.blocks]
    return _cohere(spec, read.number("logit_scale"), turned, averaged=way == "average")


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    first = read.integer(key("leading_dense_block_count"), 0, least=0)
    scale = read.number(key("logit_scale"), 0.0, positive=False) or 1.0
    return _cohere(spec, scale, [layer < first for layer in range(spec.num_layers)], averaged=True)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mixture, kinds = spec.mixture, [isinstance(block.mlp, MoESpec) for block in spec.blocks]
    has_all(spec.architecture, experts=mixture is not None, experts_in_all_layers_behind_the_first_ones=kinds == sorted(kinds))
    assert mixture is not None
    has_none(f"a {spec.architecture} model", biases_of_attention=spec.attention.qkv_bias or spec.attention.out_bias)
    stretched = any(rope.scaling != "none" for rope in spec.ropes)
    return {
        "logit_scale": spec.logit_scale, "expert_weights_norm": mixture.norm_topk, **window_pattern(spec),
        **({} if stretched else {"rope.scaling.type": "none"}),
    }  # fmt: skip


def family_of_cohere2moe(metadata: Mapping[str, Any]) -> Family:
    """Of a GGUF file: which of the two norms it has. One of 0 is none to llama.cpp."""
    return _BY_ROOT if metadata.get("cohere2moe.attention.layer_norm_rms_epsilon") else COHERE2_MOE


def _in_gguf(spec: ModelSpec) -> Family:
    return COHERE2_MOE if spec.norm.centered else _BY_ROOT


COHERE2_MOE = replace(
    COHERE2,
    name="cohere2_moe",
    gguf_name="cohere2moe",
    full_first=True,  # to llama.cpp, where a file doesn't list its layers
    experts=ExpertKeys(
        ("num_experts",), "moe_intermediate_size", "norm_topk_prob", shared="num_shared_experts", length_in_gguf=True,
        scoring="sigmoid", scoring_key="expert_selection_fn", first="first_k_dense_replace",
    ),
    config=_by_layers,
    defaults=_DEFAULTS,
    hf_names=SHARED_NAMES,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
    gguf_like=_in_gguf,
)  # fmt: skip
_BY_ROOT = replace(COHERE2_MOE, layer_norm=False)
