"""Falcon 1 and 2 (Almazrouei et al. 2023): attention and an MLP without a gate side by side, behind one layer norm, or, in Falcon
40B, each behind its own. q, k and v are one tensor, of each key-value head its queries, its key and its value
(`weights/stacked.py`).

Not covered: the first ones by another name ("RWForCausalLM"), scores that say how far a key lies away (ALiBi).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.bert import LONE
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all, has_none
from nanovllm_cli.models.gpt2 import with_usual_width
from nanovllm_cli.models.names import modules, weights_and_biases

_KEYS = {"n_embed": "hidden_size", "ffn_hidden_size": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps",
         "activation": "hidden_act"}  # fmt: skip
_LAYER = "transformer.h.{i}"
_PARTS = {
    "qkv": "self_attention.query_key_value", "o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_NORMS_BESIDE = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def _names(parts: Mapping[str, str], layer: str) -> dict[str, str]:
    return weights_and_biases(modules("blocks.{i}.", f"{layer}.", parts))


def key_heads(config: Mapping[str, Any]) -> Any:
    """As a config.json has them, which may be no number. That of another family has those of all heads."""
    heads = config.get("num_attention_heads", config.get("n_head"))
    names = config.get("architectures")
    if not isinstance(names, list) or names[:1] != ["FalconForCausalLM"]:
        return heads
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads") or heads
    return heads if config.get("multi_query") is False else 1


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    biased = config.get("bias") or False
    own = {"num_key_value_heads": key_heads(config), "attention_bias": biased, "mlp_bias": biased}
    return with_usual_width(config, _KEYS) | own


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("alibi", False):
        raise UnsupportedError(f"{read.where}: a Falcon whose scores say how far a key lies away (ALiBi)", ANOTHER)
    is_new, is_parallel = read.flag("new_decoder_architecture", False), read.flag("parallel_attn", True)
    norms = read.values.get("num_ln_in_parallel_attn")
    norms = 2 if norms is None and is_new else 1 if norms is None else norms
    if norms not in (1, 2) or (norms == 2 and not is_new) or (is_new and not is_parallel):
        raise UnsupportedError(f"{read.where}: a Falcon with other norms than are published", ANOTHER)
    return spec if is_parallel else spec.in_order("pre")


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    order = spec.blocks[0].order
    has_all(spec.architecture, attention_and_MLP_side_by_side=order != "pre")
    has_none("a falcon model", biases=spec.attention.qkv_bias)
    return {"tensor_data_layout": "jploski"}


def _like(spec: ModelSpec) -> Family:
    return FALCON_BESIDE if spec.blocks[0].order == "beside" else FALCON


def family_of_falcon(config: Mapping[str, Any]) -> Family:
    """By a config.json."""
    is_beside = config.get("new_decoder_architecture") and config.get("num_ln_in_parallel_attn") in (None, 2)
    return FALCON_BESIDE if is_beside else FALCON


def family_of_falcon_gguf(metadata: Mapping[str, Any], names: Collection[str]) -> Family:
    """By the names of a file's tensors: nothing else tells."""
    return FALCON_BESIDE if "blk.0.attn_norm_2.weight" in names else FALCON


FALCON = Family(
    "falcon",
    order="parallel",
    layer_norm=True,
    shifted=True,
    fused_qkv=True,
    qkv_by_head=True,
    ungated=LONE,
    tied_by_default=True,
    outer="transformer.",
    config=_usual_keys,
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
    hf_names={
        "embedding.weight": "transformer.word_embeddings.weight",
        **_names(_PARTS | _NORMS, _LAYER),
        **weights_and_biases({"norm": "transformer.ln_f"}),
    },
    hf=_from_hf,
    gguf_activation="lone_gelu",
    gguf_keys=_keys,
    gguf_like=_like,
)  # fmt: skip
FALCON_BESIDE = replace(
    FALCON,
    order="beside",
    hf_names={**FALCON.hf_names, **_names(_NORMS_BESIDE, _LAYER)},
    gguf_names=_names({"attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"}, "blk.{i}"),
)
"""Falcon 40B: each half of a layer behind its own norm."""
