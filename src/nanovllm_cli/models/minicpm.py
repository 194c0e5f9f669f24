"""MiniCPM 1 and 2 (Hu et al. 2024): Llama, with factors for embeddings, what joins the residual stream, and logits. MiniCPM 3:
the same with latent attention, whose rotary pairs lie apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import LatentSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.deepseek import LATENT_GGUF_NAMES, LATENT_HF_NAMES, latent_eps, latent_from_hf, with_latents
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all

_EMBEDDING, _DEPTH, _BASE = 12.0, 1.4, 256.0
"""What files mean that say nothing of it."""


def _scaled(spec: ModelSpec, embedding: float, residual: float, logits: float) -> ModelSpec:
    return replace(spec, embedding_scale=embedding, residual_scale=residual, logit_scale=1 / logits)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    others = [name for name in ("num_experts", "sparse_config") if read.values.get(name)]
    if others:
        raise UnsupportedError(f"a MiniCPM with {', '.join(others)} is not supported", ANOTHER)
    residual = read.number("scale_depth", 1.0) / spec.num_layers**0.5
    return _scaled(spec, read.number("scale_emb", 1.0), residual, spec.hidden_size / read.number("dim_model_base", 1.0))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if read.integer(key("expert_count"), 0, least=0):
        raise UnsupportedError("a MiniCPM with experts is not supported", ANOTHER)
    return _scaled(
        spec,
        read.number(key("embedding_scale"), _EMBEDDING),
        read.number(key("residual_scale"), _DEPTH / spec.num_layers**0.5),
        read.number(key("logit_scale"), spec.hidden_size / _BASE),
    )


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    return {
        "embedding_scale": spec.embedding_scale, "residual_scale": spec.residual_scale, "logit_scale": 1 / spec.logit_scale,
    }  # fmt: skip


def _latent_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    found = {**config, "rope_interleave": False}
    if config.get("v_head_dim") is None and type(hidden) is type(heads) is int and heads:
        found["v_head_dim"] = hidden // heads
    return found


def _third_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    depth, base = (read.number(name, whole) for name, whole in (("scale_depth", spec.num_layers**0.5),
                                                                ("dim_model_base", spec.hidden_size)))  # fmt: skip
    spec = latent_from_hf(spec, read)
    return _scaled(spec, read.number("scale_emb"), depth / spec.num_layers**0.5, spec.hidden_size / base)


def _third_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Its files say nothing of factors."""
    rope, heads = spec.attention.rope, spec.attention.num_heads
    assert rope is not None
    latent = LatentSpec(
        query_rank=read.integer(key("attention.q_lora_rank")),
        rank=read.integer(key("attention.kv_lora_rank")),
        key_dim=read.integer(key("attention.key_length"), least=rope.dim + 1) - rope.dim,
        rotary_dim=rope.dim,
        value_dim=read.integer(key("attention.value_length"), spec.hidden_size // heads),
        eps=latent_eps(spec.norm.eps),
    )
    spec = with_latents(spec, latent, rope, 1.0, heads, read.where)
    return _scaled(spec, _EMBEDDING, _DEPTH / spec.num_layers**0.5, spec.hidden_size / _BASE)


def _latent_gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    latent = spec.attention.latent
    assert latent is not None
    has_all(spec.architecture, low_rank_of_queries=latent.query_rank is not None)
    return {
        "attention.q_lora_rank": latent.query_rank or 0, "attention.kv_lora_rank": latent.rank,
        "attention.head_count_kv": spec.attention.num_heads, "attention.key_length": latent.query_dim,
        "attention.value_length": latent.value_dim,
    }  # fmt: skip


MINICPM = Family(
    "minicpm",
    interleaved_gguf=True,
    tied_by_default=True,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)
MINICPM3 = Family(
    "minicpm3",
    latent=True,
    tied_by_default=True,
    config=_latent_keys,
    defaults={
        "head_dim": 32, "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "scale_emb": _EMBEDDING, "scale_depth": _DEPTH,
        "dim_model_base": _BASE,
    },
    hf_names=LATENT_HF_NAMES,
    gguf_names={ours: theirs for ours, theirs in LATENT_GGUF_NAMES.items() if "{e}" not in ours},
    hf=_third_from_hf,
    gguf=_third_from_gguf,
    gguf_keys=_latent_gguf_keys,
)  # fmt: skip
