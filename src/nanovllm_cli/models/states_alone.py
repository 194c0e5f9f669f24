"""Mamba-2 by itself (Dao and Gu 2024; Codestral Mamba): each layer is one of its state spaces behind a norm. Nothing has
attention, positions or an MLP, so that no length is the longest.

What `families.py` asks of heads and MLPs in every config is told here of none, and left out of the spec again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import DeltaSpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.mamba import (
    MAMBA_GGUF_NAMES,
    check_limits,
    checked_mamba,
    mamba_from_gguf,
    mamba_gguf_keys,
    mamba_hf_names,
)

USUAL_CONTEXT = 1 << 20
"""Tokens of the longest sequence unless somebody asks for more: what llama.cpp's converter writes into files of such models."""
_NONE = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1, "attention_bias": False}
_NONE_IN_GGUF = {"attention.head_count": 1, "attention.head_count_kv": 1, "attention.key_length": 2, "feed_forward_length": 1,
                 "attention.value_length": 2}  # fmt: skip


def _usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {"state_head_dim": config.get("head_dim"), "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5)}
    return {**config, **sizes, **_NONE}


def _usual_gguf_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    arch = metadata["general.architecture"]
    return {**metadata, **{f"{arch}.{key}": value for key, value in _NONE_IN_GGUF.items()}}


def _alone(spec: ModelSpec, state: DeltaSpec) -> ModelSpec:
    return replace(spec, blocks=(BlockSpec(state, None),) * spec.num_layers)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("use_bias", False):
        raise UnsupportedError("a Mamba with biases of its projections", ANOTHER)
    if (act := read.text("hidden_act", "silu")) != "silu":
        raise UnsupportedError(f"a state space behind {act[:40]!r}", "known: silu")
    check_limits(read)
    heads, size = read.integer("num_heads"), read.integer("state_head_dim", 64)
    mamba = DeltaSpec(
        read.integer("n_groups"), read.integer("state_size"), heads, size, read.integer("conv_kernel"), mamba=True,
        conv_bias=read.flag("use_conv_bias", True),
    )  # fmt: skip
    return _alone(spec, checked_mamba(mamba, read.integer("expand") * spec.hidden_size, read))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _alone(spec, mamba_from_gguf(read, key))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """What is of no meaning is 0, as llama.cpp's converter has it."""
    (state,) = {block.mixer for block in spec.blocks}
    assert isinstance(state, DeltaSpec)
    return {"attention.head_count": 0, "feed_forward_length": 0, **mamba_gguf_keys(state)}


MAMBA2 = Family(
    "mamba2",
    outer="backbone.",
    config=_usual_keys,
    metadata=_usual_gguf_keys,
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "expand": 2, "vocab_size": 32768, "max_position_embeddings": USUAL_CONTEXT,
    },
    hf_names=mamba_hf_names("backbone.layers.{i}.mixer") | {
        "embedding.weight": "backbone.embeddings.weight",
        "norm.weight": "backbone.norm_f.weight",
        "blocks.{i}.attention_norm.weight": "backbone.layers.{i}.norm.weight",
    },
    gguf_names=MAMBA_GGUF_NAMES,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
