"""Cohere's Command R and Command R7B: attention and MLP side by side behind one layer norm, scaled logits, rotary pairs side by
side. The second (Cohere 2) has a window in most layers, and positions in those alone. In North Micro Vision pairs are halves, and
its config says which layers have positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.exaone import turned_in_windows, window_pattern
from nanovllm_cli.models.families import FULL, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_none, no_file
from nanovllm_cli.models.names import OUT_BIAS
from nanovllm_cli.models.rotary import woven

_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "max_position_embeddings": 8192}


def _cohere(spec: ModelSpec, logit_scale: float, has_norms: bool) -> ModelSpec:
    if has_norms:  # as Command R+ does, with gains of each head's own
        raise UnsupportedError("layer norms of heads of q and k are not supported", ANOTHER)
    return replace(spec, logit_scale=logit_scale)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = replace(spec, max_position=read.integer("model_max_length", spec.max_position))
    return _cohere(spec, read.number("logit_scale"), read.flag("use_qk_norm", False))


def _second_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    attention = spec.attention
    if attention.head_dim * attention.num_heads != spec.hidden_size:
        raise UnsupportedError(f"a Cohere 2 whose heads of {attention.head_dim} dims don't make {spec.hidden_size}", ANOTHER)
    return turned_in_windows(_from_hf(spec, read))


def _compass_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without a word all layers see all; those without positions get the others', until the layers are read."""
    layers = config.get("num_hidden_layers")
    found = {**config, "layer_types": config.get("layer_types") or ([FULL] * layers if type(layers) is int else None)}
    sections = config.get("rope_parameters")
    if isinstance(sections, Mapping) and (said := [sections[kind] for kind in (FULL, SLIDING) if sections.get(kind)]):
        found["rope_parameters"] = {kind: sections.get(kind) or said[0] for kind in (FULL, SLIDING)}
        found["kinds_without_rope"] = [kind for kind in (FULL, SLIDING) if kind in sections and sections[kind] is None]
    return found


def _compass_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    without, kinds = read.values.get("kinds_without_rope", ()), read.kinds("layer_types", spec.num_layers, FULL, SLIDING) or []
    spec = spec.each_attention(lambda layer, own: replace(own, rope=None) if kinds[layer] in without else own)
    return replace(spec, logit_scale=read.number("logit_scale") if read.has("logit_scale") else 1.0)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    scale = read.number(key("logit_scale"), 0.0, positive=False) or 1.0
    return _cohere(spec, scale, spec.attention.qk_norm)


def _second_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return turned_in_windows(_from_gguf(spec, read, key))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_none("a Cohere model", a_head_of_its_own=not spec.tied_head)  # llama.cpp takes the embedding whatever the file has
    stretched = any(rope.scaling != "none" for rope in spec.ropes)
    return {"logit_scale": spec.logit_scale, **({} if stretched else {"rope.scaling.type": "none"}), **window_pattern(spec)}


COHERE = Family(
    "cohere",
    order="parallel",
    gguf_name="command-r",
    layer_norm=True,
    interleaved=True,
    interleaved_gguf=True,
    tied_by_default=True,
    defaults=_DEFAULTS | {"rope_theta": 5e5},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
    gguf_homeless=(OUT_BIAS,),
)
COHERE2 = replace(
    COHERE,
    name="cohere2",
    gguf_name="",
    has_window=True,
    full_every=4,
    defaults=_DEFAULTS | {"sliding_window": 4096},
    hf=_second_from_hf,
    gguf=_second_from_gguf,
)
COHERE_COMPASS = replace(
    COHERE2,
    name="cohere_compass",
    interleaved=False,
    full_every=None,
    config=_compass_config,
    defaults={"layer_norm_eps": 1e-5, "max_position_embeddings": 8192, "sliding_window": 4096},
    hf=_compass_from_hf,
    gguf_like=no_file("Cohere Compass"),
)
COHERE_COMPASS_VISION = replace(
    COHERE_COMPASS, tied_by_default=False, hf=lambda spec, read: woven(_compass_from_hf(spec, read), (24, 20, 20))
)
"""What writes of North Micro Vision."""
