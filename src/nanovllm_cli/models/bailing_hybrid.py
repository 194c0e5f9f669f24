"""Ling 3.0 (BailingHybrid): the delta rule with a decay of each channel, as Kimi Linear has it, in all layers but the last of
each group, whose latent attention has a gate a head; DeepSeek-V3's experts behind the first layers. Decays are made of the hidden
state at once, and have a floor. Its GGUF files are of the architecture bailingmoe3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deepseek import (
    LATENT_GGUF_NAMES,
    LATENT_HF_NAMES,
    latent_from_gguf,
    latent_from_hf,
    latent_keys,
)
from nanovllm_cli.models.experts import held, limits_in_gguf, limits_of, only_behind_the_first, scored_by_sigmoids
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all
from nanovllm_cli.models.kimi import KIMI_LINEAR, by_usual_names, channel_delta
from nanovllm_cli.models.names import SHARED_NAMES, projections
from nanovllm_cli.models.qwen_next import ATTENTION, LINEAR, check_activation, kinds_of_layers, with_delta
from nanovllm_cli.state_spec import DeltaSpec

_LEAST_FLOOR = -100.0
"""Less is not believed: what is kept would be nothing."""


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its "head_dim" is that of the delta rule's heads where it is published, and the rotated part's in what transformers saves,
    which has the former by another name."""
    found = by_usual_names(config)
    dim = found.get("linear_head_dim", found.get("head_dim"))
    return {**{key: value for key, value in found.items() if key != "head_dim"}, "linear_head_dim": dim}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Ling", use_bias=False, use_qkv_bias=False, norm_head=False, use_rmsnorm=True, no_kda_lora=True)
    if (kind := read.text("gated_attention_proj_granularity_type", "head_wise")) != "head_wise":
        raise UnsupportedError(f"{read.where}: gates that are {kind[:40]!r} in a Ling's latent attention", "known: head_wise")
    check_activation(read)
    group = read.integer("layer_group_size")
    kinds = kinds_of_layers(read, spec.num_layers, lambda i: LINEAR if (i + 1) % group else ATTENTION)
    floor = _floor(read, "kda_lower_bound") if read.flag("kda_safe_gate", True) else 0.0
    dim, width = read.integer("linear_head_dim"), read.integer("short_conv_kernel_size")
    delta = replace(channel_delta(spec.attention.num_heads, dim, width, read.where), at_once=True, floor=floor)
    spec = latent_from_hf(scored_by_sigmoids(only_behind_the_first(spec, read), read, "score_function"), read)
    spec = held(spec, *(limits_of(read, f"{kind}_swiglu_limit_list", spec.num_layers) for kind in ("expert", "share_expert")))
    spec = spec.with_attention(**_GATES)
    return with_delta(spec, delta, [kind == LINEAR for kind in kinds], read.where)


def _floor(read: ConfigReader, key: str) -> float:
    if not _LEAST_FLOOR <= (floor := read.number(key, positive=False)) < 0:
        raise CheckpointError(f"{read.where}: a {key!r} of {floor:g}, not from {_LEAST_FLOOR:g} to below 0", BROKEN)
    return floor


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """As in Kimi Linear's files; decays always have a floor."""
    is_linear = read.zeros(heads := key("attention.head_count_kv"), spec.num_layers)
    if not any(is_linear) or all(is_linear):
        raise CheckpointError(f"{read.where}: {heads!r} must be a list of layers' heads, some of them 0", BROKEN)
    if not read.flag(key("kda.safe_gate"), True):
        raise UnsupportedError(f"{read.where}: a Ling whose decays have no floor", ANOTHER)
    if read.has(key("rope.dimension_sections")):
        raise UnsupportedError(f"{read.where}: a Ling that sees, whose positions are of several kinds", ANOTHER)
    dim, width = read.integer(key("kda.head_dim")), read.integer(key("ssm.conv_kernel"))
    delta = channel_delta(spec.attention.num_heads, dim, width, read.where, log_decay=False)
    delta = replace(delta, at_once=True, floor=_floor(read, key("kda.gate_lower_bound")))
    spec = latent_from_gguf(spec, read, key).with_attention(**_GATES)
    spec = held(spec, *(limits_in_gguf(read, key(f"swiglu_clamp_{kind}"), spec.num_layers) for kind in ("exp", "shexp")))
    return with_delta(spec, delta, is_linear, read.where)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mixture = spec.mixture
    delta = next((mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec)), None)
    has_all(
        "bailingmoe3", linear_layers=delta is not None, experts=mixture is not None,
        floor_of_its_decays=delta is None or delta.floor < 0.0,
        shared_experts=mixture is None or mixture.shared is not None,
        bias_that_chooses_experts=mixture is None or mixture.selection_bias,
    )  # fmt: skip
    assert delta is not None
    keys: dict[str, GGUFField] = {
        "attention.head_count_kv": [0 if isinstance(mixer, DeltaSpec) else 1 for mixer in spec.mixers],
        "ssm.conv_kernel": delta.width, "kda.head_dim": delta.key_dim, "kda.safe_gate": True, "kda.gate_lower_bound": delta.floor,
    }  # fmt: skip
    mlps = [block.mlp for block in spec.blocks]
    limits = {"exp": [_limit(mlp.expert) if isinstance(mlp, MoESpec) else 0.0 for mlp in mlps],
              "shexp": [_limit(mlp.shared if isinstance(mlp, MoESpec) else mlp) for mlp in mlps]}  # fmt: skip
    return latent_keys(spec) | keys | {f"swiglu_clamp_{kind}": own for kind, own in limits.items() if any(own)}


