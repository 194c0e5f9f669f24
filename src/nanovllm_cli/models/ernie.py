"""ERNIE 4.5 (dense): Llama with its rotary pairs side by side."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.model_spec import MLPSpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """ "use_bias" is of all projections."""
    bias = read.flag("use_bias", False)
    blocks = []
    for block in spec.blocks:
        assert isinstance(block.mlp, MLPSpec)
        attention = replace(block.attention, qkv_bias=bias, out_bias=bias)
        blocks.append(replace(block, attention=attention, mlp=replace(block.mlp, bias=bias)))
    return replace(spec, blocks=tuple(blocks))


ERNIE4_5 = Family(
    "ernie4_5",
    interleaved=True,
    interleaved_gguf=True,
    tied_by_default=True,
    defaults={"rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072,
              "rms_norm_eps": 1e-5},
    hf=_from_hf,
)  # fmt: skip
