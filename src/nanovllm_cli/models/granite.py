"""Granite 3 (dense): Llama, with factors for embeddings, scores, what joins the residual stream, and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField


def _scaled(spec: ModelSpec, embedding: float, residual: float, scores: float | None, logits: float) -> ModelSpec:
    blocks = tuple(replace(block, attention=replace(block.attention, scale=scores)) for block in spec.blocks)
    return replace(spec, blocks=blocks, embedding_scale=embedding, residual_scale=residual, logit_scale=1 / logits)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return _scaled(spec, *(read.number(name, 1.0) for name in names))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if read.has(key("deepstack_mapping")):
        raise UnsupportedError("layers of a Granite that see are not supported", ANOTHER)
    if not read.flag(key("rope.scaling.finetuned"), True):  # what says in its files that there are no positions
        blocks = (replace(block, attention=replace(block.attention, rope=None)) for block in spec.blocks)
        spec = replace(spec, blocks=tuple(blocks))
    scores = read.number(key("attention.scale"), 0.0, positive=False) or None
    embedding, residual = (read.number(key(name), 1.0) for name in ("embedding_scale", "residual_scale"))
    return _scaled(spec, embedding, residual, scores, read.number(key("logit_scale")))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    return {
        "embedding_scale": spec.embedding_scale,
        "residual_scale": spec.residual_scale,
        "attention.scale": spec.blocks[0].attention.score_scale,
        "logit_scale": 1 / spec.logit_scale,
    }


GRANITE = Family("granite", interleaved_gguf=True, hf=_from_hf, gguf=_from_gguf, gguf_keys=_keys)
