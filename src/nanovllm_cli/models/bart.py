"""BART (Lewis et al. 2020) and what is built like it: mBART (Liu et al. 2020), Marian (Junczys-Dowmunt et al. 2018; OPUS-MT),
M2M100 (Fan et al. 2021) and NLLB-200, Pegasus (Zhang et al. 2020), Blenderbot (Roller et al. 2021). An encoder reads a text, and
a decoder of layers like Whisper's attends to that and writes: what it means in another language, or in short.

They differ in what KINDS says, which configs don't: where norms are, and what positions are. Logits have a bias of their own,
which is no part of the head in their files. llama.cpp has none of them.

Not covered: Marian with a vocabulary for each side, heads that classify, and encoders or decoders alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from nanovllm_cli.cross_spec import CrossSpec, lead_of
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import BlockSpec, EntrySpec, ModelSpec
from nanovllm_cli.models.bert import LONE
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.family import ANOTHER, Family, no_file, usual_keys
from nanovllm_cli.models.names import modules, weights_and_biases
from nanovllm_cli.models.whisper import PARTS
from nanovllm_cli.norm_spec import NormSpec

MAX_POSITIONS = 1 << 16
"""Of a table of them, whatever files say."""
_DEFAULTS = {
    "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
    "decoder_layers": 12, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "max_position_embeddings": 1024,
    "activation_function": "gelu",
}  # fmt: skip
"""Of config.json: transformers' BartConfig."""
_KEYS = {
    "d_model": "hidden_size", "decoder_layers": "num_hidden_layers", "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size", "activation_function": "hidden_act",
}  # fmt: skip
_ACTIVATIONS = {"relu": "lone_relu", "silu": "lone_silu", "swish": "lone_silu", **LONE}
_NORM = NormSpec(1e-5, centered=True, shifted=True)


class Kind(NamedTuple):
    """norms: "open": in front of a layer's parts, and one behind the last layer; "closed": of the sums behind them. positions:
    "learned", whose first is this row of their table; "sines", which no checkpoint has; "sines of fairseq": those whose divisors
    reach 10000, the first position being 2. entered: embeddings with their positions are normed. defaults: of config.json, where
    they are others than BART's."""

    norms: str
    positions: str
    first: int = 0
    entered: bool = False
    defaults: Mapping[str, Any] = {}


