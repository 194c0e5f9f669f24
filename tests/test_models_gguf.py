"""GGUF files of the families against transformers in fp32: keys and names by the gguf package, numbers as llama.cpp's converter
leaves them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    HunYuanDenseV1Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from engines import SMALL, add_shape, random_model, worker_for
from gguf_anew import written_anew
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from test_models import CASES as TEXTS
from test_models import DELTA, DIVISORS, GEMMA_3N, LFM2_LAYERS, ORIGINAL, prompts
from test_quant_engine import difference, expected_logits, logits_of

Writer = gguf.GGUFWriter
Add = Callable[[Writer, Any], None]


def nothing(writer: Writer, config: Any) -> None:
    """What every architecture has is enough."""


def window(writer: Writer, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)


def gemma2(writer: Writer, config: Any) -> None:
    window(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def gemma3(writer: Writer, config: Any) -> None:
    window(writer, config)
    everywhere = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(everywhere["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(everywhere["factor"])


def gemma3n(writer: Writer, config: Any) -> None:
    window(writer, config)
    whole, local = (config.rope_parameters[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding"))
    writer.add_feed_forward_length(config.intermediate_size[0])
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = torch.tensor(config.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(whole)
    writer.add_rope_freq_base_swa(local)


def gemma4(writer: Writer, config: Any) -> None:
    window(writer, config)
    kinds, head_dim = [kind == "sliding_attention" for kind in config.layer_types], config.to_dict()["head_dim"]
    whole, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    sizes = [config.per_layer_config[i].head_dim for i in range(config.num_hidden_layers)]
    writer.add_key_length(max(sizes))
    writer.add_value_length(max(sizes))
    writer.add_key_length_swa(head_dim)
    writer.add_value_length_swa(head_dim)
    heads = [config.per_layer_config[i].num_key_value_heads for i in range(config.num_hidden_layers)]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    readers = config.num_hidden_layers - config.num_kv_shared_layers
    inner = [config.intermediate_size * (1 + (i >= readers)) for i in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(inner if config.use_double_wide_mlp else config.intermediate_size)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(kinds)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(whole["rope_theta"])
    writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_rope_dimension_count(max(sizes))
    writer.add_rope_dimension_count_swa(head_dim)
    turning = int(max(sizes) * whole["partial_rotary_factor"] / 2)
    divisors = np.ones(max(sizes) // 2, np.float32)
    divisors[turning:] = 1e30
    writer.add_tensor("rope_freqs.weight", divisors)


def granite(writer: Writer, config: Any) -> None:
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def classic(writer: Writer, config: Any) -> None:
    if config.model_type in ("gpt2", "gpt_bigcode"):
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        writer.add_head_count_kv(1 if config.model_type == "gpt_bigcode" else config.n_head)
        return
    if config.model_type == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
        if config.sliding_window is not None:
            window(writer, config)
    else:
        if config.model_type != "phi":
            writer.add_parallel_residual(config.use_parallel_residual)
    theta(writer, config)
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(config.hidden_size // config.num_attention_heads * share))


def by_distance(writer: Writer, config: Any) -> None:
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    if config.model_type == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        writer.add_clamp_kqv(config.attn_config.clip_qkv)


def falcon(writer: Writer, config: Any) -> None:
    writer.add_tensor_data_layout("jploski")
    writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    theta(writer, config)


def latent(writer: Writer, config: Any) -> None:
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    for kind in ("long", "short"):
        divisors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", divisors)


def of_layer_norms(writer: Writer, config: Any) -> None:
    writer.add_layer_norm_eps(config.norm_eps if config.model_type == "nemotron" else config.layer_norm_eps)
    theta(writer, config)
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(config.head_dim * share))


def half_rotated(writer: Writer, config: Any) -> None:
    writer.add_rope_dimension_count(config.head_dim // 2)


def theta(writer: Writer, config: Any) -> None:
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def longrope(writer: Writer, config: Any) -> None:
    writer.add_rope_dimension_count(6)
    writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    for kind in ("long", "short"):
        divisors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", divisors)


def ministral(writer: Writer, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def granite_h(writer: Writer, config: Any) -> None:
    granite(writer, config)
    heads = [0 if kind in ("mamba", "linear_attention") else config.num_key_value_heads for kind in config.layer_types]
    writer.add_head_count_kv(heads)
    writer.add_feed_forward_length(config.shared_intermediate_size)
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)


def nemotron(writer: Writer, config: Any) -> None:
    """Its MLPs are where others have attention, and say how large they are; a layer without either is a state space."""
    kinds = {"full_attention": [config.num_key_value_heads, 0], "linear_attention": [0, 0], "mlp": [0, config.intermediate_size],
             "moe": [0, config.moe_intermediate_size]}  # fmt: skip
    heads, inner = zip(*(kinds[kind] for kind in config.layers_block_type), strict=True)
    writer.add_head_count_kv(heads)
    writer.add_feed_forward_length(inner)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_rope_scaling_finetuned(False)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    if writer.arch == "nemotron_h_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)


def states_alone(writer: Writer, config: Any) -> None:
    """What is said of attention and MLPs, of which there are none, is 0."""
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.expand * config.hidden_size)
    writer.add_ssm_state_size(config.state_size)
    if writer.arch == "mamba2":
        writer.add_ssm_time_step_rank(config.num_heads)
        writer.add_ssm_group_count(config.n_groups)
    else:
        writer.add_ssm_time_step_rank(config.time_step_rank)
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def jamba(writer: Writer, config: Any) -> None:
    heads = [config.num_key_value_heads if kind == "attention" else 0 for kind in config.layers_block_type]
    writer.add_head_count_kv(heads)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_time_step_rank(config.mamba_dt_rank)


def single_expert(writer: Writer, config: Any) -> None:
    jamba(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def of_mamba(key: str, numbers: np.ndarray, flat: bool, groups: int = 1) -> np.ndarray:
    """As llama.cpp's converter has them, or with flat its quantizer, which leaves no 1 at a shape's end. groups: 0 for the first
    kind of Mamba's."""
    if "conv1d.weight" in key:
        return numbers[:, 0]
    if key.endswith(("A_log", ".D")):
        numbers, is_first_kind = -np.exp(numbers) if key.endswith("A_log") else numbers, groups == 0
        return numbers if is_first_kind else numbers[:, None]
    return numbers.reshape(groups, -1) if key.endswith((".mamba.norm.weight", ".mixer.norm.weight")) and not flat else numbers


