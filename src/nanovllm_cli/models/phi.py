"""Phi-3, Phi-3.5 and Phi-4 (text): q, k and v are one tensor, and so are gate and up; some rotate a part of each head.

Phi-1, 1.5 and 2 (Li et al. 2023): attention and an MLP without a gate side by side behind one layer norm, biases everywhere, in
the head too.

Phi-3.5-MoE (Abdin et al. 2024; Phi-mini-MoE, Phi-tiny-MoE): Mixtral with layer norms, biases of attention and of the head, and
two experts a token that each weigh their share among those with near logits. llama.cpp computes other norms and other weights of
experts; here its files are the model that they were made of, but for a factor of rotations, of which its converter writes another
than configs have. transformers takes the frequencies of short texts for long ones, too, other than the code published with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.bert import LONE_TANH
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import MIXTRAL_KEYS
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all
from nanovllm_cli.models.names import MIXTRAL_NAMES, modules, weights_and_biases
from nanovllm_cli.models.rotary import rope_section

PHI3 = Family(
    "phi3",
    qkv_bias=False,
    has_window=True,
    fused_qkv=True,
    fused_mlp=True,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
)


PHI4_MULTIMODAL = replace(
    PHI3, name="phi4_multimodal", gguf_name="phi3", aside=("model.embed_tokens_extend.",),
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072,
              "original_max_position_embeddings": 4096},
)  # fmt: skip
"""The part that writes, a Phi-4-mini. Adapters of its layers are for images and sounds alone (`names.ADAPTERS_OF_SENSES`)."""
_ADAPTED = {"qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}
PHI4_MM = replace(PHI4_MULTIMODAL, hf_names={
    f"blocks.{{i}}.{ours}.weight": f"model.layers.{{i}}.{theirs}.base_layer.weight" for ours, theirs in _ADAPTED.items()
})  # fmt: skip
"""As it is published, with code of its own."""


def _biased(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "attention_bias": True, "mlp_bias": True}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("qk_layernorm", False):
        raise UnsupportedError("layer norms of heads of q and k are not supported", ANOTHER)
    return replace(spec, head_bias=True)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, head_of_its_own=not spec.tied_head)
    return {}


_NEAR = 0.01
"""The published models' "router_jitter_noise", of which files have no word."""


def _with_experts(spec: ModelSpec, jitter: float, *, head_bias: bool) -> ModelSpec:
    spec = replace(spec, norm=replace(spec.norm, centered=True), head_bias=head_bias)
    return spec.with_mlps(MoESpec, nearness=2 * jitter)


def _with_experts_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if (taken := read.integer("num_experts_per_tok")) != 2:
        raise UnsupportedError(f"{read.where}: a Phi whose tokens take {taken} experts", "known: 2")
    section = rope_section(read)
    for rope in spec.ropes:
        if rope.scaling not in ("none", "longrope"):
            raise UnsupportedError(f"{read.where}: a Phi with experts and rope scaling {rope.scaling!r}", "known: longrope")
        if rope.scaling == "longrope":
            short, long = (section.number(f"{which}_mscale") for which in ("short", "long"))
            if short != long:
                raise UnsupportedError(f"{read.where}: factors of rotations that are {short:g} or {long:g}", "known: one of both")
            spec = spec.each_rope(lambda rope, factor=short: replace(rope, attention_factor=factor))  # type: ignore[misc]
    jitter = read.number("router_jitter_noise", _NEAR, positive=False)
    if jitter < 0:
        raise CheckpointError(f"{read.where}: 'router_jitter_noise' must be a number of at least 0, not {jitter:g}", BROKEN)
    return _with_experts(spec, jitter, head_bias=read.flag("lm_head_bias", False))


def _keys_of_experts(spec: ModelSpec) -> dict[str, GGUFField]:
    attention = spec.attention
    has_all(
        spec.architecture, head_of_its_own=not spec.tied_head, bias_of_the_head=spec.head_bias,
        bias_behind_attention=attention.out_bias,
        heads_as_wide_as_the_model=attention.num_heads * attention.head_dim == spec.hidden_size,
    )  # fmt: skip
    return {"attention.layer_norm_rms_epsilon": spec.norm.eps}


PHIMOE = Family(
    "phimoe",
    shifted=True,
    has_window=True,
    experts=MIXTRAL_KEYS,
    config=lambda config: {**config, "mlp_bias": False},
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "num_local_experts": 16, "num_experts_per_tok": 2,
    },
    hf_names=MIXTRAL_NAMES,
    hf=_with_experts_from_hf,
    gguf=lambda spec, read, key: _with_experts(spec, _NEAR, head_bias=True),
    gguf_keys=_keys_of_experts,
)
PHI = Family(
    "phi",
    gguf_name="phi2",
    order="parallel",
    layer_norm=True,
    shifted=True,
    ungated=LONE_TANH,
    config=_biased,
    defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 2048},
    hf_names=weights_and_biases({
        **modules("blocks.{i}.", "model.layers.{i}.", {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}),
        "norm": "model.final_layernorm",
    }),
    hf=_from_hf,
    gguf=lambda spec, read, key: replace(spec, head_bias=True),
    gguf_activation="lone_gelu_tanh",
    gguf_keys=_keys,
)
