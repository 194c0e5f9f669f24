"""BERT and what was made after it, RoBERTa, XLM-RoBERTa, DistilBERT, MPNet and Jina's: bge, e5, MiniLM and others embed texts by
them.

An encoder: tokens see those behind them, positions are learned, embeddings are normed, and so is the stream behind each half of a
layer. Heads for other tasks, and the pooler that BERT was trained with, are left aside: texts are pooled as their files say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import DistanceSpec, EntrySpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, no_file
from nanovllm_cli.models.names import modules, weights_and_biases

LONE = {"gelu": "lone_gelu", "gelu_new": "lone_gelu_tanh", "gelu_pytorch_tanh": "lone_gelu_tanh", "gelu_fast": "lone_gelu_tanh"}
LONE_TANH = {"gelu_new": "lone_gelu_tanh", **LONE}
"""The same where GGUF files mean the approximation."""
_PARTS = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "o": "attention.output.dense",
    "after_attention_norm": "attention.output.LayerNorm", "up": "intermediate.dense", "down": "output.dense",
    "after_mlp_norm": "output.LayerNorm",
}  # fmt: skip
_DISTILLED_PARTS = {
    "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "o": "attention.out_lin",
    "after_attention_norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "after_mlp_norm": "output_layer_norm",
}  # fmt: skip
_MPNET_PARTS = {
    **_PARTS, **{part: f"attention.attn.{part}" for part in "qkvo"}, "after_attention_norm": "attention.LayerNorm",
}  # fmt: skip
_JINA_PARTS = {
    **{name: theirs for name, theirs in _PARTS.items() if name not in ("up", "down")},
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.wo", "after_mlp_norm": "mlp.layernorm",
}  # fmt: skip
_DISTILLED_KEYS = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}  # fmt: skip
_FARTHEST = 1 << 20
"""No model reads more at once, and a table has a number for each distance."""
_GGUF_PARTS = {"after_attention_norm": "attn_output_norm", "after_mlp_norm": "layer_output_norm"}


def _hf_names(outer: str, layers: str = "encoder.layer", parts: Mapping[str, str] = _PARTS) -> dict[str, str]:
    entry = {"embedding": "word_embeddings", "positions": "position_embeddings", "segments": "token_type_embeddings"}
    tables = {f"{ours}.weight": f"{outer}embeddings.{theirs}.weight" for ours, theirs in entry.items()}
    inner = modules("blocks.{i}.", f"{outer}{layers}.{{i}}.", parts)
    return tables | weights_and_biases({"entry_norm": f"{outer}embeddings.LayerNorm", **inner})


GGUF_ENTRY = {
    "positions.weight": "position_embd.weight",
    "segments.weight": "token_types.weight",
    **weights_and_biases({"entry_norm": "token_embd_norm", **modules("blocks.{i}.", "blk.{i}.", _GGUF_PARTS)}),
}


def encoder(spec: ModelSpec, entry: EntrySpec) -> ModelSpec:
    """The same as an encoder whose norms lie behind the sums."""
    norm = replace(spec.norm, centered=True, shifted=True)
    return replace(spec.in_order("original"), norm=norm, entry=replace(entry, norm=norm), ends_normed=False)


def _from_hf(spec: ModelSpec, read: ConfigReader, first: int = 0) -> ModelSpec:
    kind = read.text("position_embedding_type", "absolute")
    if kind != "absolute" or read.flag("is_decoder", False):
        raise UnsupportedError(f"{spec.architecture} as a decoder, or with {kind[:80]!r} positions", ANOTHER)
    rows = read.integer("max_position_embeddings")
    if rows <= first:
        raise UnsupportedError(f"{spec.architecture} with {rows} positions, of which {first} are for padding", ANOTHER)
    entry = EntrySpec(spec.norm, rows, first, read.integer("type_vocab_size", 2, least=0))
    return replace(encoder(spec.with_attention(rope=None), entry), max_position=rows - first)


def _distilled_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type_vocab_size": 0, **{_DISTILLED_KEYS.get(key, key): value for key, value in config.items()}}


def _roberta_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """The first position is behind the padding's."""
    return _from_hf(spec, read, first=read.integer("pad_token_id", 1, least=0) + 1)


