"""Hy4 (Tencent 2026): DeepSeek-V3.2's sparse latent attention with a learned sink of each head and gates of what heads find,
experts that are chosen by sigmoids and whose activations are held, and several residual streams (hyper-connections). In GGUF
files rotary pairs lie side by side, and attention need not be sparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.deepseek import DEEPSEEK3, latent_from_gguf
from nanovllm_cli.models.experts import DEEPSEEK_KEYS, layers_without_experts, limited, limits_in_gguf
from nanovllm_cli.models.family import GGUFField, has_all
from nanovllm_cli.models.rotary import woven
from nanovllm_cli.models.sparse import SPARSE_GGUF_NAMES, SPARSE_HF_NAMES, sparse_from_gguf, sparse_from_hf, sparse_keys
from nanovllm_cli.streams_spec import ConnectionsSpec

MAX_STREAMS = 16
_INDEXED = "indexed_attention"
_LEAST, _MOST = 1e-6, 2.0


def _config(config: Mapping[str, Any], usual: int) -> Mapping[str, Any]:
    """With the layers that choose what is seen where it does not say, and those without experts as others have them. usual: how
    many layers there are where it says nothing."""
    found, layers = {**config}, config.get("num_hidden_layers", usual)
    if type(layers) is int:
        found["num_hidden_layers"] = layers
        if found.get("indexer_types") is None:
            found["indexer_types"] = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(layers)]
    return {**found, "head_dim": None, "mlp_only_layers": layers_without_experts(found, 1)}


def _from_hf(spec: ModelSpec, read: ConfigReader, *, interleaved: bool = False) -> ModelSpec:
    """interleaved: whether rotary pairs lie side by side, of keys that choose as well."""
    read.kinds("layer_types", spec.num_layers, _INDEXED)
    streams = _streams(read, read.integer("hc_mult"), read.number("hc_eps", _LEAST), read.number("hc_magnitude", _MOST))
    limit = max(0.0, read.number("swiglu_limit", positive=False))
    spec = sparse_from_hf(spec, read, interleaved=interleaved).each_rope(lambda rope: replace(rope, interleaved=interleaved))
    return _made(spec, streams, [limit] * spec.num_layers)


def _streams(read: ConfigReader, count: int, least: float, most: float) -> ConnectionsSpec:
    if not 2 <= count <= MAX_STREAMS:
        raise UnsupportedError(f"{read.where}: {count} residual streams", f"from 2 to {MAX_STREAMS} are known")
    return ConnectionsSpec(count, least, most)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    count = read.integer(key("hyper_connection.count"))
    least, most = (read.number(key(f"hyper_connection.{name}")) for name in ("epsilon", "magnitude"))
    limits = limits_in_gguf(read, key("swiglu_clamp_exp"), spec.num_layers)
    is_sparse = read.integer(key("attention.indexer.top_k"), 0, least=0) > 0
    spec = sparse_from_gguf(spec, read, key, interleaved=True) if is_sparse else latent_from_gguf(spec, read, key)
    return _made(spec, _streams(read, count, least, most), limits)


def _made(spec: ModelSpec, streams: ConnectionsSpec, limits: Sequence[float | None]) -> ModelSpec:
    """limits: of each layer, at what activations of its experts are held; those of all other MLPs are not."""

    def of_layer(mlp: MLPSpec | MoESpec | None, limit: float | None) -> MLPSpec | MoESpec | None:
        if not limit or not isinstance(mlp, MoESpec):
            return mlp
        return replace(mlp, expert=replace(limited(mlp.expert, limit), gate_held=True))

    blocks = (
        replace(block, mlp=of_layer(block.mlp, limit), streams=streams) for block, limit in zip(spec.blocks, limits, strict=True)
    )
    return replace(spec, blocks=tuple(blocks)).each_attention(lambda layer, own: _gated(own, spec.norm.eps))


def _gated(attention: AttentionSpec, eps: float) -> AttentionSpec:
    """What is published of DeepSeek-V3.2 besides: rotations of an indexer's heads are behind, its norm has the others' eps."""
    latent = attention.latent
    assert latent is not None
    if latent.indexer is not None:
        latent = replace(latent, indexer=replace(latent.indexer, last_rotate=latent.rotary_dim, eps=eps))
    return replace(attention, latent=latent, sinks=True, gated=True, gate_apart=True)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    streams, mixture = spec.blocks[0].streams, spec.mixture
    dense = [not isinstance(block.mlp, MoESpec) for block in spec.blocks]
    has_all(
        "hy_v4", experts=mixture is not None, shared_experts=mixture is None or mixture.shared is not None,
        experts_in_all_layers_behind_the_first=dense == sorted(dense, reverse=True), head_of_its_own=not spec.tied_head,
    )  # fmt: skip
    assert isinstance(streams, ConnectionsSpec)
    limits = [mlp.expert.limit or 0.0 if isinstance(mlp := block.mlp, MoESpec) else 0.0 for block in spec.blocks]
    chooses = [own.indexer is not None and own.indexer.chooses for own in spec.attentions]
    return sparse_keys(spec) | {
        "hyper_connection.count": streams.count, "hyper_connection.epsilon": streams.least,
        "hyper_connection.magnitude": streams.most, "leading_dense_block_count": sum(dense), "attention.indexer.types": chooses,
        **({"swiglu_clamp_exp": limits} if any(limits) else {}),
    }  # fmt: skip


_LAYER = "model.layers.{i}"
_TABLES = {"weight": "fn", "base": "base", "scale": "scale"}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 120832, "hidden_size": 2816, "intermediate_size": 6912, "moe_intermediate_size": 768, "num_hidden_layers": 34,
    "num_attention_heads": 32, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16, "hc_mult": 4, "swiglu_limit": 10.0,
}  # fmt: skip
HY_V4 = replace(
    DEEPSEEK3,
    name="hy_v4",
    experts=replace(DEEPSEEK_KEYS, first=None),
    config=partial(_config, usual=_DEFAULTS["num_hidden_layers"]),
    defaults=_DEFAULTS,
    hf_names=SPARSE_HF_NAMES | {
        "blocks.{i}.sinks": f"{_LAYER}.self_attn.sinks",
        "blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.gate_proj.weight",
        **{f"blocks.{{i}}.{half}_connection.{ours}": f"{_LAYER}.{place}.{theirs}"
           for half, place in (("attention", "attn_hc"), ("mlp", "ffn_hc")) for ours, theirs in _TABLES.items()},
        **{f"last_connection.{ours}": f"model.hc_head.hc_{theirs}" for ours, theirs in _TABLES.items()},
    },
    hf=_from_hf,
    aside=("model.mtp_layers.",),
    mtp_names={},
    gguf_name="hy_v4",
    gguf_names=SPARSE_GGUF_NAMES | {
        "blocks.{i}.sinks": "blk.{i}.attn_sinks.weight",
        "blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight",
        **{f"blocks.{{i}}.{half}_connection.{ours}": f"blk.{{i}}.hc_{place}_{theirs}.weight"
           for half, place in (("attention", "attn"), ("mlp", "ffn")) for ours, theirs in _TABLES.items()},
        **{f"last_connection.{ours}": f"output_hc_{theirs}.weight" for ours, theirs in _TABLES.items()},
    },
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
_VL_DEFAULTS = _DEFAULTS | {
    "hidden_size": 6144, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 78,
    "num_attention_heads": 64, "q_lora_rank": 2048, "index_n_heads": 32,
}
_SECTIONS = 12, 10, 10
HY_V4_VL = replace(
    HY_V4,
    name="hy_v4_vl",
    config=partial(_config, usual=_VL_DEFAULTS["num_hidden_layers"]),
    defaults=_VL_DEFAULTS,
    hf=lambda spec, read: woven(_from_hf(spec, read, interleaved=True), _SECTIONS),
)
"""What it sees by is left aside; its rotary pairs lie side by side."""
