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


def _below_the_first_step(spec: ModelSpec) -> ModelSpec:
    rope = spec.blocks[0].attention.rope
    assert rope is not None
    return replace(spec, max_position=min(spec.max_position, rope.original_len))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    kind = read.text("model_type", "mistral")
    if kind not in ("mistral", "ministral3"):
        raise UnsupportedError(f"a text model of the kind {kind[:80]!r} in a Mistral 3", ANOTHER)
    scales = read.section("rope_parameters").number("llama_4_scaling_beta", 0.0, positive=False) != 0
    return _below_the_first_step(spec) if scales else spec


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if all_dim := read.number(key("rope.scaling.yarn_log_multiplier"), 0.0, positive=False):
        blocks = (
            replace(block, attention=replace(block.attention, rope=replace(rope, mscale=1.0, mscale_all_dim=all_dim)))
            for block in spec.blocks
            if (rope := block.attention.rope) is not None
        )
        spec = replace(spec, blocks=tuple(blocks))
    scales = read.number(key("attention.temperature_scale"), 0.0, positive=False) != 0
    return _below_the_first_step(spec) if scales else spec


MISTRAL3 = Family("mistral3", has_window=True, interleaved_gguf=True, hf=_from_hf, gguf=_from_gguf, gguf_keys=None)
