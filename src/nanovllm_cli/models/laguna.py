"""Poolside's Laguna: what heads find is multiplied by a softplus, some layers have windows, rotations of their own and another
number of heads, experts are chosen by sigmoids and a bias. JetBrains' Mellum 2: a Qwen3 with experts and such windows.
Deepgrove's Maple: the same, whose other layers have no positions, and whose experts' activations are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.exaone import turned_in_windows, window_pattern
from nanovllm_cli.models.experts import ExpertKeys, held, layers_without_experts, limits_in_gguf, with_shared
from nanovllm_cli.models.families import FULL, QWEN3_MOE, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all
from nanovllm_cli.models.names import QWEN_NAMES, SHARED_NAMES

_LAYER = "model.layers.{i}"


def _by_layers(config: Mapping[str, Any], num_dense: int, ropes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with the layers that have no experts by their numbers, and what it leaves out: so many first ones have none, no
    layer has a window."""
    found: dict[str, Any] = {"mlp_only_layers": layers_without_experts(config, num_dense)}
    if config.get("layer_types") is None:
        found["sliding_window"] = None
    if config.get("rope_parameters") is None:
        found["rope_parameters"] = ropes
    return {**config, **found}


def _laguna(spec: ModelSpec, heads: Any, by_head: bool) -> ModelSpec:
    """heads: of each layer."""
    attentions = spec.attentions
    if not isinstance(heads, list | tuple) or len(heads) != spec.num_layers or not all(
        type(each) is int and each > 0 and each % attentions[0].num_kv_heads == 0 for each in heads
    ):
        raise CheckpointError(f"a Laguna's heads must be a list of {spec.num_layers} layers' numbers", BROKEN)
    if attentions[0].qkv_bias or attentions[0].out_bias:
        raise UnsupportedError("a Laguna with biases in its attention", ANOTHER)
    spec = spec.each_attention(lambda layer, own: replace(own, num_heads=heads[layer]))
    return spec.with_attention(gated=True, gate_apart=True, gate_by_head=by_head, gate_is="softplus")


def _laguna_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.number("moe_router_logit_softcapping", 0.0, positive=False) or read.flag("moe_apply_router_weight_on_input", False):
        raise UnsupportedError(f"{read.where}: a cap of the router's logits, or weights of experts' inputs", ANOTHER)
    spec = with_shared(spec, read.integer("shared_expert_intermediate_size", 512))
    gating = read.values.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise UnsupportedError(f"{read.where}: gates {str(gating)[:40]!r}", "known: per-head, per-element")
    heads = read.values.get("num_attention_heads_per_layer") or [read.integer("num_attention_heads")] * spec.num_layers
    return _laguna(spec, heads, gating != "per-element")


