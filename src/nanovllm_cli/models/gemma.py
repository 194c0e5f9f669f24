"""Gemma 1, 2 and 3 (text): norms that add 1 to their gains, scaled embeddings, a norm on either side of attention and MLP.

Configs on the hub leave out what transformers has as a default. What GGUF files don't say is fixed in llama.cpp: which layers
have a window, and how the 27B models scale their scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family, GGUFField, no_file
from nanovllm_cli.models.names import OUT_BIAS, POST_HF_NAMES, SANDWICH_GGUF_NAMES
from nanovllm_cli.norm_spec import NormSpec

SANDWICH_HF_NAMES = POST_HF_NAMES | {
    "blocks.{i}.mlp_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
}


def _gemma(spec: ModelSpec, stored_offset: float) -> ModelSpec:
    """What all of them have."""
    spec = replace(spec, norm=NormSpec(spec.norm.eps, 1.0, stored_offset), embedding_scale=spec.hidden_size**0.5)
    return spec.with_mlps(activation="gelu_tanh")


def _scaled(spec: ModelSpec, scale: float, score_cap: float | None, logit_cap: float | None) -> ModelSpec:
    """Gemma 2 and 3. scale: of scores; the caps: of scores and logits."""
    return replace(spec, logit_softcap=logit_cap).with_attention(scale=scale, softcap=score_cap)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return _gemma(spec, 0.0)


def _first_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """ "gelu" was written where its approximation by tanh was meant."""
    for key in ("hidden_act", "hidden_activation"):
        if (activation := read.text(key, "gelu")) not in ("gelu", "gelu_pytorch_tanh"):
            raise UnsupportedError(f"activation {activation[:80]!r} in a gemma model", "known: gelu, gelu_pytorch_tanh")
    return _from_hf(spec, read)


def _sandwich_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if (activation := read.text("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise UnsupportedError(f"activation {activation[:80]!r} in a {spec.architecture} model", "known: gelu_pytorch_tanh")
    scale = read.number("query_pre_attn_scalar", 256) ** -0.5
    score_cap = None if spec.attention.qk_norm else read.cap("attn_logit_softcapping")  # a Gemma 3 says it, and has none
    spec = replace(spec, max_position=read.integer("max_position_embeddings"))  # whatever its ropes are stretched by
    return _scaled(_from_hf(spec, read), scale, score_cap, read.cap("final_logit_softcapping"))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _gemma(spec, 1.0)


def _score_scale(spec: ModelSpec, largest: int) -> float:
    """largest: layers of the 27B model."""
    attention = spec.attention
    width = spec.hidden_size // attention.num_heads if spec.num_layers == largest else attention.head_dim
    return float(width**-0.5)


def _gemma2_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Early files say nothing of windows and caps."""
    caps = read.number(key("attn_logit_softcapping"), 50.0), read.number(key("final_logit_softcapping"), 30.0)
    spec = _scaled(_gemma(spec, 1.0), _score_scale(spec, 46), *caps)
    if read.has(key("attention.sliding_window")):
        return spec
    return spec.each_attention(lambda layer, attention: replace(attention, window=None if layer % 2 else 4096))


def _gemma3_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _scaled(_gemma(spec, 1.0), _score_scale(spec, 62), None, read.cap(key("final_logit_softcapping")))


def window_keys(is_full: Callable[[int], bool]) -> Callable[[ModelSpec], dict[str, GGUFField]]:
    """What files say of layers with windows. is_full: of a layer's number, whether it has none without a word."""

    def keys(spec: ModelSpec) -> dict[str, GGUFField]:
        local = [a.rope.theta for a in spec.attentions if a.window is not None and a.rope is not None]
        found: dict[str, GGUFField] = {"rope.freq_base_swa": local[0]} if local else {}
        windows = [a.window is not None for a in spec.attentions]
        if local and windows != [not is_full(i) for i in range(spec.num_layers)]:
            found["attention.sliding_window_pattern"] = windows
        return found

    return keys


def _sandwich_keys(full_every: int) -> Callable[[ModelSpec], dict[str, GGUFField]]:
    of_windows = window_keys(lambda layer: (layer + 1) % full_every == 0)

    def keys(spec: ModelSpec) -> dict[str, GGUFField]:
        caps = {"attn_logit_softcapping": spec.attention.softcap, "final_logit_softcapping": spec.logit_softcap}
        return {**{key: cap for key, cap in caps.items() if cap is not None}, **of_windows(spec)}

    return keys


def _gemma3_in_gguf(spec: ModelSpec) -> Family:
    return GEMMA_EMBEDDING if spec.reads_both_ways else GEMMA3


def _prompt_apart(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """That a prompt sees all of itself is a matter of its image (towers_paligemma.py); answers see what is before them."""
    return {key: value for key, value in config.items() if key != "use_bidirectional_attention"}


GEMMA = Family(
    "gemma",
    tied_by_default=True,
    defaults={"hidden_act": "gelu", "head_dim": 256, "max_position_embeddings": 8192},
    hf=_first_from_hf,
    gguf=_from_gguf,
    gguf_activation="gelu_tanh",
    gguf_homeless=(OUT_BIAS,),
)
PALI_GEMMA = replace(GEMMA, config=_prompt_apart, gguf_like=no_file("PaliGemma"), defaults={
    **GEMMA.defaults, "vocab_size": 257152, "hidden_size": 2048, "num_hidden_layers": 18, "intermediate_size": 16384,
    "num_attention_heads": 8, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
})  # fmt: skip
"""As a PaliGemma's config leaves it out."""
GEMMA2 = Family(
    "gemma2",
    order="sandwich",
    has_window=True,
    full_every=2,
    tied_by_default=True,
    defaults={
        "sliding_window": 4096, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "head_dim": 256, "num_key_value_heads": 4,
    },
    hf_names=SANDWICH_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    hf=_sandwich_from_hf,
    gguf=_gemma2_from_gguf,
    gguf_activation="gelu_tanh",
    gguf_keys=_sandwich_keys(2),
    gguf_homeless=(OUT_BIAS,),
)  # fmt: skip
PALI_GEMMA2 = replace(GEMMA2, config=_prompt_apart, gguf_like=no_file("PaliGemma 2"))
VAULT_GEMMA = replace(
    GEMMA2,
    name="vaultgemma",
    order="pre",
    hf_names={"blocks.{i}.mlp_norm.weight": SANDWICH_HF_NAMES["blocks.{i}.mlp_norm.weight"]},
    gguf_like=no_file("VaultGemma"),
)
"""Without norms of what attention and MLP add."""
GEMMA3 = Family(
    "gemma3",
    order="sandwich",
    halves_window=True,
    gguf_like=_gemma3_in_gguf,
    qk_norm=True,
    has_window=True,
    full_every=6,
    local_theta=10000.0,
    tied_by_default=True,
    defaults={
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rope_theta": 1e6,
        "sliding_window": 4096, "max_position_embeddings": 131072,
    },
    hf_names=SANDWICH_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    hf=_sandwich_from_hf,
    gguf=_gemma3_from_gguf,
    gguf_activation="gelu_tanh",
    gguf_keys=_sandwich_keys(6),
    gguf_homeless=(OUT_BIAS,),
)  # fmt: skip
GEMMA_EMBEDDING = replace(GEMMA3, gguf_name="gemma-embedding", both_ways=True)
"""As its GGUF files call it; a folder's config says that tokens see those behind them."""
