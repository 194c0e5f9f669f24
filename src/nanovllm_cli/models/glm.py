"""GLM-4 (0414, dense): half of each head is rotated, in pairs side by side; norms on either side of attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family
from nanovllm_cli.models.names import SANDWICH_GGUF_NAMES


def _sandwich(spec: ModelSpec) -> ModelSpec:
    blocks = (replace(block, order="sandwich", attention=replace(block.attention, out_bias=False)) for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if read.integer(key("nextn_predict_layers"), 0, least=0):
        raise UnsupportedError("GLM files with layers that predict further tokens are not supported", ANOTHER)
    sections = read.values.get(key("rope.dimension_sections"))
    if isinstance(sections, list | tuple) and any(sections[:2]):
        raise UnsupportedError("the positions of a GLM that sees are not supported", ANOTHER)
    return _sandwich(spec)


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
