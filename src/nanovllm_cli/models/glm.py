"""GLM-4 (0414, dense): half of each head is rotated, in pairs side by side; norms on either side of attention and MLP. GLM-4.5 to
4.7 with experts: as Llama has it, but for half of each head, a shared expert and a router of sigmoids. Solar Open is such a one
with experts in all layers, whose heads are rotated whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import SHARED_NAMES, ExpertKeys, scored_by_sigmoids
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.names import MTP_HF_NAMES, SANDWICH_GGUF_NAMES


def _sandwich(spec: ModelSpec) -> ModelSpec:
    return spec.in_order("sandwich").with_attention(out_bias=False)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    sections = read.values.get(key("rope.dimension_sections"))
    if isinstance(sections, list | tuple) and any(sections[:2]):
        raise UnsupportedError("the positions of a GLM that sees are not supported", ANOTHER)
    return _sandwich(spec)


def _with_experts_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return spec.with_attention(out_bias=False, qk_norm=read.flag("use_qk_norm", False))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mixture = spec.mixture
    return {} if mixture is None else {"expert_weights_scale": mixture.scale, "expert_weights_norm": mixture.norm_topk}


_EXPERTS = ExpertKeys(
    ("n_routed_experts",), "moe_intermediate_size", "norm_topk_prob", first="first_k_dense_replace",
    shared="n_shared_experts", scale="routed_scaling_factor", groups=("n_group", "topk_group"),
    scoring="sigmoid", selection_bias=True,
)  # fmt: skip
GLM4 = Family(
    "glm4",
    interleaved=True,
    interleaved_gguf=True,
    fused_mlp=True,
    defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
              "num_key_value_heads": 2, "max_position_embeddings": 131072},
    hf_names={
        "blocks.{i}.after_attention_norm.weight": "model.layers.{i}.post_self_attn_layernorm.weight",
        "blocks.{i}.after_mlp_norm.weight": "model.layers.{i}.post_mlp_layernorm.weight",
    },
    gguf_names=SANDWICH_GGUF_NAMES,
    hf=lambda spec, read: _sandwich(spec),
    gguf=_from_gguf,
)
GLM4_MOE = Family(
    "glm4_moe",
    gguf_name="glm4moe",
    experts=_EXPERTS,
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072,
              "norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    hf_names=SHARED_NAMES | {"blocks.{i}.router.selection_bias": "model.layers.{i}.mlp.gate.e_score_correction_bias"},
    gguf_names={"blocks.{i}.mlp_norm.weight": "blk.{i}.post_attention_norm.weight"},
    hf=_with_experts_from_hf,
    gguf_keys=_keys,
    mtp_names=MTP_HF_NAMES,
)  # fmt: skip
SOLAR_OPEN = replace(
    GLM4_MOE,
    name="solar_open",
    experts=replace(_EXPERTS, first=None),
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
              "rope_theta": 1e6, "norm_topk_prob": True, "n_shared_experts": 1, "n_routed_experts": 128,
              "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "intermediate_size": 10240},
    hf=lambda spec, read: scored_by_sigmoids(spec.with_attention(out_bias=False), read),
    mtp_names={},
)  # fmt: skip
"""To llama.cpp it is a GLM-4.5. No layer has an MLP of "intermediate_size"."""
