"""Moonshine (Jeffries et al. 2024) and what is trained like it for other languages (Flavors of Moonshine, King et al. 2025): a
small decoder that attends to what an encoder makes of a sound, of as many rows as that is long, and writes down what is said in
it. The encoder is a tower of models that hear (`ears_moonshine.py`); llama.cpp has none.

Its layers have layer norms without biases, a share of a head's numbers turns in pairs that lie beside each other, attention has
no biases, and an MLP is gated, up in front of its gate in one matrix (`weights/stacked.py`), with biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.cross_spec import CrossSpec, lead_of
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.hearing_spec import RATE, samples_in_rows
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, no_file, usual_keys
from nanovllm_cli.models.names import modules, weights_and_biases
from nanovllm_cli.norm_spec import NormSpec

DEFAULTS = {
    "vocab_size": 32768, "hidden_size": 288, "intermediate_size": 1152, "encoder_num_hidden_layers": 6,
    "decoder_num_hidden_layers": 6, "encoder_num_attention_heads": 8, "decoder_num_attention_heads": 8,
    "encoder_hidden_act": "gelu", "decoder_hidden_act": "silu", "max_position_embeddings": 512, "partial_rotary_factor": 0.9,
}  # fmt: skip
"""Of config.json: transformers' MoonshineConfig."""
LONGEST = 30 * RATE
"""Samples of a piece: of what it was trained with, the longest (its model card)."""
MAX_POSITIONS = 1 << 14
"""Of a text, whatever files say."""
_KEYS = {
    "decoder_num_hidden_layers": "num_hidden_layers", "decoder_num_attention_heads": "num_attention_heads",
    "decoder_num_key_value_heads": "num_key_value_heads", "decoder_hidden_act": "hidden_act",
}  # fmt: skip
_PLACE = "model.decoder"
_PARTS = {
    "attention_norm": "input_layernorm", "cross_norm": "post_attention_layernorm", "mlp_norm": "final_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.fc2", **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    **{f"cross_{part}": f"encoder_attn.{part}_proj" for part in "qkvo"},
}  # fmt: skip


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    config = {**with_defaults(config), "num_key_value_heads": None}
    return {**config, **usual_keys(config, _KEYS), "mlp_bias": True}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if spec.attention.num_kv_heads != spec.attention.num_heads:
        # transformers reads as many queries as there are keys, and nothing can have been trained so
        raise UnsupportedError(f"{read.where}: a Moonshine with fewer heads of keys than of queries", ANOTHER)
    if spec.max_position > MAX_POSITIONS:
        told = f"texts of {spec.max_position} positions; at most {MAX_POSITIONS} are believed"
        raise CheckpointError(f"{read.where}: {told}", BROKEN)
    spec = spec.with_attention(out_bias=False)
    attention = spec.attention
    cross = CrossSpec(replace(attention, rope=None))
    return replace(
        spec,
        blocks=tuple(replace(block, cross=cross) for block in spec.blocks),
        norm=NormSpec(1e-5, centered=True),
        max_position=lead_of(samples_in_rows(LONGEST)) + spec.max_position,
    )


MOONSHINE = Family(
    "moonshine",
    layer_norm=True,
    interleaved=True,
    tied_by_default=True,
    config=_usual_keys,
    aside=("model.encoder.",),
    hf_names={
        "embedding.weight": f"{_PLACE}.embed_tokens.weight",
        **weights_and_biases({
            **modules("blocks.{i}.", f"{_PLACE}.layers.{{i}}.", _PARTS), "norm": f"{_PLACE}.norm", "head": "proj_out",
        }),
    },
    hf=_from_hf,
    gguf_like=no_file("Moonshine"),
)  # fmt: skip
