"""K2 Horizon (IFM): Llama with norms of parts of a row. Some have mixtures of experts, and some of these, in layers that have
one, values that are a mixture's, too (MoVA), and gates of what heads find in all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import MAX_EXPERTS, ExpertKeys
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all, has_none, weight_keys
from nanovllm_cli.models.names import SHARED_NAMES, modules

_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192, "beta_fast": 128.0,
    "beta_slow": 4.0, "attention_factor": 1.2772588722239782,
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 64256, "hidden_size": 1536, "intermediate_size": 5120, "num_hidden_layers": 28, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "num_experts": 0, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "router_score_func": "softmax",
}  # fmt: skip


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the positions that a config means without a word, those of the smallest."""
    says_rope = any(config.get(key) is not None for key in ("rope_parameters", "rope_scaling", "rope_theta"))
    return {**config, "mlp_bias": False} | ({} if says_rope else {"rope_parameters": _YARN})


def _in_parts(spec: ModelSpec, groups: int, where: str) -> ModelSpec:
    if spec.hidden_size % groups:
        raise CheckpointError(f"{where}: {groups} groups of rows of {spec.hidden_size}, for norms", BROKEN)
    return replace(spec, norm=replace(spec.norm, groups=groups))


def _with_values(spec: ModelSpec, count: int, taken: int, where: str, *, norm_topk: bool) -> ModelSpec:
    """Of a mixture of so many matrices in layers that have one of MLPs, whose router weighs as that one's."""
    if not count:
        return spec
    if not 0 < taken <= count <= MAX_EXPERTS:
        raise CheckpointError(f"{where}: {taken} of {count} experts of values, of {MAX_EXPERTS} at the most", BROKEN)
    blocks = []
    for block in spec.blocks:
        if isinstance(mlp := block.mlp, MoESpec) and isinstance(own := block.mixer, AttentionSpec):
            expert = MLPSpec(own.num_kv_heads * own.found_dim, "lone_silu", down=False)
            values = replace(
                mlp, num_experts=count, experts_per_token=taken, expert=expert, norm_topk=norm_topk, shared=None
            )
            block = replace(block, mixer=replace(own, values=values))
        blocks.append(block)
    return replace(spec, blocks=tuple(blocks))


def _with_gates(spec: ModelSpec) -> ModelSpec:
    return spec.with_attention(gated=True, gate_apart=True, gate_is="softplus of 2")


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a K2 Horizon", attention_bias=False, query_key_norm=False)
    if read.has("attention_gate_func"):
        if (function := read.text("attention_gate_func")) != "softplus":
            raise UnsupportedError(f"{read.where}: a K2 Horizon with gates by {function[:40]!r}", "known: softplus")
        spec = _with_gates(spec)
    if (dim := read.integer("rope_head_dim", spec.attention.head_dim)) != spec.attention.head_dim:
        raise UnsupportedError(f"{read.where}: a K2 Horizon that rotates {dim} of {spec.attention.head_dim} dims", ANOTHER)
    biased = read.flag("moe_gate_bias", False)
    spec = spec.with_mlps(MoESpec, selection_bias=biased)
    taken = read.integer("mova_num_experts_per_tok", 0, least=0)
    spec = _with_values(spec, read.integer("mova_num_experts", 0, least=0), taken, read.where, norm_topk=taken > 1)
    return _in_parts(spec, read.integer("layernorm_num_groups", 1), read.where)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Gates come with experts of values, of which alone a key speaks."""
    if count := read.integer(key("attention.value_expert_count"), 0, least=0):
        taken = read.integer(key("attention.value_expert_used_count"))
        norm_topk = spec.mixture is not None and spec.mixture.norm_topk
        spec = _with_gates(_with_values(spec, count, taken, read.where, norm_topk=norm_topk))
    return _in_parts(spec, read.integer(key("attention.group_norm_groups"), 1), read.where)


def _gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    values = next((each.values for each in spec.attentions if each.values is not None), None)
    has_none(
        f"a {spec.architecture} model", windows=any(each.window is not None for each in spec.attentions),
        gates_without_experts_of_values=spec.attention.gated and values is None,
        experts_of_values_without_gates=values is not None and not spec.attention.gated,
        experts_that_are_weighed_otherwise_than_those_of_values=
        values is not None and spec.mixture is not None and values.norm_topk != spec.mixture.norm_topk,
    )  # fmt: skip
    keys: dict[str, GGUFField] = {"attention.group_norm_groups": spec.norm.groups}
    if spec.mixture is None:
        return keys
    have = [isinstance(block.mlp, MoESpec) for block in spec.blocks]
    first = have.index(True)
    has_all(spec.architecture, layers_with_experts_alone_behind_those_without=all(have[first:]))
    if values is not None:
        keys |= {"attention.value_expert_count": values.num_experts,
                 "attention.value_expert_used_count": values.experts_per_token}  # fmt: skip
    return {**keys, "leading_dense_block_count": first, "moe_every_n_layers": 1, **weight_keys(spec)}


K2_HORIZON = Family(
    "k2_horizon",
    gguf_name="k2-horizon",
    has_window=True,
    window_switch="use_sliding_window",
    experts=ExpertKeys(
        ("num_experts",), "moe_intermediate_size", "norm_topk_prob", switch="num_experts", shared="num_shared_experts",
        scale="router_scaling_factor", scoring="sigmoid", scoring_key="router_score_func", selection_bias=True,
        norm_in_gguf=True, length_in_gguf=True,
    ),
    config=_config,
    defaults=_DEFAULTS,
    hf_names={
        **SHARED_NAMES,
        "blocks.{i}.router.selection_bias": "model.layers.{i}.mlp.gate.bias",
        **modules("blocks.{i}.", "model.layers.{i}.self_attn.", {
            "attention_gate.weight": "gate_proj.weight", "values.router.weight": "v_router.weight",
            "values.router.selection_bias": "v_router.bias", "values.experts.{e}.up.weight": "v_experts.{e}.weight",
        }),
    },
    gguf_names=modules("blocks.{i}.", "blk.{i}.attn_", {
        "attention_gate.weight": "gate.weight", "values.router.weight": "v_gate.weight",
        "values.router.selection_bias": "v_gate.bias", "values.experts.{e}.up.weight": "v_exps.{e}.weight",
    }),
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_gguf_keys,
)  # fmt: skip
