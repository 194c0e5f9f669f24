"""GLM-4 before 0414, GLM-Edge: half of each head is rotated, in pairs side by side. GLM-4 (0414, dense): norms on either side of
attention and MLP as well. GLM-4.5 to 4.7 with experts: as Llama has it, but for half of each head, a shared expert and a router
of sigmoids. Solar Open is such a one with experts in all layers, whose heads are rotated whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import DEEPSEEK_KEYS, scored_by_sigmoids
from nanovllm_cli.models.families import section_keys
from nanovllm_cli.models.family import Family, weight_keys
from nanovllm_cli.models.names import BIAS_NAME, MTP_HF_NAMES, SANDWICH_GGUF_NAMES, SHARED_NAMES


def _that_sees(spec: ModelSpec) -> ModelSpec:
    return spec.each_rope(lambda own: replace(own, sections=own.sections or (8, 12, 12)))


def family_of_glm4(metadata: Mapping[str, Any]) -> Family:
    """Of a GGUF file: one that sees has its rotary pairs as halves."""
    sections = metadata.get("glm4.rope.dimension_sections")
    return GLM4V if isinstance(sections, list | tuple) and any(sections[:2]) else GLM4


def _with_experts_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return spec.with_attention(qk_norm=read.flag("use_qk_norm", False))


_FIRST_PLACE = "transformer.encoder.layers.{i}"
_FIRST_PARTS = {"qkv": "self_attention.query_key_value", "o": "self_attention.dense", "gate_up": "mlp.dense_h_to_4h",
                "down": "mlp.dense_4h_to_h"}  # fmt: skip
"""In the code that GLM-4 was first published with, whose GGUF files have q, k and v as one."""
GLM = Family(
    "glm",
    gguf_name="chatglm",
    interleaved=True,
    interleaved_gguf=True,
    fused_mlp=True,
    defaults={"partial_rotary_factor": 0.5, "attention_bias": True, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
              "num_key_value_heads": 2, "max_position_embeddings": 131072},
    attention={"out_bias": False},
    peft_names={f"blocks.{{i}}.{ours}.weight": f"{_FIRST_PLACE}.{theirs}.weight" for ours, theirs in _FIRST_PARTS.items()},
)  # fmt: skip
GLM4 = Family(
    "glm4",
    order="sandwich",
    attention={"out_bias": False},
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
)
GLM4V = replace(
    GLM4,
    name="glm4v",
    gguf_name="glm4",
    interleaved_gguf=False,
    qkv_bias=True,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "vocab_size": 151552, "hidden_size": 4096,
              "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32, "max_position_embeddings": 32768},
    hf=lambda spec, read: _that_sees(spec),
    gguf_keys=section_keys,
)  # fmt: skip
"""Of GLM-4.1V and 4.6V-Flash."""
GLM_OCR = replace(
    GLM4V,
    name="glm_ocr",
    qkv_bias=False,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096,
              "num_hidden_layers": 16, "num_attention_heads": 16, "max_position_embeddings": 131072},
)  # fmt: skip
GLM4_MOE = Family(
    "glm4_moe",
    attention={"out_bias": False},
    gguf_name="glm4moe",
    experts=DEEPSEEK_KEYS,
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072,
              "norm_topk_prob": True, "first_k_dense_replace": 1, "n_shared_experts": 1},
    hf_names=SHARED_NAMES | BIAS_NAME,
    gguf_names={"blocks.{i}.mlp_norm.weight": "blk.{i}.post_attention_norm.weight"},
    hf=_with_experts_from_hf,
    gguf_keys=weight_keys,
    mtp_names=MTP_HF_NAMES,
)  # fmt: skip
GLM4V_MOE = replace(
    GLM4_MOE,
    name="glm4v_moe",
    hf=lambda spec, read: _that_sees(_with_experts_from_hf(spec, read)),
    gguf_keys=lambda spec: {**weight_keys(spec), **section_keys(spec)},
    defaults={**GLM4_MOE.defaults, "attention_bias": True, "max_position_embeddings": 65536},
    mtp_names={},
)
"""Of GLM-4.5V and 4.6V."""
SOLAR_OPEN = replace(
    GLM4_MOE,
    name="solar_open",
    experts=replace(DEEPSEEK_KEYS, first=None),
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
              "rope_theta": 1e6, "norm_topk_prob": True, "n_shared_experts": 1, "n_routed_experts": 128,
              "num_experts_per_tok": 8, "moe_intermediate_size": 1280, "intermediate_size": 10240},
    hf=scored_by_sigmoids,
    mtp_names={},
)  # fmt: skip
"""To llama.cpp it is a GLM-4.5. No layer has an MLP of "intermediate_size"."""
