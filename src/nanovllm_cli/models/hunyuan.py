"""Hunyuan (V1, dense): Llama, with norms of heads of q and k behind their rotation. Its "dynamic" scaling is another base, the
same whatever the length (alpha: NTK-aware scaling, bloc97 2023).
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.mixer_spec import RopeSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.rotary import checked_rope, rope_section


def _hunyuan(spec: ModelSpec) -> ModelSpec:
    return spec.with_attention(qk_norm_of="turned head")


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    section, max_position = rope_section(read), read.integer("max_position_embeddings", 2048)
    if not section.values.get("alpha"):
        return _hunyuan(spec)
    alpha = section.number("alpha")

    def stretched(rope: RopeSpec) -> RopeSpec:
        if rope.scaling != "dynamic":
            return rope
        theta = rope.theta * alpha ** (rope.dim / (rope.dim - 2))
        plain = RopeSpec(rope.dim, theta, attention_factor=rope.attention_factor, original_len=max_position)
        return checked_rope(plain, spec.attention.head_dim, section)

    found = spec.each_rope(stretched)
    return _hunyuan(found if found == spec else replace(found, max_position=max_position))


HUNYUAN_DENSE = Family(
    "hunyuan_v1_dense",
    gguf_name="hunyuan-dense",
    qk_norm=True,
    defaults={"rms_norm_eps": 1e-5},
    hf_names={f"blocks.{{i}}.{part[0]}_norm.weight": f"model.layers.{{i}}.self_attn.{part}_layernorm.weight"
              for part in ("query", "key")},
    hf=_from_hf,
    gguf=lambda spec, read, key: _hunyuan(spec),
)  # fmt: skip
