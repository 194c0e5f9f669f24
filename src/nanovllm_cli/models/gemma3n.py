"""Gemma 3n (the part that writes): E2B and E4B.

Four residual streams, of which layers compute with one, and a path of low rank beside attention (`layers/altup.py`); numbers of
each token's own for each layer (`layers/per_layer.py`); the last layers read the keys of others; in the first ones few gates of
an MLP count. Values are normed, scores are not scaled.

GGUF files say nothing of the rank of that path, which is 64 there, and take the sizes of all else from tensors that llama.cpp
expects: four streams, 256 numbers a layer. They are read for any, by the keys that its converter writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.gemma4 import PER_LAYER_GGUF_NAMES, PER_LAYER_HF_NAMES, with_readers
from nanovllm_cli.streams_spec import StreamsSpec

MAX_STREAMS = 16
_RANK = 64
_SIZES = "intermediate_sizes"
"""Of each layer, where "intermediate_size" lists them."""

_HF_LAYER = "model.layers.{i}"
_HF_NAMES = PER_LAYER_HF_NAMES | {
    "altup_in.{e}.weight": "model.altup_projections.{e}.weight",
    "altup_out.{e}.weight": "model.altup_unembed_projections.{e}.weight",
    "blocks.{i}.altup_router.weight": f"{_HF_LAYER}.altup.modality_router.weight",
    "blocks.{i}.altup_router_norm.weight": f"{_HF_LAYER}.altup.router_norm.weight",
    "blocks.{i}.altup_predict.weight": f"{_HF_LAYER}.altup.prediction_coefs.weight",
    "blocks.{i}.altup_correct.weight": f"{_HF_LAYER}.altup.correction_coefs.weight",
    "blocks.{i}.altup_scale": f"{_HF_LAYER}.altup.correct_output_scale",
    "blocks.{i}.laurel_left.weight": f"{_HF_LAYER}.laurel.linear_left.weight",
    "blocks.{i}.laurel_right.weight": f"{_HF_LAYER}.laurel.linear_right.weight",
    "blocks.{i}.laurel_norm.weight": f"{_HF_LAYER}.laurel.post_laurel_norm.weight",
}
_GGUF_NAMES = PER_LAYER_GGUF_NAMES | {
    "altup_in.{e}.weight": "altup_proj.{e}.weight",
    "altup_out.{e}.weight": "altup_unembd_proj.{e}.weight",
    "blocks.{i}.altup_router.weight": "blk.{i}.altup_router.weight",
    "blocks.{i}.altup_router_norm.weight": "blk.{i}.altup_router_norm.weight",
    "blocks.{i}.altup_predict.weight": "blk.{i}.altup_predict_coef.weight",
    "blocks.{i}.altup_correct.weight": "blk.{i}.altup_correct_coef.weight",
    "blocks.{i}.altup_scale": "blk.{i}.altup_correct_scale.weight",
    "blocks.{i}.laurel_left.weight": "blk.{i}.laurel_l.weight",
    "blocks.{i}.laurel_right.weight": "blk.{i}.laurel_r.weight",
    "blocks.{i}.laurel_norm.weight": "blk.{i}.laurel_post_norm.weight",
}


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With one size of MLPs by the key that others have it by."""
    sizes = config.get("intermediate_size")
    return {**config, "intermediate_size": sizes[0], _SIZES: sizes} if isinstance(sizes, list) and sizes else config


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if (activation := read.text("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise UnsupportedError(f"activation {activation[:80]!r} in a gemma3n model", "known: gelu_pytorch_tanh")
    if read.flag("attention_bias", False):
        raise UnsupportedError("a gemma3n model with biases of attention", ANOTHER)
    if not read.flag("altup_correct_scale", True):
        raise UnsupportedError("a gemma3n model without gains of its corrected stream", ANOTHER)
    layers = spec.num_layers
    shares = read.values.get("activation_sparsity_pattern")
    if shares is None:
        shares = [0.95 if layers > 10 and i < 10 else 0.0 for i in range(layers)]
    if not isinstance(shares, list):
        shares = [shares] * layers
    known = all(isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share < 1 for share in shares)
    if len(shares) != layers or not known:
        message = f"'activation_sparsity_pattern' must be a list of {layers} numbers from 0 on, below 1"
        raise CheckpointError(f"{read.where}: {message}", BROKEN)
    rows = read.integer("vocab_size_per_layer_input")
    if rows > spec.vocab_size:
        raise UnsupportedError(f"embeddings of layers for {rows} tokens where there are {spec.vocab_size}", ANOTHER)
    spec = replace(
        spec,
        logit_softcap=read.cap("final_logit_softcapping"),
        per_layer_width=read.integer("hidden_size_per_layer_input"),
        per_layer_rows=rows if rows < spec.vocab_size else 0,
    )
    return _gemma3n(
        spec, read, sizes=read.integers(_SIZES if read.has(_SIZES) else "intermediate_size", layers),
        cutoffs=[NormalDist().inv_cdf(share) if share else None for share in shares],
        streams=_streams(read, "altup_num_inputs", "altup_active_idx", read.integer("laurel_rank")),
        readers=read.integer("num_kv_shared_layers", least=0),
    )  # fmt: skip


def _streams(read: ConfigReader, count: str, active: str, rank: int) -> StreamsSpec:
    if (first := read.integer(active, 0, least=0)) != 0:
        raise UnsupportedError(f"a gemma3n model whose layers compute with stream {first}, not with the first", ANOTHER)
    if not 2 <= (number := read.integer(count, 4)) <= MAX_STREAMS:
        raise UnsupportedError(f"a gemma3n model with {number} streams", f"from 2 to {MAX_STREAMS} are known")
    return StreamsSpec(number, rank)


def _gemma3n(
    spec: ModelSpec, read: ConfigReader, *, sizes: list[int], cutoffs: list[float | None], streams: StreamsSpec, readers: int
) -> ModelSpec:
    attentions = [replace(attention, scale=1.0, value_norm=True, qk_norm=True) for attention in spec.attentions]
    rows = zip(spec.blocks, with_readers(attentions, readers, read), sizes, cutoffs, strict=True)
    blocks = [
        replace(block, mixer=attention, mlp=MLPSpec(size, "gelu_tanh", cutoff=cutoff), order="sandwich", streams=streams)
        for block, attention, size, cutoff in rows
    ]
    return replace(spec, blocks=tuple(blocks), embedding_scale=spec.hidden_size**0.5)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    layers, name = spec.num_layers, key("activation_sparsity_scale")
    scales = read.values.get(name)
    if not isinstance(scales, (list, tuple)) or len(scales) != layers or not all(map(_is_cutoff, scales)):
        raise CheckpointError(f"{read.where}: {name!r} must be a list of {layers} numbers", BROKEN)
    spec = replace(
        spec,
        logit_softcap=read.number(key("final_logit_softcapping"), 30.0),
        per_layer_width=read.integer(key("embedding_length_per_layer_input")),
    )
    return _gemma3n(
        spec, read, sizes=read.integers(key("feed_forward_length"), layers),
        cutoffs=[None if scale == -math.inf else float(scale) for scale in scales],
        streams=_streams(read, key("altup.num_inputs"), key("altup.active_idx"), _RANK),
        readers=read.integer(key("attention.shared_kv_layers"), 0, least=0),
    )  # fmt: skip


def _is_cutoff(scale: object) -> bool:
    """-inf where all gates count."""
    return isinstance(scale, float) and (scale == -math.inf or abs(scale) < 1e3)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    assert isinstance(spec.streams, StreamsSpec)
    if spec.streams.rank != _RANK:
        raise UnsupportedError(f"GGUF files of gemma3n models have a path of rank {_RANK}, not {spec.streams.rank}",
                               "keep the model as a Hugging Face folder")  # fmt: skip
    sizes = [mlp.intermediate_size for mlp in spec.mlps]
    local = [a.rope.theta for a in spec.attentions if a.window is not None and a.rope is not None]
    found: dict[str, GGUFField] = {
        "feed_forward_length": sizes if len(set(sizes)) > 1 else sizes[0],
        "attention.sliding_window_pattern": [attention.window is not None for attention in spec.attentions],
        "attention.shared_kv_layers": sum(attention.reads is not None for attention in spec.attentions),
        "embedding_length_per_layer_input": spec.per_layer_width,
        "altup.active_idx": 0,
        "altup.num_inputs": spec.streams.count,
        "activation_sparsity_scale": [-math.inf if mlp.cutoff is None else mlp.cutoff for mlp in spec.mlps],
    }
    if local:
        found["rope.freq_base_swa"] = local[0]
    if spec.logit_softcap:
        found["final_logit_softcapping"] = spec.logit_softcap
    return found


GEMMA3N = Family(
    "gemma3n",
    qk_norm=True,
    qkv_bias=False,
    has_window=True,
    full_every=5,
    local_theta=10000.0,
    tied_by_default=True,
    varied=True,
    config=_config,
    defaults={
        "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512, "rope_theta": 1e6,
        "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "laurel_rank": 64,
        "num_kv_shared_layers": 15, "final_logit_softcapping": 30.0,
    },
    hf_names=_HF_NAMES,
    gguf_names=_GGUF_NAMES,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="gelu_tanh",
    gguf_keys=_keys,
    gguf_unread=True,
)  # fmt: skip
