"""Whisper (Radford et al. 2022) and what is distilled of it: a decoder that attends to what an encoder makes of half a minute of
sound, and writes down what is said in it. The encoder is the tower of models that hear (`ears.py`); llama.cpp has none.

Its layers are a decoder's with learned positions, layer norms and biases everywhere but at keys, and with attention to the
encoder's rows between their own attention and the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.cross_spec import CrossSpec
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.bert import LONE
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, no_file, usual_keys
from nanovllm_cli.models.names import modules, weights_and_biases
from nanovllm_cli.norm_spec import NormSpec

DEFAULTS = {
    "vocab_size": 51865, "d_model": 384, "num_mel_bins": 80, "encoder_layers": 4, "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536, "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536,
    "max_source_positions": 1500, "max_target_positions": 448, "activation_function": "gelu",
}  # fmt: skip
"""Of config.json: transformers' WhisperConfig."""
MAX_ROWS = 1 << 14
"""Of an encoder, whatever files say."""
_KEYS = {
    "d_model": "hidden_size", "decoder_layers": "num_hidden_layers", "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size", "max_target_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
}  # fmt: skip
_PLACE = "model.decoder"
PARTS = {
    "attention_norm": "self_attn_layer_norm", "cross_norm": "encoder_attn_layer_norm", "mlp_norm": "final_layer_norm",
    "up": "fc1", "down": "fc2", "o": "self_attn.out_proj", "cross_o": "encoder_attn.out_proj",
    **{part: f"self_attn.{part}_proj" for part in "qkv"}, **{f"cross_{part}": f"encoder_attn.{part}_proj" for part in "qkv"},
}  # fmt: skip
"""Of a layer: our name -> that of fairseq, which transformers has kept in all that comes from there."""


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    config = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    own = {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None, "head_dim": None}
    return {**config, **usual_keys(config, _KEYS), **own}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("scale_embedding", False):
        raise UnsupportedError(f"{read.where}: scale_embedding true is not supported", ANOTHER)
    if (rows := read.integer("max_source_positions")) > MAX_ROWS:
        raise CheckpointError(f"{read.where}: an encoder of {rows} rows; at most {MAX_ROWS} are believed", BROKEN)
    spec = spec.with_attention(rope=None, key_bias=False)
    cross = CrossSpec(spec.attention, rows)
    return replace(
        spec,
        blocks=tuple(replace(block, cross=cross) for block in spec.blocks),
        norm=NormSpec(1e-5, centered=True, shifted=True),
        entry=EntrySpec(None, positions=spec.max_position),
        max_position=spec.max_position + cross.lead,
    )


WHISPER = Family(
    "whisper",
    layer_norm=True,
    shifted=True,
    ungated=LONE,
    tied_by_default=True,
    config=_usual_keys,
    aside=("model.encoder.",),
    hf_names={
        "embedding.weight": f"{_PLACE}.embed_tokens.weight",
        "positions.weight": f"{_PLACE}.embed_positions.weight",
        **weights_and_biases({
            **modules("blocks.{i}.", f"{_PLACE}.layers.{{i}}.", PARTS), "norm": f"{_PLACE}.layer_norm", "head": "proj_out",
        }),
    },
    hf=_from_hf,
    gguf_like=no_file("Whisper"),
)  # fmt: skip