def _limit(mlp: MLPSpec | None) -> float:
    return 0.0 if mlp is None or mlp.limit is None else mlp.limit


_GATES: dict[str, Any] = {"gated": True, "gate_apart": True, "gate_by_head": True}


assert KIMI_LINEAR.experts is not None
_EXPERTS = replace(KIMI_LINEAR.experts, norm_in_gguf=True, length_in_gguf=True)
_PLACE, _TRAINED = "model.layers.{i}.attention", "model.layers.{i}.self_attn"
BAILING_HYBRID = Family(
    "bailing_hybrid",
    latent=True,
    convolutions=True,
    experts=_EXPERTS,
    config=_config,
    defaults={"vocab_size": 157184, "hidden_size": 2560, "intermediate_size": 6144, "moe_intermediate_size": 768,
              "num_hidden_layers": 42, "num_attention_heads": 32, "linear_head_dim": 128, "num_experts": 512,
              "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5,
              "num_expert_group": 8, "topk_group": 4, "moe_renormalize": True, "max_position_embeddings": 262144,
              "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 6e6,
              "short_conv_kernel_size": 4, "layer_group_size": 6, "kda_lower_bound": -5.0},
    hf_names={
        **{ours: theirs.replace("self_attn", "attention") for ours, theirs in LATENT_HF_NAMES.items()},
        **SHARED_NAMES,
        **projections("blocks.{i}.", f"{_PLACE}.", ("q",)),
        "embedding.weight": "model.word_embeddings.weight",
        "blocks.{i}.o.weight": f"{_PLACE}.dense.weight",
        "blocks.{i}.attention_gate.weight": f"{_PLACE}.g_proj.weight",
        "blocks.{i}.router.selection_bias": "model.layers.{i}.mlp.gate.expert_bias",
        **projections("blocks.{i}.delta_", f"{_PLACE}.", ("q", "k", "v", "b", "f", "g")),
        **{f"blocks.{{i}}.delta.{part}_taps": f"{_PLACE}.{part}_conv1d.weight" for part in "qkv"},
        "blocks.{i}.delta_out.weight": f"{_PLACE}.dense.weight",
        "blocks.{i}.delta.decay": f"{_PLACE}.A_log",
        "blocks.{i}.delta.decay_bias": f"{_PLACE}.dt_bias",
        "blocks.{i}.delta.norm.weight": f"{_PLACE}.o_norm.weight",
    },
    peft_names={
        **LATENT_HF_NAMES,
        **projections("blocks.{i}.", f"{_TRAINED}.", ("q", "o")),
        "blocks.{i}.attention_gate.weight": f"{_TRAINED}.g_proj.weight",
        **projections("blocks.{i}.delta_", f"{_TRAINED}.", ("q", "k", "v", "b", "g")),
        "blocks.{i}.delta_f.weight": f"{_TRAINED}.forget_gate.f_proj.weight",
        "blocks.{i}.delta_out.weight": f"{_TRAINED}.o_proj.weight",
    },
    hf=_from_hf,
    interleaved=True,
    interleaved_gguf=True,
    gguf_name="bailingmoe3",
    gguf_names=LATENT_GGUF_NAMES | {
        "blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight",
        **{ours: theirs for ours, theirs in KIMI_LINEAR.gguf_names.items() if ".delta" in ours},
        **{f"blocks.{{i}}.delta_{part}.weight": f"blk.{{i}}.ssm_{part}_a.weight" for part in "fg"},
    },
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
