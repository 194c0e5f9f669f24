"""GPT-NeoX (Black et al. 2022), of which Pythia is: layer norms, biases everywhere, a quarter of each head rotated, and in most
of them attention and MLP side by side, each behind a norm of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.bert import LONE
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family, GGUFField, has_all, usual_keys
from nanovllm_cli.models.names import modules, weights_and_biases

_KEYS = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
_PARTS = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "qkv": "attention.query_key_value",
    "o": "attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**usual_keys(config, _KEYS), **config, "num_key_value_heads": None, "head_dim": None}  # of which it has none


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _side_by_side(spec, read.flag("use_parallel_residual", True))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _side_by_side(spec, read.flag(key("use_parallel_residual"), True))


def _side_by_side(spec: ModelSpec, is_so: bool) -> ModelSpec:
    return spec.in_order("beside" if is_so else "pre")


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    biased = spec.attention.qkv_bias and all(mlp.bias for mlp in spec.mlps)
    has_all(spec.architecture, head_of_its_own=not spec.tied_head, biases=biased)
    return {"use_parallel_residual": spec.blocks[0].order == "beside"}


GPT_NEOX = Family(
    "gpt_neox",
    gguf_name="gptneox",
    layer_norm=True,
    shifted=True,
    fused_qkv=True,
    qkv_by_head=True,
    ungated=LONE,
    outer="gpt_neox.",
    config=_usual_keys,
    defaults={
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True, "mlp_bias": True,
    },
    hf_names={
        "embedding.weight": "gpt_neox.embed_in.weight",
        **weights_and_biases({**modules("blocks.{i}.", "gpt_neox.layers.{i}.", _PARTS), "norm": "gpt_neox.final_layer_norm"}),
        "head.weight": "embed_out.weight",
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="lone_gelu",
    gguf_keys=_keys,
)  # fmt: skip
