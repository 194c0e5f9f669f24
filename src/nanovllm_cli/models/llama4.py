"""Llama 4, the part that writes: of four layers three rotate heads, norm them without gains, and see no further than their chunk
of tokens; the fourth has no positions, sees everything, and its queries grow. An expert reads what the sigmoid of its logit has
scaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.names import each_expert, projections
from nanovllm_cli.models.rotary import checked_rope, without_growth
from nanovllm_cli.rope_spec import TemperatureSpec

CHUNK, LEAST_CHUNK = 8192, 64
"""Of tokens; files don't say it. A multiple of the second, so that one begins with a block of the cache."""
_CHUNKED, _FULL = "chunked_attention", "full_attention"
_LAYER = "model.layers.{i}"
_UNNORMED = 128
"""Of so many experts (Maverick), to whose heads llama.cpp has no norm; its files don't say so."""


def _sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """By the keys of others: what it calls intermediate_size is an expert's. Lists of layers may be empty, which says nothing."""
    own = {"moe_intermediate_size": config.get("intermediate_size", 8192),
           "intermediate_size": config.get("intermediate_size_mlp", 16384)}  # fmt: skip
    found = {**config, **own, "no_rope_layers": config.get("no_rope_layers") or None}
    layers, count = config.get("moe_layers"), config.get("num_hidden_layers")
    if layers is not None and type(count) is int:
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise CheckpointError("config.json: 'moe_layers' must be a list of layers", BROKEN)
        others = set(range(min(max(count, 0), 1024))) - set(layers)
        found |= {"mlp_only_layers": sorted(others), "interleave_moe_layer_step": 1}
    return found


def _made(spec: ModelSpec, where: str) -> ModelSpec:
    """Of each token's one expert what it weighs is 1: it has been scaled by that before."""

    def read_by_one(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        if isinstance(mlp, MLPSpec):
            return mlp
        if mlp.experts_per_token != 1:
            raise UnsupportedError(f"{where}: {mlp.experts_per_token} experts that each read a token scaled for it", "known: one")
        return replace(mlp, shared=mlp.expert, scales_input=True)

    return spec.each_mlp(read_by_one)


def _in_layers(spec: ModelSpec, chunks: list[int | None], normed: bool, temperature: TemperatureSpec | None) -> ModelSpec:
    def layer(i: int, own: AttentionSpec) -> AttentionSpec:
        own = replace(own, window=None, chunk=chunks[i])
        if own.rope is None:
            return replace(own, qk_norm=False, temperature=temperature)
        return replace(own, qk_norm=normed, qk_gains=False, rope=without_growth(own.rope) if normed else own.rope)

    return spec.each_attention(layer)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    chunk = read.integer("attention_chunk_size") if read.has("attention_chunk_size") else None
    if chunk is not None and chunk % LEAST_CHUNK:
        raise UnsupportedError(f"{read.where}: attention in chunks of {chunk} tokens", f"known: multiples of {LEAST_CHUNK}")
    kinds = read.kinds("layer_types", spec.num_layers, _CHUNKED, _FULL)
    if kinds is None:
        kinds = [_FULL if attention.rope is None else _CHUNKED for attention in spec.attentions]
    temperature = TemperatureSpec(read.integer("floor_scale", 8192), read.number("attn_scale", 0.1, positive=False), 1)
    tuned = bool(read.values.get("attn_temperature_tuning", True)) and temperature.scale != 0
    chunks = [chunk if kind == _CHUNKED else None for kind in kinds]
    return _in_layers(_made(spec, read.where), chunks, read.flag("use_qk_norm", True), temperature if tuned else None)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if read.values.get(key("attention.sliding_window"), CHUNK) == 0 or spec.mixture is None:
        raise UnsupportedError(f"{read.where}: a Llama 4 without chunks, or without experts", ANOTHER)
    chunks = [None if attention.rope is None else CHUNK for attention in spec.attentions]
    normed = spec.mixture.num_experts != _UNNORMED
    if read.has(theta := key("rope.freq_base_swa")):  # which layers with chunks have, and no others rotate
        spec = spec.each_rope(lambda rope: checked_rope(replace(rope, theta=read.number(theta)), spec.attention.head_dim, read))
    return _in_layers(_made(spec, read.where), chunks, normed, TemperatureSpec(CHUNK, 0.1, 1))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_experts, layers = [isinstance(block.mlp, MoESpec) for block in spec.blocks], range(spec.num_layers)
    steps = (n for n in range(1, spec.num_layers + 1) if has_experts == [(i + 1) % n == 0 for i in layers])
    if (step := next(steps, None)) is None:
        raise UnsupportedError("GGUF cannot say this of a llama4 model: which layers have experts", "keep the model as a folder")
    return {"interleave_moe_layer_step": step}


LLAMA4 = Family(
    "llama4",
    interleaved=True,
    interleaved_gguf=True,
    no_rope_every=4,
    experts=ExpertKeys(("num_local_experts",), "moe_intermediate_size", True, step="interleave_moe_layer_step",
                       switch="num_local_experts"),
    config=_sizes,
    defaults={"rope_theta": 5e5, "rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 8, "num_experts_per_tok": 1,
              "num_local_experts": 16, "max_position_embeddings": 131072, "attention_chunk_size": CHUNK},
    hf_names={
        **projections("blocks.{i}.", f"{_LAYER}.feed_forward."),
        "blocks.{i}.router.weight": f"{_LAYER}.feed_forward.router.weight",
        **projections("blocks.{i}.shared.", f"{_LAYER}.feed_forward.shared_expert."),
        **each_expert(f"{_LAYER}.feed_forward.experts"),
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
