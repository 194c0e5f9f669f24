"""Zamba 2: Mamba-2's state spaces, ahead of some of which comes attention with an MLP that several layers share: it reads the
residual stream and the embedding side by side, and each layer has matrices of low rank beside its own use of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mixer_spec import AheadSpec, MixerSpec, PairSpec
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, check_usual, no_file
from nanovllm_cli.models.mamba import checked_mamba, mamba_hf_names
from nanovllm_cli.models.names import projections
from nanovllm_cli.state_spec import DeltaSpec

_STATE, _LED = "linear_attention", "hybrid"
_KINDS = {"mamba": _STATE, _STATE: _STATE, _LED: _LED}
_NORM_EPS = 1e-5
_LONG = 16384
_LAYER = "model.layers.{i}"
_SHARED = f"{_LAYER}.shared_transformer"
_ATTENTION, _MLP = f"{_SHARED}.self_attn", f"{_SHARED}.feed_forward"
_SIDES = {"down": 0, "up": 1}


def _usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """By the keys that others have. Heads are as wide as what they read, which is twice the residual stream."""
    read = ConfigReader(config, "config.json")
    hidden, heads = read.integer("hidden_size", 2560), read.integer("num_attention_heads", 32)
    found = {**config, "head_dim": read.integer("attention_head_dim", 2 * hidden // heads)}
    found["intermediate_size"] = read.integer("intermediate_size", 4 * hidden)
    if config.get("use_long_context") is True:
        found["max_position_embeddings"] = _LONG
    if config.get("layers_block_type") is None:
        found["layers_block_type"] = [_LED if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else _STATE for i in range(54)]
    return found


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Zamba 2", add_bias_linear=False)
    if not spec.tied_head:  # which transformers takes to mean that nothing else is shared, either
        raise UnsupportedError(f"{read.where}: a Zamba 2 with a head of its own", ANOTHER)
    said = read.kinds("layers_block_type", spec.num_layers, *_KINDS) or []
    led = [i for i, kind in enumerate(said) if kind == _LED]
    if not led:
        raise UnsupportedError(f"{read.where}: no layer has attention", ANOTHER)
    heads = read.integer("n_mamba_heads")
    inner = read.integer("mamba_expand") * spec.hidden_size
    mamba = checked_mamba(
        DeltaSpec(
            read.integer("mamba_ngroups"), read.integer("mamba_d_state"), heads, inner // heads, read.integer("mamba_d_conv"),
            mamba=True, conv_bias=True, eps=_NORM_EPS, least_step=read.number("time_step_min"),
        ), inner, read,
    )  # fmt: skip
    attention = replace(
        spec.attention, scale=(spec.attention.head_dim / 2) ** -0.5, read_size=2 * spec.hidden_size,
        rope=spec.attention.rope if read.flag("use_mem_rope", False) else None,
    )  # fmt: skip
    (mlp,) = {each for each in spec.mlps if isinstance(each, MLPSpec)}
    count = read.integer("num_mem_blocks")
    ahead = AheadSpec(
        mlp.intermediate_size, mlp.activation, read.integer("adapter_rank"),
        beside_attention=read.flag("use_shared_attention_adapter", False),
    )  # fmt: skip

    def mixer(layer: int) -> MixerSpec:
        if layer not in led:
            return mamba
        use = led.index(layer)
        uses = tuple(range(use, len(led), count)) if use < count else ()
        return PairSpec(attention, mamba, replace(ahead, of=use % count, use=use, uses=uses))

    return replace(spec, blocks=tuple(BlockSpec(mixer(layer), None) for layer in range(spec.num_layers)))


ZAMBA2 = Family(
    "zamba2",
    qkv_bias=False,
    tied_by_default=True,
    config=_usual_keys,
    gguf_like=no_file("Zamba 2"),
    hf=_from_hf,
    hf_names=mamba_hf_names(f"{_LAYER}.mamba") | {
        "norm.weight": "model.final_layernorm.weight",
        "blocks.{i}.ahead_norm.weight": f"{_SHARED}.input_layernorm.weight",
        "blocks.{i}.ahead_mlp_norm.weight": f"{_SHARED}.pre_ff_layernorm.weight",
        "blocks.{i}.ahead_out.weight": f"{_LAYER}.linear.weight",
        **projections("blocks.{i}.", f"{_ATTENTION}.", "qkvo"),
        **projections("blocks.{i}.", f"{_MLP}.", ("gate_up", "down")),
        **{f"blocks.{{i}}.uses.{{e}}.{part}_{side}.weight": f"{_ATTENTION}.linear_{part}_adapter_list.{{e}}.{place}.weight"
           for part in "qkv" for side, place in _SIDES.items()},
        **{f"blocks.{{i}}.uses.{{e}}.gate_up_{side}.weight": f"{_MLP}.gate_up_proj_adapter_list.{{e}}.{place}.weight"
           for side, place in _SIDES.items()},
    },
    peft_names={
        f"blocks.{{i}}.mamba_{side}.weight": f"{_LAYER}.mamba_decoder.mamba.{side}_proj.weight" for side in ("in", "out")
    },
    defaults={"vocab_size": 32000, "max_position_embeddings": 4096, "hidden_size": 2560, "num_hidden_layers": 54,
              "num_attention_heads": 32, "hidden_act": "gelu", "rms_norm_eps": 1e-5, "mamba_d_state": 64, "mamba_d_conv": 4,
              "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8, "time_step_min": 0.001, "num_mem_blocks": 1,
              "adapter_rank": 128},
)  # fmt: skip
"""weights/saved_names.py calls what of a layer with attention is the state space's as in others."""
