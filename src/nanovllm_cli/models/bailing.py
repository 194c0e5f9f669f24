"""Ling and Ring 2.0 (BailingMoe V2), and Sarvam, which is built like them: DeepSeek-V3's experts behind attention with norms of
heads, of which Ling rotates a half. q, k and v are one tensor. Ling and Ring 1 and 1.5 (BailingMoe): the first DeepSeek's experts
behind a Llama's attention. The model in its folders is code of the publisher's, which nobody runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import DEEPSEEK_KEYS, scored_by_sigmoids, with_shared
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all, weight_keys
from nanovllm_cli.models.names import MTP_HF_NAMES, SHARED_NAMES

_LAYER = "model.layers.{i}"
_RENAMED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"}
"""What published configs say -> what transformers saves of a Sarvam."""


def _renamed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {_RENAMED.get(key, key): value for key, value in config.items()}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Ling", attention_bias=False, use_bias=False, norm_head=False, use_rmsnorm=True)
    biased, of_heads = read.flag("moe_router_enable_expert_bias", True), read.flag("use_qk_norm", True)
    spec = spec.with_mlps(MoESpec, selection_bias=biased)
    return scored_by_sigmoids(spec, read, "score_function").with_attention(qk_norm=of_heads)


def _first_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Ling", attention_bias=False, use_bias=False, norm_head=False)
    return spec


def _first_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mixture = spec.mixture
    has_all(
        spec.architecture, experts_in_all_layers=mixture is not None and spec.dense_mlp is None,
        expert_for_all_tokens=mixture is not None and mixture.shared is not None, head_of_its_own=not spec.tied_head,
    )  # fmt: skip
    return weight_keys(spec)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """The length that its files have is of each of as many experts that every token takes, as llama.cpp counts them."""
    count = read.integer(key("expert_shared_count"), 1, least=0)
    length = key("expert_shared_feed_forward_length")
    return with_shared(spec, count * read.integer(length)) if count > 1 and read.has(length) else spec


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mixture = spec.mixture
    if mixture is None or mixture.shared is None:
        raise UnsupportedError("GGUF files of a Ling without an expert for all tokens are not written", ANOTHER)
    shared = mixture.shared.intermediate_size
    return weight_keys(spec) | {"expert_shared_count": 1, "expert_shared_feed_forward_length": shared}


_NAMES = SHARED_NAMES | {
    "embedding.weight": "model.word_embeddings.weight",
    "blocks.{i}.o.weight": f"{_LAYER}.attention.dense.weight",
}
BAILING_MOE = Family(
    "bailing_moe",
    gguf_name="bailingmoe",
    qkv_bias=False,
    interleaved_gguf=True,
    experts=replace(DEEPSEEK_KEYS, scoring="softmax", selection_bias=False, groups=None, scale=None),
    config=_renamed,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 16384, "norm_topk_prob": True, "n_shared_experts": 0},
    hf_names=_NAMES | {f"blocks.{{i}}.{part}.weight": f"{_LAYER}.attention.{part}_proj.weight" for part in "qkv"},
    hf=_first_from_hf,
    gguf_keys=_first_keys,
)
BAILING_MOE2 = Family(
    "bailing_moe2",
    gguf_name="bailingmoe2",
    qk_norm=True,
    qkv_bias=False,
    fused_qkv=True,
    experts=DEEPSEEK_KEYS,
    config=_renamed,
    defaults={"rope_theta": 6e5, "partial_rotary_factor": 0.5, "num_key_value_heads": 4, "max_position_embeddings": 32768,
              "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4,
              "routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "n_routed_experts": 256, "moe_intermediate_size": 512},
    hf_names=_NAMES
    | {
        "blocks.{i}.qkv.weight": f"{_LAYER}.attention.query_key_value.weight",
        "blocks.{i}.q_norm.weight": f"{_LAYER}.attention.query_layernorm.weight",
        "blocks.{i}.k_norm.weight": f"{_LAYER}.attention.key_layernorm.weight",
        "blocks.{i}.router.selection_bias": f"{_LAYER}.mlp.gate.expert_bias",
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
    mtp_names={**MTP_HF_NAMES, "norm.weight": f"{_LAYER}.final_layernorm.weight"},
    mtp_gguf_names={"norm.weight": "blk.{i}.layer_output_norm.weight"},
)  # fmt: skip
SARVAM_MOE = replace(
    BAILING_MOE2,
    name="sarvam_moe",
    defaults={"rope_theta": 8e6, "head_dim": 64, "num_key_value_heads": 4, "max_position_embeddings": 131072,
              "norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
              "num_experts_per_tok": 6, "n_routed_experts": 128, "moe_intermediate_size": 1024},
)  # fmt: skip
"""To llama.cpp it is a Ling. Its publisher's code takes the mean off the biases that choose, which changes no choice."""
