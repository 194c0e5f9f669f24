"""StarCoder 2: layer norms, biases everywhere, MLPs without a gate, a window (Lozhkov et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.bert import LONE_TANH
from nanovllm_cli.models.family import Family, GGUFField, has_all
from nanovllm_cli.models.names import modules, weights_and_biases


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    biased = config.get("use_bias", True)
    return {"layer_norm_eps": config.get("norm_epsilon", 1e-5), "attention_bias": biased, "mlp_bias": biased, **config}


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, bias_behind_attention=spec.attention.out_bias)
    return {}


STARCODER2 = Family(
    "starcoder2",
    layer_norm=True,
    shifted=True,
    has_window=True,
    ungated=LONE_TANH,
    tied_by_default=True,
    config=_usual_keys,
    defaults={"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 2, "max_position_embeddings": 4096},
    hf_names=weights_and_biases(modules("blocks.{i}.", "model.layers.{i}.mlp.", {"up": "c_fc", "down": "c_proj"})),
    gguf_activation="lone_gelu_tanh",
    gguf_keys=_keys,
)
