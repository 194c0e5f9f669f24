"""GPT-2 (Radford et al. 2019): layer norms, biases everywhere, learned positions. Its folders hold matrices turned over, inputs
by outputs (weights/stacked.py).

GPT-BigCode (Ben Allal et al. 2023; SantaCoder and StarCoder 1): the same with one head of keys and values for all, and matrices
as usual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.bert import LONE_TANH
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, usual_keys
from nanovllm_cli.models.names import modules, weights_and_biases

KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act",
}  # fmt: skip
_PARTS = {
    "attention_norm": "ln_1", "mlp_norm": "ln_2", "qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}  # fmt: skip


def with_usual_width(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """By usual keys, and with MLPs four times as wide as the model where nothing is said of them; all heads have keys."""
    found = {**config, **usual_keys(config, keys)}
    found = {key: value for key, value in found.items() if key != "intermediate_size" or value is not None}
    width = found.get("hidden_size")
    found = {"intermediate_size": 4 * width, **found} if type(width) is int else found
    return found | {"num_key_value_heads": None, "head_dim": None}  # of which they have none


def _one_key_head(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return with_usual_width(config, KEYS) | {"num_key_value_heads": 1}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("add_cross_attention", False):
        raise UnsupportedError(f"{read.where}: a {spec.architecture} that attends to another model", ANOTHER)
    if not read.flag("multi_query", True):
        raise UnsupportedError(f"{read.where}: a {spec.architecture} with keys and values of each head's own", ANOTHER)
    spec = _gpt2(spec)
    scale = spec.attention.score_scale if read.flag("scale_attn_weights", True) else 1.0
    if read.flag("scale_attn_by_inverse_layer_idx", False):
        return spec.each_attention(lambda layer, own: replace(own, scale=scale / (layer + 1)))
    return spec if scale == spec.attention.score_scale else spec.with_attention(scale=scale)


def _gpt2(spec: ModelSpec) -> ModelSpec:
    return replace(spec, entry=EntrySpec(None, positions=spec.max_position))


GPT2 = Family(
    "gpt2",
    attention={"rope": None},
    layer_norm=True,
    shifted=True,
    fused_qkv=True,
    turned_over=True,
    ungated=LONE_TANH,
    tied_by_default=True,
    outer="transformer.",
    config=lambda config: with_usual_width(config, KEYS),
    defaults={
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 1024, "attention_bias": True,
        "mlp_bias": True,
    },
    hf_names={
        "embedding.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
        **weights_and_biases({**modules("blocks.{i}.", "transformer.h.{i}.", _PARTS), "norm": "transformer.ln_f"}),
    },
    gguf_names={"positions.weight": "position_embd.weight"},
    hf=_from_hf,
    gguf=lambda spec, read, key: _gpt2(spec),
    gguf_activation="lone_gelu_tanh",
)  # fmt: skip
GPT_BIGCODE = replace(GPT2, name="gpt_bigcode", gguf_name="starcoder", turned_over=False, config=_one_key_head)
