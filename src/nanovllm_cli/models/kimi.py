"""Kimi Linear (Kimi Team 2025): a delta rule with a decay of each channel in three of four layers, latent attention without
positions in the others, DeepSeek-V3's experts behind the first layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deepseek import LATENT_GGUF_NAMES, LATENT_HF_NAMES, latent_dims, latent_from_gguf, with_latents
from nanovllm_cli.models.experts import ExpertKeys, only_behind_the_first, scored_by_sigmoids
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all, usual_keys
from nanovllm_cli.models.names import MIXTRAL_NAMES, projections
from nanovllm_cli.models.qwen_next import ATTENTION, LINEAR, check_activation, kinds_of_layers, with_delta
from nanovllm_cli.state_spec import DeltaSpec

_MAX_HEAD_DIM = 1 << 14
_USUAL = {
    "max_position_embeddings": "model_max_length", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group",
    "num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
"""What transformers takes as well -> how its configs have it."""
_PARTS = ("q", "k", "v")


def by_usual_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what others call a thing, too, and how many layers come before those with experts."""
    found = {**usual_keys(config, _USUAL), **config}
    if (length := found.get("model_max_length")) is not None:
        found["max_position_embeddings"] = length
    kinds = found.get("mlp_layer_types")
    if isinstance(kinds, list):
        found["first_k_dense_replace"] = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    return found


def _kinds(read: ConfigReader, layers: int) -> list[str]:
    """By "layer_types", or by lists of layers, the first being 1, as published configs have them."""
    section = read.section("linear_attn_config")
    listed = {kind: section.values.get(key) for key, kind in (("full_attn_layers", ATTENTION), ("kda_layers", LINEAR))}
    if read.values.get("layer_types") is not None or None in listed.values():
        return kinds_of_layers(read, layers, lambda i: ATTENTION if i and i % 4 == 0 else LINEAR)
    found: dict[int, str] = {}
    for kind, numbers in listed.items():
        if isinstance(numbers, list) and all(type(number) is int for number in numbers):
            found |= dict.fromkeys(numbers, kind)
    if sorted(found) != [*range(1, layers + 1)]:
        raise CheckpointError(f"{section.where}: its lists must name each of {layers} layers once", BROKEN)
    return [found[i + 1] for i in range(layers)]


def channel_delta(heads: int, dim: int, width: int, where: str, log_decay: bool = True) -> DeltaSpec:
    """With a decay of each channel, of as many heads of keys as of values."""
    if dim > _MAX_HEAD_DIM:
        raise CheckpointError(f"{where}: heads of {dim} numbers; at most {_MAX_HEAD_DIM} are believed", BROKEN)
    if dim % 2:
        raise UnsupportedError(f"{where}: heads of {dim} numbers, which is not an even number", ANOTHER)
    return DeltaSpec(heads, dim, heads, dim, width, log_decay=log_decay, apart=True, channel_rank=dim)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("attention_bias", False):
        raise UnsupportedError("latent attention with biases is not supported", ANOTHER)
    if not read.flag("mla_use_nope", True):
        raise UnsupportedError("a Kimi Linear whose attention has positions is not supported", ANOTHER)
    if read.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedError("experts in some layers only are not supported", ANOTHER)
    check_activation(read)
    spec = scored_by_sigmoids(only_behind_the_first(spec, read), read, "moe_router_activation_func")
    kinds, linear = _kinds(read, spec.num_layers), read.section("linear_attn_config")
    heads = linear.integer("num_heads", read.integer("linear_num_heads"))
    dim = linear.integer("head_dim", read.integer("linear_head_dim"))
    width = linear.integer("short_conv_kernel_size", read.integer("linear_conv_kernel_dim"))
    delta = channel_delta(heads, dim, width, read.where)
    spec = with_latents(spec, latent_dims(read), None, 1.0, spec.attention.num_heads, read.where)
    return with_delta(spec, delta, [kind == LINEAR for kind in kinds], read.where)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A layer without key and value heads is of the delta rule, which has as many heads as attention. llama.cpp makes weights of
    a token's experts 1 together whatever a file says."""
    is_linear = read.zeros(heads := key("attention.head_count_kv"), spec.num_layers)
    if not any(is_linear):
        raise CheckpointError(f"{read.where}: {heads!r} must be a list of layers' heads, some of them 0", BROKEN)
    spec = latent_from_gguf(spec, read, key).with_attention(rope=None)
    spec = spec.with_mlps(MoESpec, norm_topk=True)
    width = read.integer(key("ssm.conv_kernel"))
    delta = channel_delta(spec.attention.num_heads, read.integer(key("kda.head_dim")), width, read.where, log_decay=False)
    return with_delta(spec, delta, is_linear, read.where)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """llama.cpp knows queries of latent attention that are made at once alone, and no groups of experts."""
    latent, mixture = spec.attention.latent, spec.mixture
    delta = next((mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec)), None)
    assert latent is not None
    has_all(
        "kimi_linear", linear_layers=delta is not None, experts=mixture is not None,
        weights_that_are_1_together=mixture is None or mixture.norm_topk,
        single_group_of_experts=mixture is None or mixture.groups == 1,
        queries_made_at_once=latent.query_rank is None,
        heads_of_states_as_of_attention=delta is None or delta.num_values == spec.attention.num_heads,
        bias_that_chooses_experts=mixture is None or mixture.selection_bias,
        shared_experts=mixture is None or mixture.shared is not None,
    )  # fmt: skip
    assert delta is not None
    assert mixture is not None
    return {
        "attention.head_count_kv": [0 if isinstance(mixer, DeltaSpec) else 1 for mixer in spec.mixers],
        "attention.kv_lora_rank": latent.rank, "attention.key_length_mla": latent.query_dim,
        "attention.value_length_mla": latent.value_dim, "ssm.conv_kernel": delta.width, "kda.head_dim": delta.key_dim,
        "expert_weights_scale": mixture.scale,
    }  # fmt: skip


