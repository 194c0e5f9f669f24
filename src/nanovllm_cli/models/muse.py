"""Muse Glimmer (text): norms of embeddings and of heads, both without gains, queries that grow by a factor, gates of what heads
find, norms on either side of attention and MLP, windows in most layers, which alone have positions, scaled and capped logits.

GGUF files have the factor as the gains of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.exaone import turned_in_windows, window_pattern
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, ReadValues, has_all, has_none, usual_keys
from nanovllm_cli.models.gemma import SANDWICH_HF_NAMES
from nanovllm_cli.models.names import SANDWICH_GGUF_NAMES
from nanovllm_cli.norm_spec import NormSpec

_EVERY = 4
_AFTER_EPS = 1e-8  # which llama.cpp takes for granted
_GAINS = {part: f".attn_{part}_norm.weight" for part in "qk"}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": 2048,
    "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87, "output_multiplier": 0.19611613513818404,
    "post_norm_eps": _AFTER_EPS,
}  # fmt: skip


def _by_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with the kinds of its layers: the last, and each fourth before it, has no window."""
    config = {**config, **usual_keys(config, {"hidden_activation": "hidden_act"})}
    layers = ConfigReader({**_DEFAULTS, **config}, "config.json").integer("num_hidden_layers")
    if config.get("layer_types") is not None or layers > MAX_LAYERS:
        return config
    return {**config, "layer_types": [SLIDING if (layers - 1 - i) % _EVERY else FULL for i in range(layers)]}


def _muse(spec: ModelSpec, after_eps: float, stored_offset: float, where: str) -> ModelSpec:
    attention, eps = spec.attention, spec.norm.eps
    if attention.qkv_bias or attention.out_bias:
        raise UnsupportedError(f"{where}: gated attention with biases", ANOTHER)
    norm = NormSpec(eps, 1.0, stored_offset, after_eps=after_eps)
    return replace(spec, norm=norm, last_norm=NormSpec(eps), embedding_normed=True)


def _scaled(spec: ModelSpec, factor: float) -> ModelSpec:
    """factor: of queries."""
    return spec.with_attention(scale=factor * spec.attention.head_dim**-0.5)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if not read.has("sliding_window"):
        raise UnsupportedError(f"{read.where}: a Muse Glimmer without a window", ANOTHER)
    count, theta = spec.num_layers, spec.attention.rope.theta if spec.attention.rope is not None else 0.0
    thetas = read.values.get("layer_rope_theta")
    if thetas is None:
        thetas = [theta if (count - 1 - i) % _EVERY else 0 for i in range(count)]
    if not isinstance(thetas, list) or len(thetas) != count or any(type(each) not in (int, float) for each in thetas):
        raise CheckpointError(f"{read.where}: 'layer_rope_theta' must be a list of {count} numbers", BROKEN)
    if others := [each for each in thetas if each not in (0, theta)]:
        raise UnsupportedError(f"{read.where}: a rotary base of {others[0]:g} in some layers", f"known: {theta:g} in all, or 0")
    spec = _muse(spec, read.number("post_norm_eps"), 0.0, read.where)
    spec = spec.each_attention(lambda layer, own: own if thetas[layer] else replace(own, rope=None))
    scale, cap = read.number("output_multiplier"), read.number("final_logit_softcapping")
    return replace(_scaled(spec, read.number("qk_scale_factor")), logit_scale=scale, logit_softcap=cap)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    spec = turned_in_windows(_muse(spec, _AFTER_EPS, 1.0, read.where))
    if read.has(theta := key("rope.freq_base_swa")):
        spec = spec.each_rope(lambda rope: replace(rope, theta=read.number(theta)))
    cap = read.number(key("final_logit_softcapping"), 0.0, positive=False)
    return replace(spec, logit_scale=read.number(key("logit_scale")), logit_softcap=cap if cap > 0 else None)


def _from_gains(spec: ModelSpec, values: ReadValues, where: str) -> ModelSpec:
    """All layers' queries have one factor as gains, and keys none."""
    size, found = spec.attention.head_dim, set()
    for i in range(spec.num_layers):
        queries, keys = (values(f"blk.{i}{gains}") or () for gains in _GAINS.values())
        if len(queries) != size or len(keys) != size or set(keys) != {1.0}:
            raise UnsupportedError(f"{where}: a Muse Glimmer whose keys have gains, or queries none", ANOTHER)
        found |= set(queries)
    if len(found) != 1 or not 0 < (factor := found.pop()) < float("inf"):
        raise UnsupportedError(f"{where}: a Muse Glimmer whose queries have several factors, or one that is none", ANOTHER)
    return _scaled(spec, factor)


def _gains(spec: ModelSpec) -> dict[str, list[float]]:
    attention = spec.attention
    factors = {"q": attention.score_scale * attention.head_dim**0.5, "k": 1.0}
    return {f"blk.{i}{_GAINS[part]}": [factors[part]] * attention.head_dim for i in range(spec.num_layers) for part in "qk"}


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    alike = all((each.window is None) == (each.rope is None) for each in spec.attentions)
    windows = any(each.window is not None for each in spec.attentions)
    has_all(spec.architecture, head_of_its_own=not spec.tied_head, layers_with_windows=windows)
    has_none(f"a {spec.architecture} model", positions_in_other_layers_than_those_with_a_window=not alike)
    return {"logit_scale": spec.logit_scale, "final_logit_softcapping": spec.logit_softcap or 0.0, **window_pattern(spec)}


MUSE_GLIMMER = Family(
    "muse_glimmer",
    order="sandwich",
    attention={"gated": True, "gate_apart": True, "qk_gains": False},
    gguf_name="muse-glimmer",
    qk_norm=True,
    interleaved_gguf=True,
    has_window=True,
    full_every=_EVERY,
    config=_by_layers,
    defaults=_DEFAULTS,
    hf_names=SANDWICH_HF_NAMES | {"blocks.{i}.attention_gate.weight": "model.layers.{i}.self_attn.gate_proj.weight"},
    gguf_names=SANDWICH_GGUF_NAMES | {"blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight"},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_values=_from_gains,
    gguf_told_by=tuple(_GAINS.values()),
    gguf_tables=_gains,
    gguf_keys=_keys,
)
