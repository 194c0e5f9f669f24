"""BLOOM (Le Scao et al. 2022) and MPT (MosaicML 2023), which know positions by distance (ALiBi, Press et al. 2022).

BLOOM: GPT-2 with matrices as usual and a norm behind its embedding. MPT: GPT-2 without biases, in norms and elsewhere. Neither
has a longest sequence; contexts are what they were trained with, unless a config says more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import DistanceSpec, EntrySpec, ModelSpec
from nanovllm_cli.models.bert import LONE, LONE_TANH
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all, usual_keys
from nanovllm_cli.models.gpt2 import with_usual_width
from nanovllm_cli.models.names import modules, weights_and_biases

_KEYS = {
    "n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "layer_norm_epsilon": "layer_norm_eps", "seq_length": "max_position_embeddings",
}  # fmt: skip
_PARTS = {
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "qkv": "self_attention.query_key_value",
    "o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip
_MPT_KEYS = {
    "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "layer_norm_epsilon": "layer_norm_eps", "max_seq_len": "max_position_embeddings",
}  # fmt: skip
_MPT_PARTS = {
    "attention_norm": "norm_1", "mlp_norm": "norm_2", "qkv": "attn.Wqkv", "o": "attn.out_proj", "up": "ffn.up_proj",
    "down": "ffn.down_proj",
}  # fmt: skip
_USUAL_BIAS = 8.0
"""By which slopes are told; no other is published."""
FARTHEST = 1 << 20
"""A table has a number for each distance."""


def told_by_distance(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """The same with slopes of distances, up to its longest context."""
    if spec.max_position > FARTHEST:
        raise UnsupportedError(f"{read.where}: a {spec.architecture} with a context of {spec.max_position} tokens", ANOTHER)
    return replace(spec, distances=DistanceSpec(spec.max_position))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("apply_residual_connection_post_layernorm", False):
        raise UnsupportedError(f"{read.where}: a BLOOM whose residual stream is normed", ANOTHER)
    return _bloom(spec, read)


def _bloom(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return replace(told_by_distance(spec, read), entry=EntrySpec(spec.norm))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, biases=spec.attention.qkv_bias and all(mlp.bias for mlp in spec.mlps))
    return {}


def _mpt_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {**config, **usual_keys(config, _MPT_KEYS), "num_key_value_heads": None, "head_dim": None}
    width, ratio = found.get("hidden_size"), config.get("expansion_ratio", 4)
    return found | ({"intermediate_size": ratio * width} if type(width) is type(ratio) is int else {})


def _mpt_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    attention = read.section("attn_config")
    if not attention.flag("alibi", True) or attention.number("alibi_bias_max", _USUAL_BIAS) != _USUAL_BIAS:
        raise UnsupportedError(f"{read.where}: an MPT with other slopes of distances, or learned positions", ANOTHER)
    if not read.flag("no_bias", True) or read.has("logit_scale"):
        raise UnsupportedError(f"{read.where}: an MPT with biases, or a factor of logits", ANOTHER)
    others = [name for name in ("qk_ln", "prefix_lm") if attention.flag(name, False)]
    others += [name for name in ("kv_n_heads",) if attention.has(name)]
    if others or attention.text("attn_type", "multihead_attention") != "multihead_attention":
        raise UnsupportedError(f"{read.where}: an MPT with {others[0] if others else 'one head of keys'}", ANOTHER)
    scale = attention.number("softmax_scale") if attention.has("softmax_scale") else None
    clip = attention.number("clip_qkv", positive=False) if attention.has("clip_qkv") else 0.0
    return _mpt(spec.with_attention(scale=scale), read, clip)


def _mpt(spec: ModelSpec, read: ConfigReader, clip: float) -> ModelSpec:
    if clip < 0:
        raise CheckpointError(f"{read.where}: queries that are held between {-clip:g} and {clip:g}", BROKEN)
    return told_by_distance(spec.with_attention(clip=clip or None), read)


def _mpt_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if (most := read.number(key("attention.max_alibi_bias"), 0.0, positive=False)) != _USUAL_BIAS:
        raise UnsupportedError(f"{read.where}: an MPT whose scores are told by {most:g}", "known: 8")
    if spec.attention.qkv_bias or spec.attention.qk_norm or spec.attention.num_kv_heads != spec.attention.num_heads:
        raise UnsupportedError(f"{read.where}: an MPT with biases, norms of queries, or fewer heads of keys", ANOTHER)
    return _mpt(spec, read, read.number(key("attention.clamp_kqv"), 0.0, positive=False))


def _mpt_gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, usual_factor_of_scores=spec.attention.scale is None)
    keys: dict[str, GGUFField] = {"attention.max_alibi_bias": _USUAL_BIAS}
    return keys if spec.attention.clip is None else {**keys, "attention.clamp_kqv": spec.attention.clip}


def _names(parts: Mapping[str, str], layers: str, last: str) -> dict[str, str]:
    return weights_and_biases({**modules("blocks.{i}.", f"transformer.{layers}.{{i}}.", parts), "norm": f"transformer.{last}"})


BLOOM = Family(
    "bloom",
    attention={"rope": None},
    layer_norm=True,
    shifted=True,
    fused_qkv=True,
    qkv_by_head=True,
    ungated=LONE_TANH,
    tied_by_default=True,
    outer="transformer.",
    config=lambda config: with_usual_width(config, _KEYS),
    defaults={
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": True,
        "mlp_bias": True,
    },
    hf_names={
        "embedding.weight": "transformer.word_embeddings.weight",
        **weights_and_biases({"entry_norm": "transformer.word_embeddings_layernorm"}),
        **_names(_PARTS, "h", "ln_f"),
    },
    gguf_names=weights_and_biases({"entry_norm": "token_embd_norm"}),
    hf=_from_hf,
    gguf=lambda spec, read, key: _bloom(spec, read),
    gguf_activation="lone_gelu_tanh",
    gguf_keys=_keys,
)  # fmt: skip
MPT = Family(
    "mpt",
    attention={"rope": None},
    layer_norm=True,
    fused_qkv=True,
    qkv_bias=False,
    ungated=LONE,
    tied_by_default=True,
    outer="transformer.",
    config=_mpt_keys,
    defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
    hf_names={"embedding.weight": "transformer.wte.weight", **_names(_MPT_PARTS, "blocks", "norm_f")},
    hf=_mpt_from_hf,
    gguf=_mpt_from_gguf,
    gguf_activation="lone_gelu",
    gguf_keys=_mpt_gguf_keys,
)
