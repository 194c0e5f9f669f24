"""A.X-K1 (SK Telecom): DeepSeek-V3 with a norm of what a layer's experts add. Published folders have that norm for dense layers,
too, where nothing reads it, and no bias that chooses experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.model_spec import ModelSpec, MoESpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.deepseek import DEEPSEEK3, latent_from_hf
from nanovllm_cli.models.experts import layers_without_experts
from nanovllm_cli.models.family import ReadValues, no_file
from nanovllm_cli.models.names import BIAS_NAME

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
