"""Talkie (talkie-lm): Llama whose norms have no weights, with one learned number each instead: of a head's queries, of what
attention and MLP add, of the normed embedding, which joins once more behind every layer, and of logits. Heads of q and k are
normed as rope leaves them, which turns the other way.

GGUF files have rows of q and k that turn as those of others, and the number of logits among their keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, GGUFTable, ReadValues, check_usual, has_all
from nanovllm_cli.models.names import MATRICES, TALKIE_GAINS
from nanovllm_cli.models.rotary import normed_when_turned
from nanovllm_cli.norm_spec import NormSpec

MOST = 1e3
"""Of one of its numbers; those of a head's queries are a few."""
_EPS = 2.0**-23  # of all norms, whatever a config says: that of a function without one
_BLOCK = "model.blocks.{i}"
_HEADS, *_FACTORS, _LOGITS = TALKIE_GAINS
_GGUF_HEADS = ".attn_q_norm.weight"
_GGUF_FACTORS = {".attn_output.scale": 1.0, ".ffn_down.scale": 1.0, ".layer_output_scale.weight": None}
_PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "resid"}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65540, "hidden_size": 5120, "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 40,
    "head_dim": 128, "max_position_embeddings": 2048, "rope_theta": 1e6,
}  # fmt: skip


class _Layer(NamedTuple):
    """heads: of each head's queries; factors: see `BlockSpec`."""

    heads: tuple[float, ...]
    factors: tuple[float, ...]


def _with(spec: ModelSpec, layers: Sequence[_Layer], where: str) -> ModelSpec:
    if not all(abs(number) <= MOST for layer in layers for numbers in layer for number in numbers):  # a NaN is none either
        raise CheckpointError(f"{where}: the gains of a Talkie must lie between -{MOST:g} and {MOST:g}", BROKEN)
    spec = spec.each_attention(lambda i, own: replace(own, query_gains=layers[i].heads))
    blocks = (
        replace(block, factors=(layer.factors[0], layer.factors[1], layer.factors[2]))
        for block, layer in zip(spec.blocks, layers, strict=True)
    )
    return replace(spec, blocks=tuple(blocks))


def _plain(spec: ModelSpec, eps: float, where: str) -> ModelSpec:
    """Where heads turn whole, so that whole ones are mirrored in files."""
    rope, head_dim = spec.attention.rope, spec.attention.head_dim
    if rope is not None and rope.dim != head_dim:
        raise UnsupportedError(f"{where}: a Talkie that rotates {rope.dim} of {head_dim} dims", ANOTHER)
    spec = replace(spec, norm=NormSpec(eps, gains=False), embedding_normed=True)
    return normed_when_turned(spec, qk_gains=False)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """With numbers as they are before a training, which made-up weights have."""
    check_usual(read, "a Talkie", attention_bias=False, mlp_bias=False, tie_word_embeddings=False)
    spec = _plain(spec, _EPS, read.where).each_rope(lambda rope: replace(rope, backwards=True))
    added = (2 * spec.num_layers) ** -0.5
    layer = _Layer((1.0,) * spec.attention.num_heads, (added, added, 0.0))
    return _with(spec, [layer] * spec.num_layers, read.where)


def _numbers(values: ReadValues, name: str, count: int, where: str, usual: float | None = None) -> tuple[float, ...]:
    """Of a tensor of so many; one that may be missing has a usual value."""
    found = values(name)
    if found is None and usual is not None:
        return (usual,)
    if found is None or len(found) != count:
        raise CheckpointError(f"{where}: tensor {name!r} must hold {count} number{'s' * (count > 1)}", BROKEN)
    return found


def _from_tensors(spec: ModelSpec, values: ReadValues, where: str) -> ModelSpec:
    """Some have the number of logits in the head's weights."""
    heads, layers = spec.attention.num_heads, []
    for i in range(spec.num_layers):
        place = _BLOCK.format(i=i)
        factors = [number for part in _FACTORS for number in _numbers(values, place + part, 1, where)]
        layers.append(_Layer(_numbers(values, place + _HEADS, heads, where), tuple(factors)))
    (scale,) = _numbers(values, _LOGITS, 1, where, usual=1.0)
    if not 0 < scale <= MOST:
        raise CheckpointError(f"{where}: tensor {_LOGITS!r} must hold a number above 0, up to {MOST:g}", BROKEN)
    return replace(_with(spec, layers, where), logit_scale=scale)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return replace(_plain(spec, spec.norm.eps, read.where), logit_scale=read.number(key("logit_scale")))


def _from_gguf_tensors(spec: ModelSpec, values: ReadValues, where: str) -> ModelSpec:
    heads, layers = spec.attention.num_heads, []
    for i in range(spec.num_layers):
        factors = [_numbers(values, f"blk.{i}{name}", 1, where, usual)[0] for name, usual in _GGUF_FACTORS.items()]
        layers.append(_Layer(_numbers(values, f"blk.{i}{_GGUF_HEADS}", heads, where), tuple(factors)))
    return _with(spec, layers, where)


def _gguf_tables(spec: ModelSpec) -> dict[str, GGUFTable]:
    tables: dict[str, GGUFTable] = {}
    for i, (block, attention) in enumerate(zip(spec.blocks, spec.attentions, strict=True)):
        assert block.factors is not None
        tables[f"blk.{i}{_GGUF_HEADS}"] = [[gain] for gain in attention.query_gains]
        tables |= {f"blk.{i}{name}": [factor] for name, factor in zip(_GGUF_FACTORS, block.factors, strict=True)}
    return tables


def _gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, head_of_its_own=not spec.tied_head)
    return {"logit_scale": spec.logit_scale}


TALKIE = Family(
    "talkie",
    qk_norm=True,
    mirrored_gguf=True,
    defaults=_DEFAULTS,
    hf_names={
        "embedding.weight": "model.embed.weight",
        **{f"blocks.{{i}}.{ours}.weight": f"{_BLOCK}.attn.attn_{theirs}.weight" for ours, theirs in _PROJECTIONS.items()},
        **{f"blocks.{{i}}.{ours}.weight": f"{_BLOCK}.mlp.mlp_{theirs}.weight"
           for ours, theirs in zip(MATRICES, ("gate", "linear", "resid"), strict=True)},
    },
    hf=_from_hf,
    tensors=_from_tensors,
    gguf=_from_gguf,
    gguf_values=_from_gguf_tensors,
    gguf_told_by=(_GGUF_HEADS, *_GGUF_FACTORS),
    gguf_tables=_gguf_tables,
    gguf_keys=_gguf_keys,
)  # fmt: skip