_PLACE, _MOE = "model.layers.{i}.self_attn", "model.layers.{i}.block_sparse_moe"
KIMI_LINEAR = Family(
    "kimi_linear",
    latent=True,
    convolutions=True,
    experts=ExpertKeys(
        ("num_experts",), "moe_intermediate_size", "moe_renormalize", taken="num_experts_per_token",
        first="first_k_dense_replace", shared="num_shared_experts", scale="routed_scaling_factor",
        groups=("num_expert_group", "topk_group"), scoring="sigmoid", selection_bias=True,
    ),
    config=by_usual_names,
    defaults={"vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
              "num_hidden_layers": 27, "num_attention_heads": 32, "head_dim": 64, "num_experts": 256, "num_experts_per_token": 8,
              "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "num_expert_group": 1,
              "topk_group": 1, "moe_renormalize": True, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
              "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "linear_head_dim": 128,
              "linear_num_heads": 32, "linear_conv_kernel_dim": 4},
    hf_names=LATENT_HF_NAMES | MIXTRAL_NAMES | {
        "blocks.{i}.router.selection_bias": f"{_MOE}.gate.e_score_correction_bias",
        **projections("blocks.{i}.shared.", f"{_MOE}.shared_experts."),
        **projections("blocks.{i}.delta_", f"{_PLACE}.", (*_PARTS, "b", "f_a", "f_b", "g_a", "g_b")),
        **{f"blocks.{{i}}.delta.{part}_taps": f"{_PLACE}.{part}_conv1d.weight" for part in _PARTS},
        "blocks.{i}.delta_out.weight": f"{_PLACE}.o_proj.weight",
        "blocks.{i}.delta.decay": f"{_PLACE}.A_log",
        "blocks.{i}.delta.decay_bias": f"{_PLACE}.dt_bias",
        "blocks.{i}.delta.norm.weight": f"{_PLACE}.o_norm.weight",
    },
    peft_names={
        **projections("blocks.{i}.delta_", f"{_PLACE}.forget_gate.", ("f_a", "f_b")),
        **projections("blocks.{i}.shared.", "model.layers.{i}.mlp.shared_experts."),
    },
    hf=_from_hf,
    gguf_names=LATENT_GGUF_NAMES | {
        **{f"blocks.{{i}}.delta_{part}.weight": f"blk.{{i}}.attn_{part}.weight" for part in _PARTS},
        **{f"blocks.{{i}}.delta.{part}_taps": f"blk.{{i}}.ssm_conv1d_{part}.weight" for part in _PARTS},
        **{f"blocks.{{i}}.delta_{part}.weight": f"blk.{{i}}.ssm_{part}.weight" for part in ("f_a", "f_b", "g_a", "g_b")},
        "blocks.{i}.delta_b.weight": "blk.{i}.ssm_beta.weight",
        "blocks.{i}.delta_out.weight": "blk.{i}.attn_output.weight",
        "blocks.{i}.delta.decay": "blk.{i}.ssm_a",
        "blocks.{i}.delta.decay_bias": "blk.{i}.ssm_dt.bias",
        "blocks.{i}.delta.norm.weight": "blk.{i}.ssm_norm.weight",
    },
    gguf=_from_gguf,
    gguf_name="kimi-linear",
    gguf_keys=_keys,
)  # fmt: skip
