"""Models with latent attention: DeepSeek-V2 and V3 with experts (Moonlight and Kimi K2 are V3s), GLM-4.7-Flash, whose experts are
GLM-4's, and Youtu-LLM and PLM, which have none; PLM's MLPs have no gate. The first DeepSeek with experts has attention like any
other's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec, LatentSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import (
    BY_SIGMOID,
    BY_SOFTMAX,
    DEEPSEEK_KEYS,
    check_scoring,
    layers_without_experts,
    only_behind_the_first,
)
from nanovllm_cli.models.family import ANOTHER, SQUARED, Family, GGUFField, has_none, no_file, weight_keys
from nanovllm_cli.models.names import BIAS_NAME, MTP_HF_NAMES, SHARED_NAMES
from nanovllm_cli.models.rotary import rope_from_hf, rope_section, stretched, tempered
from nanovllm_cli.rope_spec import RopeSpec

MAX_DIM = 1 << 14
"""Of anything that a head has: more is not believed."""

LATENT_EPS = 1e-6
LATENT_HF_NAMES = {
    "blocks.{i}.q_a.weight": "model.layers.{i}.self_attn.q_a_proj.weight",
    "blocks.{i}.q_a_norm.weight": "model.layers.{i}.self_attn.q_a_layernorm.weight",
    "blocks.{i}.q_b.weight": "model.layers.{i}.self_attn.q_b_proj.weight",
    "blocks.{i}.kv_a.weight": "model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight",
    "blocks.{i}.kv_a_norm.weight": "model.layers.{i}.self_attn.kv_a_layernorm.weight",
    "blocks.{i}.kv_b.weight": "model.layers.{i}.self_attn.kv_b_proj.weight",
}
LATENT_GGUF_NAMES = {
    "blocks.{i}.q_a.weight": "blk.{i}.attn_q_a.weight",
    "blocks.{i}.q_a_norm.weight": "blk.{i}.attn_q_a_norm.weight",
    "blocks.{i}.q_b.weight": "blk.{i}.attn_q_b.weight",
    "blocks.{i}.kv_a.weight": "blk.{i}.attn_kv_a_mqa.weight",
    "blocks.{i}.kv_a_norm.weight": "blk.{i}.attn_kv_a_norm.weight",
    "blocks.{i}.kv_b.weight": "blk.{i}.attn_kv_b.weight",
    "blocks.{i}.k_b.{e}.weight": "blk.{i}.attn_k_b.{e}.weight",
    "blocks.{i}.v_b.{e}.weight": "blk.{i}.attn_v_b.{e}.weight",
}


def _growth(factor: float, share: float) -> float:
    """YaRN's: what attention's scores are to be multiplied with, in two parts of this, where positions are stretched."""
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def latent_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("attention_bias", False):
        raise UnsupportedError("latent attention with biases is not supported", ANOTHER)
    if read.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedError("experts in some layers only are not supported", ANOTHER)
    if spec.mixture is not None:
        check_scoring(read, spec.mixture.scoring)
    heads, latent = spec.attention.num_heads, latent_dims(read)
    max_position = read.integer("max_position_embeddings", 2048)
    rope = replace(rope_from_hf(read, latent.rotary_dim, max_position), interleaved=read.does("rope_interleave", True))
    growth = 1.0
    if rope.scaling != "none" and rope.mscale_all_dim:
        growth = _growth(rope_section(read).number("factor"), rope.mscale_all_dim)
    spec = replace(spec, max_position=stretched(rope, max_position))
    return with_latents(spec, latent, rope, growth, heads, read.where)


def latent_dims(read: ConfigReader) -> LatentSpec:
    return LatentSpec(
        query_rank=read.integer("q_lora_rank") if read.has("q_lora_rank") else None,
        rank=read.integer("kv_lora_rank"),
        key_dim=read.integer("qk_nope_head_dim"),
        rotary_dim=read.integer("qk_rope_head_dim"),
        value_dim=read.integer("v_head_dim"),
        eps=latent_eps(read.number("rms_norm_eps", LATENT_EPS)),
    )


def with_latents(
    spec: ModelSpec, latent: LatentSpec, rope: RopeSpec | None, growth: float, heads: int, where: str
) -> ModelSpec:
    """growth: half of what its positions' stretching makes of scores. rope None: what ends all heads' keys is not rotated."""
    if rope is not None and rope.dim != latent.rotary_dim:
        raise UnsupportedError(f"{where}: {rope.dim} rotary dims of {latent.rotary_dim}", ANOTHER)
    dims = {"rank": latent.rank, "key_dim": latent.key_dim, "value_dim": latent.value_dim, "rotary_dim": latent.rotary_dim}
    for name, dim in dims.items():
        if dim > MAX_DIM:
            raise CheckpointError(f"{where}: a {name} of {dim}; at most {MAX_DIM} are believed", BROKEN)
        if dim % 2:
            raise UnsupportedError(f"{where}: a {name} of {dim} is not an even number", ANOTHER)
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=1, head_dim=latent.rotary_dim + latent.rank, rope=rope,
        scale=latent.query_dim**-0.5 * growth**2, latent=latent,
    )  # fmt: skip
    return spec.each_attention(lambda layer, own: attention)


def _v2_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return latent_from_hf(_chosen(spec, read), read)


def _chosen(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """What it says of groups counts where it says so."""
    match read.text("topk_method", "greedy"):
        case "greedy":
            return spec.with_mlps(MoESpec, groups=1, groups_taken=1)
        case "group_limited_greedy":
            return spec
        case other:
            raise UnsupportedError(f"experts chosen by {other!r} are not supported", ANOTHER)


def latent_eps(others: float) -> float | None:
    """Of norms of what is kept, and of what queries are made of: it is their own, whatever a config says, in transformers and in
    the code that these models were published with. llama.cpp's have that of the others."""
    return None if math.isclose(others, LATENT_EPS, rel_tol=1e-3) else LATENT_EPS