def hybrid(writer: Writer, config: Any) -> None:
    window(writer, config)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def cohere(writer: Writer, config: Any) -> None:
    if writer.arch == "cohere2":
        window(writer, config)
    theta(writer, config)
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def olmo3(writer: Writer, config: Any) -> None:
    hybrid(writer, config)
    whole, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_rope_freq_base(whole["rope_theta"])
    writer.add_rope_freq_base_swa(local["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(whole["factor"])
    writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])


def olmo(writer: Writer, config: Any) -> None:
    writer.add_layer_norm_eps(1e-5)
    writer.add_clamp_kqv(config.clip_qkv)


def taps(writer: Writer, config: Any) -> None:
    theta(writer, config)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def delta(writer: Writer, config: Any) -> None:
    theta(writer, config)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", [kind == "linear_attention" for kind in config.layer_types])


def of_delta(key: str, numbers: np.ndarray, config: Any) -> np.ndarray:
    """As llama.cpp's converter has them: decays without their logarithm, taps as a matrix, one more in the gains of norms, and
    value heads dealt out to key heads in turn."""
    if key.endswith(".A_log"):
        numbers = -np.exp(numbers)
    elif "conv1d" in key:
        numbers = numbers[:, 0]
    elif key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        numbers = numbers + 1
    if config.model_type == "qwen3_next":
        return numbers
    heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
    order = np.arange(heads).reshape(config.linear_num_key_heads, -1).T.flatten()
    rows = (order[:, None] * dim + np.arange(dim)).flatten()
    place = key.split(".")[-2 if key.endswith(".weight") else -1]
    if place in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return numbers[order]
    if place in ("in_proj_qkv", "conv1d"):
        first = len(numbers) - len(rows)
        return np.concatenate([numbers[:first], numbers[first:][rows]])
    if place == "in_proj_z":
        return numbers[rows]
    return np.ascontiguousarray(numbers[:, rows]) if place == "out_proj" else numbers


