"""GPT-2 (Radford et al. 2019): layer norms, biases everywhere, learned positions. Its folders hold matrices turned over, inputs
by outputs (weights/stacked.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.bert import LONE_TANH
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family

_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act",
}  # fmt: skip
_OTHERWISE = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""What there are other GPT-2s with, and how it is here."""
_PARTS = {
    "attention_norm": "ln_1", "mlp_norm": "ln_2", "qkv": "attn.c_attn", "o": "attn.c_proj", "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}  # fmt: skip


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {**config, **{usual: config[own] for own, usual in _KEYS.items() if config.get(own) is not None}}
    width = found.get("hidden_size")
    return {"intermediate_size": 4 * width, **found} if type(width) is int else found


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    others = [name for name, usual in _OTHERWISE.items() if read.flag(name, usual) is not usual]
    if others:
        raise UnsupportedError(f"{read.where}: a GPT-2 with another {', '.join(others)}", ANOTHER)
    return _gpt2(spec)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _gpt2(spec)


def _gpt2(spec: ModelSpec) -> ModelSpec:
    spec = spec.with_shifted_norms().with_attention(rope=None)
    return replace(spec, entry=EntrySpec(None, positions=spec.max_position))


GPT2 = Family(
    "gpt2",
    layer_norm=True,
    fused_qkv=True,
    turned_over=True,
    ungated=LONE_TANH,
    tied_by_default=True,
    outer="transformer.",
    config=_usual_keys,
    defaults={
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 1024, "attention_bias": True,
        "mlp_bias": True,
    },
    hf_names={
        "embedding.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
        **{
            f"blocks.{{i}}.{ours}.{kind}": f"transformer.h.{{i}}.{theirs}.{kind}"
            for ours, theirs in _PARTS.items()
            for kind in ("weight", "bias")
        },
        **{f"norm.{kind}": f"transformer.ln_f.{kind}" for kind in ("weight", "bias")},
    },
    gguf_names={"positions.weight": "position_embd.weight"},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="lone_gelu_tanh",
)  # fmt: skip