def latent_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """What its files call yarn_log_multiplier is a tenth of mscale_all_dim, and its mscale is as large: angles don't grow.
    Queries of Mistral Large 3 do."""
    by_head = read.has(key("attention.key_length_mla"))  # else a file of before 2025's April
    kind = "_mla" if by_head else ""
    rope = spec.attention.rope
    assert rope is not None
    query_rank = key("attention.q_lora_rank")
    latent = LatentSpec(
        query_rank=read.integer(query_rank) if read.has(query_rank) else None,
        rank=read.integer(key("attention.kv_lora_rank")),
        key_dim=read.integer(key(f"attention.key_length{kind}"), least=rope.dim + 1) - rope.dim,
        rotary_dim=rope.dim,
        value_dim=read.integer(key(f"attention.value_length{kind}")),
        by_head=by_head,
        eps=latent_eps(spec.norm.eps),
    )
    growth = 1.0
    if rope.scaling == "yarn" and (share := 10 * read.number(key("rope.scaling.yarn_log_multiplier"), 0.0, positive=False)):
        rope, growth = replace(rope, attention_factor=1.0), _growth(rope.factor, share)
    scale = read.number(key("attention.temperature_scale"), 0.0, positive=False)
    length = read.integer(key("attention.temperature_length")) if scale else 1
    return tempered(with_latents(spec, latent, rope, growth, spec.attention.num_heads, read.where), scale, length)


