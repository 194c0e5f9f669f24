"""Xiaomi's MiMo-V2: values are narrower than keys, most layers have a window, and these have more heads of keys, a learned sink
of each head and a rotary base of their own. Experts are chosen by sigmoids and a bias. Layers that guess are left aside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deci import of_layers
from nanovllm_cli.models.exaone import window_pattern
from nanovllm_cli.models.experts import ExpertKeys, layers_without_experts, scored_by_sigmoids
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all, has_none, usual_keys
from nanovllm_cli.models.names import BIAS_NAME, QWEN_NAMES

_FULL_EVERY = 6
_BASE, _LOCAL_BASE, _SHARE = 5e6, 1e4, 0.334
_PATTERN, _COUNTS = "attention.sliding_window_pattern", "attention.head_count_kv"


def _by_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With lists of layers as others have them. Windows: transformers' count a query's own token, those of the code that MiMo was
    published with do not."""
    found = {**config, **usual_keys(config, {"layernorm_epsilon": "rms_norm_eps"})}
    count = ConfigReader(found, "config.json").integer("num_hidden_layers", 48)
    if count > MAX_LAYERS:
        return found
    if found.get("layer_types") is None:
        usual = [int(i > 0 and (i + 1) % _FULL_EVERY > 0) for i in range(count)]
        found["layer_types"] = [SLIDING if flag else FULL for flag in _flags(found, "hybrid_layer_pattern", count, usual)]
    if found.get("mlp_layer_types") is not None:
        found["mlp_only_layers"] = layers_without_experts(found, 1)
    else:
        has_some = _flags(found, "moe_layer_freq", count, [int(i > 0) for i in range(count)])
        found["mlp_only_layers"] = [layer for layer, flag in enumerate(has_some) if not flag]
    if type(size := found.get("sliding_window_size")) is int:
        found["sliding_window"] = size + 1
    sections, share = found.get("rope_parameters"), found.get("partial_rotary_factor", _SHARE)
    if isinstance(sections, Mapping):
        found["rope_parameters"] = {
            kind: {"partial_rotary_factor": share, **section} if isinstance(section, Mapping) else section
            for kind, section in sections.items()
        }
    if sections is None:
        bases = {FULL: found.get("rope_theta", _BASE), SLIDING: found.get("swa_rope_theta", _LOCAL_BASE)}
        found["rope_parameters"] = {kind: {"rope_theta": base, "partial_rotary_factor": share} for kind, base in bases.items()}
    return found


def _flags(config: Mapping[str, Any], key: str, count: int, usual: list[int]) -> list[int]:
    """0 or 1 of each layer."""
    listed = config.get(key)
    if listed is None:
        return usual
    if not isinstance(listed, list) or len(listed) != count or not all(each in (0, 1) for each in listed):
        raise CheckpointError(f"config.json: {key!r} must be a list of {count} layers' 0 or 1", BROKEN)
    return listed


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(
        read, "a MiMo", norm_topk_prob=True, add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False
    )
    attention, value_dim = spec.attention, read.integer("v_head_dim")
    numbers = {"swa_num_attention_heads": attention.num_heads, "swa_head_dim": attention.head_dim, "swa_v_head_dim": value_dim}
    for key, usual in numbers.items():
        if read.integer(key, usual) != usual:
            raise UnsupportedError(f"{read.where}: another {key!r} than of layers without a window", ANOTHER)
    if read.integer("n_shared_experts", 0, least=0):
        raise UnsupportedError(f"{read.where}: a MiMo with experts that every token takes", ANOTHER)
    keys = read.integer("swa_num_key_value_heads", 2 * attention.num_kv_heads)
    counts = [attention.num_kv_heads if own.window is None else keys for own in spec.attentions]
    scale = read.number("attention_value_scale") if read.has("attention_value_scale") else 1.0
    return _made(scored_by_sigmoids(spec, read), counts, value_dim, scale, read.where)


def _metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what is said of layers that guess, and with flags where llama.cpp's converter writes numbers."""
    read = ConfigReader(metadata, "GGUF metadata")
    count = read.integer("mimo2.block_count") - read.integer("mimo2.nextn_predict_layers", 0, least=0)
    lists = {name: value for name in (_PATTERN, _COUNTS) if isinstance(value := metadata.get(f"mimo2.{name}"), list | tuple)}
    own = {f"mimo2.{name}": list(value[: max(0, count)]) for name, value in lists.items()}
    if _PATTERN in lists:
        own[f"mimo2.{_PATTERN}"] = [bool(each) if each in (0, 1) else each for each in own[f"mimo2.{_PATTERN}"]]
    return {**metadata, **own}


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    counts = of_layers(read, key(_COUNTS), spec.num_layers, least=1)
    value_dim = read.integer(key("attention.value_length"), spec.attention.head_dim)
    return _made(spec, counts, value_dim, read.number(key("attention.value_scale"), 1.0), read.where)


def _made(spec: ModelSpec, counts: list[int], value_dim: int, scale: float, where: str) -> ModelSpec:
    """counts: heads of keys of each layer."""
    for count in counts:
        if spec.attention.num_heads % count:
            raise CheckpointError(f"{where}: {spec.attention.num_heads} heads don't share {count} of keys", BROKEN)
    if value_dim > spec.attention.head_dim:
        raise UnsupportedError(f"{where}: values of {value_dim} numbers, which are wider than keys", ANOTHER)
    narrow = None if value_dim == spec.attention.head_dim else value_dim

    def of_layer(layer: int, own: AttentionSpec) -> AttentionSpec:
        return replace(own, num_kv_heads=counts[layer], sinks=own.window is not None, keys_are_values=False)

    return spec.with_attention(value_dim=narrow, value_scale=scale).each_attention(of_layer)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    attention, mixture = spec.attention, spec.mixture
    local = [own.rope for own in spec.attentions if own.window is not None and own.rope is not None]
    has_all(spec.architecture, layers_with_a_window=bool(local), head_of_its_own=not spec.tied_head)
    has_none("a MiMo-V2", factors_of_experts=mixture is not None and mixture.scale != 1.0)
    return {
        "attention.key_length": attention.head_dim, "attention.value_length": attention.found_dim,
        _COUNTS: [own.num_kv_heads for own in spec.attentions], "attention.value_scale": attention.value_scale,
        "rope.freq_base_swa": local[0].theta, **window_pattern(spec),
    }  # fmt: skip


MIMO2 = Family(
    "mimo2",
    attention={"out_bias": False},
    has_window=True,
    local_theta=_LOCAL_BASE,
    varied=True,
    narrow_values=True,
    experts=ExpertKeys(
        ("n_routed_experts", "num_local_experts"), "moe_intermediate_size", True, scale="routed_scaling_factor",
        groups=("n_group", "topk_group"), scoring="sigmoid", selection_bias=True,
    ),
    config=_by_layers,
    metadata=_metadata,
    defaults={
        "vocab_size": 152576, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "sliding_window": 129, "attention_value_scale": 0.707, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    hf_names={**QWEN_NAMES, **BIAS_NAME, "blocks.{i}.sinks": "model.layers.{i}.self_attn.attention_sink_bias"},
    gguf_names={"blocks.{i}.sinks": "blk.{i}.attn_sinks.weight"},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
