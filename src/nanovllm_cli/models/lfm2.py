"""LFM2: gated short convolutions in most layers, attention in the others; with experts, a router of sigmoids and a bias that
chooses. LFM3: norms on either side, a gate a head, and windows in some of the layers with attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import Family, GGUFField, has_all, no_file
from nanovllm_cli.models.names import modules, weights_and_biases
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.state_spec import ConvSpec

CONV, ATTENTION = "conv", "full_attention"
MAX_TAPS = 64

_LAYER = "model.layers.{i}"
_CONV_PARTS = {"conv_in": "in_proj", "conv_out": "out_proj", "conv": "conv"}
_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES = {
    "blocks.{i}.attention_norm.weight": f"{_LAYER}.operator_norm.weight",
    "blocks.{i}.mlp_norm.weight": f"{_LAYER}.ffn_norm.weight",
    "blocks.{i}.o.weight": f"{_LAYER}.self_attn.out_proj.weight",
    **{f"blocks.{{i}}.{part}_norm.weight": f"{_LAYER}.self_attn.{part}_layernorm.weight" for part in "qk"},
    **weights_and_biases(modules("blocks.{i}.", f"{_LAYER}.conv.", _CONV_PARTS)),
    **{f"blocks.{{i}}.{part}.weight": f"{_LAYER}.feed_forward.{theirs}.weight" for part, theirs in _PARTS.items()},
    "norm.weight": "model.embedding_norm.weight",
}
"""The taps of a channel are a matrix of one row there; weights/stacked.py makes a row of it."""
_MOE_NAMES = _NAMES | {
    "blocks.{i}.router.weight": f"{_LAYER}.feed_forward.gate.weight",
    "blocks.{i}.router.selection_bias": f"{_LAYER}.feed_forward.expert_bias",
    **{f"blocks.{{i}}.experts.{{e}}.{part}.weight": f"{_LAYER}.feed_forward.experts.{{e}}.{theirs}.weight"
       for part, theirs in _PARTS.items()},
}  # fmt: skip
_GGUF_NAMES = {
    **weights_and_biases(modules("blocks.{i}.", "blk.{i}.shortconv.", _CONV_PARTS)), "norm.weight": "token_embd_norm.weight",
}


def _with_convolutions(spec: ModelSpec, convolves: list[bool], width: int, bias: bool) -> ModelSpec:
    conv = ConvSpec(spec.hidden_size, width, bias)
    return spec.with_mixers(conv if own else mixer for mixer, own in zip(spec.mixers, convolves, strict=True))


def _width(read: ConfigReader, key: str) -> int:
    width = read.integer(key)
    if width > MAX_TAPS:
        raise CheckpointError(f"{read.where}: convolutions over {width} tokens; at most {MAX_TAPS} are believed", BROKEN)
    return width


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    types, layers = read.kinds("layer_types", spec.num_layers, CONV, ATTENTION), range(spec.num_layers)
    if types is None:
        whole = read.values.get("full_attn_idxs")
        whole = list(layers) if whole is None else whole
        if not isinstance(whole, list) or not all(type(i) is int and i in layers for i in whole):
            raise CheckpointError(f"{read.where}: 'full_attn_idxs' must be a list of layers", BROKEN)
        types = [ATTENTION if i in whole else CONV for i in layers]
    return _convolving(replace(spec, tied_head=read.flag("tie_embedding", spec.tied_head)), read, types)


def _convolving(spec: ModelSpec, read: ConfigReader, types: list[str]) -> ModelSpec:
    convolves = [kind == CONV for kind in types]
    if all(convolves):
        raise CheckpointError(f"{read.where}: no layer has attention", BROKEN)
    spec = replace(spec, norm=NormSpec(read.number("norm_eps")))
    return _with_convolutions(spec, convolves, _width(read, "conv_L_cache"), read.flag("conv_bias", False))


def _kinds_apart(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with the layers that convolve in a list of their own, and among "layer_types" as layers without a window."""
    layers, types = config.get("num_hidden_layers", 24), config.get("layer_types")
    if types is None and type(layers) is int and 0 < layers <= MAX_LAYERS:
        types = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV for i in range(layers)]
    ropes = config.get("rope_parameters") or {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }
    if isinstance(ropes, Mapping) and len(ropes) == 1:  # of layers of one kind alone
        ropes = {**dict.fromkeys((SLIDING, FULL), next(iter(ropes.values()))), **ropes}
    if not isinstance(types, list):
        return {**config, "rope_parameters": ropes}
    kinds = [FULL if kind == CONV else kind for kind in types]
    return {**config, "rope_parameters": ropes, "layer_types": kinds, "mixers": types}


