"""StepFun's Step 3.5 and 3.7 (text): gates of what heads find, a sigmoid a head, windows in most layers, which have more heads
and rotate them whole, by a base of their own; the others rotate a half of each. Norms add 1 to their gains, experts are chosen by
sigmoids and a bias, and in the last layers activations are held."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deci import of_layers
from nanovllm_cli.models.experts import ExpertKeys, held, layers_without_experts, limits_in_gguf, limits_of, with_shared
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, check_usual, usual_keys
from nanovllm_cli.models.names import MATRICES, projections
from nanovllm_cli.models.rotary import checked_rope
from nanovllm_cli.norm_spec import NormSpec

_LAYER = "model.layers.{i}"
_KEYS = {
    "num_attention_groups": "num_key_value_heads", "moe_num_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}  # fmt: skip
_BASE = 10000.0
_FIRST = 3
"""Layers without experts, where a config names none that have some."""
_LISTS = ("attention.head_count", "attention.head_count_kv", "attention.sliding_window_pattern", "swiglu_clamp_exp",
          "swiglu_clamp_shexp")  # fmt: skip


def _by_layers(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its lists speak of layers that guess, too; those end here."""
    found = {**config, **usual_keys(config, _KEYS)}
    count = ConfigReader(found, "config.json").integer("num_hidden_layers")
    if count > MAX_LAYERS:
        return found
    for key in ("layer_types", "mlp_layer_types"):
        if isinstance(listed := found.get(key), list):
            found[key] = listed[:count]
    found["layer_types"] = found.get("layer_types") or [FULL] * count
    if found.get("mlp_layer_types") is not None:
        found["mlp_only_layers"] = layers_without_experts(found, 0)
    else:
        has_some = _numbers(found.get("moe_layers_enum"), range(_FIRST, count))
        found["mlp_only_layers"] = [layer for layer in range(count) if layer not in has_some]
    sections = found.get("rope_parameters")
    if not (isinstance(sections, Mapping) and {FULL, SLIDING} & sections.keys()):
        found["rope_parameters"], found["rope_scaling"] = _ropes(found), None
    return found


def _numbers(said: Any, usual: range) -> set[int]:
    """A list of layers, or its numbers with commas between them."""
    if said is None:
        return set(usual)
    parts = [part for part in said.split(",") if part.strip()] if isinstance(said, str) else said
    try:
        return {int(part) for part in parts}
    except (TypeError, ValueError):
        raise CheckpointError("config.json: 'moe_layers_enum' must be a list of layers", BROKEN) from None


