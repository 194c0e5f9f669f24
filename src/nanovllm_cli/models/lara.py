"""LaraMini: the gated delta rule in two of five layers, and attention as Qwen3's in the others, most with a window; those without
one have no positions. In all layers experts, and a shared one that counts in full.

Its folders have what reads the input of a delta rule in one matrix, which weights/stacked.py takes apart.
"""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.families import SLIDING
from nanovllm_cli.models.family import Family, no_file
from nanovllm_cli.models.names import QWEN_NAMES
from nanovllm_cli.models.qwen_next import (
    ATTENTION,
    DELTA_NAMES,
    LINEAR,
    SHARED_NAMES,
    WEIGHED,
    check_activation,
    delta_from_hf,
    kinds_of_layers,
    with_delta,
)

_PATTERN = (LINEAR, SLIDING, LINEAR, ATTENTION, SLIDING)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    kinds = kinds_of_layers(read, spec.num_layers, lambda i: _PATTERN[i % len(_PATTERN)], SLIDING)
    check_activation(read)
    window = read.integer("sliding_window")

    def own(layer: int, attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, window=window) if kinds[layer] == SLIDING else replace(attention, rope=None)

    spec = spec.each_attention(own).with_mlps(MoESpec, shared_gate=False)
    return with_delta(spec, delta_from_hf(read), [kind == LINEAR for kind in kinds], read.where)


LARA_MINI = Family(
    "lara_mini",
    qk_norm=True,
    tied_by_default=True,
    experts=WEIGHED,
    defaults={"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 34,
              "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131072,
              "sliding_window": 512, "linear_num_key_heads": 8, "linear_key_head_dim": 128, "linear_num_value_heads": 16,
              "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 128, "num_experts_per_tok": 4,
              "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    hf_names=DELTA_NAMES | QWEN_NAMES | SHARED_NAMES
             | {"blocks.{i}.delta.norm.weight": "model.layers.{i}.linear_attn.out_norm.weight"},
    hf=_from_hf,
    gguf_like=no_file("LaraMini"),
)  # fmt: skip