def _lfm3_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    types = read.kinds("mixers", spec.num_layers, CONV, FULL, SLIDING)
    if types is None:
        raise CheckpointError(f"{read.where}: 'layer_types' must be a list of {spec.num_layers} kinds", BROKEN)
    gated = read.flag("use_attention_gate", True)
    spec = spec.with_attention(gated=gated, gate_apart=gated, gate_by_head=gated)
    return _convolving(spec.in_order("sandwich" if read.flag("use_sandwich_norm", True) else "pre"), read, types)


def _dense_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Their MLPs are as wide as a rule makes of what the config says."""
    size = read.integer("block_ff_dim", read.integer("intermediate_size"))
    if read.flag("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if read.values.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = read.integer("block_multiple_of", 256)
            size = multiple * -(-int(read.number("block_ffn_dim_multiplier", 1.0) * size) // multiple)
    if size < 1:
        raise CheckpointError(f"{read.where}: an MLP without a row", BROKEN)
    return _from_hf(spec.each_mlp(lambda mlp: MLPSpec(size)), read)


def _moe_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _from_hf(spec.with_mlps(MoESpec, selection_bias=read.flag("use_expert_bias", True)), read)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A layer without key and value heads is a convolution."""
    convolves = read.zeros(key("attention.head_count_kv"), spec.num_layers)
    return _with_convolutions(spec, convolves, _width(read, key("shortconv.l_cache")), False)


def _moe_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Its files say nothing of weights, which llama.cpp makes 1 together."""
    return _from_gguf(spec, read, key).with_mlps(MoESpec, norm_topk=True)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    conv = next((mixer for mixer in spec.mixers if isinstance(mixer, ConvSpec)), None)
    heads = [mixer.num_kv_heads if isinstance(mixer, AttentionSpec) else 0 for mixer in spec.mixers]
    return {"attention.head_count_kv": heads, "shortconv.l_cache": 1 if conv is None else conv.width}


def _moe_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, biases_of_the_choice_of_experts=spec.mixture is None or spec.mixture.selection_bias)
    return _keys(spec)


_DEFAULTS = {"rope_theta": 1e6, "norm_eps": 1e-5, "max_position_embeddings": 128000, "num_key_value_heads": 8,
             "num_attention_heads": 32, "conv_L_cache": 3, "vocab_size": 65536, "num_hidden_layers": 32}  # fmt: skip
LFM2 = Family(
    "lfm2",
    attention={"qk_norm": True},
    qkv_bias=False,
    tied_by_default=True,
    convolutions=True,
    defaults=_DEFAULTS | {"hidden_size": 2560, "intermediate_size": 12288},
    hf_names=_NAMES,
    gguf_names=_GGUF_NAMES,
    hf=_dense_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)
LFM2_MOE = replace(
    LFM2,
    name="lfm2_moe",
    gguf_name="lfm2moe",
    experts=ExpertKeys(
        ("num_experts",), "moe_intermediate_size", "norm_topk_prob", first="num_dense_layers", scale="routed_scaling_factor",
        scoring="sigmoid", selection_bias=True,
    ),
    defaults=_DEFAULTS | {"hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32,
                          "num_experts_per_tok": 4, "num_dense_layers": 2, "norm_topk_prob": True},
    hf_names=_MOE_NAMES,
    hf=_moe_from_hf,
    gguf=_moe_from_gguf,
    gguf_keys=_moe_keys,
)  # fmt: skip
LFM3 = replace(
    LFM2,
    name="lfm3",
    gguf_like=no_file("LFM3"),
    has_window=True,
    config=_kinds_apart,
    defaults={"norm_eps": 1e-5, "max_position_embeddings": 128000, "num_key_value_heads": 4, "num_attention_heads": 16,
              "head_dim": 128, "conv_L_cache": 7, "vocab_size": 128000, "num_hidden_layers": 24, "hidden_size": 2048,
              "intermediate_size": 7680, "sliding_window": 256, "rope_theta": 1e6},
    hf_names={
        **{ours: theirs for ours, theirs in _NAMES.items() if "self_attn" not in theirs},
        "blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.gate_proj.weight",
        "blocks.{i}.after_attention_norm.weight": f"{_LAYER}.post_operator_norm.weight",
        "blocks.{i}.after_mlp_norm.weight": f"{_LAYER}.post_ffn_norm.weight",
    },
    peft_names={"blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.g_proj.weight"},
    hf=_lfm3_from_hf,
)  # fmt: skip
