"""Granite 3, with and without experts, and those of Granite 4 that are all attention: Llama, with factors for embeddings, scores,
what joins the residual stream, and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import MLPSpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import MATRICES, ExpertKeys
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField

_EXPERTS = "model.layers.{i}.block_sparse_moe"
_MOE_NAMES = {
    "blocks.{i}.router.weight": f"{_EXPERTS}.router.layer.weight",
    **{f"blocks.{{i}}.experts.{{e}}.{part}.weight": f"{_EXPERTS}.experts.{{e}}.{part}_proj.weight" for part in MATRICES},
}
_HYBRID_NAMES = {
    "blocks.{i}.gate.weight": "model.layers.{i}.shared_mlp.gate_proj.weight",
    "blocks.{i}.up.weight": "model.layers.{i}.shared_mlp.up_proj.weight",
    "blocks.{i}.down.weight": "model.layers.{i}.shared_mlp.output_linear.weight",
}
"""Where gate and up are one tensor; weights/stacked.py takes it apart."""


def _scaled(spec: ModelSpec, embedding: float, residual: float, scores: float | None, logits: float) -> ModelSpec:
    spec = spec.with_attention(scale=scores)
    return replace(spec, embedding_scale=embedding, residual_scale=residual, logit_scale=1 / logits)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return _scaled(spec, *(read.number(name, 1.0) for name in names))


def _hybrid_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Without the layers that make it a hybrid."""
    kinds = read.values.get("layer_types")
    if not isinstance(kinds, list) or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise UnsupportedError("a Granite with state space layers is not supported", ANOTHER)
    if read.integer("num_local_experts", least=0):
        raise UnsupportedError("a Granite with shared experts is not supported", ANOTHER)
    mlp = MLPSpec(read.integer("shared_intermediate_size"))
    spec = _from_hf(replace(spec, blocks=tuple(replace(block, mlp=mlp) for block in spec.blocks)), read)
    return spec if read.text("position_embedding_type", "") == "rope" else spec.with_attention(rope=None)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if read.has(key("deepstack_mapping")):
        raise UnsupportedError("layers of a Granite that see are not supported", ANOTHER)
    if not read.flag(key("rope.scaling.finetuned"), True):  # what says in its files that there are no positions
        spec = spec.with_attention(rope=None)
    scores = read.number(key("attention.scale"), 0.0, positive=False) or None
    embedding, residual = (read.number(key(name), 1.0) for name in ("embedding_scale", "residual_scale"))
    return _scaled(spec, embedding, residual, scores, read.number(key("logit_scale")))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    return {
        "embedding_scale": spec.embedding_scale,
        "residual_scale": spec.residual_scale,
        "attention.scale": spec.attention.score_scale,
        "logit_scale": 1 / spec.logit_scale,
    }


GRANITE = Family("granite", interleaved_gguf=True, hf=_from_hf, gguf=_from_gguf, gguf_keys=_keys)
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    experts=ExpertKeys(("num_local_experts",), "intermediate_size", norm_topk=True),
    hf_names=_MOE_NAMES,
)
GRANITE_HYBRID = replace(
    GRANITE, hf=_hybrid_from_hf, hf_names=_HYBRID_NAMES,
    defaults={"num_local_experts": 8, "shared_intermediate_size": 1024, "intermediate_size": 11008},
)  # fmt: skip
"""GraniteMoeHybrid, as its configs call what may have neither experts nor states; to llama.cpp such a one is a Granite."""