KINDS = {
    "bart": Kind("closed", "learned", 2, entered=True),
    "mbart": Kind("open", "learned", 2, entered=True),
    "marian": Kind("closed", "sines", defaults={"vocab_size": 58101}),
    "m2m100": Kind(
        "open", "sines of fairseq", 2,
        defaults={"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True},
    ),
    "pegasus": Kind("open", "sines"),
    "blenderbot": Kind(
        "open", "learned",
        defaults={
            "vocab_size": 8008, "d_model": 2560, "encoder_layers": 2, "encoder_attention_heads": 32, "encoder_ffn_dim": 10240,
            "decoder_layers": 24, "decoder_attention_heads": 32, "decoder_ffn_dim": 10240, "max_position_embeddings": 128,
        },
    ),
}  # fmt: skip


def _usual_keys(kind: Kind, config: Mapping[str, Any]) -> Mapping[str, Any]:
    config = {**_DEFAULTS, **kind.defaults, **{key: value for key, value in config.items() if value is not None}}
    own = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": True}
    return {**config, **usual_keys(config, _KEYS), **own}


def _from_hf(kind: Kind, spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    _check(spec, read)
    spec = spec.with_attention(rope=None)
    longest, waves = spec.max_position, {"sines": spec.hidden_size // 2, "sines of fairseq": spec.hidden_size // 2 - 1}
    entry = EntrySpec(
        _NORM if kind.entered else None, longest + kind.first, kind.first, waves=waves.get(kind.positions, 0),
    )  # fmt: skip
    (own,) = {block.mlp for block in spec.blocks}
    assert isinstance(own, MLPSpec)
    heads = read.integer("encoder_attention_heads")
    if spec.hidden_size % heads:
        raise CheckpointError(f"{read.where}: an encoder of {spec.hidden_size} columns with {heads} heads", BROKEN)
    attention = AttentionSpec(heads, heads, spec.hidden_size // heads, None, qkv_bias=True, out_bias=True, both_ways=True)
    mlp = replace(own, intermediate_size=read.integer("encoder_ffn_dim"))
    order = "pre" if kind.norms == "open" else "original"
    scale = spec.hidden_size**0.5 if read.flag("scale_embedding", False) else 1.0
    encoder = ModelSpec(
        spec.architecture, spec.vocab_size, spec.hidden_size,
        (BlockSpec(attention, mlp, order),) * read.integer("encoder_layers"),  # type: ignore[arg-type]
        _NORM, longest, tied_head=True, has_head=False, embedding_scale=scale, entry=entry, ends_normed=order == "pre",
        dtype=spec.dtype,
    )  # fmt: skip
    block = BlockSpec(spec.attention, own, order, cross=CrossSpec(spec.attention))  # type: ignore[arg-type]
    return replace(
        spec,
        blocks=(block,) * spec.num_layers,
        norm=_NORM,
        max_position=lead_of(longest) + longest,
        head_bias=True,
        embedding_scale=scale,
        entry=entry,
        ends_normed=order == "pre",
        encoder=encoder,
    )


def _check(spec: ModelSpec, read: ConfigReader) -> None:
    """Raises CheckpointError, and UnsupportedError."""
    for what, count, most in (
        ("layers", read.integer("encoder_layers"), MAX_LAYERS), ("positions", spec.max_position, MAX_POSITIONS),
    ):  # fmt: skip
        if count > most:
            raise CheckpointError(f"{read.where} asks for {count} {what}; at most {most} are believed", BROKEN)
    if spec.hidden_size % 2 or spec.hidden_size < 4:
        raise UnsupportedError(f"{read.where}: a model of {spec.hidden_size} columns", ANOTHER)
    other = read.integer("decoder_vocab_size", spec.vocab_size)
    if other != spec.vocab_size or not read.flag("share_encoder_decoder_embeddings", True):
        raise UnsupportedError(f"{read.where}: an encoder and a decoder with a vocabulary each", ANOTHER)


def _hf_names(kind: Kind) -> dict[str, str]:
    closed = {"attention_norm": "after_attention_norm", "mlp_norm": "after_mlp_norm"} if kind.norms == "closed" else {}
    names = {"embedding.weight": "model.shared.weight", "head.weight": "lm_head.weight", "head.bias": "final_logits_bias"}
    for ours, theirs in (("encoder.", "model.encoder"), ("", "model.decoder")):
        parts = {closed.get(part, part): name for part, name in PARTS.items() if not (ours and part.startswith("cross_"))}
        inner = modules(f"{ours}blocks.{{i}}.", f"{theirs}.layers.{{i}}.", parts)
        outer = {f"{ours}norm": f"{theirs}.layer_norm", f"{ours}entry_norm": f"{theirs}.layernorm_embedding"}
        names |= weights_and_biases({**inner, **outer})
        names[f"{ours}positions.weight"] = f"{theirs}.embed_positions.weight"
    return names


def _family(name: str, kind: Kind) -> Family:
    halves = ("model.encoder.", "model.decoder.")
    parts = ("embed_tokens.", *(() if kind.positions == "learned" else ("embed_positions.",)))
    return Family(
        name,
        has_encoder=True,
        layer_norm=True,
        shifted=True,
        ungated=_ACTIVATIONS,
        tied_by_default=True,
        config=partial(_usual_keys, kind),
        hf=partial(_from_hf, kind),
        hf_names=_hf_names(kind),
        also_embedded=tuple(f"{half}embed_tokens.weight" for half in reversed(halves)),
        aside=(*(half + part for half in halves for part in parts), *(f"{half}version" for half in halves)),
        gguf_like=no_file(name),
    )


BART_FAMILIES = {
    architecture: _family(name, KINDS[name])
    for architecture, name in {
        "BartForConditionalGeneration": "bart", "MBartForConditionalGeneration": "mbart", "MarianMTModel": "marian",
        "M2M100ForConditionalGeneration": "m2m100", "PegasusForConditionalGeneration": "pegasus",
        "BlenderbotForConditionalGeneration": "blenderbot",
    }.items()
}  # fmt: skip
"""By what config.json calls them. NLLB-200 is an M2M100."""
