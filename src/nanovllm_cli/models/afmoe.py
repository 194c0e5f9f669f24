"""AFMoE (Arcee's Trinity): norms on either side of attention and MLP, gates of what heads find, windows in most layers, which
alone have positions, and experts that are chosen by sigmoids and a bias."""

from __future__ import annotations

import math
from dataclasses import replace

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.exaone import turned_in_windows, window_pattern
from nanovllm_cli.models.experts import ExpertKeys, scored_by_sigmoids
from nanovllm_cli.models.family import ANOTHER, Family, weight_keys
from nanovllm_cli.models.names import SANDWICH_GGUF_NAMES, SHARED_NAMES

_LAYER = "model.layers.{i}"
_EVERY = 4


def _made(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Its embeddings are scaled."""
    attention = spec.attention
    if attention.qkv_bias or attention.out_bias:
        raise UnsupportedError(f"{read.where}: gated attention with biases", ANOTHER)
    if not any(each.window for each in spec.attentions):
        raise UnsupportedError(f"{read.where}: an AFMoE without a window, and so without positions", ANOTHER)
    spec = turned_in_windows(spec)
    return replace(spec, embedding_scale=math.sqrt(spec.hidden_size))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.values.get("layer_types") is None and read.has("sliding_window"):
        window, every = read.integer("sliding_window"), read.integer("global_attn_every_n_layers", _EVERY)
        spec = spec.each_attention(lambda layer, own: replace(own, window=window if (layer + 1) % every else None))
    made = _made(scored_by_sigmoids(spec, read, "score_func"), read)
    return made if read.flag("mup_enabled", False) else replace(made, embedding_scale=1.0)


AFMOE = Family(
    "afmoe",
    order="sandwich",
    attention={"gated": True, "gate_apart": True},
    qk_norm=True,
    has_window=True,
    full_every=_EVERY,
    experts=ExpertKeys(
        ("num_experts",), "moe_intermediate_size", "route_norm", first="num_dense_layers", shared="num_shared_experts",
        scale="route_scale", scoring="sigmoid", selection_bias=True,
    ),
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "sliding_window": 1024,
              "route_norm": True, "num_dense_layers": 1, "num_shared_experts": 2, "num_experts": 64, "num_experts_per_tok": 6,
              "moe_intermediate_size": 1408},
    hf_names=SHARED_NAMES
    | {
        "blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.gate_proj.weight",
        "blocks.{i}.after_attention_norm.weight": f"{_LAYER}.post_attention_layernorm.weight",
        "blocks.{i}.mlp_norm.weight": f"{_LAYER}.pre_mlp_layernorm.weight",
        "blocks.{i}.after_mlp_norm.weight": f"{_LAYER}.post_mlp_layernorm.weight",
        "blocks.{i}.router.weight": f"{_LAYER}.mlp.router.gate.weight",
        "blocks.{i}.router.selection_bias": f"{_LAYER}.mlp.expert_bias",
    },
    gguf_names=SANDWICH_GGUF_NAMES | {"blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight"},
    hf=_from_hf,
    gguf=lambda spec, read, key: _made(spec, read),
    gguf_keys=lambda spec: window_pattern(spec) | weight_keys(spec),
)  # fmt: skip