def latent_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """What the architecture's files say of it, as llama.cpp's converter has it: of experts also where there are none."""
    rope, latent, mixture = spec.attention.rope, spec.attention.latent, spec.mixture
    assert rope is not None
    assert latent is not None
    keys: dict[str, GGUFField] = {
        "attention.kv_lora_rank": latent.rank, "attention.key_length_mla": latent.query_dim,
        "attention.value_length_mla": latent.value_dim,
    }  # fmt: skip
    if latent.query_rank is not None:
        keys["attention.q_lora_rank"] = latent.query_rank
    if rope.scaling == "yarn" and rope.mscale_all_dim:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * rope.mscale_all_dim
    if mixture is None:
        size = 0 if spec.dense_mlp is None else spec.dense_mlp.intermediate_size
        none = {"expert_feed_forward_length": size, "expert_shared_count": 0, "leading_dense_block_count": spec.num_layers}
        return keys | none
    kind = BY_SIGMOID if mixture.scoring == "sigmoid" else BY_SOFTMAX
    return keys | weight_keys(spec) | {"expert_gating_func": kind}


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """Of architecture "deepseek2", which has all of them: by its experts. Files of the first GLM-4.7-Flash don't say how they are
    chosen."""
    read = ConfigReader(metadata, "GGUF metadata")
    if read.integer("deepseek2.expert_count", 0, least=0) == 0:
        return YOUTU
    tokens = metadata.get("tokenizer.ggml.tokens")
    is_glm = read.integer("deepseek2.block_count") in (47, 48) and isinstance(tokens, list) and len(tokens) == 154880
    chosen_by = read.integer("deepseek2.expert_gating_func", BY_SIGMOID if is_glm else BY_SOFTMAX, least=0)
    return DEEPSEEK3 if chosen_by == BY_SIGMOID else DEEPSEEK2


def _sarvam_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What its publisher's code calls deepseek_yarn is yarn; heads are as wide as is said of their parts."""
    found = {key: value for key, value in config.items() if key != "head_dim"}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(section := config.get(name), Mapping):
            kinds = {key: "yarn" for key in ("type", "rope_type") if section.get(key) == "deepseek_yarn"}
            found[name] = {**section, **kinds}
    return found


def _ocr_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the first folders say of latent attention is that there is none; heads are as wide as follows from their number."""
    first = config.get("first_k_dense_replace", 0)
    less = {key: value for key, value in config.items() if key not in ("head_dim", "first_k_dense_replace")}
    return {**less, "mlp_only_layers": layers_without_experts(config, first if type(first) is int else 0)}


def _ocr_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.flag("use_mla", False):
        raise UnsupportedError(f"{read.where}: latent attention of a DeepSeek-OCR is not supported", ANOTHER)
    return _chosen(spec, read)


def _ocr_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """llama.cpp has as many heads of keys as of queries there, which turn as a whole and are not stretched."""
    mixture, attention, rope = spec.mixture, spec.attention, spec.attention.rope
    usual = rope is not None and (rope.scaling, rope.theta, rope.dim) == ("none", 1e4, attention.head_dim)
    has_none(
        "a DeepSeek-OCR", no_experts=mixture is None, groups_of_experts=mixture is not None and mixture.groups != 1,
        shared_heads_of_keys=attention.num_kv_heads != attention.num_heads, positions_with_another_base_or_stretched=not usual,
    )  # fmt: skip
    return weight_keys(spec) | {"expert_gating_func": BY_SOFTMAX}


def _ocr_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without the size of what is turned, which converters took from where there is none."""
    key = "deepseek2-ocr.rope.dimension_count"
    return {name: value for name, value in metadata.items() if name != key or value}


def _first_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.text("scoring_func", "softmax") != "softmax" or read.integer("moe_layer_freq", 1) != 1:
        raise UnsupportedError(f"{read.where}: a DeepSeek of the first kind with other experts, or in some layers only", ANOTHER)
    return spec


def _first_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """llama.cpp leaves weights of experts there as they are."""
    mixture = spec.mixture
    has_none("the first DeepSeek", no_experts=mixture is None, weights_of_experts_that_are_1_together=mixture is not None
             and mixture.norm_topk, no_expert_for_all_tokens=mixture is not None and mixture.shared is None)  # fmt: skip
    return {} if mixture is None else {"expert_weights_scale": mixture.scale}


