"""Jamba (AI21 Labs; Lieber et al. 2024): in most layers Mamba's first state space, with norms of what its steps, B and C are made
of, in every so many-th attention without positions; in every so many-th layer experts in place of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all
from nanovllm_cli.models.names import each_expert, projections
from nanovllm_cli.models.scan import SCAN_GGUF_NAMES, scan_from_gguf, scan_from_hf, scan_gguf_keys, scan_hf_names
from nanovllm_cli.state_spec import ScanSpec

_LAYER = "model.layers.{i}"
_KEYS = {name: f"mamba_{theirs}" for name, theirs in {
    "expand": "expand", "size": "d_state", "rank": "dt_rank", "width": "d_conv", "conv_bias": "conv_bias", "bias": "proj_bias",
}.items()}  # fmt: skip


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A single expert is an MLP without a router."""
    count = config.get("num_experts", config.get("num_local_experts", 16))
    return {"num_experts": count, **config, "has_experts": count != 1}


def _metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The same of files."""
    alone = metadata.get("jamba.expert_count") == 1
    return {**metadata, "jamba.expert_count": 0} if alone else dict(metadata)


def _turns(read: ConfigReader, what: str) -> Callable[[int], bool]:
    """Which layers have it."""
    period, offset = read.integer(f"{what}_layer_period"), read.integer(f"{what}_layer_offset", least=0)
    if offset >= period:
        raise CheckpointError(f"{read.where}: '{what}_layer_offset' must be less than the period, {period}", BROKEN)
    return lambda layer: layer % period == offset


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    scan = scan_from_hf(read, spec.hidden_size, "gains", **_KEYS)
    attends, mixes = _turns(read, "attn"), _turns(read, "expert")
    blocks = (
        block if mixes(i) or not isinstance(block.mlp, MoESpec) else replace(block, mlp=block.mlp.expert)
        for i, block in enumerate(spec.blocks)
    )
    return _hybrid(replace(spec, blocks=tuple(blocks)), scan, [not attends(i) for i in range(spec.num_layers)], read)


def _hybrid(spec: ModelSpec, scan: ScanSpec, scans: list[bool], read: ConfigReader) -> ModelSpec:
    if all(scans):
        raise UnsupportedError(f"{read.where}: no layer has attention", ANOTHER)
    return spec.with_mixers(scan if own else mixer for mixer, own in zip(spec.mixers, scans, strict=True))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A layer without key and value heads is a state space. llama.cpp leaves weights of a token's experts as they are."""
    scans = read.zeros(key("attention.head_count_kv"), spec.num_layers)
    spec = spec.with_mlps(MoESpec, norm_topk=False)
    return _hybrid(spec, scan_from_gguf(read, key, "gains"), scans, read)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    scan = next((mixer for mixer in spec.mixers if isinstance(mixer, ScanSpec)), None)
    has_all("jamba", state_spaces=scan is not None)
    assert scan is not None
    has_all("jamba", biases_of_convolutions=scan.conv_bias, inner_width_of_twice_the_outer=scan.channels == 2 * spec.hidden_size)
    heads = [mixer.num_kv_heads if isinstance(mixer, AttentionSpec) else 0 for mixer in spec.mixers]
    return {"attention.head_count_kv": heads, "rope.scaling.finetuned": False, **scan_gguf_keys(scan)}


JAMBA = Family(
    "jamba",
    attention={"rope": None},
    qkv_bias=False,
    convolutions=True,
    experts=ExpertKeys(("num_experts",), "intermediate_size", norm_topk=False, switch="has_experts"),
    config=_config,
    metadata=_metadata,
    defaults={
        "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144, "num_experts_per_tok": 2,
        "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2,
    },
    hf_names=scan_hf_names(f"{_LAYER}.mamba") | {
        "norm.weight": "model.final_layernorm.weight",
        "blocks.{i}.mlp_norm.weight": f"{_LAYER}.pre_ff_layernorm.weight",
        **projections("blocks.{i}.", f"{_LAYER}.feed_forward."),
        "blocks.{i}.router.weight": f"{_LAYER}.feed_forward.router.weight",
        **each_expert(f"{_LAYER}.feed_forward.experts"),
    },
    gguf_names=SCAN_GGUF_NAMES,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