def _ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of each kind of layer, as its first one has it. What stretches positions is for those without a window."""
    kinds, found = config["layer_types"], {}
    for kind in (FULL, SLIDING):
        place = kinds.index(kind) if isinstance(kinds, list) and kind in kinds else 0
        values = {"rope_theta": config.get("rope_theta", _BASE), "partial_rotary_factor": config.get("partial_rotary_factors")}
        own = {key: value[place] if isinstance(value, list) and len(value) > place else value for key, value in values.items()}
        stretch = config.get("rope_scaling") if kind == FULL else None
        found[kind] = {key: value for key, value in own.items() if value is not None} | dict(stretch or {})
    return found


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(
        read, "a Step", use_head_wise_attn_gate=True, norm_expert_weight=True, use_moe_router_bias=True, use_qk_norm=True
    )
    if (kind := read.text("moe_router_activation", "sigmoid")) != "sigmoid":
        raise UnsupportedError(f"{read.where}: experts that are weighed by {kind[:40]!r}", "known: sigmoid")
    others = read.section("attention_other_setting")
    attention = spec.attention
    heads = read.integer("num_sliding_attention_heads", others.integer("num_attention_heads", attention.num_heads))
    for key, usual in (("num_attention_groups", attention.num_kv_heads), ("head_dim", attention.head_dim)):
        if others.integer(key, usual) != usual:
            raise UnsupportedError(f"{others.where}: another {key!r} in layers with a window", ANOTHER)
    counts = [attention.num_heads if own.window is None else heads for own in spec.attentions]
    limits = [limits_of(read, key, spec.num_layers) for key in ("swiglu_limits", "swiglu_limits_shared")]
    spec = with_shared(spec, read.integer("share_expert_dim"))
    scale = read.number("query_pre_attn_scalar", attention.head_dim) ** -0.5
    scale = None if scale == attention.score_scale else scale
    return _made(spec.with_attention(scale=scale), counts, limits[0], limits[1], 0.0, read.where)


def _metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without what is said of layers that guess."""
    read = ConfigReader(metadata, "GGUF metadata")
    count = read.integer("step35.block_count") - read.integer("step35.nextn_predict_layers", 0, least=0)
    lists = {key: value for name in _LISTS if isinstance(value := metadata.get(key := f"step35.{name}"), list | tuple)}
    return {**metadata, **{key: value[: max(0, count)] for key, value in lists.items()}}


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """What files say of rotated dims is of layers with a window; the others rotate half of these, which they don't say."""
    heads, groups = (of_layers(read, key(f"attention.head_count{kind}"), spec.num_layers, least=1) for kind in ("", "_kv"))
    if len(set(groups)) != 1:
        raise UnsupportedError(f"{read.where}: other numbers of heads of keys in some layers", ANOTHER)

    def halved(layer: int, own: AttentionSpec) -> AttentionSpec:
        if own.window is not None or own.rope is None:
            return own
        dim = own.rope.dim // 2
        rope = replace(own.rope, dim=dim, short_divisors=own.rope.short_divisors[: dim // 2])
        return replace(own, rope=checked_rope(rope, own.head_dim, read))

    limits = [limits_in_gguf(read, key(f"swiglu_clamp_{kind}"), spec.num_layers) for kind in ("exp", "shexp")]
    return _made(spec.each_attention(halved), heads, limits[0], limits[1], 1.0, read.where)


def _made(
    spec: ModelSpec, heads: list[int], limits: list[float | None], shared: list[float | None], stored: float, where: str
) -> ModelSpec:
    """heads: of each layer. limits, shared: see `held`. stored: see `NormSpec`."""
    for count in heads:
        if count % spec.attention.num_kv_heads:
            raise CheckpointError(f"{where}: {count} heads don't share {spec.attention.num_kv_heads} of keys", BROKEN)
    spec = held(replace(spec, norm=NormSpec(spec.norm.eps, 1.0, stored)), limits, shared)
    return spec.each_attention(lambda layer, own: replace(own, num_heads=heads[layer]))


STEP = Family(
    "step3p5",
    gguf_name="step35",
    attention={"gated": True, "gate_apart": True, "gate_by_head": True},
    qk_norm=True,
    has_window=True,
    full_every=4,
    full_first=True,
    local_theta=_BASE,
    varied=True,
    experts=ExpertKeys(
        ("n_routed_experts",), "moe_intermediate_size", True, shared="n_shared_experts", scale="moe_router_scaling_factor",
        scoring="sigmoid", selection_bias=True,
    ),
    config=_by_layers,
    metadata=_metadata,
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 128000,
              "moe_intermediate_size": 1280, "n_routed_experts": 288, "num_experts_per_tok": 8, "share_expert_dim": 1280},
    hf_names={
        "blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.g_proj.weight",
        "blocks.{i}.router.weight": f"{_LAYER}.moe.gate.weight",
        "blocks.{i}.router.selection_bias": f"{_LAYER}.moe.router_bias",
        **{f"blocks.{{i}}.experts.{{e}}.{part}.weight": f"{_LAYER}.moe.{part}_proj.{{e}}.weight" for part in MATRICES},
        **projections("blocks.{i}.shared.", f"{_LAYER}.share_expert."),
    },
    gguf_names={"blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight"},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=None,
)  # fmt: skip
