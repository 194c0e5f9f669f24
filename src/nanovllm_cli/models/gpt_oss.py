"""gpt-oss: experts with biases and a clamped activation, a learned sink for each head, windows in every second layer. OpenAI's
privacy filter is one whose tokens see both ways, in all layers within windows, and get labels.

Its folders hold the experts of a layer in one tensor, in MXFP4 or turned over; weights/stacked.py takes that apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.family import Family, GGUFField, has_all, no_file
from nanovllm_cli.models.names import MATRICES, weights_and_biases

_ACTIVATION = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
_NAMES = {
    "blocks.{i}.sinks": "model.layers.{i}.self_attn.sinks",
    **weights_and_biases({"blocks.{i}.router": "model.layers.{i}.mlp.router"}),
    **{
        f"blocks.{{i}}.experts.{{e}}.{part}.{kind}": f"model.layers.{{i}}.mlp.experts.{{e}}.{part}_proj{theirs}"
        for part in MATRICES
        for kind, theirs in (("weight", ""), ("bias", "_bias"))
    },
}
_GGUF_NAMES = {
    "blocks.{i}.sinks": "blk.{i}.attn_sinks.weight",
    "blocks.{i}.mlp_norm.weight": "blk.{i}.post_attention_norm.weight",
}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    for key, known in _ACTIVATION.items():
        if (value := read.number(key, known)) != known:
            raise UnsupportedError(f"{read.where}: {key!r} of {value:g} is not supported", f"known: {known:g}")
    return _made(spec, read)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Its yarn rounds none of the frequencies between which it interpolates, which GGUF has no key for."""
    return _made(spec.each_rope(lambda rope: replace(rope, truncate=False)), read)


def _made(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return spec.each_mlp(lambda mlp: _mixture(mlp, read))


def _mixture(mlp: MLPSpec | MoESpec, read: ConfigReader) -> MoESpec:
    if not isinstance(mlp, MoESpec):
        raise CheckpointError(f"{read.where}: a gpt-oss model without experts", BROKEN)
    return replace(mlp, expert=replace(mlp.expert, activation="swiglu_oai", bias=True), router_bias=True)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mixture = spec.mixture
    has_all(spec.architecture, biases_of_attention=spec.attention.qkv_bias and spec.attention.out_bias)
    return {} if mixture is None else {"expert_feed_forward_length": mixture.expert.intermediate_size}


GPT_OSS = Family(
    "gpt_oss",
    gguf_name="gpt-oss",
    attention={"sinks": True},
    has_window=True,
    full_every=2,
    experts=ExpertKeys(("num_local_experts",), "intermediate_size", norm_topk=True),
    defaults={
        "attention_bias": True, "sliding_window": 128, "head_dim": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False,
        },
    },
    hf_names=_NAMES,
    gguf_names=_GGUF_NAMES,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="swiglu_oai",
    gguf_keys=_keys,
    gguf_truncates=False,
)


def _both_sides(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A window is told of one side."""
    window = config.get("sliding_window", 128)
    return {**config, "sliding_window": 2 * window if type(window) is int else window}


PRIVACY_FILTER = replace(
    GPT_OSS,
    name="openai_privacy_filter",
    gguf_like=no_file("privacy filter"),
    config=_both_sides,
    both_ways=True,
    halves_window=True,
    full_every=None,
    interleaved=True,
    defaults={**GPT_OSS.defaults, "num_key_value_heads": 2, "num_attention_heads": 14},
)
