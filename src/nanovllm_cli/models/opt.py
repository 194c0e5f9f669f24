"""OPT (Zhang et al. 2022) and what is built like it (Galactica): GPT-2 with matrices as usual and a ReLU, whose learned positions
begin at the third row of their table. llama.cpp does not compute it.

Not covered: OPT 350M, whose embedding is narrower than the model, and which norms the residual stream itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.bert import LONE
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, no_file, usual_keys
from nanovllm_cli.models.names import modules, weights_and_biases
from nanovllm_cli.norm_spec import NormSpec

_UNUSED = 2
"""Rows of the table of positions in front of the first one's."""
_KEYS = {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"}
_PLACE = "model.decoder"
_PARTS = {
    "attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm", "o": "self_attn.out_proj", "up": "fc1",
    "down": "fc2", **{part: f"self_attn.{part}_proj" for part in "qkv"},
}  # fmt: skip


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    biased = config.get("enable_bias", True)
    own = {"attention_bias": biased, "mlp_bias": biased, "num_key_value_heads": None, "head_dim": None}
    return {**config, **usual_keys(config, _KEYS), **own}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if not read.flag("do_layer_norm_before", True):
        raise UnsupportedError(f"{read.where}: an OPT that norms the residual stream itself", ANOTHER)
    if read.has("word_embed_proj_dim") and read.integer("word_embed_proj_dim") != spec.hidden_size:
        raise UnsupportedError(f"{read.where}: an OPT whose embedding is narrower than the model", ANOTHER)
    has_weights = read.flag("layer_norm_elementwise_affine", True)
    return replace(
        spec.with_attention(rope=None),
        norm=NormSpec(1e-5, centered=True, shifted=has_weights, gains=has_weights),
        ends_normed=not read.flag("_remove_final_layer_norm", False),
        entry=EntrySpec(None, positions=spec.max_position + _UNUSED, first_position=_UNUSED),
    )


OPT = Family(
    "opt",
    layer_norm=True,
    ungated={"relu": "lone_relu", **LONE},
    tied_by_default=True,
    config=_usual_keys,
    defaults={"hidden_act": "relu", "max_position_embeddings": 2048},
    hf_names={
        "embedding.weight": f"{_PLACE}.embed_tokens.weight",
        "positions.weight": f"{_PLACE}.embed_positions.weight",
        **weights_and_biases({
            **modules("blocks.{i}.", f"{_PLACE}.layers.{{i}}.", _PARTS), "norm": f"{_PLACE}.final_layer_norm",
        }),
    },
    hf=_from_hf,
    gguf_like=no_file("OPT"),
)  # fmt: skip
