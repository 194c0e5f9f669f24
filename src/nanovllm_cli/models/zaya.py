"""ZAYA1: compressed convolutional attention, experts of which a token takes one or none as a router decides that is an MLP and
reads what the one of the layer before has made of the token, and shifts and factors of all that joins the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import ConvolvedSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.families import FULL, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, check_usual, no_file
from nanovllm_cli.models.lfm2 import MAX_TAPS
from nanovllm_cli.models.names import each_expert, modules, weights_and_biases
from nanovllm_cli.router_spec import RouterSpec

_KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
_BASES = {FULL: 5e6, SLIDING: 1e4}
_LAYER = "model.layers.{i}"
_ATTENTION, _GATE = f"{_LAYER}.self_attn", f"{_LAYER}.mlp.gate"
_SIDES = {"found": "hidden_states", "stream": "residual"}


def _usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """With kinds of layers by the names that others have for them. Published configs name a type beside the kinds' own ropes."""
    found, ropes = dict(config), config.get("rope_parameters")
    sections = {_KINDS[kind]: own for kind, own in ropes.items() if kind in _KINDS} if isinstance(ropes, Mapping) else {}
    usual = {kind: {"rope_theta": base, "partial_rotary_factor": 0.5} for kind, base in _BASES.items()}
    found["rope_parameters"] = usual | sections
    if isinstance(kinds := config.get("layer_types"), list):
        read = ConfigReader(config, "config.json")
        found["layer_types"] = [_KINDS[kind] for kind in read.kinds("layer_types", len(kinds), *_KINDS) or []]
        if SLIDING in found["layer_types"] and config.get("sliding_window") is None:
            raise CheckpointError("config.json: 'sliding_window' is missing, which some layers have", BROKEN)
    else:
        found["sliding_window"] = None
    return found | {"intermediate_size": config.get("moe_intermediate_size", 2048)}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a ZAYA1", attention_bias=False)
    if read.integer("num_experts_per_tok") != 1:
        raise UnsupportedError(f"{read.where}: a ZAYA1 whose tokens take several experts", ANOTHER)
    convolved = ConvolvedSpec(read.integer("cca_time0"), read.integer("cca_time1"))
    if not 1 < convolved.width <= MAX_TAPS:
        raise UnsupportedError(f"{read.where}: convolutions over {convolved.width} tokens", f"known: 2 to {MAX_TAPS}")
    router = RouterSpec(read.integer("router_hidden_size"))
    spec = spec.with_attention(convolved=convolved, keys_are_values=False)
    blocks = (
        replace(block, rescaled=True, mlp=replace(block.mlp, router=replace(router, reads_last=i > 0)))
        for i, block in enumerate(spec.blocks)
        if isinstance(block.mlp, MoESpec)
    )
    head_bias = read.flag("lm_head_bias", False)
    return replace(spec, blocks=tuple(blocks), entry=EntrySpec(None, rescaled=True), head_bias=head_bias)


ZAYA = Family(
    "zaya",
    has_window=True,
    qkv_bias=False,
    tied_by_default=True,
    config=_usual_keys,
    gguf_like=no_file("ZAYA1"),
    experts=ExpertKeys(("num_experts",), "moe_intermediate_size", False, scoring="sigmoid"),
    defaults={"vocab_size": 262272, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 8,
              "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
              "moe_intermediate_size": 2048, "num_experts": 16, "num_experts_per_tok": 1, "router_hidden_size": 256,
              "cca_time0": 2, "cca_time1": 2},
    hf=_from_hf,
    hf_names={
        "entry.shift": "model.input_hidden_states_bias",
        "entry.gains": "model.input_hidden_states_scale",
        **modules("blocks.{i}.", f"{_ATTENTION}.", {
            "q.weight": "qkv_proj.q_proj.weight", "k.weight": "qkv_proj.k_proj.weight", "k_gains": "qk_norm.temp",
            "v.weight": "qkv_proj.v_proj_current.weight", "v_before.weight": "qkv_proj.v_proj_delayed.weight",
            **weights_and_biases({"conv": "qkv_proj.conv_qk_depthwise", "head_conv": "qkv_proj.conv_qk_grouped"}),
        }),
        **modules("blocks.{i}.", f"{_GATE}.", {
            **weights_and_biases({
                "router_in": "down_proj", "router_norm": "router_mlp.norm", "router_0": "router_mlp.fc1",
                "router_1": "router_mlp.fc2", "router_out": "router_mlp.out_proj",
            }),
            "router_gains": "router_states_scale", "router_bias": "balancing_biases",
        }),
        **{f"blocks.{{i}}.{part}_{side}.{ours}": f"{_LAYER}.post_{part}_residual_scale.{theirs}_{kind}"
           for part in ("attention", "mlp") for side, theirs in _SIDES.items()
           for ours, kind in (("shift", "bias"), ("gains", "scale"))},
        **each_expert(f"{_LAYER}.mlp.experts"),
    },
)  # fmt: skip