def taken_apart(numbers: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Of Qwen3-Next's queries, keys, values and z, key head by key head: those of all heads."""
    keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // keys * config.linear_value_head_dim
    heads = numbers.reshape(keys, 2 * dim + 2 * group, -1)
    parts = [part.reshape(-1, numbers.shape[1]) for part in np.split(heads, np.cumsum([dim, dim, group]), axis=1)]
    return {"attn_qkv": np.concatenate(parts[:3]), "attn_gate": parts[3]}


TIED = {"tie_word_embeddings": True}
QWEN35 = TEXTS["qwen3.5"]
CASES: dict[str, tuple[str, Any, Add]] = {
    "arcee": ("arcee", ArceeConfig(**SMALL | {"head_dim": 8}), theta),
    "ernie 4.5": ("ernie4_5", Ernie4_5Config(**SMALL), theta),
    "llama": ("llama", LlamaConfig(**SMALL), nothing),
    "mistral": ("llama", MistralConfig(**SMALL | {"sliding_window": 20}), window),
    "qwen2": ("qwen2", Qwen2Config(**SMALL), nothing),
    "qwen3": ("qwen3", Qwen3Config(**SMALL), nothing),
    "gemma": ("gemma", GemmaConfig(**SMALL | TIED), nothing),
    "gemma2": (
        "gemma2", Gemma2Config(**SMALL | TIED | {"sliding_window": 20, "query_pre_attn_scalar": SMALL["head_dim"]}), gemma2,
    ),
    "gemma3": (
        "gemma3",
        Gemma3TextConfig(
            **SMALL | TIED | {"num_hidden_layers": 7, "sliding_window": 20, "query_pre_attn_scalar": SMALL["head_dim"]},
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        gemma3,
    ),
    "gemma3n": ("gemma3n", Gemma3nTextConfig(**GEMMA_3N | {"laurel_rank": 64}), gemma3n),
    "gemma4, keys of other layers": ("gemma4", TEXTS["gemma4, keys of other layers"], gemma4),
    "gemma4, keys are values": ("gemma4", TEXTS["gemma4, keys are values"], gemma4),
    "command r": ("command-r", CohereConfig(**SMALL | TIED | {"head_dim": 8}, logit_scale=0.25), cohere),
    "command r7b": (
        "cohere2",
        Cohere2Config(**SMALL | TIED | {"head_dim": 8, "num_hidden_layers": 5, "sliding_window": 20}, logit_scale=0.7),
        cohere,
    ),
    "exaone 4": (
        "exaone4", Exaone4Config(**SMALL | {"num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 2}), hybrid,
    ),
    "glm": ("chatglm", TEXTS["glm"], half_rotated),
    "glm4": ("glm4", Glm4Config(**SMALL), half_rotated),
    "granite": ("granite", TEXTS["granite"], granite),
    "granite 4 h": ("granitehybrid", TEXTS["granite 4 h"], granite_h),
    "hunyuan": ("hunyuan-dense", HunYuanDenseV1Config(**SMALL | TIED), nothing),
    "jais 2": ("jais2", TEXTS["jais 2"], of_layer_norms),
    "lfm2": ("lfm2", Lfm2Config(**SMALL | {"head_dim": 8}, layer_types=LFM2_LAYERS, block_auto_adjust_ff_dim=False), taps),
    "lfm2, four taps": (
        "lfm2",
        Lfm2Config(
            **SMALL | TIED | {"head_dim": 8}, layer_types=["full_attention", *LFM2_LAYERS[:2]], conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
        ),
        taps,
    ),
    "minicpm3": ("minicpm3", TEXTS["minicpm3, longrope, factors of its files"], latent),
    "mistral3": ("mistral3", TEXTS["ministral3, queries that grow"], ministral),
    "nemotron": ("nemotron", TEXTS["nemotron"], of_layer_norms),
    "nemotron, biases, another share": ("nemotron", TEXTS["nemotron, biases, another share"], of_layer_norms),
    "mamba2": ("mamba2", TEXTS["mamba2"], states_alone),
    "mamba": ("mamba", TEXTS["mamba"], states_alone),
    "falcon mamba": ("mamba", TEXTS["falcon mamba"], states_alone),
    "jamba": ("jamba", TEXTS["jamba"], jamba),
    "jamba, as llama.cpp's converter has it": ("jamba", TEXTS["jamba"], single_expert),
    "nemotron h": ("nemotron_h", TEXTS["nemotron h"], nemotron),
    "nemotron h, 3 of 5 and shared": ("nemotron_h_moe", TEXTS["nemotron h, 3 of 5 and shared"], nemotron),
    "nemotron h, 3 of 5 in fewer numbers": (
        "nemotron_h_moe", TEXTS["nemotron h, 3 of 5 in fewer numbers"], nemotron,
    ),
    "olmo": ("olmo", TEXTS["olmo, clipped"], olmo),
    "olmo2": ("olmo2", Olmo2Config(**SMALL), nothing),
    "olmo3": ("olmo2", TEXTS["olmo3"], olmo3),
    "phi3": ("phi3", Phi3Config(**SMALL | {"head_dim": 8, "pad_token_id": 0, "sliding_window": 25}), window),
    "phi3, longrope of a part": (
        "phi3",
        Phi3Config(
            **SMALL | {"head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 6 * ORIGINAL},
            original_max_position_embeddings=ORIGINAL,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                "short_factor": DIVISORS[1][:3], "long_factor": DIVISORS[4][:3],
            },
        ),
        longrope,
    ),
    "qwen3.5": ("qwen35", QWEN35, delta),
    "qwen3.5, tied, a key head each": (
        "qwen35", Qwen3_5TextConfig(**QWEN35.to_dict() | TIED | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}), delta,
    ),
    "qwen3-next, no experts": (
        "qwen3next",
        Qwen3NextConfig(**SMALL, **DELTA, layer_types=QWEN35.layer_types[:3], mlp_only_layers=[0, 1, 2]),
        delta,
    ),
    "seed-oss": ("seed_oss", SeedOssConfig(**SMALL), nothing),
    "starcoder2": ("starcoder2", TEXTS["starcoder2"], classic),
    "stablelm": ("stablelm", TEXTS["stablelm"], classic),
    "stablelm, side by side": ("stablelm", TEXTS["stablelm, side by side"], classic),
    "pythia": ("gptneox", TEXTS["pythia"], classic),
    "gpt-neox, one after the other": ("gptneox", TEXTS["gpt-neox, one after the other"], classic),
    "gpt2": ("gpt2", TEXTS["gpt2"], classic),
    "bloom": ("bloom", TEXTS["bloom"], by_distance),
    "mpt": ("mpt", TEXTS["mpt, clipped"], by_distance),
    "falcon": ("falcon", TEXTS["falcon"], falcon),
    "falcon, two norms": ("falcon", TEXTS["falcon, two norms"], falcon),
    "falcon 2": ("falcon", TEXTS["falcon 2, another base"], falcon),
    "gpt bigcode": ("starcoder", TEXTS["gpt bigcode"], classic),
    "phi": ("phi2", TEXTS["phi"], classic),
    "smollm3": ("smollm3", SmolLM3Config(**SMALL | {"num_hidden_layers": 5}), theta),
}  # fmt: skip
PAIRS = ("llama", "arcee", "olmo", "granite", "granitehybrid", "nemotron_h", "nemotron_h_moe", "mistral3", "smollm3")
"""Architectures whose files have the rows of a rotary pair side by side, where Hugging Face has halves of a head; those whose
heads don't rotate, too."""


def write(path: Path, arch: str, model: Any, add: Add, leave_out: str = "", flat: bool = False) -> Path:
    """flat: see `of_mamba`."""
    config = model.config
    writer = Writer(path, arch)
    add_shape(writer, config)
    add(writer, config)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    factors = [(f"{name}.weight", buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    factors += [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    parameters = [*model.named_parameters(), *factors]
    streams = [name for name, _ in parameters if re.search(r"\.altup_\w+\.\d+\.", name)]
    for which in dict.fromkeys(name.split(".")[1] for name in streams):
        matrices = torch.stack([parameter.detach() for name, parameter in parameters if name.split(".")[1] == which])
        parameters.append((f"model.{which}.weight", matrices))
    for key, parameter in parameters:
        numbers = parameter.detach().numpy()
        if key in streams:
            continue
        if arch.startswith("nemotron_h"):
            key = key.replace("model.", "backbone.", 1).replace("_correction_bias", "_correction.bias")
        key = key.removeprefix("transformer.") if arch == "bloom" else key
        if "mixer.experts." in key:
            writer.add_tensor(f"blk.{key.split('.')[2]}.ffn_{key.split('.')[-1].removesuffix('_proj')}_exps.weight", numbers)
            continue
        if "in_proj_qkvz" in key:
            for part, rows in taken_apart(numbers, config).items():
                writer.add_tensor(f"blk.{key.split('.')[2]}.{part}.weight", np.ascontiguousarray(rows))
            continue
        if arch.startswith(("qwen35", "qwen3next")):
            numbers, key = of_delta(key, numbers, config), key.replace(".dt_bias", ".dt_proj.bias")
        if "mamba" in key or "mixer" in key:
            groups = 0 if arch in ("mamba", "jamba") else getattr(config, "n_groups", 1)
            numbers, key = of_mamba(key, numbers, flat, groups), key.replace(".dt_bias", ".dt_proj.bias")
        if "shared_mlp.input_linear" in key:
            for part, rows in zip(("gate", "up"), np.split(numbers, 2), strict=True):
                writer.add_tensor(f"blk.{key.split('.')[2]}.ffn_{part}.weight", rows)
            continue
        if arch == "falcon" and "query_key_value" in key:  # as llama.cpp's converter takes it apart
            keys = config.num_kv_heads if config.new_decoder_architecture else 1
            groups = numbers.reshape(keys, config.num_attention_heads // keys + 2, -1, config.hidden_size)
            parts = (part.reshape(-1, config.hidden_size) for part in np.split(groups, [-2, -1], axis=1))
            numbers = np.concatenate(list(parts))
        elif "query_key_value" in key:  # which a folder has head by head
            heads = numbers.reshape(config.num_attention_heads, 3, -1, *numbers.shape[1:])
            numbers = np.ascontiguousarray(heads.swapaxes(0, 1).reshape(numbers.shape))
        if arch == "gpt2" and numbers.ndim == 2 and ".h." in key:
            numbers = np.ascontiguousarray(numbers.T)
        key += ".weight" if key.endswith("correct_output_scale") else ""
        key = key.replace("shared_mlp.output_linear", "mlp.down_proj")  # an MLP of its own there
        name = names.get_name(key, (".weight", ".bias"))
        if name is None:  # its files have experts, which is not what is looked at here
            name = f"blk.{key.split('.')[2]}.ffn_{key.split('.')[-2].removesuffix('_proj')}.weight"
        if arch in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            numbers = numbers + 1
        if "shortconv.conv." in name:
            numbers = numbers[:, 0]
        if arch in PAIRS and ("attn_q." in name or "attn_k." in name):
            halves = numbers.reshape(-1, 2, config.head_dim // 2, *numbers.shape[1:])
            numbers = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))
        if name != leave_out:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_of_a_stablelm_tensors_tell_what_lies_side_by_side(tmp_path: Path) -> None:
    """As in llama.cpp: its converter writes the flag for folders that leave it out, where transformers means the contrary."""
    reference = random_model(TEXTS["stablelm"])
    said = write(tmp_path / "said.gguf", "stablelm", reference, classic)
    other = write(tmp_path / "other.gguf", "stablelm", reference, says_parallel)
    tokens = prompts(TEXTS["stablelm"].vocab_size)[2:4]
    assert torch.equal(*(logits_of(worker_for(path), tokens) for path in (said, other)))


def says_parallel(writer: Writer, config: Any) -> None:
    own = type(config)(**config.to_dict() | {"use_parallel_residual": True})
    classic(writer, own)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(case: str, tmp_path: Path) -> None:
    arch, config, add = CASES[case]
    reference = random_model(config)
    worker = worker_for(write(tmp_path / "m.gguf", arch, reference, add))
    tokens = prompts(config.vocab_size)
    both = logits_of(worker, tokens), expected_logits(reference, tokens)
    actual, expected = (logits.split([len(ids) for ids in tokens]) for logits in both)
    assert all(difference(*rows) < 1e-4 for rows in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    "heads", [[0, 2], [0, 2, 3], [0, 0, 0], [0, -2, 0], ["0", "2", "0"], [False, True, False], [0.0, 2.0, 0.0]], ids=str
)
def test_key_value_heads_by_layer_that_mean_nothing(heads: list[Any], tmp_path: Path) -> None:
    def wrong(writer: Writer, config: Any) -> None:
        taps(writer, config)
        writer.add_array("lfm2.attention.head_count_kv", heads)

    arch, config, _ = CASES["lfm2"]
    with pytest.raises(CheckpointError, match=r"'lfm2.attention.head_count_kv' must be"):
        worker_for(write(tmp_path / "m.gguf", arch, random_model(config), wrong))


@pytest.mark.parametrize(("arch", "like"), [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3")])
def test_of_a_model_that_sees_the_part_that_writes(arch: str, like: str, tmp_path: Path) -> None:
    def positions(writer: Writer, config: Any) -> None:
        writer.add_rope_dimension_sections([4, 4, 4, 0])
        writer.add_uint32(f"{arch}.n_deepstack_layers", 1)

    reference = random_model(CASES[like][1])
    worker, tokens = worker_for(write(tmp_path / "m.gguf", arch, reference, positions)), prompts(513)
    assert difference(logits_of(worker, tokens), expected_logits(reference, tokens)) < 1e-4


def test_bfloat16_gains_of_gemma_lose_nothing(tmp_path: Path) -> None:
    """The file has 1 more in float32; in bfloat16 that would take most bits from a small number. Numbers below 2**-16 lose some
    in float32 too."""
    arch, config, add = CASES["gemma3"]
    reference = random_model(config)
    draw = torch.Generator().manual_seed(0)
    vectors = {name: parameter for name, parameter in reference.named_parameters() if parameter.dim() == 1}
    gains = {name: torch.rand(p.shape, generator=draw) * 0.06 + 2**-13 for name, p in vectors.items()}
    gains = {name: (gain * torch.sign(torch.randn(gain.shape, generator=draw))).bfloat16() for name, gain in gains.items()}
    for name, parameter in reference.named_parameters():
        parameter.data = (gains[name] if name in gains else parameter.data.bfloat16()).float()
    worker = worker_for(write(tmp_path / "m.gguf", arch, reference, add), dtype="bfloat16")
    block, layer = worker.model.blocks[2], "model.layers.2"
    for name, gain in (
        ("input_layernorm", block.attention_norm.weight), ("self_attn.q_norm", block.mixer.norm.q),
        ("self_attn.k_norm", block.mixer.norm.k), ("post_attention_layernorm", block.after_attention.weight),
        ("pre_feedforward_layernorm", block.mlp_norm.weight), ("post_feedforward_layernorm", block.after_mlp.weight),
    ):  # fmt: skip
        assert torch.equal(gain, gains[f"{layer}.{name}.weight"])


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_the_largest_gemmas(arch: str, layers: int, tmp_path: Path) -> None:
    """query_pre_attn_scalar of the 27B models: hidden_size / num_attention_heads. No key of a file says so."""
    _, config, add = CASES[arch]
    config = type(config)(**config.to_dict() | {"num_hidden_layers": layers, "layer_types": None})
    worker = worker_for(write(tmp_path / "m.gguf", arch, random_model(config), add))
    assert {block.mixer.scale for block in worker.spec.blocks} == {(48 / 6) ** -0.5}


def test_early_gemma2_files_say_nothing_of_their_window_and_caps(tmp_path: Path) -> None:
    spec = worker_for(write(tmp_path / "m.gguf", "gemma2", random_model(CASES["gemma2"][1]), nothing)).spec
    assert [block.mixer.window for block in spec.blocks] == [4096, None, 4096]
    assert (spec.blocks[0].mixer.softcap, spec.logit_softcap) == (50.0, 30.0)


@pytest.mark.parametrize("kind", [1, [True, False, True]], ids=["every", "list"])
def test_a_file_may_say_which_layers_have_a_window(kind: Any, tmp_path: Path) -> None:
    def pattern(writer: Writer, config: Any) -> None:
        gemma2(writer, config)
        writer.add_sliding_window_pattern(kind)

    worker = worker_for(write(tmp_path / "m.gguf", "gemma2", random_model(CASES["gemma2"][1]), pattern))
    wanted = [20, None, 20] if isinstance(kind, list) else [None] * 3
    assert [block.mixer.window for block in worker.spec.blocks] == wanted


@pytest.mark.parametrize("keys", [{}, {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}], ids=["plain", "yarn"])
def test_layers_with_a_window_may_have_a_base_of_their_own(keys: dict[str, Any], tmp_path: Path) -> None:
    """llama.cpp's `load_hparams` reads it for Gemma 2, too. A scaling is of all layers."""
    _, config, add = CASES["gemma2"]
    base = write(tmp_path / "m.gguf", "gemma2", random_model(config), add)

    def attentions(**more: Any) -> list[AttentionSpec]:
        said = {f"gemma2.{key}": value for key, value in (keys | more).items()}
        return worker_for(written_anew(base, tmp_path / "changed.gguf", said)).spec.attentions

    before, after = attentions(), attentions(**{"rope.freq_base_swa": 333.0})
    assert {each.window for each in after} == {20, None}
    for old, new in zip(before, after, strict=True):
        assert old.rope is not None
        assert new == (old if old.window is None else replace(old, rope=replace(old.rope, theta=333.0)))


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_layers_with_a_window_may_rotate_another_share_of_their_heads(kind: str, tmp_path: Path) -> None:
    """llama.cpp's `load_hparams` reads it for all architectures."""
    arch, config, add = CASES[kind]
    base, key = write(tmp_path / "m.gguf", arch, random_model(config), add), f"{arch}.rope.dimension_count_swa"
    before = worker_for(base).spec.attentions
    after = worker_for(written_anew(base, tmp_path / "changed.gguf", {key: 4})).spec.attentions
    assert None in {each.window for each in after} != {None}
    for old, new in zip(before, after, strict=True):
        assert old.rope is not None
        assert new == (old if old.window is None else replace(old, rope=replace(old.rope, dim=4)))
    with pytest.raises(CheckpointError, match="rotary dims do not fit heads"):
        worker_for(written_anew(base, tmp_path / "broken.gguf", {key: 1000}))


def test_a_list_of_windows_has_an_entry_a_layer(tmp_path: Path) -> None:
    def pattern(writer: Writer, config: Any) -> None:
        gemma2(writer, config)
        writer.add_sliding_window_pattern([True, False])

    with pytest.raises(CheckpointError, match="sliding_window_pattern must be a list of 3 flags"):
        worker_for(write(tmp_path / "m.gguf", "gemma2", random_model(CASES["gemma2"][1]), pattern))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("gemma2", "blk.1.post_attention_norm.weight"),
        ("gemma3", "blk.6.post_ffw_norm.weight"),
        ("glm4", "blk.0.ffn_up.weight"),
        ("phi3", "blk.2.attn_qkv.weight"),
    ],
)
def test_a_missing_tensor_is_named(case: str, name: str, tmp_path: Path) -> None:
    arch, config, add = CASES[case]
    with pytest.raises(CheckpointError, match=f"1 missing: {name}"):
        worker_for(write(tmp_path / "m.gguf", arch, random_model(config), add, leave_out=name))


def test_norms_of_state_spaces_may_be_vectors(tmp_path: Path) -> None:
    arch, config, add = CASES["granite 4 h"]
    files = [write(tmp_path / f"{flat}.gguf", arch, random_model(config), add, flat=flat) for flat in (False, True)]
    assert torch.equal(*(logits_of(worker_for(file), prompts(513)) for file in files))


def test_a_granite_file_may_have_no_positions(tmp_path: Path) -> None:
    def without(writer: Writer, config: Any) -> None:
        granite(writer, config)
        writer.add_rope_scaling_finetuned(False)

    worker = worker_for(write(tmp_path / "m.gguf", "granite", random_model(CASES["granite"][1]), without))
    assert {block.mixer.rope for block in worker.spec.blocks} == {None}


@pytest.mark.parametrize(
    ("keys", "factor"),
    [({"rope.scaling.factor": 4.0}, 4.0), ({"rope.scale_linear": 4.0}, 4.0),
     ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
     ({"rope.scaling.type": "none", "rope.scale_linear": 4.0}, 1.0)],
)  # fmt: skip
def test_positions_are_divided_by_a_factor_unless_a_file_says_none(keys: dict[str, Any], factor: float, tmp_path: Path) -> None:
    """llama.cpp's `load_hparams` has "linear" where no type is."""
    arch, config, add = CASES["qwen2"]
    base = write(tmp_path / "m.gguf", arch, random_model(config), add)
    changed = written_anew(base, tmp_path / "changed.gguf", {f"{arch}.{key}": value for key, value in keys.items()})
    rope = {"rope_type": "linear", "factor": factor, "rope_theta": config.rope_parameters["rope_theta"]}
    expected = random_model(type(config)(**config.to_dict() | {"rope_parameters": rope}))
    assert difference(logits_of(worker_for(changed), prompts(500)), expected_logits(expected, prompts(500))) < 1e-4


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_positions_with_divisors_are_not_divided_again(kind: str, tmp_path: Path) -> None:
    arch, config, add = CASES["gemma4, keys of other layers"]
    base = write(tmp_path / "m.gguf", arch, random_model(config), add)
    keys = {f"{arch}.rope.scaling.type": kind, f"{arch}.rope.scaling.factor": 4.0}
    with pytest.raises(UnsupportedError, match=f"'{kind}' beside a tensor 'rope_freqs.weight'"):
        worker_for(written_anew(base, tmp_path / "changed.gguf", keys))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_positions_of_longrope_are_not_divided_as_well(key: str, tmp_path: Path) -> None:
    """llama.cpp does both."""
    arch, config, add = CASES["phi3, longrope of a part"]
    base = write(tmp_path / "m.gguf", arch, random_model(config), add)
    with pytest.raises(UnsupportedError, match="a factor of 4 beside longrope's factors"):
        worker_for(written_anew(base, tmp_path / "changed.gguf", {f"{arch}.{key}": 4.0}))
    keys = {f"{arch}.{key}": 4.0, f"{arch}.rope.scaling.type": "none"}
    plain, named = worker_for(base), worker_for(written_anew(base, tmp_path / "changed.gguf", keys))
    assert plain.spec == named.spec


EXPERTS = {"expert_count": 4, "expert_used_count": 2}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts where there are none": ("gemma3", EXPERTS, "gemma3 with experts"),
    "weights of experts": ("llama", {**EXPERTS, "expert_weights_scale": 2.5}, "experts times 2.5"),
    "a sigmoid": ("llama", {**EXPERTS, "expert_gating_func": 2}, "not weighed by a softmax"),
    "layers that see": ("granite", {"deepstack_mapping": [-1, 0, 1]}, "layers of a Granite that see"),
    "groups of experts": ("llama", {**EXPERTS, "expert_group_count": 2}, "chosen by groups"),
    "heads that grow": ("llama", {"rope.scaling.attn_factor": 0.5}, "rope.scaling.attn_factor 0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_can_not_be_followed(case: str, tmp_path: Path) -> None:
    arch, keys, message = REFUSED[case]
    _, config, usual = CASES[arch]

    def add(writer: Writer, config: Any) -> None:
        usual(writer, config)
        for key, value in keys.items():
            kinds = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
            kinds[type(value)](f"{arch}.{key}", value)

    with pytest.raises(UnsupportedError, match=message):
        worker_for(write(tmp_path / "m.gguf", arch, random_model(config), add))


def fused(whole: Path, path: Path, arch: str) -> Path:
    """The same file with q, k and v of a layer, and their biases, as one."""
    writer = gguf.GGUFWriter(path, arch)
    reader = gguf.GGUFReader(whole)
    for name, field in reader.fields.items():
        if name.startswith(arch):
            writer.add_key_value(name, field.contents(), field.types[0])
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    for query in [name for name in found if "attn_q." in name]:
        parts = [found.pop(query.replace("attn_q.", f"attn_{part}.")) for part in "qkv"]
        found[query.replace("attn_q.", "attn_qkv.")] = np.concatenate(parts)
    for name, numbers in found.items():
        writer.add_tensor(name, np.array(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_bias_of_q_k_and_v_as_one(tmp_path: Path) -> None:
    """A file that some converters write of Qwen2."""
    arch, config, add = CASES["qwen2"]
    whole = write(tmp_path / "whole.gguf", arch, random_model(config), add)
    tokens = prompts(config.vocab_size)
    assert torch.equal(*(logits_of(worker_for(path), tokens) for path in (whole, fused(whole, tmp_path / "fused.gguf", arch))))
