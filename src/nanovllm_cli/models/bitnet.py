"""BitNet b1.58 (Ma et al. 2024, 2025): a Llama of ternary weights, with a norm before the last projection of attention and MLP.

What its folders have of weights `weights/quantized_bitnet.py` reads; here a weight is any. llama.cpp's graph has a SiLU, as the
first such models had; a file of one with a squared ReLU says so by a key that others have for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField

_ACTIVATION = "hidden_activation"
_Activation = Literal["silu", "relu2_gated"]
_KNOWN: dict[str, _Activation] = {"relu2": "relu2_gated", "silu": "silu"}


def _normed(spec: ModelSpec, activation: _Activation) -> ModelSpec:
    return spec.with_mlps(normed=True, activation=activation)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if (activation := read.text("hidden_act")) not in _KNOWN:
        raise UnsupportedError(f"activation {activation[:80]!r} in a BitNet", f"known: {', '.join(_KNOWN)}")
    return _normed(spec, _KNOWN[activation])


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    activation = read.text(key(_ACTIVATION), "silu")
    if activation not in _KNOWN:
        raise UnsupportedError(f"{read.where}: activation {activation[:80]!r}", f"known: {', '.join(_KNOWN)}")
    return _normed(spec, _KNOWN[activation])


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    if not spec.tied_head:
        raise UnsupportedError("GGUF files of a BitNet whose head is not its embedding", "llama.cpp reads none; " + ANOTHER)
    return {_ACTIVATION: "relu2"} if spec.mlps[0].activation == "relu2_gated" else {}


BITNET = Family(
    "bitnet",
    attention={"found_norm": True},
    hf_names={
        "blocks.{i}.found_norm.weight": "model.layers.{i}.self_attn.attn_sub_norm.weight",
        "blocks.{i}.inner_norm.weight": "model.layers.{i}.mlp.ffn_sub_norm.weight",
    },
    gguf_names={
        "blocks.{i}.found_norm.weight": "blk.{i}.attn_sub_norm.weight",
        "blocks.{i}.inner_norm.weight": "blk.{i}.ffn_sub_norm.weight",
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="relu2_gated",
    gguf_keys=_keys,
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 5},
)
