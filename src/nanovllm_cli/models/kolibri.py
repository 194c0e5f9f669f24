"""Kolibri 1 (Aleph Alpha 2026): norms on either side of attention and experts, positions in layers with a window alone, experts
that logits and a bias choose, which weigh by sigmoids, and one that every token takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys, with_shared
from nanovllm_cli.models.family import Family, no_file
from nanovllm_cli.models.flint import turning_in_windows, with_kinds
from nanovllm_cli.models.names import SHARED_NAMES


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """All layers have experts, of whose size alone it speaks; there are no biases."""
    found = with_kinds(config, lambda layer, layers: (layer + 1) % 5 == 0)
    size = config.get("moe_intermediate_size", 512)
    return {**found, "intermediate_size": size, "attention_bias": False, "mlp_bias": False, "mlp_only_layers": []}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = with_shared(spec, read.integer("shared_expert_intermediate_size"))
    return turning_in_windows(spec.with_mlps(MoESpec, ranks_logits=True), read)


_LAYER = "model.layers.{i}"
KOLIBRI1 = Family(
    "kolibri1",
    order="sandwich",
    qk_norm=True,
    has_window=True,
    experts=ExpertKeys(
        ("num_local_experts", "num_experts"), "moe_intermediate_size", "norm_topk_prob", scoring="sigmoid", selection_bias=True,
    ),
    config=_config,
    defaults={
        "vocab_size": 128000, "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48, "num_key_value_heads": 4,
        "head_dim": 128, "max_position_embeddings": 262144, "sliding_window": 513, "num_experts": 384, "num_experts_per_tok": 6,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    hf_names={
        **SHARED_NAMES,
        "blocks.{i}.router.selection_bias": f"{_LAYER}.moe.router.expert_bias",
        "blocks.{i}.after_attention_norm.weight": f"{_LAYER}.post_attn_norm.weight",
        "blocks.{i}.after_mlp_norm.weight": f"{_LAYER}.post_ffn_norm.weight",
    },
    hf=_from_hf,
    gguf_like=no_file("Kolibri"),
)  # fmt: skip
