"""Naver's HyperCLOVA X SEED: Granite, with norms of what attention and MLP add. What they add is multiplied by a factor, which is
in those norms' gains here; logits are multiplied, not divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family, Folding, Sections, no_file

_LAYER = "model.layers.{i}"
_FACTOR = "residual_multiplier"


def _has_norms(read: ConfigReader) -> bool:
    return read.flag("use_post_norm", True)


def _sections(read: ConfigReader) -> Mapping[str, Sections]:
    if not _has_norms(read):
        return {}
    factor = read.number(_FACTOR, 1.0)
    return {f"blocks.{{i}}.after_{part}_norm.weight": ((None, factor),) for part in ("attention", "mlp")}


def _without(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, _FACTOR: 1.0} if config.get("use_post_norm", True) else config


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    scale = read.number("attention_multiplier", spec.attention.score_scale)
    has_norms = _has_norms(read)
    spec = spec.with_attention(scale=scale).in_order("sandwich" if has_norms else "pre")
    return replace(
        spec,
        embedding_scale=read.number("embedding_multiplier", 1.0),
        residual_scale=1.0 if has_norms else read.number(_FACTOR, 1.0),
        logit_scale=read.number("logits_scaling", 1.0),
    )


HYPERCLOVAX = Family(
    "hyperclovax",
    hf_names={f"blocks.{{i}}.after_{part}_norm.weight": f"{_LAYER}.post_norm{place}.weight"
              for place, part in enumerate(("attention", "mlp"), 1)},
    hf=_from_hf,
    folding=Folding(_sections, _without),
    gguf_like=no_file("HyperCLOVA X"),
    defaults={"max_position_embeddings": 2048},
)  # fmt: skip
