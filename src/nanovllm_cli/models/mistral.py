"""Mistral Small 3; Ministral 3, whose queries grow with their position once it is past the length that it was first trained on;
and Mistral Small 4, where they do, too: latent attention, and experts of which a softmax chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.deepseek import DEEPSEEK2, latent_from_gguf, latent_from_hf, latent_keys
from nanovllm_cli.models.families import LLAMA, MISTRAL
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.rotary import rope_section, tempered

_ROTARY = ("rope_parameters", "rope_scaling")


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return tempered(spec, rope_section(read).number("llama_4_scaling_beta", 0.0, positive=False))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if all_dim := read.number(key("rope.scaling.yarn_log_multiplier"), 0.0, positive=False):
        spec = spec.each_rope(lambda rope: replace(rope, mscale=1.0, mscale_all_dim=all_dim))
    return tempered(spec, read.number(key("attention.temperature_scale"), 0.0, positive=False))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """The length that queries grow from is that of its rotary positions there."""
    rope, own = spec.attention.rope, spec.attention.temperature
    assert rope is not None
    keys: dict[str, GGUFField] = {}
    if rope.scaling == "yarn" and rope.mscale_all_dim:
        keys["rope.scaling.yarn_log_multiplier"] = rope.mscale_all_dim
    return keys if own is None else {**keys, "attention.temperature_scale": own.scale}


def _mistral_text(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    kind = read.text("model_type", "mistral")
    if kind != "mistral":
        raise UnsupportedError(f"a text model of the kind {kind[:80]!r} in a Mistral 3", ANOTHER)
    return spec


def _rotary_whole(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the share of a head that is rotated: what else is said of its dims says so, too."""
    sections = {key: config[key] for key in _ROTARY if isinstance(config.get(key), Mapping)}
    return {**config, **{key: {name: value for name, value in section.items() if name != "partial_rotary_factor"}
                         for key, section in sections.items()}}  # fmt: skip


def _latent_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if spec.mixture is not None and spec.mixture.groups > 1:
        raise UnsupportedError(f"{read.where}: experts of a Mistral that are chosen by groups", "known: one group")
    return _from_hf(latent_from_hf(spec, read), read)


def _latent_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    own = spec.attention.temperature
    grown = {} if own is None else {"attention.temperature_scale": own.scale, "attention.temperature_length": own.length}
    return {**latent_keys(spec), **grown}


MISTRAL3 = replace(MISTRAL, name="mistral3", hf=_mistral_text, defaults={**MISTRAL.defaults, "num_attention_heads": 32})
_SIZES = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAVA = replace(LLAMA, defaults={**_SIZES, "intermediate_size": 11008})
"""A Vicuna 7B, of whose config LLaVAs leave out what transformers knows."""
LLAVA_MISTRAL = replace(MISTRAL, name="llava", defaults={**MISTRAL.defaults, **_SIZES, "intermediate_size": 14336})
MINISTRAL3 = Family(
    "mistral3",
    has_window=True,
    interleaved_gguf=True,
    defaults={
        "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 262144,
        "rope_scaling": {
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
MISTRAL4 = replace(
    DEEPSEEK2,
    name="mistral4",
    config=_rotary_whole,
    defaults={
        **DEEPSEEK2.defaults, "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "norm_topk_prob": True,
        "n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
        "max_position_embeddings": 1048576, "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn", "factor": 128.0, "original_max_position_embeddings": 8192, "mscale_all_dim": 1.0, "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    hf=_latent_from_hf,
    gguf=latent_from_gguf,
    gguf_name="mistral4",
    gguf_keys=_latent_keys,
)  # fmt: skip
