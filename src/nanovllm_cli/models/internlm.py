"""InternLM 2, 2.5 and 3 (Cai et al. 2024): Llama, whose folders say otherwise which biases it has. InternLM 2's have q, k and v
as one tensor, of each key-value head its queries, its key and its value (`weights/stacked.py`). Their code is not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family, GGUFField, has_none
from nanovllm_cli.models.names import modules, weights_and_biases

_PARTS = {
    "attention_norm": "attention_norm", "mlp_norm": "ffn_norm", "q": "attention.wq", "k": "attention.wk", "v": "attention.wv",
    "o": "attention.wo", "gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2",
}  # fmt: skip


def _second_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "attention_bias": config.get("bias", True)}


def _unbiased(spec: ModelSpec) -> dict[str, GGUFField]:
    has_none("an internlm2 model", a_bias_behind_attention=spec.attention.out_bias)
    return {}


def _third_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    biased = config.get("bias")
    return config if biased is None else {**config, "attention_bias": biased, "mlp_bias": biased}


def _third_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return spec.with_attention(qkv_bias=read.flag("qkv_bias", spec.attention.qkv_bias))


INTERNLM2 = Family(
    "internlm2",
    interleaved_gguf=True,
    config=_second_keys,
    gguf_keys=_unbiased,
    defaults={"rms_norm_eps": 1e-6},
    hf_names={
        "embedding.weight": "model.tok_embeddings.weight",
        "head.weight": "output.weight",
        **weights_and_biases(modules("blocks.{i}.", "model.layers.{i}.", _PARTS)),
    },
)
INTERNLM3 = Family(
    "internlm3",
    gguf_name="llama",
    interleaved_gguf=True,
    config=_third_keys,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "max_position_embeddings": 32768, "head_dim": 128},
    hf=_third_from_hf,
)