def _laguna_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Those with windows have a gate a head, the one without has one a number; no file says so."""
    heads = read.values.get(key("attention.head_count"))
    has_windows = any(attention.window is not None for attention in spec.attentions)
    spec = spec.with_mlps(MoESpec, norm_topk=read.flag(key("expert_weights_norm"), False))
    return _laguna(spec, heads if isinstance(heads, list | tuple) else [heads] * spec.num_layers, has_windows)


def _mellum_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """What is not stretched has no length of its own; files give it that of the others."""
    lengths = [own.rope.original_len for own in spec.attentions if own.rope is not None and own.window is None]
    if not lengths:
        return spec
    return spec.each_rope(lambda rope: rope if rope.scaling != "none" else replace(rope, original_len=lengths[0]))


def _mellum_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    bases = {attention.rope.theta for attention in spec.attentions if attention.rope is not None}
    has_all(spec.architecture, one_rotary_base_for_all_layers=len(bases) == 1, experts_in_all_layers=spec.dense_mlp is None)
    return window_pattern(spec) | {"rope.freq_base_swa": bases.pop()}


_HELD = 7.0
"""In the code that Maple was published with, whatever its config says."""


def _with_held_gates(spec: ModelSpec, limits: list[float | None]) -> ModelSpec:
    def of_gates(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        return replace(mlp, expert=replace(mlp.expert, gate_held=True)) if isinstance(mlp, MoESpec) else mlp

    return held(spec, limits, [None] * spec.num_layers).each_mlp(of_gates)


def _maple_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Maple", norm_topk_prob=True, nope_on_global_attention=True)
    if read.integer("num_shared_experts", 0, least=0):
        raise UnsupportedError(f"{read.where}: a Maple with an expert that every token takes", ANOTHER)
    layers = spec.num_layers
    return _with_held_gates(turned_in_windows(spec), [_HELD] * layers)


def _maple_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    layers, theta = spec.num_layers, key("rope.freq_base_swa")
    spec = turned_in_windows(spec).each_rope(lambda rope: replace(rope, theta=read.number(theta, rope.theta)))
    return _with_held_gates(spec, limits_in_gguf(read, key("swiglu_clamp_exp"), layers))


def _maple_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    bases = [attention.rope.theta for attention in spec.attentions if attention.rope is not None]
    has_all(spec.architecture, experts_in_all_layers=spec.dense_mlp is None, layers_with_a_window=bool(bases),
            head_of_its_own=not spec.tied_head)  # fmt: skip
    limits = [mlp.limit or 0.0 for mlp in spec.mlps]
    return window_pattern(spec) | {"rope.freq_base_swa": bases[0], "swiglu_clamp_exp": limits}


LAGUNA = Family(
    "laguna",
    qk_norm=True,
    has_window=True,
    full_every=4,
    full_first=True,
    local_theta=10000.0,
    varied=True,
    experts=ExpertKeys(
        ("num_experts", "num_local_experts"), "moe_intermediate_size", True, shared="n_shared_experts",
        scale="moe_routed_scaling_factor", scoring="sigmoid", selection_bias=True,
    ),
    config=lambda config: _by_layers(config, 1, {
        FULL: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }),
    defaults={"head_dim": 128, "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8,
              "max_position_embeddings": 131072, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
              "intermediate_size": 8192, "sliding_window": 512, "vocab_size": 100352},
    hf_names={
        **{ours: theirs.replace("shared_experts", "shared_expert") for ours, theirs in SHARED_NAMES.items()},
        "blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.g_proj.weight",
        "blocks.{i}.router.selection_bias": f"{_LAYER}.mlp.experts.e_score_correction_bias",
    },
    peft_names=SHARED_NAMES,
    gguf_names={"blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight"},
    hf=_laguna_from_hf,
    gguf=_laguna_from_gguf,
    gguf_keys=None,
)  # fmt: skip
MELLUM = replace(
    QWEN3_MOE,
    name="mellum",
    gguf_name="mellum",
    window_switch=None,
    full_every=4,
    local_theta=10000.0,
    config=lambda config: _by_layers(config, 0, {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}}),
    defaults={"head_dim": 128, "num_hidden_layers": 28, "num_key_value_heads": 4, "max_position_embeddings": 131072,
              "num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True, "vocab_size": 98304,
              "sliding_window": 1024,
              "hidden_size": 2304, "intermediate_size": 7168, "num_attention_heads": 32},
    hf=_mellum_from_hf,
    gguf_keys=_mellum_keys,
)  # fmt: skip
MAPLE = replace(
    QWEN3_MOE,
    name="maple",
    gguf_name="maple",
    window_switch=None,
    full_every=4,
    config=lambda config: {"intermediate_size": config.get("moe_intermediate_size", 512), **config},
    defaults={"head_dim": 128, "num_key_value_heads": 4, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5,
              "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True,
              "sliding_window": 512},
    hf_names={**QWEN_NAMES, "embedding.weight": "model.word_embeddings.weight"},
    hf=_maple_from_hf,
    gguf=_maple_from_gguf,
    gguf_keys=_maple_keys,
)  # fmt: skip
