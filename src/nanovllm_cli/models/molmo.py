"""Molmo 2 (Allen Institute for AI 2025): a Qwen3, or an OLMo 3 without windows, with more tokens than its head has rows for:
those that stand for images. What it sees by: `towers_molmo.py`; what its folders call tensors: `weights/molmo_names.py`.
llama.cpp has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import QWEN3
from nanovllm_cli.models.family import Family, no_file
from nanovllm_cli.models.olmo import OLMO2
from nanovllm_cli.rope_spec import RopeSpec

MOLMO_NAMES = ("Molmo2ForConditionalGeneration",)
_MORE_TOKENS = 128
_MOST_TOKENS = 1 << 20


def _keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of published folders, which say two things otherwise."""
    renamed = {"qkv_bias": "attention_bias", "layer_norm_eps": "rms_norm_eps"}
    return {**{new: config[old] for old, new in renamed.items() if old in config}, **config}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    more = read.integer("additional_vocab_size", _MORE_TOKENS, least=0)
    if more > _MOST_TOKENS:
        raise CheckpointError(f"{read.where}: {more} tokens beside the vocabulary are not believed", BROKEN)
    scaled = _scaled_layers(read, spec.num_layers)

    def own(layer: int, attention: AttentionSpec) -> AttentionSpec:
        rope = attention.rope
        if layer not in scaled and rope is not None:
            rope = RopeSpec(rope.dim, rope.theta, rope.interleaved, original_len=rope.original_len)
        return replace(attention, rope=rope, out_bias=False)

    spec = spec.each_attention(own)
    return replace(spec, vocab_size=spec.vocab_size + more, head_rows=spec.vocab_size if more else 0)


def _scaled_layers(read: ConfigReader, count: int) -> set[int]:
    """Whose rotary positions are stretched as the config says; those of the others are as they are."""
    said = read.values.get("rope_scaling_layers")
    if said is None:
        return set(range(count))
    if not isinstance(said, list) or not all(type(each) is int and 0 <= each < count for each in said):
        raise CheckpointError(f"{read.where}: 'rope_scaling_layers' must be a list of layers, of {count}", BROKEN)
    return set(said)


_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12288, "rms_norm_eps": 1e-6, "max_position_embeddings": 36864, "rope_theta": 1e4,
}  # fmt: skip
"""transformers' Molmo2TextConfig."""
MOLMO2 = replace(QWEN3, name="molmo2", has_window=False, qkv_bias=None, config=_keys, hf=_from_hf, defaults=_DEFAULTS,
                 gguf_like=no_file("Molmo 2"))  # fmt: skip
MOLMO2_O = replace(OLMO2, name="molmo2_o", full_every=None, config=_keys, hf=_from_hf, defaults=_DEFAULTS,
                   gguf_like=no_file("Molmo 2"))  # fmt: skip


def family_of_molmo(config: Mapping[str, Any]) -> Family:
    """By what its layers norm: heads, and what they read; or all heads together, and what they add."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    kinds = text.get("qk_norm_type", "qwen3"), text.get("norm_after", False)
    if kinds == ("qwen3", False):
        return MOLMO2
    if kinds == ("olmo", True):
        return MOLMO2_O
    told = f"config.json: qk_norm_type {str(kinds[0])[:40]!r} with norm_after {str(kinds[1])[:40]}"
    raise UnsupportedError(told, "known: 'qwen3' with false, 'olmo' with true")
