"""Phi-3, Phi-3.5 and Phi-4 (text): q, k and v are one tensor, and so are gate and up; some rotate a part of each head.

Phi-1, 1.5 and 2 (Li et al. 2023): attention and an MLP without a gate side by side behind one layer norm, biases everywhere, in
the head too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.bert import LONE_TANH
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all

PHI3 = Family(
    "phi3",
    qkv_bias=False,
    has_window=True,
    fused_qkv=True,
    fused_mlp=True,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)


def _biased(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "attention_bias": True, "mlp_bias": True}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("qk_layernorm", False):
        raise UnsupportedError("layer norms of heads of q and k are not supported", ANOTHER)
    return _phi(spec)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _phi(spec)


def _phi(spec: ModelSpec) -> ModelSpec:
    return replace(spec.with_shifted_norms().in_order("parallel"), head_bias=True)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, head_of_its_own=not spec.tied_head)
    return {}


PHI = Family(
    "phi",
    gguf_name="phi2",
    layer_norm=True,
    ungated=LONE_TANH,
    config=_biased,
    defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 2048},
    hf_names={
        **{
            f"blocks.{{i}}.{ours}.{kind}": f"model.layers.{{i}}.{theirs}.{kind}"
            for ours, theirs in {"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"}.items()
            for kind in ("weight", "bias")
        },
        **{f"norm.{kind}": f"model.final_layernorm.{kind}" for kind in ("weight", "bias")},
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="lone_gelu_tanh",
    gguf_keys=_keys,
)
