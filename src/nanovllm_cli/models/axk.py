"""A.X-K1 (SK Telecom): DeepSeek-V3 with a norm of what a layer's experts add. Published folders have that norm for dense layers,
too, where nothing reads it, and no bias that chooses experts. A.X-K2: DeepSeek-V3.2 with gates of what heads find, which are made
together with queries, and gates of what norms give, but for those of dense MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deepseek import DEEPSEEK3, MAX_DIM, latent_from_hf
from nanovllm_cli.models.experts import layers_without_experts
from nanovllm_cli.models.family import ReadValues, no_file
from nanovllm_cli.models.names import BIAS_NAME
from nanovllm_cli.models.sparse import DEEPSEEK32, indexed_from_hf

_AFTER = "post_mlp_layernorm.weight"


def by_kinds(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which layers have experts is said by "mlp_layer_types", or else by how many come before them, which is 1 if nothing is."""
    first = config.get("first_k_dense_replace", 1)
    less = {key: value for key, value in config.items() if key != "first_k_dense_replace"}
    return {**less, "mlp_only_layers": layers_without_experts(config, first if type(first) is int else 1)}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = latent_from_hf(spec, read)
    blocks = (replace(block, order="open") if isinstance(block.mlp, MoESpec) else block for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


def biased_where_there(spec: ModelSpec, values: ReadValues, where: str) -> ModelSpec:
    """Without the bias that chooses experts where a folder has none in the first layer that may."""
    first = next((i for i, block in enumerate(spec.blocks) if isinstance(block.mlp, MoESpec)), None)
    if first is None or values(BIAS_NAME["blocks.{i}.router.selection_bias"].replace("{i}", str(first))) is not None:
        return spec
    return spec.with_mlps(MoESpec, selection_bias=False)


AXK1 = replace(
    DEEPSEEK3,
    name="axk1",
    config=by_kinds,
    defaults={key: value for key, value in DEEPSEEK3.defaults.items() if key != "first_k_dense_replace"} | {
        "max_position_embeddings": 32768, "n_routed_experts": 192, "moe_intermediate_size": 2048,
    },
    hf=_from_hf,
    hf_names={**DEEPSEEK3.hf_names, "blocks.{i}.after_mlp_norm.weight": f"model.layers.{{i}}.{_AFTER}"},
    unread_without_experts=(f".{_AFTER}",),
    tensors=biased_where_there,
    gguf_like=no_file("A.X-K1"),
    mtp_names={},
)  # fmt: skip


def _second_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    read.kinds("layer_types", spec.num_layers, "indexed_attention")
    rank = read.integer("gated_norm_rank")
    if rank > MAX_DIM:
        raise CheckpointError(f"{read.where}: a 'gated_norm_rank' of {rank}; at most {MAX_DIM} are believed", BROKEN)

    def gated(block: BlockSpec) -> BlockSpec:
        norms = ("attention_norm", "mlp_norm") if isinstance(block.mlp, MoESpec) else ("attention_norm",)
        return replace(block, gated_norms=norms, gate_rank=rank)

    def gated_too(layer: int, own: AttentionSpec) -> AttentionSpec:
        return replace(own, gated=True, latent=own.latent and replace(own.latent, beside=True))

    spec = indexed_from_hf(spec, read, interleaved=False).each_attention(gated_too)
    return replace(spec, blocks=tuple(map(gated, spec.blocks)))


_GATED = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
AXK2 = replace(
    DEEPSEEK32,
    name="axk2",
    template="",  # its publisher brings one
    config=by_kinds,
    defaults={
        "head_dim": 32, "kv_lora_rank": 128, "q_lora_rank": 384, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "norm_topk_prob": True, "n_shared_experts": 1, "n_routed_experts": 128, "moe_intermediate_size": 512,
        "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "max_position_embeddings": 131072, "index_n_heads": 16,
        "index_head_dim": 128, "index_topk": 2048, "gated_norm_rank": 16,
    },
    hf=_second_from_hf,
    hf_names={**DEEPSEEK32.hf_names} | {
        f"blocks.{{i}}.{ours}.{part}.weight": f"model.layers.{{i}}.{theirs}.{own}.weight"
        for ours, theirs in _GATED.items() for part, own in (("gated", "norm"), ("gate_in", "W_down"), ("gate_out", "W_up"))
    },
    peft_names={
        "blocks.{i}.q_b.weight": "model.layers.{i}.self_attn.q_gate_proj.weight",
        **{
            f"blocks.{{i}}.{ours}.{part}.weight": f"model.layers.{{i}}.{theirs}.mlp.{own}.weight"
            for ours, theirs in _GATED.items() for part, own in (("gate_in", "fc1"), ("gate_out", "fc2"))
        },
    },
    gguf_like=no_file("A.X-K2"),
)  # fmt: skip