_DEFAULTS = {"head_dim": 64, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
             "v_head_dim": 128}  # fmt: skip
_OF_ALL: dict[str, Any] = {
    "latent": True, "interleaved_gguf": True, "gguf_name": "deepseek2", "gguf_names": LATENT_GGUF_NAMES, "gguf": latent_from_gguf,
    "gguf_keys": latent_keys, "interleaved": True,
}  # fmt: skip
DEEPSEEK = Family(
    "deepseek",
    interleaved_gguf=True,
    experts=replace(DEEPSEEK_KEYS, scoring="softmax", selection_bias=False, groups=None, scale=None),
    defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "n_shared_experts": 2},
    hf_names=SHARED_NAMES,
    hf=_first_from_hf,
    gguf_keys=_first_keys,
)
DEEPSEEK2 = Family(
    "deepseek2",
    experts=replace(DEEPSEEK_KEYS, scoring="softmax", selection_bias=False),
    defaults=_DEFAULTS | {"norm_topk_prob": False, "n_shared_experts": 2},
    hf_names=SHARED_NAMES | LATENT_HF_NAMES,
    hf=_v2_from_hf,
    **_OF_ALL,
)
DEEPSEEK_OCR = Family(
    "deepseek_ocr",
    template="plain",
    experts=replace(DEEPSEEK_KEYS, scoring="softmax", selection_bias=False),
    defaults={"norm_topk_prob": False, "n_shared_experts": 2, "rms_norm_eps": 1e-6},
    hf_names=SHARED_NAMES,
    config=_ocr_config,
    hf=_ocr_from_hf,
    gguf_name="deepseek2-ocr",
    gguf_keys=_ocr_keys,
    metadata=_ocr_metadata,
)
"""V2's experts behind attention that is any other's."""
DEEPSEEK3 = Family(
    "deepseek3",
    experts=DEEPSEEK_KEYS,
    defaults=_DEFAULTS | {"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
                          "topk_group": 4, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8,
                          "max_position_embeddings": 4096},
    hf_names=SHARED_NAMES | LATENT_HF_NAMES | BIAS_NAME,
    hf=latent_from_hf,
    mtp_names=MTP_HF_NAMES,
    **_OF_ALL,
)  # fmt: skip
SARVAM_MLA = replace(
    DEEPSEEK3,
    config=_sarvam_config,
    defaults={**DEEPSEEK3.defaults, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    gguf_like=no_file("Sarvam with latent attention"),
    mtp_names={},
)
"""A DeepSeek-V3 whose queries are made of the hidden state, which llama.cpp expects of models of another number of layers."""
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    experts=DEEPSEEK_KEYS,
    defaults=_DEFAULTS | {"norm_topk_prob": True, "n_shared_experts": 1, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5,
                          "routed_scaling_factor": 1.8, "num_experts_per_tok": 4, "max_position_embeddings": 202752,
                          "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
    hf_names=SHARED_NAMES | LATENT_HF_NAMES | BIAS_NAME,
    hf=lambda spec, read: latent_from_hf(only_behind_the_first(spec, read), read),
    mtp_names=MTP_HF_NAMES,
    **_OF_ALL,
)  # fmt: skip
PLM = Family(
    "plm",
    tied_by_default=True,
    ungated=SQUARED,
    gguf_activation="relu2",
    defaults=_DEFAULTS | {"q_lora_rank": None, "hidden_act": "relu2", "max_position_embeddings": 4096, "rope_theta": 1e5},
    hf_names=LATENT_HF_NAMES,
    hf=latent_from_hf,
    **_OF_ALL | {"gguf_name": "plm", "gguf_keys": None},
)
YOUTU = Family(
    "youtu",
    tied_by_default=True,
    defaults=_DEFAULTS | {"max_position_embeddings": 131072},
    hf_names=LATENT_HF_NAMES,
    hf=latent_from_hf,
    **_OF_ALL,
)