def _mpnet_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Positions, and by distance as well (Song et al. 2020). In transformers the padding's is 1, whatever the file says, and
    distances fall into 32 buckets."""
    spec = _from_hf(spec, read, first=2)
    buckets = read.integer("relative_attention_num_buckets", 32)
    if buckets != 32:
        raise UnsupportedError(f"an MPNet with {buckets} buckets of distances", ANOTHER)
    if spec.max_position > _FARTHEST:
        raise UnsupportedError(f"an MPNet with a context of {spec.max_position} tokens", ANOTHER)
    return replace(spec, distances=DistanceSpec(spec.max_position, buckets, farthest=128))


def _jina_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    others = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    other = next((name for name, usual in others.items() if read.text(name, usual) != usual), None)
    if other is not None:
        raise UnsupportedError(f"a Jina BERT with {other} {read.text(other)[:80]!r} is not supported", ANOTHER)
    return _jina(spec, read.integer("type_vocab_size", 2, least=0))


def _jina_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _jina(spec.with_mlps(activation="gelu"), read.integer("tokenizer.ggml.token_type_count", 1))


def _jina(spec: ModelSpec, segments: int) -> ModelSpec:
    """Positions by distance alone (Günther et al. 2023)."""
    if spec.max_position > _FARTHEST:
        raise UnsupportedError(f"a Jina BERT with a context of {spec.max_position} tokens", ANOTHER)
    spec = encoder(spec.with_attention(rope=None).with_mlps(bias=False, down_bias=True), EntrySpec(spec.norm, segments=segments))
    return replace(spec, distances=DistanceSpec(spec.max_position))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """The table of positions begins with the first token's."""
    segments = read.integer("tokenizer.ggml.token_type_count", 1)
    entry = EntrySpec(spec.norm, positions=spec.max_position, segments=segments)
    return encoder(spec.with_attention(rope=None), entry)


BERT = Family(
    "bert",
    layer_norm=True,
    ungated=LONE,
    both_ways=True,
    outer="bert.",
    aside=("bert.pooler.", "pooler.", "cls.", "classifier.", "bert.embeddings.position_ids", "embeddings.position_ids"),
    tied_by_default=True,
    defaults={
        "hidden_act": "gelu", "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "attention_bias": True, "mlp_bias": True,
    },
    hf_names=_hf_names("bert."),
    gguf_names=GGUF_ENTRY,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="lone_gelu",
)  # fmt: skip
ROBERTA = replace(
    BERT,
    name="roberta",
    gguf_name="bert",
    outer="roberta.",
    aside=("roberta.pooler.", "pooler.", "lm_head.", "classifier.", "roberta.embeddings.position_ids", "embeddings.position_ids"),
    hf_names=_hf_names("roberta."),
    hf=_roberta_from_hf,
)
DISTILBERT = replace(
    BERT,
    name="distilbert",
    gguf_name="bert",
    outer="distilbert.",
    aside=("vocab_", "pre_classifier.", "classifier."),
    config=_distilled_keys,
    hf_names=_hf_names("distilbert.", "transformer.layer", _DISTILLED_PARTS),
)
MPNET = replace(
    BERT,
    name="mpnet",
    gguf_like=no_file("MPNet"),
    defaults={**BERT.defaults, "type_vocab_size": 0},
    outer="mpnet.",
    aside=("mpnet.pooler.", "pooler.", "lm_head.", "classifier.", "mpnet.embeddings.position_ids", "embeddings.position_ids"),
    hf_names=_hf_names("mpnet.", parts=_MPNET_PARTS) | {"distances.weight": "mpnet.encoder.relative_attention_bias.weight"},
    hf=_mpnet_from_hf,
)
JINA_BERT = replace(
    BERT,
    name="jina_bert",
    gguf_name="jina-bert-v2",
    ungated={},
    hf_names=_hf_names("bert.", parts=_JINA_PARTS),
    hf=_jina_from_hf,
    gguf=_jina_from_gguf,
    gguf_activation="gelu",
)
