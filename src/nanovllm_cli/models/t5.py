"""T5 (Raffel et al. 2020), and what was made after it: T5 1.1, FLAN-T5, MADLAD-400, UL2, mT5 (Xue et al. 2021), UMT5 (Chung et
al. 2023). An encoder reads what is asked, and a decoder attends to that and writes the answer.

Both know positions by buckets of distances alone, the decoder's of what came before; UMT5's layers have numbers of their own. No
matrix has a bias, norms are RMS norms, and scores are not scaled. What is in the config and not in the weights: MLPs are gated
("gated-gelu", by tanh) or, in the first T5, have a ReLU; and logits are scaled where head and embedding were one when the model
was trained, which transformers calls "scale_decoder_outputs" and published files "tie_word_embeddings". In mT5 they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nanovllm_cli.cross_spec import CrossSpec, lead_of
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import BlockSpec, DistanceSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import MAX_LAYERS
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_none, usual_keys
from nanovllm_cli.models.names import MATRICES, modules

_DEFAULTS = {
    "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
}  # fmt: skip
"""Of config.json: transformers' T5Config."""
_NEWER = {**_DEFAULTS, "vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
"""The same of MT5Config and UMT5Config."""
_KEYS = {
    "d_model": "hidden_size", "d_kv": "head_dim", "d_ff": "intermediate_size", "num_heads": "num_attention_heads",
    "num_decoder_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "feed_forward_proj": "hidden_act",
}  # fmt: skip
T5_NAMES = {
    "T5ForConditionalGeneration": "t5", "T5WithLMHeadModel": "t5", "MT5ForConditionalGeneration": "mt5",
    "UMT5ForConditionalGeneration": "umt5",
}  # fmt: skip
"""What config.json calls them."""
_LENGTH = 512
"""Of what was read, and of what was written, in training: "n_positions" of T5's files, where they have one."""
_LONGEST, _MOST_BUCKETS = 1 << 16, 1 << 12
"""Of those that are believed: each layer may have a table with a number for each distance."""
_FARTHEST = 128
"""Distance from which on all are one: of published models, and of all to llama.cpp."""
_ACTIVATIONS = {
    "relu": "lone_relu", "gelu": "lone_gelu", "gelu_new": "lone_gelu_tanh", "silu": "lone_silu",
    "gated-gelu": "gelu_tanh", "gated-gelu_new": "gelu_tanh", "gated-silu": "silu", "gated-relu": "relu_gated",
}  # fmt: skip


def family_of_t5(config: Mapping[str, Any], name: str) -> Family:
    """By a config.json, which says whether MLPs are gated. name: "t5", "mt5" or "umt5"."""
    usual = (_DEFAULTS if name == "t5" else _NEWER)["feed_forward_proj"]
    return T5_FAMILIES[name, str(config.get("feed_forward_proj") or usual).startswith("gated")]


def _usual_keys(usual: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    config = {**usual, **{key: value for key, value in config.items() if value is not None}}
    config = {"num_decoder_layers": config["num_layers"], **config}
    length = config.get("n_positions", _LENGTH)
    return {**config, **usual_keys(config, _KEYS), "num_key_value_heads": None, "max_position_embeddings": length}


def _from_hf(by_layer: bool, is_scaled: bool, spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    layers = read.integer("num_layers")
    buckets = read.integer("relative_attention_num_buckets", 32), read.integer("relative_attention_max_distance", _FARTHEST)
    tied = "scale_decoder_outputs" if read.has("scale_decoder_outputs") else "tie_word_embeddings"
    spec = with_encoder(spec, layers, *buckets, read.where, by_layer=by_layer)
    return replace(spec, logit_scale=spec.hidden_size**-0.5) if is_scaled and read.flag(tied, True) else spec


def with_encoder(spec: ModelSpec, layers: int, buckets: int, farthest: int, where: str, *, by_layer: bool) -> ModelSpec:
    """Of a decoder's spec, whose max_position is that of a text: with an encoder of so many layers like its own, which its own
    attend to, and both with so many buckets of distances. CheckpointError for numbers that no model has, UnsupportedError for a
    context beyond all tables."""
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{where} asks for {layers} layers; at most {MAX_LAYERS} are believed", BROKEN)
    if buckets % 4 or buckets > _MOST_BUCKETS or farthest <= buckets // 2:
        raise CheckpointError(f"{where}: {buckets} buckets of distances up to {farthest}", BROKEN)
    if spec.max_position > _LONGEST:
        raise UnsupportedError(f"{where}: a {spec.architecture} with a context of {spec.max_position} tokens", ANOTHER)
    attention = AttentionSpec(spec.attention.num_heads, spec.attention.num_heads, spec.attention.head_dim, None, scale=1.0)
    longest = lead_of(spec.max_position) + spec.max_position
    distances = DistanceSpec(longest, buckets, farthest, both_ways=False, by_layer=by_layer)
    (mlp,) = {block.mlp for block in spec.blocks}
    encoder = ModelSpec(
        spec.architecture, spec.vocab_size, spec.hidden_size, (BlockSpec(replace(attention, both_ways=True), mlp),) * layers,
        spec.norm, longest, tied_head=True, has_head=False, distances=replace(distances, both_ways=True), dtype=spec.dtype,
    )  # fmt: skip
    blocks = (BlockSpec(attention, mlp, cross=CrossSpec(attention)),) * spec.num_layers
    return replace(spec, blocks=blocks, max_position=longest, distances=distances, encoder=encoder)


def family_of_t5_gguf(names: Collection[str]) -> Family:
    """By the names of a file's tensors. Nothing tells an mT5 from a T5 1.1, and nothing differs."""
    return T5_FAMILIES["umt5" if "dec.blk.1.attn_rel_b.weight" in names else "t5", "dec.blk.0.ffn_gate.weight" in names]


def _from_gguf(by_layer: bool, is_scaled: bool, spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """llama.cpp leaves out the factor of a first T5's logits, which no file tells of: here it is as in transformers."""
    layers = read.integer(key("decoder_block_count"), spec.num_layers)
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{read.where} asks for {layers} layers; at most {MAX_LAYERS} are believed", BROKEN)
    buckets = read.integer(key("attention.relative_buckets_count"))
    decoder = replace(spec, blocks=spec.blocks[:1] * layers)
    found = with_encoder(decoder, spec.num_layers, buckets, _FARTHEST, read.where, by_layer=by_layer)
    return replace(found, logit_scale=spec.hidden_size**-0.5) if is_scaled else found


def _gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """Raises UnsupportedError for distances that llama.cpp's would not be."""
    assert spec.encoder is not None
    assert spec.distances is not None
    has_none(f"a {spec.architecture} model", distances_that_differ_beyond_128=spec.distances.farthest != _FARTHEST)
    return {
        "block_count": spec.encoder.num_layers, "decoder_block_count": spec.num_layers,
        "attention.relative_buckets_count": spec.distances.buckets, "attention.layer_norm_epsilon": spec.norm.eps,
    }  # fmt: skip


def _gguf_names() -> dict[str, str]:
    names = {"norm.weight": "dec.output_norm.weight", "encoder.norm.weight": "enc.output_norm.weight"}
    parts = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm", **{f: f"attn_{f}" for f in "qkvo"}, "distances": "attn_rel_b",
             **{part: f"ffn_{part}" for part in MATRICES}}  # fmt: skip
    crossing = {"cross_norm": "cross_attn_norm", **{f"cross_{f}": f"cross_attn_{f}" for f in "qkvo"}}
    for ours, theirs, own in (("encoder.", "enc", parts), ("", "dec", parts | crossing)):
        names |= {f"{o}.weight": f"{t}.weight" for o, t in modules(f"{ours}blocks.{{i}}.", f"{theirs}.blk.{{i}}.", own).items()}
        names[f"{ours}distances.weight"] = f"{theirs}.blk.0.attn_rel_b.weight"
    return names


def _hf_names(*, gated: bool, by_layer: bool) -> dict[str, str]:
    names = {"embedding.weight": "shared.weight", "head.weight": "lm_head.weight"}
    for ours, theirs, mlp in (("encoder.", "encoder", 1), ("", "decoder", 2)):
        place = f"{theirs}.block.{{i}}.layer."
        inner = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
        parts = {
            "attention_norm": "0.layer_norm", "mlp_norm": f"{mlp}.layer_norm", **{f: f"0.SelfAttention.{f}" for f in "qkvo"},
            **{part: f"{mlp}.DenseReluDense.{of}" for part, of in {**inner, "down": "wo"}.items()},
        }  # fmt: skip
        if not ours:
            parts |= {"cross_norm": "1.layer_norm", **{f"cross_{f}": f"1.EncDecAttention.{f}" for f in "qkvo"}}
        parts |= {"distances": "0.SelfAttention.relative_attention_bias"} if by_layer else {}
        names |= {f"{o}.weight": f"{t}.weight" for o, t in modules(f"{ours}blocks.{{i}}.", place, parts).items()}
        if not by_layer:
            names[f"{ours}distances.weight"] = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        names[f"{ours}norm.weight"] = f"{theirs}.final_layer_norm.weight"
    return names


def _family(name: str, *, gated: bool) -> Family:
    by_layer = name == "umt5"
    return Family(
        name,
        has_encoder=True,
        ungated={theirs: ours for theirs, ours in _ACTIVATIONS.items() if theirs.startswith("gated-") == gated},
        tied_by_default=True,
        config=partial(_usual_keys, _DEFAULTS if name == "t5" else _NEWER),
        hf=partial(_from_hf, by_layer, name != "mt5"),
        hf_names=_hf_names(gated=gated, by_layer=by_layer),
        also_embedded=("decoder.embed_tokens.weight", "encoder.embed_tokens.weight"),
        aside=(
            "encoder.embed_tokens.", "decoder.embed_tokens.",
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",  # which no code reads
        ),
        gguf_name="t5",
        gguf_names=_gguf_names(),
        gguf=partial(_from_gguf, by_layer, not gated),
        gguf_keys=_gguf_keys,
        gguf_activation="gelu_tanh" if gated else "lone_relu",
    )  # fmt: skip


T5_FAMILIES = {(name, gated): _family(name, gated=gated) for name in ("t5", "mt5", "umt5") for gated in (False, True)}
