"""SmallThinker (Song et al. 2025): experts are chosen by what a layer finds, before its attention, and their gates are ReLUs. In
the larger one most layers have a window, and only those have positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.exaone import turned_in_windows
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all, has_none, usual_keys
from nanovllm_cli.models.names import each_expert
from nanovllm_cli.models.plamo import check_dims_in_windows

_EVERY, _WINDOW = 4, 4096
"""Of files: every so many-th layer, from the first on, sees all and has no positions, where there is a window; which is that for
llama.cpp, whatever a file says."""
_KEYS = {"sliding_window_size": "sliding_window", "moe_ffn_hidden_size": "intermediate_size"}
_MOE = "model.layers.{i}.block_sparse_moe"


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With windows, and what scores experts, as others have them."""
    found = {**config, **usual_keys(config, _KEYS)}
    count = ConfigReader(found, "config.json").integer("num_hidden_layers", 32)
    if count <= MAX_LAYERS:
        found["layer_types"] = [SLIDING if flag else FULL for flag in _flags(found, "sliding_window_layout", count, 0)]
    if (activation := found.pop("hidden_act", "relu")) != "relu":
        raise UnsupportedError(f"activation {str(activation)[:80]!r} in a SmallThinker", "known: relu")
    by_softmax = ConfigReader(found, "config.json").flag("moe_primary_router_apply_softmax", False)
    return {**found, "scoring_func": "softmax" if by_softmax else "sigmoid"}


def _flags(config: Mapping[str, Any], key: str, count: int, usual: int) -> list[int]:
    """0 or 1 of each layer."""
    listed = config.get(key)
    if listed is None:
        return [usual] * count
    if not isinstance(listed, list) or len(listed) != count or not all(type(each) is int and each in (0, 1) for each in listed):
        raise CheckpointError(f"config.json: {key!r} must be a list of {count} layers' 0 or 1", BROKEN)
    return listed


def _made(spec: ModelSpec, early: bool = True) -> ModelSpec:
    def of_layer(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        if isinstance(mlp, MoESpec):
            return replace(mlp, expert=replace(mlp.expert, activation="relu_gated"), routed_early=early)
        return replace(mlp, activation="relu_gated")

    return spec.each_mlp(of_layer)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a SmallThinker", moe_enable_secondary_experts=False, use_qk_norm=False, norm_topk_prob=True)
    if not all(_flags(dict(read.values), "moe_layer_layout", spec.num_layers, 1)):
        raise UnsupportedError(f"{read.where}: a SmallThinker whose layers do not all have experts", ANOTHER)
    if read.integer("moe_shared_primary_experts", 0, least=0):
        raise UnsupportedError(f"{read.where}: a SmallThinker with experts that every token takes", ANOTHER)
    rotates = _flags(dict(read.values), "rope_layout", spec.num_layers, 1)
    spec = spec.each_attention(lambda layer, own: own if rotates[layer] else replace(own, rope=None))
    return _made(spec, read.flag("moe_enable_early_router", True))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if (scale := read.number(key("expert_weights_scale"), 0.0, positive=False) or 1.0) != 1.0:  # llama.cpp does not read it
        raise UnsupportedError(f"{read.where}: weights of experts times {scale:g} in a SmallThinker", "known: 1")
    pattern = read.values.get(key("attention.sliding_window_pattern"), _EVERY)
    if isinstance(pattern, list | tuple):
        same = list(pattern) == [layer % _EVERY > 0 for layer in range(spec.num_layers)]
    else:
        same = pattern == _EVERY
    if not same:
        raise UnsupportedError(f"{read.where}: a SmallThinker with other windows than in all layers but each fourth", ANOTHER)
    check_dims_in_windows(spec, read, key)
    if any(own.window is not None for own in spec.attentions):
        base = key("rope.freq_base_swa")
        spec = turned_in_windows(spec).each_rope(lambda rope: replace(rope, theta=read.number(base, rope.theta)))
    return _made(spec)


def _gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """What llama.cpp takes for granted must be so."""
    kinds = {(layer % _EVERY > 0, own.window, own.rope is not None) for layer, own in enumerate(spec.attentions)}
    with_windows = kinds <= {(False, None, False), (True, _WINDOW, True)}
    without = all(window is None and rotates for _, window, rotates in kinds)
    mixture = spec.mixture
    has_all(
        spec.architecture, experts_in_all_layers=spec.dense_mlp is None and mixture is not None,
        router_that_reads_what_a_layer_finds=mixture is not None and mixture.routed_early,
    )  # fmt: skip
    has_none("a SmallThinker", other_windows_and_positions_than_published_ones=not (with_windows or without))
    return {}


SMALLTHINKER = Family(
    "smallthinker",
    qkv_bias=False,
    has_window=True,
    full_every=_EVERY,
    full_first=True,
    tied_by_default=True,
    experts=ExpertKeys(
        ("moe_num_primary_experts",), "moe_ffn_hidden_size", True, taken="moe_num_active_primary_experts", scoring="sigmoid",
        scoring_key="scoring_func",
    ),
    config=_config,
    defaults={
        "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 768, "num_hidden_layers": 32, "num_attention_heads": 12,
        "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1e6,
        "sliding_window": _WINDOW, "moe_num_primary_experts": 32, "moe_num_active_primary_experts": 4, "moe_ffn_hidden_size": 768,
    },
    hf_names={"blocks.{i}.router.weight": f"{_MOE}.primary_router.weight", **{
        ours: theirs.replace("_proj", "") for ours, theirs in each_expert(f"{_MOE}.experts").items()
    }},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="relu_gated",
    gguf_keys=_gguf_keys,
)  # fmt: skip
