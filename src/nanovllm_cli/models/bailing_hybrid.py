"""Ling 3.0 (BailingHybrid): the delta rule with a decay of each channel, as Kimi Linear has it, in all layers but the last of
each group, whose latent attention has a gate a head; DeepSeek-V3's experts behind the first layers. Decays are made of the hidden
state at once, and have a floor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deepseek import LATENT_HF_NAMES, latent_from_hf
from nanovllm_cli.models.experts import only_behind_the_first, scored_by_sigmoids
from nanovllm_cli.models.family import Family, check_usual, no_file
from nanovllm_cli.models.kimi import KIMI_LINEAR, by_usual_names, channel_delta
from nanovllm_cli.models.names import SHARED_NAMES, projections
from nanovllm_cli.models.qwen_next import ATTENTION, LINEAR, check_activation, kinds_of_layers, with_delta

_LEAST_FLOOR = -100.0
"""Less is not believed: what is kept would be nothing."""


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its "head_dim" is that of the delta rule's heads where it is published, and the rotated part's in what transformers saves,
    which has the former by another name."""
    found = by_usual_names(config)
    dim = found.get("linear_head_dim", found.get("head_dim"))
    return {**{key: value for key, value in found.items() if key != "head_dim"}, "linear_head_dim": dim}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Ling", use_bias=False, use_qkv_bias=False, norm_head=False, use_rmsnorm=True)
    check_activation(read)
    group = read.integer("layer_group_size")
    kinds = kinds_of_layers(read, spec.num_layers, lambda i: LINEAR if (i + 1) % group else ATTENTION)
    floor = read.number("kda_lower_bound", positive=False) if read.flag("kda_safe_gate", True) else 0.0
    if read.flag("kda_safe_gate", True) and not _LEAST_FLOOR <= floor < 0:
        raise CheckpointError(f"{read.where}: a 'kda_lower_bound' of {floor:g}, not from {_LEAST_FLOOR:g} to below 0", BROKEN)
    dim, width = read.integer("linear_head_dim"), read.integer("short_conv_kernel_size")
    delta = replace(channel_delta(spec.attention.num_heads, dim, width, read.where), at_once=True, floor=floor)
    spec = latent_from_hf(scored_by_sigmoids(only_behind_the_first(spec, read), read, "score_function"), read)
    spec = spec.with_attention(gated=True, gate_apart=True, gate_by_head=True)
    return with_delta(spec, delta, [kind == LINEAR for kind in kinds], read.where)


_PLACE, _TRAINED = "model.layers.{i}.attention", "model.layers.{i}.self_attn"
BAILING_HYBRID = Family(
    "bailing_hybrid",
    latent=True,
    convolutions=True,
    experts=KIMI_LINEAR.experts,
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
    gguf_like=no_file("Ling 3.0"),
)  # fmt: skip
