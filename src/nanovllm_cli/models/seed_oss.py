"""Seed-OSS: Llama with biases of its queries, keys and values."""

from __future__ import annotations

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return spec.with_attention(out_bias=read.flag("attention_out_bias", False))


SEED_OSS = Family(
    "seed_oss",
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288},
    gguf_names={"blocks.{i}.mlp_norm.weight": "blk.{i}.post_attention_norm.weight"},
    hf=_from_hf,
)
