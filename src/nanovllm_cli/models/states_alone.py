"""Mamba and Mamba-2 by themselves (Gu and Dao 2023; Falcon Mamba; Dao and Gu 2024; Codestral Mamba): each layer is one state
space behind a norm. Nothing has attention, positions or an MLP, so that no length is the longest.

What `families.py` asks of heads and MLPs in every config is told here of none, and left out of the spec again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all
from nanovllm_cli.models.mamba import (
    MAMBA_GGUF_NAMES,
    check_kind,
    checked_mamba,
    mamba_from_gguf,
    mamba_gguf_keys,
    mamba_hf_names,
)
from nanovllm_cli.models.scan import (
    SCAN_GGUF_NAMES,
    NormKind,
    scan_from_gguf,
    scan_from_hf,
    scan_gguf_keys,
    scan_hf_names,
)
from nanovllm_cli.state_spec import DeltaSpec, ScanSpec, StateSpec

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


def _alone(spec: ModelSpec, state: StateSpec) -> ModelSpec:
    return replace(spec, blocks=(BlockSpec(state, None),) * spec.num_layers)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("use_bias", False):
        raise UnsupportedError("a Mamba with biases of its projections", ANOTHER)
    check_kind(read)
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


_OUTER_NAMES = {
    "embedding.weight": "backbone.embeddings.weight",
    "norm.weight": "backbone.norm_f.weight",
    "blocks.{i}.attention_norm.weight": "backbone.layers.{i}.norm.weight",
}
MAMBA2 = Family(
    "mamba2",
    outer="backbone.",
    config=_usual_keys,
    metadata=_usual_gguf_keys,
    defaults={
        "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "expand": 2, "vocab_size": 32768, "max_position_embeddings": USUAL_CONTEXT,
    },
    hf_names=mamba_hf_names("backbone.layers.{i}.mixer") | _OUTER_NAMES,
    gguf_names=MAMBA_GGUF_NAMES,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip

FALCONS_EPS = 1e-6
"""Of norms of what a Falcon Mamba's steps, B and C are made of. Files don't say it; llama.cpp takes that of the other norms."""
_SCAN_KEYS = {"expand": "expand", "size": "state_size", "rank": "time_step_rank", "width": "conv_kernel",
              "conv_bias": "use_conv_bias", "bias": "use_bias"}  # fmt: skip


def _scan_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _alone(spec, scan_from_hf(read, spec.hidden_size, "none", **_SCAN_KEYS))


def _falcon_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    scan = scan_from_hf(read, spec.hidden_size, "plain", **_SCAN_KEYS)
    return _alone(spec, replace(scan, eps=read.number("mixer_rms_eps")))


def _scan_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    norms: NormKind = "plain" if read.flag(key("ssm.dt_b_c_rms"), False) else "none"
    scan = scan_from_gguf(read, key, norms)
    return _alone(spec, scan if norms == "none" else replace(scan, eps=FALCONS_EPS))


def _scan_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    (scan,) = {block.mixer for block in spec.blocks}
    assert isinstance(scan, ScanSpec)
    has_all("mamba", biases_of_convolutions=scan.conv_bias, inner_width_of_twice_the_outer=scan.channels == 2 * spec.hidden_size)
    keys: dict[str, GGUFField] = {"attention.head_count": 0, "feed_forward_length": 0, "ssm.dt_b_c_rms": scan.norms == "plain"}
    return keys | scan_gguf_keys(scan)


MAMBA = Family(
    "mamba",
    outer="backbone.",
    tied_by_default=True,
    config=_usual_keys,
    metadata=_usual_gguf_keys,
    defaults={
        "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "state_size": 16, "conv_kernel": 4, "expand": 2,
        "max_position_embeddings": USUAL_CONTEXT,
    },
    hf_names=scan_hf_names("backbone.layers.{i}.mixer") | _OUTER_NAMES,
    gguf_names=SCAN_GGUF_NAMES,
    hf=_scan_from_hf,
    gguf=_scan_from_gguf,
    gguf_keys=_scan_keys,
)  # fmt: skip
FALCON_MAMBA = replace(
    MAMBA, name="falcon_mamba", gguf_name="mamba", hf=_falcon_from_hf, defaults={**MAMBA.defaults, "mixer_rms_eps": FALCONS_EPS},
)  # fmt: skip
