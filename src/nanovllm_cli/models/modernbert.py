"""ModernBERT (Warner et al. 2024; gte-modernbert, granite-embedding R2 and others embed texts with it): an encoder with rotary
positions, gated MLPs, norms in front without shifts, and windows on either side in two of three layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, usual_keys
from nanovllm_cli.models.gemma import window_keys
from nanovllm_cli.models.names import modules, weights_and_biases

_KEYS = {
    "hidden_activation": "hidden_act", "norm_eps": "layer_norm_eps", "local_attention": "sliding_window",
    "global_rope_theta": "rope_theta", "local_rope_theta": "rope_local_base_freq",
    "global_attn_every_n_layers": "sliding_window_pattern",
}  # fmt: skip
_PARTS = {
    "attention_norm": "attn_norm", "qkv": "attn.Wqkv", "o": "attn.Wo", "mlp_norm": "mlp_norm", "gate_up": "mlp.Wi",
    "down": "mlp.Wo",
}  # fmt: skip
_ACTIVATIONS: dict[str, Literal["gelu", "silu"]] = {
    "gelu": "gelu", "geglu": "gelu", "silu": "silu", "swish": "silu", "swiglu": "silu",
}  # fmt: skip


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, **usual_keys(config, _KEYS)}


def _encoder(spec: ModelSpec) -> ModelSpec:
    """Embeddings are normed, so that the first layer's mixer has no norm of its own."""
    first, *others = spec.blocks
    return replace(spec, blocks=(replace(first, bare=True), *others), entry=EntrySpec(spec.norm))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("norm_bias", False):
        raise UnsupportedError("a ModernBERT whose norms have shifts is not supported", ANOTHER)
    return _encoder(spec)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """What files don't say is a GELU."""
    said = read.text(key("hidden_activation"), "gelu")
    if said not in _ACTIVATIONS:
        raise UnsupportedError(f"{read.where}: activation {said[:40]!r} is not supported", f"known: {', '.join(_ACTIVATIONS)}")
    return _encoder(spec.with_mlps(activation=_ACTIVATIONS[said]))


def _gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mlp = spec.dense_mlp
    own: dict[str, GGUFField] = {} if mlp is None or mlp.activation == "gelu" else {"hidden_activation": mlp.activation}
    return {**window_keys(lambda layer: layer % 3 == 0)(spec), **own}


MODERNBERT = Family(
    "modernbert",
    gguf_name="modern-bert",
    layer_norm=True,
    both_ways=True,
    halves_window=True,
    has_window=True,
    full_every=3,
    full_first=True,
    local_theta=10000.0,
    fused_qkv=True,
    fused_mlp=True,
    tied_by_default=True,
    aside=("head.", "decoder.", "classifier."),
    config=_usual_keys,
    defaults={
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "sliding_window": 128, "rope_theta": 160000.0,
        "max_position_embeddings": 8192,
    },
    hf_names={
        "embedding.weight": "model.embeddings.tok_embeddings.weight",
        "entry_norm.weight": "model.embeddings.norm.weight",
        "norm.weight": "model.final_norm.weight",
        **weights_and_biases(modules("blocks.{i}.", "model.layers.{i}.", _PARTS)),
    },
    gguf_names={"entry_norm.weight": "token_embd_norm.weight"},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="gelu",
    gguf_keys=_gguf_keys,
)  # fmt: skip
