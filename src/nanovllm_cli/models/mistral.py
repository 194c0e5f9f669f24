"""Mistral Small 3, and Ministral 3, whose scores grow with the position once it is past the length that it was first trained on.

No kernel here scales a query by its position, so Ministral 3 gets that length as its context: below it the factor is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family
from nanovllm_cli.models.rotary import rope_section


def _below_the_first_step(spec: ModelSpec) -> ModelSpec:
    rope = spec.attention.rope
    assert rope is not None
    return replace(spec, max_position=min(spec.max_position, rope.original_len))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    scales = rope_section(read).number("llama_4_scaling_beta", 0.0, positive=False) != 0
    return _below_the_first_step(spec) if scales else spec


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if all_dim := read.number(key("rope.scaling.yarn_log_multiplier"), 0.0, positive=False):
        spec = spec.each_rope(lambda rope: replace(rope, mscale=1.0, mscale_all_dim=all_dim))
    scales = read.number(key("attention.temperature_scale"), 0.0, positive=False) != 0
    return _below_the_first_step(spec) if scales else spec


def _mistral_text(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    kind = read.text("model_type", "mistral")
    if kind != "mistral":
        raise UnsupportedError(f"a text model of the kind {kind[:80]!r} in a Mistral 3", ANOTHER)
    return spec


MISTRAL3 = Family("mistral3", has_window=True, interleaved_gguf=True, hf=_mistral_text, gguf_keys=None)
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
    gguf_keys=None,
)  # fmt: skip
