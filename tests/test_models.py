"""Every family and rope scaling against transformers in fp32: logits of whole prompts, and 64 greedy tokens in a batch."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AXK1Config,
    AXK2Config,
    BailingHybridConfig,
    BambaConfig,
    BitNetConfig,
    BloomConfig,
    Cohere2Config,
    Cohere2MoeConfig,
    CohereCompassConfig,
    CohereCompassTextConfig,
    CohereConfig,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    DoryConfig,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5_VLMoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneConfig,
    ExaoneMoeConfig,
    FalconConfig,
    FalconH1Config,
    FalconMambaConfig,
    FlexOlmoConfig,
    FlintConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HrmTextConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    HYV4Config,
    Jais2Config,
    JambaConfig,
    KimiLinearConfig,
    Kolibri1Config,
    LagunaConfig,
    LaraMiniConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm2VlConfig,
    Lfm3Config,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    Mamba2Config,
    MambaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniCPM3Config,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    MllamaConfig,
    MptConfig,
    NanoChatConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen4ExpTextConfig,
    SarvamMoEConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
    YoutuConfig,
    Zamba2Config,
    ZayaConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engines import SMALL, engine_for, greedy, num_parameters, random_model, run, save, worker_for
from nanovllm_cli.batch import Batch
from nanovllm_cli.errors import CheckpointError, NanovllmError, UnsupportedError
from nanovllm_cli.models.families import spec_from_hf
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.planning.facts import facts_of, parameters
from nanovllm_cli.rope_spec import TemperatureSpec
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.tensor_names import matrix_types

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # it is one, and is not among them
PROMPT_LENS = [1, 3, 17, 31, 40, 63, 64, 90]
ORIGINAL = 32


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | values}


DIVISORS = {n: [1.0 + 0.05 * i * n for i in range(12)] for n in (1, 4)}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 8.0}
GRANITE_4 = SMALL | {
    "head_dim": 8, "num_local_experts": 0, "shared_intermediate_size": 74, "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 6,
}  # fmt: skip
LATENT = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "num_key_value_heads": 6, "q_lora_rank": 28, "kv_lora_rank": 40, "qk_nope_head_dim": 18, "qk_rope_head_dim": 12,
    "v_head_dim": 22,
}  # fmt: skip
LATENT_EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 33, "n_shared_experts": 1,
                  "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}  # fmt: skip
INDEXER = {"index_n_heads": 20, "index_head_dim": 20, "index_topk": 9}
"""So many heads that no token's score is zero by all of them: of equal ones transformers takes any."""
MINICPM3 = LATENT | {"v_head_dim": None}
GRANITE_4_H = GRANITE_4 | {
    "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 6, "mamba_d_state": 16,
}
BAMBA = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 16, "num_attention_heads": 4,
}
TWO_LAYERS = SMALL | {"num_hidden_layers": 2}
WIDE_EXPERTS = TWO_LAYERS | {"head_dim": 8, "intermediate_size": 33}
EXAONE_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 33, "first_k_dense_replace": 1}
CLASSIC = {name: value for name, value in SMALL.items() if name != "head_dim"}
WHOLE_HEADS = {name: value for name, value in CLASSIC.items() if name != "num_key_value_heads"}
GPT2_SIZES = {"vocab_size": 513, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 200, "bos_token_id": 0,
              "eos_token_id": 1}  # fmt: skip
GPT_NEO = {"vocab_size": 513, "hidden_size": 48, "num_layers": 3, "num_heads": 6, "max_position_embeddings": 200,
           "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
FALCON = {"vocab_size": 513, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_hidden_size": 70,
          "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
MPT = {"vocab_size": 513, "d_model": 48, "n_layers": 2, "n_heads": 6, "max_seq_len": 256}
OPT = {"vocab_size": 513, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_dim": 70,
       "max_position_embeddings": 200, "word_embed_proj_dim": 48, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
SWA = SMALL | {"head_dim": 8, "sliding_window": 20}
NEMOTRON = {name: value for name, value in SMALL.items() if name != "num_hidden_layers"} | {
    "hybrid_override_pattern": "M-M*-MM--*", "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 3, "ssm_state_size": 16,
}
MAMBA2 = {
    "vocab_size": 512, "hidden_size": 48, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 16, "state_size": 24, "n_groups": 3,
    "layer_norm_epsilon": 1e-5, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MAMBA = {
    "vocab_size": 513, "hidden_size": 48, "num_hidden_layers": 3, "state_size": 16, "layer_norm_epsilon": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
JAMBA = {name: value for name, value in SMALL.items() if name not in ("head_dim", "tie_word_embeddings")} | {
    "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 16,
}
NEMOTRON_EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 33,
                    "moe_shared_expert_intermediate_size": 41, "routed_scaling_factor": 2.5}  # fmt: skip
FALCON_H1 = SMALL | {
    "head_dim": 24, "mamba_d_ssm": 60, "mamba_n_heads": 6, "mamba_d_head": 10, "mamba_d_state": 16, "mamba_n_groups": 2,
    "embedding_multiplier": 5.7, "lm_head_multiplier": 0.4, "key_multiplier": 0.6, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7, "mlp_multipliers": [0.9, 0.6],
    "ssm_multipliers": [0.7, 0.8, 1.1, 1.4, 0.6],
}
ZAMBA2: dict[str, Any] = {name: value for name, value in CLASSIC.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"], "num_mem_blocks": 2,
    "adapter_rank": 8, "n_mamba_heads": 6, "mamba_d_state": 16, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}
ZAYA: dict[str, Any] = {name: value for name, value in SMALL.items() if name not in ("intermediate_size", "head_dim")} | {
    "head_dim": 20, "num_experts": 5, "moe_intermediate_size": 33, "router_hidden_size": 22, "tie_word_embeddings": True,
}
MIMO: dict[str, Any] = {
    "v_head_dim": 10, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "sliding_window": 20,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
LAGUNA = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "moe_routed_scaling_factor": 1.7,
}
KOLIBRI = {name: value for name, value in SMALL.items() if name != "intermediate_size"}
LFM2_LAYERS = ["conv", "full_attention", "conv"]
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 20}
DELTA_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
OLMO_HYBRID = {name: value for name, value in SMALL.items() if name != "head_dim"} | DELTA | {"num_hidden_layers": 4}
KIMI = {name: value for name, value in SMALL.items() if name not in ("head_dim", "num_key_value_heads")} | {
    "num_hidden_layers": 5, "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 18, "qk_rope_head_dim": 6,
    "v_head_dim": 14, "linear_head_dim": 12, "linear_num_heads": 6, "num_local_experts": 5, "num_experts_per_tok": 3,
    "moe_intermediate_size": 33,
}
LING_3 = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"} | {
    "num_hidden_layers": 5, "layer_group_size": 2, "num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 6, "v_head_dim": 14, "head_dim": 12, "num_local_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 33, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
    "kda_lower_bound": -2.5,
}
HRM = {name: value for name, value in SMALL.items() if name not in ("num_hidden_layers", "num_key_value_heads")} | {
    "num_hidden_layers": 2,
}
DORY = SMALL | {
    "num_hidden_layers": 5, "n_input_layers": 1, "n_output_layers": 2, "n_recurrent_loops": 3, "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "initializer_range": 1.0, "ngpt_alpha_init": 0.4,
}
LARA = {name: value for name, value in SMALL.items() if name != "intermediate_size"} | DELTA | {
    "num_hidden_layers": 4, "tie_word_embeddings": True, "sliding_window": 20, "num_experts": 5, "num_experts_per_tok": 3,
    "moe_intermediate_size": 33, "shared_expert_intermediate_size": 41,
}
GEMMA_4 = SMALL | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 40,
    "sliding_window": 20, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
}
GEMMA_4_E = GEMMA_4 | {
    "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 513, "num_hidden_layers": 6, "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"],
    "use_double_wide_mlp": True,
}
GEMMA_4_LARGE = GEMMA_4 | {
    "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}
GEMMA_3N = SMALL | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20,
    "tie_word_embeddings": True, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 513, "num_kv_shared_layers": 2,
    "laurel_rank": 11, "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.0], "altup_num_inputs": 4,
}
CASES: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "llama, bias, tied, group 1": LlamaConfig(
        **SMALL | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6}
    ),
    "llama, head dim 80, group 8": LlamaConfig(
        **SMALL | {"head_dim": 80, "num_attention_heads": 8, "num_key_value_heads": 1, "hidden_size": 40}
    ),
    "arcee": ArceeConfig(**SMALL | {"head_dim": 8}, **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    "arcee, biases, tied": ArceeConfig(**SMALL | {"head_dim": 8, "mlp_bias": True, "tie_word_embeddings": True}),
    "apertus": ApertusConfig(
        **SMALL | {"head_dim": 8},
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    ),
    "llama, linear": LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
    "llama, dynamic": LlamaConfig(**SMALL | {"max_position_embeddings": ORIGINAL}, **rope("dynamic", factor=6.0)),
    "llama, llama3": LlamaConfig(
        **SMALL,
        **rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
        ),
    ),
    "llama, yarn": LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    "llama, yarn, mscale": LlamaConfig(
        **SMALL,
        **rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=ORIGINAL,
            mscale=1.0,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    ),
    "llama, longrope": LlamaConfig(
        **SMALL,
        **rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=ORIGINAL,
            short_factor=DIVISORS[1],
            long_factor=DIVISORS[4],
        ),
    ),
    "mistral, window": MistralConfig(**SMALL | {"sliding_window": 20}),
    "mistral, no window, group 3": MistralConfig(
        **SMALL | {"sliding_window": None, "num_attention_heads": 3, "num_key_value_heads": 1}
    ),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, tied, window in later layers": Qwen2Config(
        **SMALL
        | {"use_sliding_window": True, "sliding_window": 25, "max_window_layers": 1, "tie_word_embeddings": True}
    ),
    "qwen3": Qwen3Config(**SMALL),
    "gemma": GemmaConfig(**SMALL | {"tie_word_embeddings": True}),
    "vaultgemma": VaultGemmaConfig(
        **SMALL | {"query_pre_attn_scalar": 40, "sliding_window": 20, "tie_word_embeddings": True},
    ),
    "gemma2, caps, window in every other layer": Gemma2Config(
        **SMALL | {"tie_word_embeddings": True, "sliding_window": 20, "query_pre_attn_scalar": 40}
    ),
    "gemma3, ropes of two bases": Gemma3TextConfig(
        **SMALL | {"num_hidden_layers": 6, "tie_word_embeddings": True, "sliding_window": 20, "query_pre_attn_scalar": 17},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma3, head dim 80, a cap on logits": Gemma3TextConfig(
        **SMALL | {"head_dim": 80, "final_logit_softcapping": 5.0, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
        sliding_window=30, attn_logit_softcapping=0.5,  # which nothing reads
    ),
    "glm4": Glm4Config(**SMALL),
    "granite": GraniteConfig(**SMALL, **GRANITE),
    "granite moe, 2 of 5": GraniteMoeConfig(
        **SMALL | {"intermediate_size": 33}, num_local_experts=5, num_experts_per_tok=2, **GRANITE
    ),
    "granite 4, all attention": GraniteMoeHybridConfig(**GRANITE_4, **GRANITE, position_embedding_type="rope"),
    "granite 4, no positions": GraniteMoeHybridConfig(**GRANITE_4, **GRANITE),
    "granite 4, another activation": GraniteMoeHybridConfig(**GRANITE_4, **GRANITE, hidden_act="gelu"),
    "ernie 4.5, biases": Ernie4_5Config(**SMALL | {"tie_word_embeddings": False}, use_bias=True),
    "ernie 4.5": Ernie4_5Config(**SMALL),
    "seed-oss": SeedOssConfig(**SMALL),
    "seed-oss, other biases": SeedOssConfig(**SMALL, attention_bias=False, attention_out_bias=True, mlp_bias=True),
    "lfm2": Lfm2Config(**SMALL, layer_types=LFM2_LAYERS),
    "lfm2, four taps, biases, tied": Lfm2Config(
        **SMALL | {"tie_word_embeddings": True}, full_attn_idxs=[0], conv_L_cache=4, conv_bias=True, block_multiple_of=10,
        block_ffn_dim_multiplier=1.3,
    ),
    "lfm2, all attention": Lfm2Config(**SMALL, block_auto_adjust_ff_dim=False),
    "glm": GlmConfig(**SMALL | {"pad_token_id": 0}),
    "glm, no biases, tied": GlmConfig(**SMALL | {"pad_token_id": 0, "attention_bias": False, "tie_word_embeddings": True}),
    "nemotron": NemotronConfig(**SMALL),
    "nemotron, biases, another share": NemotronConfig(
        **SMALL, mlp_bias=True, attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 1e3,
                                                                      "partial_rotary_factor": 0.25},
    ),
    "code world model": CwmConfig(**SMALL | {"num_hidden_layers": 5, "pad_token_id": 0}, sliding_window=20),
    "helium": HeliumConfig(**SMALL | {"pad_token_id": 0, "head_dim": 8}),
    "helium, biases": HeliumConfig(**SMALL | {"pad_token_id": 0, "head_dim": 8}, attention_bias=True, mlp_bias=True),
    "jais 2": Jais2Config(**SMALL | {"pad_token_id": 0}),
    "ministral": MinistralConfig(
        **SMALL, sliding_window=20, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    ),
    "hyperclova x": HyperCLOVAXConfig(
        **SMALL, embedding_multiplier=3.0, residual_multiplier=0.22, attention_multiplier=0.2, logits_scaling=0.4,
    ),
    "hyperclova x, without outer norms": HyperCLOVAXConfig(**SMALL, use_post_norm=False, residual_multiplier=0.3),
    "laguna, 2 of 5 and shared": LagunaConfig(
        **SMALL | {"num_hidden_layers": 4}, **LAGUNA, num_attention_heads_per_layer=[4, 6, 6, 4], sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0,
                               "original_max_position_embeddings": ORIGINAL},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
        },
    ),
    "laguna, a gate a number": LagunaConfig(**SMALL, **LAGUNA | {"gating": "per-element"}),
    "mellum, 2 of 5": MellumConfig(
        **SMALL | {"num_hidden_layers": 4}, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=20,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
    ),
    "mellum, of one base": MellumConfig(
        **SMALL | {"num_hidden_layers": 4}, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=20,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "mellum, weights as they are": MellumConfig(
        **SMALL, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False
    ),
    "mellum, as its config has it": MellumConfig(**SMALL, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24),
    "cohere compass": CohereCompassTextConfig(
        **SMALL | {"pad_token_id": 0, "head_dim": 8}, sliding_window=20, logit_scale=0.4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    ),
    "zamba2, two shared": Zamba2Config(**ZAMBA2 | {"rms_norm_eps": 0.01}),
    "zamba2, one shared, adapters of attention, positions, groups, time steps that are held": Zamba2Config(**ZAMBA2 | {
        "num_hidden_layers": 2, "layers_block_type": ["hybrid", "hybrid"], "num_mem_blocks": 1,
        "use_shared_attention_adapter": True, "use_mem_rope": True, "mamba_ngroups": 3, "time_step_min": 0.4,
        "mamba_d_conv": 3, "hidden_act": "silu",
    }),
    "zaya, 1 of 5 or none": ZayaConfig(**ZAYA),
    "zaya, longer convolutions, windows, a head of its own": ZayaConfig(**ZAYA | {
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "cca_time0": 3, "cca_time1": 3, "sliding_window": 20,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"], "lm_head_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 1.0},
                            "hybrid_sliding": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    }),
    "zaya, one convolution, a group of all": ZayaConfig(**ZAYA | {"num_key_value_heads": 1, "cca_time0": 1, "num_experts": 3}),
    "mimo v2, 2 of 5": MiMoV2FlashConfig(**SMALL | {"num_hidden_layers": 4, "num_key_value_heads": 3}, **MIMO),
    "lfm3": Lfm3Config(
        **SMALL | {"num_hidden_layers": 5}, sliding_window=20,
        layer_types=["conv", "conv", "full_attention", "sliding_attention", "conv"],
    ),
    "lfm3, as its config has it, tied": Lfm3Config(
        **SMALL | {"num_hidden_layers": 7, "head_dim": 24, "tie_word_embeddings": True}, sliding_window=9, conv_bias=True
    ),
    "lfm3, without gates and outer norms": Lfm3Config(
        **SMALL, use_sandwich_norm=False, use_attention_gate=False, conv_L_cache=4, sliding_window=None,
        layer_types=["full_attention", "conv", "conv"],
    ),
    "lfm2 moe, 2 of 5": Lfm2MoeConfig(
        **SMALL, layer_types=LFM2_LAYERS, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=34, num_dense_layers=1,
    ),
    "lfm2 moe, weights as they are, none preferred": Lfm2MoeConfig(
        **SMALL, layer_types=LFM2_LAYERS, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=34, num_dense_layers=0,
        norm_topk_prob=False, use_expert_bias=False, routed_scaling_factor=1.5,
    ),
    "starcoder2": Starcoder2Config(**CLASSIC | {"tie_word_embeddings": True}, sliding_window=20, hidden_act="gelu_pytorch_tanh"),
    "starcoder2, no biases": Starcoder2Config(**CLASSIC, use_bias=False, norm_epsilon=0.03),
    "starcoder2, no window, untied": Starcoder2Config(**CLASSIC | {"num_key_value_heads": 6}, sliding_window=None),
    "stablelm": StableLmConfig(**CLASSIC, use_qkv_bias=True, partial_rotary_factor=0.25),
    "stablelm, side by side": StableLmConfig(**CLASSIC, use_parallel_residual=True, partial_rotary_factor=0.5),
    "pythia": GPTNeoXConfig(**WHOLE_HEADS, rotary_pct=0.5),
    "gpt-neox, one after the other": GPTNeoXConfig(**WHOLE_HEADS, use_parallel_residual=False),
    "gpt-neox, few biases": GPTNeoXConfig(
        **WHOLE_HEADS | {"attention_bias": False, "hidden_act": "gelu_fast", "num_hidden_layers": 2},
        **rope("linear", factor=4.0, partial_rotary_factor=0.5),
    ),
    "phi": PhiConfig(**CLASSIC),
    "falcon": FalconConfig(**FALCON),
    "falcon, two norms": FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon, one after the other, biases, keys of each head": FalconConfig(
        **FALCON | {"num_hidden_layers": 2}, multi_query=False, parallel_attn=False, bias=True,
    ),
    "falcon 2, another base": FalconConfig(
        **FALCON | {"tie_word_embeddings": False}, new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1,
        **rope("default", rope_theta=500.0),
    ),
    "bloom": BloomConfig(vocab_size=513, hidden_size=48, n_layer=3, n_head=6, bos_token_id=0, eos_token_id=1),
    "mpt, another scale": MptConfig(**MPT | {"tie_word_embeddings": False}, attn_config={"softmax_scale": 0.3}),
    "mpt, clipped": MptConfig(**MPT | {"n_heads": 4}, attn_config={"clip_qkv": 0.5}),
    "opt": OPTConfig(**OPT),
    "opt, gelu, no biases, norms without weights": OPTConfig(
        **OPT | {"num_hidden_layers": 2, "tie_word_embeddings": False}, activation_function="gelu", enable_bias=False,
        layer_norm_elementwise_affine=False, _remove_final_layer_norm=True,
    ),
    "gpt2": GPT2Config(**GPT2_SIZES, n_inner=70),
    "gpt-neo": GPTNeoConfig(
        **GPT_NEO, attention_types=[[["global", "local"], 1], [["local"], 1]], window_size=20,
        attention_layers=["local", "global", "local"],  # which counts
    ),
    "gpt-j": GPTJConfig(**GPT2_SIZES | {"n_head": 2}, rotary_dim=10, n_inner=70),
    "gpt2, other scales": GPT2Config(
        **GPT2_SIZES | {"n_layer": 2}, scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=0.03,
    ),
    "gpt bigcode": GPTBigCodeConfig(**GPT2_SIZES, n_inner=70),
    "gpt2, exact gelu, untied": GPT2Config(**GPT2_SIZES, activation_function="gelu", tie_word_embeddings=False),
    "command r": CohereConfig(**SMALL | {"head_dim": 8, "tie_word_embeddings": True}, logit_scale=0.25, attention_bias=True),
    "command r7b": Cohere2Config(
        **SMALL | {"head_dim": 8, "num_hidden_layers": 5, "tie_word_embeddings": True, "sliding_window": 20}, logit_scale=0.7,
    ),
    "command a+, 2 of 5 and shared": Cohere2MoeConfig(
        **SMALL | {"num_hidden_layers": 4, "intermediate_size": 33, "tie_word_embeddings": True}, sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"], num_experts=5,
        mlp_layer_types=["dense", *["sparse"] * 3], prefix_dense_intermediate_size=70, num_shared_experts=2,
        expert_selection_fn="sigmoid", logit_scale=0.7,
    ),
    "command a+, 3 of 7, sums, weights as they are, positions with windows alone": Cohere2MoeConfig(
        **TWO_LAYERS | {"head_dim": 8, "intermediate_size": 33}, sliding_window=20, num_experts=7, num_experts_per_tok=3,
        first_k_dense_replace=1, prefix_dense_sliding_window_pattern=3, num_shared_experts=1, expert_selection_fn="sigmoid",
        shared_expert_combination_strategy="sum", norm_topk_prob=False, attention_bias=True, sliding_window_pattern=1,
    ),
    "command a+, 2 of 5 by a softmax": Cohere2MoeConfig(
        **TWO_LAYERS | {"intermediate_size": 33}, sliding_window=20, num_experts=5, rms_norm_eps=1e-5, norm_topk_prob=False,
        sliding_window_pattern=2,
    ),
    "exaone 4, a window in most layers, the first without": Exaone4Config(
        **SMALL | {"sliding_window": 20, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    ),
    "exaone 4, no window, tied": Exaone4Config(
        **SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}
    ),
    "hunyuan, yarn": HunYuanDenseV1Config(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    "hunyuan, another base": HunYuanDenseV1Config(
        **SMALL | {"tie_word_embeddings": True, "attention_bias": True}, **rope("dynamic", factor=1.0, alpha=50.0),
    ),
    "flint, 2 of 5 and shared": FlintConfig(
        **SMALL | {"num_hidden_layers": 4}, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, sliding_window=20,
        shared_expert_intermediate_size=40, mlp_only_layers=[0],
    ),
    "flint, biases, weights as they are, a window first": FlintConfig(
        **TWO_LAYERS | {"tie_word_embeddings": True}, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24,
        sliding_window=20, shared_expert_intermediate_size=40, mlp_only_layers=[1], norm_topk_prob=False, attention_bias=True,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "kolibri, 2 of 5 and shared": Kolibri1Config(
        **KOLIBRI | {"num_hidden_layers": 5}, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, sliding_window=20,
    ),
    "kolibri, weights made 1 together": Kolibri1Config(
        **KOLIBRI | {"num_hidden_layers": 2}, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, sliding_window=20, norm_topk_prob=True,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "nanochat": NanoChatConfig(**SMALL),
    "nanochat, biases, tied, no cap, dynamic": NanoChatConfig(
        **SMALL | {"tie_word_embeddings": True, "head_dim": 16, "max_position_embeddings": ORIGINAL}, attention_bias=True,
        final_logit_softcapping=None, **rope("dynamic", factor=6.0),
    ),
    "hy v3, 3 of 5 and shared": HYV3Config(
        **SMALL, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=33, router_scaling_factor=1.7,
    ),
    "hy v3, dense in between, two shared, tied": HYV3Config(
        **SMALL | {"tie_word_embeddings": True}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        num_shared_experts=2, mlp_layer_types=["sparse", "dense", "sparse"], attention_bias=True,
    ),
    "phimoe, 2 of 5": PhimoeConfig(
        **WIDE_EXPERTS | {"pad_token_id": 0}, num_local_experts=5, attention_bias=True, lm_head_bias=True,
        router_jitter_noise=0.3, rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": DIVISORS[4][:4], "long_factor": DIVISORS[4][:4],
            "short_mscale": 1.24, "long_mscale": 1.24, "original_max_position_embeddings": ORIGINAL, "factor": 4.0,
        },
    ),
    "phimoe, no biases, a window, tied": PhimoeConfig(
        **WIDE_EXPERTS | {"pad_token_id": 0, "tie_word_embeddings": True}, num_local_experts=3, sliding_window=20,
    ),
    "olmo, clipped": OlmoConfig(**SMALL | {"head_dim": 8, "pad_token_id": 0}, clip_qkv=0.1),
    "olmo, biases, tied": OlmoConfig(**SMALL | {"pad_token_id": 0, "tie_word_embeddings": True}, attention_bias=True),
    "olmoe, clipped": OlmoeConfig(**WIDE_EXPERTS, num_experts=5, num_experts_per_tok=3, clip_qkv=0.7),
    "olmo2, group 1": Olmo2Config(**SMALL | {"head_dim": 8, "num_key_value_heads": 6}),
    "olmo3": Olmo3Config(
        **SMALL | {"head_dim": 12, "num_attention_heads": 4, "num_hidden_layers": 5, "sliding_window": 20},
        rope_parameters={
            "full_attention": rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3, window": Phi3Config(**SMALL | {"head_dim": 8, "pad_token_id": 0, "sliding_window": 25}),
    "phi3, longrope of a part": Phi3Config(
        **SMALL | {"head_dim": 8, "pad_token_id": 0, "max_position_embeddings": 6 * ORIGINAL},
        original_max_position_embeddings=ORIGINAL,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": DIVISORS[1][:3], "long_factor": DIVISORS[4][:3],
        },
    ),
    "llama4, 1 of 5 and shared in every second layer, chunks": Llama4TextConfig(
        **SMALL | {"num_hidden_layers": 4, "intermediate_size": 33}, intermediate_size_mlp=70, num_local_experts=5,
        interleave_moe_layer_step=2, attention_chunk_size=64, floor_scale=20, attn_scale=0.4,
        **rope("yarn", factor=8.0, original_max_position_embeddings=ORIGINAL),
    ),
    "llama4, as published": Llama4TextConfig(
        **SMALL | {"num_hidden_layers": 4, "intermediate_size": 33}, intermediate_size_mlp=70, num_local_experts=5,
        interleave_moe_layer_step=2,
    ),
    "llama4, 1 of 7 and shared, no norms": Llama4TextConfig(
        **SMALL | {"intermediate_size": 33, "tie_word_embeddings": True}, num_local_experts=7, use_qk_norm=False,
        no_rope_layers=[0, 1, 1], attn_temperature_tuning=False,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=ORIGINAL),
    ),
    "mistral4, 3 of 5 and shared": Mistral4Config(
        **LATENT | LATENT_EXPERTS | {"num_hidden_layers": 2, "first_k_dense_replace": 0, "pad_token_id": 0},
        **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=1.0,
               llama_4_scaling_beta=0.5),
    ),
    "ministral3, queries that grow": Ministral3Config(
        **SMALL | {"pad_token_id": 0},
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": ORIGINAL,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
        },
    ),
    "smollm3": SmolLM3Config(**SMALL | {"num_hidden_layers": 5}),
    "smollm3, positions in some layers": SmolLM3Config(**SMALL | {"no_rope_layers": [0, 1, 0]}),
    "qwen3, head dim 80, yarn, tied": Qwen3Config(
        **SMALL | {"head_dim": 80, "tie_word_embeddings": True},
        **rope("yarn", factor=2.0, original_max_position_embeddings=ORIGINAL),
    ),
    "qwen3 moe, 3 of 5, a dense layer between": Qwen3MoeConfig(
        **SMALL,
        num_experts=5, num_experts_per_tok=3, moe_intermediate_size=41, norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "qwen3 moe, 1 of 7 in every second layer, weights of all": Qwen3MoeConfig(
        **SMALL | {"tie_word_embeddings": True},
        num_experts=7, num_experts_per_tok=1, moe_intermediate_size=33, norm_topk_prob=False, decoder_sparse_step=2,
    ),
    "gpt-oss, 2 of 5": GptOssConfig(
        **SMALL | {"intermediate_size": 33}, num_local_experts=5, num_experts_per_tok=2, sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, truncate=False),
    ),
    "ernie 4.5, 2 of 5 and shared": Ernie4_5_MoeConfig(
        **SMALL, moe_num_experts=5, moe_k=2, moe_intermediate_size=33, moe_num_shared_experts=2,
    ),
    "ernie 4.5, none shared, every second layer": Ernie4_5_MoeConfig(
        **SMALL, moe_num_experts=7, moe_k=3, moe_intermediate_size=33, moe_num_shared_experts=0, moe_layer_start_index=0,
        moe_layer_interval=2,
    ),
    "glm4 moe, 2 of 5 and shared": Glm4MoeConfig(
        **SMALL, n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=34, attention_bias=True,
        routed_scaling_factor=2.5,
    ),
    "glm4 moe, norms of heads": Glm4MoeConfig(
        **SMALL, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=34, norm_topk_prob=False, use_qk_norm=True,
        n_shared_experts=2, first_k_dense_replace=2,
    ),
    "qwen3.5": Qwen3_5TextConfig(**SMALL | {"num_hidden_layers": 4}, **DELTA, layer_types=DELTA_LAYERS),
    "qwen3.5, tied, a key head each": Qwen3_5TextConfig(
        **SMALL | {"head_dim": 80, "tie_word_embeddings": True, "num_hidden_layers": 5}, **DELTA | {"linear_num_key_heads": 4},
        layer_types=[*DELTA_LAYERS, "full_attention"], linear_conv_kernel_dim=3, **rope("default", partial_rotary_factor=0.5),
    ),
    "qwen3.5 moe, 2 of 5 and shared": Qwen3_5MoeTextConfig(
        **{name: value for name, value in SMALL.items() if name != "intermediate_size"}, **DELTA, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=33, shared_expert_intermediate_size=41, layer_types=DELTA_LAYERS[:3],
    ),
    "qwen4 exp, 2 of 5 and shared": Qwen4ExpTextConfig(
        **{name: value for name, value in SMALL.items() if name != "intermediate_size"}, **DELTA, num_experts=5,
        num_experts_per_tok=2, moe_intermediate_size=33, shared_expert_intermediate_size=41, layer_types=DELTA_LAYERS[:3],
        hc_count=3, hc_lowrank=13, ple_layer_ids=[1], ple_embed_dim=40, heads_per_ngram=4, ngram_vocab_size_base=50,
        split_ngram_parts=3, indexer_n_heads=9, indexer_kv_heads=1, indexer_head_dim=24, indexer_budget=15,
        indexer_compress_ratio=3,
    ),
    "qwen3-next, 3 of 5 and shared": Qwen3NextConfig(
        **SMALL, **DELTA, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=33, shared_expert_intermediate_size=41,
        layer_types=DELTA_LAYERS[:3], mlp_only_layers=[1],
    ),
    "lara mini, 3 of 5 and shared": LaraMiniConfig(**LARA),
    "lara mini, weights as they are, a key head each": LaraMiniConfig(**LARA | {
        "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "norm_topk_prob": False,
        "linear_num_key_heads": 4, "tie_word_embeddings": False,
    }),
    "kimi linear, 3 of 5 and shared": KimiLinearConfig(**KIMI),
    "kimi linear, 3 of 8 in two of four groups, queries by another rank": KimiLinearConfig(**KIMI | {
        "rms_norm_eps": 0.03,  # but not of the norms of what is kept
        "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "q_lora_rank": 16,
        "num_local_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "linear_num_heads": 5,
        "mlp_layer_types": ["dense", "dense", "sparse"], "linear_conv_kernel_dim": 3,
    }),
    "ling 3, 3 of 8 in two of four groups": BailingHybridConfig(**LING_3),
    "ling 3, no floor, queries by another rank": BailingHybridConfig(**LING_3 | {
        "kda_safe_gate": False, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "q_lora_rank": 16, "norm_topk_prob": False, "mlp_layer_types": ["dense", "dense", "sparse"], "short_conv_kernel_size": 3,
        "rms_norm_eps": 0.03, "n_group": 1, "topk_group": 1,
    }),
    "olmo hybrid": OlmoHybridConfig(**OLMO_HYBRID, rope_parameters={"rope_type": "default", "rope_theta": None}),
    "olmo hybrid, positions, biases, betas up to 1": OlmoHybridConfig(**OLMO_HYBRID | {
        "num_hidden_layers": 3, "attention_bias": True, "linear_allow_neg_eigval": False, "linear_num_key_heads": 4,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    }),
    "qwen2 moe, 2 of 5 and shared": Qwen2MoeConfig(
        **{name: value for name, value in SMALL.items() if name != "head_dim"}, num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=33, shared_expert_intermediate_size=41, mlp_only_layers=[0],
    ),
    "gemma3n": Gemma3nTextConfig(**GEMMA_3N),
    "gemma3n, three streams, fewer tokens with numbers, sizes of its own": Gemma3nTextConfig(**GEMMA_3N | {
        "altup_num_inputs": 3, "vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0,
        "intermediate_size": [70, 33, 70, 48], "activation_sparsity_pattern": [0.0, 0.9, 0.0, 0.3],
    }),
    "gemma4, keys of other layers": Gemma4TextConfig(**GEMMA_4_E),
    "gemma4, numbers a layer": Gemma4TextConfig(**GEMMA_4 | {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 513, "final_logit_softcapping": None,
    }),
    "gemma4, keys are values": Gemma4TextConfig(**GEMMA_4_LARGE),
    "gemma4, one piece": Gemma4UnifiedTextConfig(**{
        name: value for name, value in GEMMA_4_LARGE.items() if name != "hidden_size_per_layer_input"
    }),
    "gemma4, 2 of 5 beside": Gemma4TextConfig(
        **GEMMA_4_LARGE, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=33,
    ),
    "deepseek v2, 3 of 5 and shared": DeepseekV2Config(**LATENT | {"q_lora_rank": None}, **LATENT_EXPERTS),
    "deepseek v2, yarn of two shares": DeepseekV2Config(
        **LATENT | {"n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 33, "first_k_dense_replace": 2},
        **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=0.7, mscale_all_dim=0.4),
    ),
    "deepseek v2, 3 of 8 in two of four groups": DeepseekV2Config(
        **LATENT, **LATENT_EXPERTS | {"n_routed_experts": 8}, n_group=4, topk_group=2, topk_method="group_limited_greedy",
    ),
    "deepseek v3, 3 of 8 in two of four groups": DeepseekV3Config(
        **LATENT, **LATENT_EXPERTS | {"n_routed_experts": 8}, n_group=4, topk_group=2
    ),
    "glm4 moe, 2 of 9 in one of three groups": Glm4MoeConfig(
        **SMALL, n_routed_experts=9, num_experts_per_tok=2, moe_intermediate_size=34, n_group=3, topk_group=1,
    ),
    "deepseek v3, 3 of 5 and shared": DeepseekV3Config(**LATENT, **LATENT_EXPERTS, n_group=1, topk_group=1),
    "deepseek v3, halves, weights as they are": DeepseekV3Config(
        **LATENT, **LATENT_EXPERTS | {"n_shared_experts": 2}, n_group=1, topk_group=1, rope_interleave=False,
        norm_topk_prob=False,
        **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm4 moe lite, 3 of 5 and shared": Glm4MoeLiteConfig(
        **{name: value for name, value in LATENT.items() if name != "head_dim"},
        **{name: value for name, value in LATENT_EXPERTS.items() if name != "first_k_dense_replace"}, rms_norm_eps=1e-6,
    ),
    "a.x k1, 3 of 5 and shared": AXK1Config(**LATENT, **LATENT_EXPERTS, n_group=1, topk_group=1),
    "a.x k1, 3 of 8 in two of four groups, dense layers between": AXK1Config(
        **LATENT | {"num_hidden_layers": 4, "tie_word_embeddings": True}, **LATENT_EXPERTS | {"n_routed_experts": 8}, n_group=4,
        topk_group=2, mlp_layer_types=["sparse", "dense", "sparse", "dense"],
        **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=1.0),
    ),
    "a.x k2, 9 of what is before": AXK2Config(**LATENT, **LATENT_EXPERTS, **INDEXER, gated_norm_rank=5),
    "a.x k2, 3 of 8 in two of four groups, dense layers between": AXK2Config(
        **LATENT | {"tie_word_embeddings": True, "rms_norm_eps": 0.02}, **LATENT_EXPERTS | {"n_routed_experts": 8},
        **INDEXER | {"index_topk": 11}, n_group=4, topk_group=2, mlp_layer_types=["sparse", "dense", "sparse"],
        norm_topk_prob=False,
    ),
    "deepseek v3.2, 9 of what is before": DeepseekV32Config(**LATENT, **LATENT_EXPERTS, n_group=1, topk_group=1, **INDEXER),
    "glm 5, a layer goes by another": GlmMoeDsaConfig(
        **LATENT | {"num_hidden_layers": 2}, **LATENT_EXPERTS, n_group=1, topk_group=1, **INDEXER,
        indexer_types=["full", "shared"],
    ),
    "hy 4, a layer goes by another": HYV4Config(
        **{name: value for name, value in (LATENT | LATENT_EXPERTS).items() if name != "first_k_dense_replace"}, **INDEXER,
        indexer_types=["full", "shared", "full"],
    ),
    "hy 4, three streams, all layers choose, held, two groups, stretched": HYV4Config(
        **LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 33},
        **INDEXER | {"index_topk": 600},
        hc_mult=3, hc_magnitude=1.3, hc_eps=1e-2, swiglu_limit=0.5, indexer_types=["full"] * 3, n_group=4, topk_group=2,
        mlp_layer_types=["sparse", "dense", "sparse"], norm_topk_prob=False,
        **rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=1.0),
    ),
    "youtu": YoutuConfig(**LATENT),
    "youtu, queries at once, tied": YoutuConfig(**LATENT | {"q_lora_rank": None, "tie_word_embeddings": True, "v_head_dim": 36}),
    "granite 4 h": GraniteMoeHybridConfig(**GRANITE_4_H, **GRANITE),
    "granite 4 h, no bias, positions, three taps": GraniteMoeHybridConfig(
        **GRANITE_4_H | {"mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_d_state": 24}, **GRANITE,
        position_embedding_type="rope",
    ),
    "granite 4 h, 2 of 5 and shared": GraniteMoeHybridConfig(
        **GRANITE_4_H | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 33}, **GRANITE,
    ),
    "granite moe shared, 2 of 5": GraniteMoeSharedConfig(
        **WIDE_EXPERTS, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=41, **GRANITE,
    ),
    "bamba": BambaConfig(**BAMBA, attn_layer_indices=[1]),
    "bamba, biases, tied, another base": BambaConfig(
        **BAMBA | {"tie_word_embeddings": True}, attn_layer_indices=[0, 2], attention_bias=True, mlp_bias=True,
        mamba_conv_bias=False, rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
    ),
    "mamba2": Mamba2Config(**MAMBA2),
    "mamba2, one group, no bias, three taps, tied": Mamba2Config(
        **MAMBA2 | {"n_groups": 1, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": True},
    ),
    "jamba": JambaConfig(**JAMBA, num_experts=1),
    "jamba, 2 of 5, three taps, tied": JambaConfig(
        **JAMBA | {"mamba_d_conv": 3, "mamba_d_state": 7, "mamba_dt_rank": 5}, num_experts=5, num_experts_per_tok=2,
        expert_layer_period=2, expert_layer_offset=0, tie_word_embeddings=True,
    ),
    "mamba": MambaConfig(**MAMBA),
    "mamba, no bias, three taps, a head of its own": MambaConfig(
        **MAMBA | {"use_conv_bias": False, "conv_kernel": 3, "expand": 1, "time_step_rank": 7}, tie_word_embeddings=False,
    ),
    "falcon mamba": FalconMambaConfig(**MAMBA, tie_word_embeddings=False),
    "nemotron h": NemotronHConfig(**NEMOTRON),
    "nemotron h, one group, no bias, three taps, biases of MLPs": NemotronHConfig(
        **NEMOTRON | {"n_groups": 1, "use_conv_bias": False, "conv_kernel": 3, "mlp_bias": True},
    ),
    "nemotron h, 3 of 5 and shared": NemotronHConfig(
        **NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "MEM*EM-E", "n_groups": 2},
    ),
    "nemotron h, 2 of 8 in one of two groups, weights as they are": NemotronHConfig(
        **NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "E*M", "n_routed_experts": 8, "num_experts_per_tok": 2},
        n_group=2, topk_group=1, norm_topk_prob=False,
    ),
    "nemotron h, 3 of 5 in fewer numbers": NemotronHConfig(
        **NEMOTRON | NEMOTRON_EXPERTS | {"hybrid_override_pattern": "M-*EE", "moe_latent_size": 28},
    ),
    "falcon h1": FalconH1Config(**FALCON_H1),
    "falcon h1, a norm of groups, no bias, tied": FalconH1Config(
        **FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 3, "mamba_conv_bias": False,
                       "mamba_d_conv": 3, "tie_word_embeddings": True, "num_hidden_layers": 2},
    ),
    "bitnet": BitNetConfig(**SMALL | {"head_dim": 8, "tie_word_embeddings": True}),
    "llama, squared relu": LlamaConfig(**SMALL | {"head_dim": 8, "num_hidden_layers": 1}, hidden_act="relu2"),
    "mixtral, 2 of 4, window": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=20),
    "afmoe, 2 of 5 and shared": AfmoeConfig(
        **SMALL | {"num_hidden_layers": 4}, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=33, num_dense_layers=1,
        num_shared_experts=1, route_scale=2.5, sliding_window=20, mup_enabled=True,
    ),
    "granite swa, positions in some layers": GraniteSWAConfig(**SWA, **GRANITE, layer_rope_theta=[1e4, 0, 1e4]),
    "granite moe swa, 3 of 5 and shared": GraniteMoeSWAConfig(
        **SWA | WIDE_EXPERTS, **GRANITE, num_local_experts=5, num_experts_per_tok=3,
        shared_intermediate_size=41,
    ),
    "dots1, 3 of 8 in two of four groups": Dots1Config(
        **TWO_LAYERS | {"num_key_value_heads": 6}, **LATENT_EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2}, n_group=4,
        topk_group=2, norm_topk_prob=True, sliding_window=None,
    ),
    "dots1, weights as they are, a window in the last layers": Dots1Config(
        **TWO_LAYERS, **LATENT_EXPERTS, sliding_window=20, max_window_layers=1,
    ),
    "sarvam moe, 3 of 8 in two of four groups": SarvamMoEConfig(
        **TWO_LAYERS | {"head_dim": 8}, **LATENT_EXPERTS | {"n_routed_experts": 8}, n_group=4, topk_group=2,
        **rope("default", partial_rotary_factor=0.5),
    ),
    "solar open, 3 of 5 and shared": SolarOpenConfig(
        **{name: value for name, value in TWO_LAYERS.items() if name != "intermediate_size"},
        **{name: value for name, value in LATENT_EXPERTS.items() if name != "first_k_dense_replace"},
    ),
    "exaone moe, 2 of 5 and shared, windows": ExaoneMoeConfig(
        **SMALL | {"sliding_window": 20, "sliding_window_pattern": 2}, **EXAONE_EXPERTS,
    ),
    "minicpm3": MiniCPM3Config(**MINICPM3 | {"scale_depth": 2.0, "dim_model_base": 20, "scale_emb": 3}),
    "minicpm3, longrope, factors of its files": MiniCPM3Config(
        **MINICPM3 | {"max_position_embeddings": 6 * ORIGINAL, "num_hidden_layers": 2, "tie_word_embeddings": True},
        **rope("longrope", original_max_position_embeddings=6 * ORIGINAL, short_factor=DIVISORS[1][:6],
               long_factor=DIVISORS[4][:6]),
    ),
    "minimax m2, 3 of 5": MiniMaxM2Config(
        **WIDE_EXPERTS | {"head_dim": 24}, num_local_experts=5, num_experts_per_tok=3,
        **rope("default", partial_rotary_factor=0.5),
    ),
    "hrm, twice three and one": HrmTextConfig(**HRM),
    "hrm, three times one and one, tied": HrmTextConfig(**HRM | {
        "H_cycles": 3, "L_cycles": 1, "num_hidden_layers": 1, "tie_word_embeddings": True, "embedding_scale": 3.7, "head_dim": 8,
        "rms_norm_eps": 0.01,
    }, **rope("linear", factor=4.0)),
    "dory, two layers thrice": DoryConfig(**DORY),
    "dory, one after the other, tied, other bases": DoryConfig(**DORY | {
        "n_recurrent_loops": 1, "n_recurrent_layers": 0, "n_output_layers": 4, "tie_word_embeddings": True, "layer_types": None,
        "rope_parameters": {"sliding_attention": {"rope_type": "linear", "rope_theta": 2e3, "factor": 2.0},
                            "full_attention": {"rope_type": "default", "rope_theta": 5e4}},
    }),
    "hunyuan moe, 3 of 5 and shared, another base": HunYuanMoEV1Config(
        **WIDE_EXPERTS | {"tie_word_embeddings": True}, num_experts=5, moe_topk=3, **rope("dynamic", factor=1.0, alpha=50.0),
    ),
    "olmoe, 3 of 5": OlmoeConfig(**WIDE_EXPERTS, num_experts=5, num_experts_per_tok=3),
    "flex olmo, 2 of 5, weights of those alone": FlexOlmoConfig(
        **WIDE_EXPERTS, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True,
    ),
}  # fmt: skip


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in PROMPT_LENS]


def whole_batch(token_lists: list[list[int]]) -> Batch:
    """All prompts in one forward, each with its own blocks, logits of every row."""
    lens = torch.tensor([len(ids) for ids in token_lists])
    width = -(-int(lens.max()) // 16)
    tables = (1 + torch.arange(width * len(token_lists), dtype=torch.int32)).reshape(-1, width)
    positions = torch.cat([torch.arange(int(n)) for n in lens])
    seq = torch.repeat_interleave(torch.arange(len(lens)), lens)
    return Batch(
        token_ids=torch.tensor([i for ids in token_lists for i in ids]),
        positions=positions,
        rope_lens=torch.maximum(positions + 1, lens[seq]),
        query_starts=torch.cat([torch.zeros(1), lens.cumsum(0)]).int(),
        kv_lens=lens.int(),
        known_lens=lens.int(),
        slots=tables[seq, positions // 16].long() * 16 + positions % 16,
        block_tables=tables,
        logit_rows=torch.arange(len(positions)),
        states=torch.arange(len(lens), dtype=torch.int32),
    )


def forget_lengths(reference: Any) -> None:
    """transformers' dynamic scaling remembers the longest sequence it ever saw; each prompt is to be the first."""
    inner = reference.model
    rotary = getattr(inner, "pos_emb", None) or getattr(inner, "rotary_emb", None)
    if rotary is not None and rotary.rope_type == "dynamic":
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        rotary.register_buffer("inv_freq", rotary.original_inv_freq, persistent=False)


def chosen(reference: Any, ids: list[int], answer: list[int]) -> list[int]:
    """transformers' token behind each part of the answer. One pass over all of it takes a small part of the time of 64, and is as
    good but where a pass has the frequencies of its last token for all, as with these two scalings."""
    if any(kind in str(getattr(reference.config, "rope_parameters", None)) for kind in ("dynamic", "longrope")):
        forget_lengths(reference)
        found = reference.generate(
            torch.tensor([ids]), max_new_tokens=len(answer), do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return found[0, len(ids) :].tolist()
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + answer[:-1]])).logits[0]
    return logits[len(ids) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(case: str, tmp_path: Path) -> None:
    config = CASES[case]
    reference = random_model(config)
    folder = save(reference, tmp_path)
    worker = worker_for(folder)
    tokens = prompts(config.vocab_size)
    with torch.inference_mode():
        hidden = worker.model.run(worker.model.prepare(whole_batch(tokens)), worker.runner.cache)
        actual = worker.model.logits(hidden).split([len(ids) for ids in tokens])
        for ids, rows in zip(tokens, actual, strict=True):
            expected = reference(torch.tensor([ids])).logits[0]
            assert float((rows - expected).norm() / expected.norm()) < 1e-4
    engine = engine_for(worker, max_num_batched_tokens=50)
    outputs = run(engine, [(ids, greedy(64)) for ids in tokens])
    begins_again = case == "phi3, longrope of a part"  # transformers does, where a sequence passes the original length
    for ids, output in zip(tokens, outputs, strict=True):
        if begins_again and len(ids) <= ORIGINAL:
            continue
        answer = list(output.outputs[0].token_ids)
        assert len(answer) == 64
        assert answer == chosen(reference, ids, answer)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
EXAONE_PARTS = {
    "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0", "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj", "self_attn.o_proj": "attn.attention.out_proj",
    **{f"self_attn.{part}_proj": f"attn.attention.{part}_proj" for part in "qkv"},
}  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_an_exaone_is_a_llama_by_other_names(tied: bool, tmp_path: Path) -> None:
    """As EXAONE 3.5 and EXAONE Deep are published, with code of their own."""
    reference = random_model(LlamaConfig(**SMALL | {"tie_word_embeddings": tied}, rope_parameters=LLAMA3))
    folder = save(reference, tmp_path)
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
        outer = {"model.embed_tokens.weight": "transformer.wte.weight", "model.norm.weight": "transformer.ln_f.weight"}
        ours = outer.get(name, name) if inner is None else f"transformer.h.{inner[1]}.{EXAONE_PARTS[inner[2]]}.weight"
        renamed[ours] = tensor
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    own = {"num_hidden_layers": "num_layers", "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
    config = {own.get(key, key): value for key, value in config.items() if key not in ("rope_parameters", "head_dim")}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    more = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "head_dim": SMALL["head_dim"],
            "rope_theta": LLAMA3["rope_theta"], "rope_scaling": scaling}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | more))
    check_what_it_writes(reference, folder)


def test_an_exaone_that_transformers_saved_is_one_and_calls_itself_a_llama(tmp_path: Path) -> None:
    reference = random_model(ExaoneConfig(**SMALL, rope_parameters=LLAMA3))
    folder = save(reference, tmp_path)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    check_what_it_writes(reference, folder)
    config = {"model_type": "exaone", "architectures": ["LlamaForCausalLM"]} | {
        key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "max_position_embeddings")
    }
    spec, like = spec_from_hf(config | {"num_attention_heads": 8}, hf_family(config)), ExaoneConfig()
    assert spec.attention.rope is not None
    assert (spec.attention.num_kv_heads, spec.max_position) == (like.num_key_value_heads, like.max_position_embeddings)
    assert (spec.norm.eps, spec.attention.rope.theta) == (like.rms_norm_eps, like.rope_parameters["rope_theta"])


@pytest.mark.parametrize("case", ["mistral3", "pixtral"])
def test_a_mistral_that_sees_leaves_out_what_mistrals_have(case: str) -> None:
    """As mistral-community/pixtral-12b does: it says nothing of its 32 heads."""
    whole = SEEING[case].to_dict()
    like, usual = MistralConfig(), ("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "sliding_window")
    text = {key: value for key, value in whole["text_config"].items() if key not in usual}
    name = type(SEEING[case]).__name__.replace("Config", "ForConditionalGeneration")
    config = whole | {"text_config": text, "architectures": [name]}
    spec = spec_from_hf(config, hf_family(config))
    found = spec.attention.num_heads, spec.attention.num_kv_heads, spec.max_position, spec.attention.window
    assert found == tuple(getattr(like, key) for key in usual)


@pytest.mark.parametrize("case", ["gpt2", "pythia"])
def test_masks_and_bare_names_of_old_folders_are_no_hindrance(case: str, tmp_path: Path) -> None:
    """As GPT-2 and Pythia are published: masks among the tensors; of the first, no prefix."""
    folder = save(random_model(CASES[case]), tmp_path / "new")
    expected = worker_for(folder).model.logits(torch.ones(1, 48))
    tensors = load_file(folder / "model.safetensors")
    place = "gpt_neox.layers.0.attention." if case == "pythia" else "transformer.h.0.attn."
    tensors |= {f"{place}bias": torch.zeros(1, 1, 8, 8).bool(), f"{place}masked_bias": torch.tensor(-1e9)}
    save_file({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(worker_for(folder).model.logits(torch.ones(1, 48)), expected)
    with open_checkpoint(folder) as checkpoint:
        assert matrix_types(checkpoint) == {"F32"}


def test_learned_positions_stay_as_they_are_in_any_format(tmp_path: Path) -> None:
    folder = save(random_model(CASES["gpt2"]), tmp_path)
    places = torch.arange(7)
    exact, rounded = (worker_for(folder, **quant).model.entry.weight.rows(places, None) for quant in ({}, {"quant": "int8"}))
    assert torch.equal(exact, rounded)


OF_OTHER_KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms of heads": ("stablelm", {"qk_layernorm": True}, "layer norms of heads of q and k"),
    "norms of heads of a Phi": ("phi", {"qk_layernorm": True}, "layer norms of heads"),
    "another activation": ("phi", {"hidden_act": "relu"}, "activation 'relu'"),
    "attention to an encoder": ("gpt2", {"add_cross_attention": True}, "gpt2 that attends to another model"),
    "embeddings of fewer numbers": ("opt", {"word_embed_proj_dim": 24}, "an OPT whose embedding is narrower"),
    "slopes of no MPT": ("mpt, clipped", {"attn_config": {"alibi_bias_max": 16}}, "an MPT with other slopes of distances"),
    "biases of an MPT": ("mpt, clipped", {"no_bias": False}, "an MPT with biases"),
    "norms of queries": ("mpt, clipped", {"attn_config": {"qk_ln": True}}, "an MPT with qk_ln"),
    "a stream that is normed": ("bloom", {"apply_residual_connection_post_layernorm": True}, "a BLOOM whose residual stream"),
    "norms behind": ("opt", {"do_layer_norm_before": False}, "an OPT that norms the residual stream itself"),
    "scores by distance": ("falcon", {"alibi": True}, "a Falcon whose scores say how far a key lies away"),
    "norms of no Falcon": ("falcon", {"num_ln_in_parallel_attn": 2}, "a Falcon with other norms than are published"),
    "keys of each head": ("gpt bigcode", {"multi_query": False}, "gpt_bigcode with keys and values of each head's own"),
}


@pytest.mark.parametrize("what", OF_OTHER_KINDS)
def test_what_other_models_of_a_family_have_is_named(what: str) -> None:
    case, values, message = OF_OTHER_KINDS[what]
    name = type(CASES[case]).__name__.replace("Config", "LMHeadModel" if case == "gpt2" else "ForCausalLM")
    with pytest.raises(UnsupportedError, match=message):
        spec_from_hf(CASES[case].to_dict() | values, hf_family({"architectures": [name]}))


COUNTED = [
    "mamba2", "nemotron h, 3 of 5 in fewer numbers", "falcon h1", "bitnet", "jamba, 2 of 5, three taps, tied", "mamba",
    "falcon mamba", "bamba, biases, tied, another base", "arcee, biases, tied",
    "llama", "llama, bias, tied, group 1", "llama, head dim 80, group 8", "qwen2", "qwen3",
    "qwen3 moe, 3 of 5, a dense layer between", "mixtral, 2 of 4, window",
    "gpt-oss, 2 of 5", "ernie 4.5, 2 of 5 and shared", "lfm2", "lfm2, four taps, biases, tied",
    "lfm2 moe, weights as they are, none preferred", "qwen3.5", "qwen3.5, tied, a key head each",
    "qwen3.5 moe, 2 of 5 and shared", "qwen3-next, 3 of 5 and shared", "qwen2 moe, 2 of 5 and shared",
    "lara mini, 3 of 5 and shared", "olmo hybrid", "olmo hybrid, positions, biases, betas up to 1",
    "kimi linear, 3 of 5 and shared", "kimi linear, 3 of 8 in two of four groups, queries by another rank",
    "gemma3n", "gemma3n, three streams, fewer tokens with numbers, sizes of its own",
    "gemma4, keys of other layers", "gemma4, keys are values", "gemma4, 2 of 5 beside", "granite 4 h", "olmo3", "olmo, clipped",
    "phimoe, 2 of 5", "nanochat", "flint, 2 of 5 and shared",
    "command r7b", "command a+, 2 of 5 and shared", "starcoder2", "stablelm, side by side", "pythia", "gpt2", "phi",
    "bloom", "mpt, clipped", "gpt-neo", "gpt-j", "opt", "opt, gelu, no biases, norms without weights", "falcon, two norms",
    "falcon, one after the other, biases, keys of each head",
    "deepseek v2, 3 of 5 and shared", "youtu", "youtu, queries at once, tied", "granite 4 h, 2 of 5 and shared",
    "mimo v2, 2 of 5", "hy 4, a layer goes by another",
    "zaya, 1 of 5 or none", "zaya, longer convolutions, windows, a head of its own", "zamba2, two shared",
    "zamba2, one shared, adapters of attention, positions, groups, time steps that are held",
    "a.x k1, 3 of 8 in two of four groups, dense layers between",
    "a.x k2, 3 of 8 in two of four groups, dense layers between", "ling 3, 3 of 8 in two of four groups",
    "hrm, twice three and one", "dory, two layers thrice",
]  # fmt: skip


@pytest.mark.parametrize("case", COUNTED)
def test_numbers_are_counted_as_transformers_has_them(case: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CASES[case])
    names = {"_hc.": "other", ".hc_": "other", "norm": "norms", "ln_": "norms",
             "altup": "other", "laurel": "other", "per_layer": "per layer", "embed_out": "head",
             "embed": "embedding", "wte": "embedding", "wpe": "embedding", "attention": "attention", "lm_head": "head",
             "attn": "attention", "lambda_1": "attention", "lambda_2": "mlp",
             **dict.fromkeys((f"mixer.{part}" for part in ("up", "down", "gate.", "experts", "shared", "fc")), "mlp"),
             "mixer": "attention",
             "mamba": "attention", "mlp": "mlp", "feed_forward": "mlp", "experts": "mlp", "router": "mlp",
             "block_sparse_moe": "mlp", ".fc": "mlp", "ffn": "mlp", "conv": "conv",
             "layer_scalar": "other", "_scale": "other", "input_hidden": "other", "z_L_init": "other",
             ".linear.": "other"}  # fmt: skip
    counted: Counter[str] = Counter()
    counts = ("layer_scalar", "e_score_correction_bias", "balancing_biases")
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(counts)]
    for name, parameter in [*model.named_parameters(), *scalars]:
        counted[next(part for mark, part in names.items() if mark in name)] += parameter.numel()
    config = CASES[case].to_dict() | {"architectures": [type(model).__name__]}
    family = hf_family(config)
    assert +Counter(parameters(spec_from_hf(config, family), family.names("hf"))) == counted


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_TEXT = {name: value for name, value in SMALL.items() if name != "head_dim"} | {
    "num_attention_heads": 3, "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
QWEN_VISION = {"depth": 1, "hidden_size": 48, "num_heads": 2, "patch_size": 14}
QWEN3_VISION = QWEN_VISION | {
    "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 48, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
QWEN35_VISION = {name: value for name, value in QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
QWEN_IDS = {"image_token_id": 512, "video_token_id": 511, "vision_start_token_id": 510, "vision_end_token_id": 509}
SEEING: dict[str, Any] = {
    "gemma3": Gemma3Config(
        text_config=CASES["gemma3, ropes of two bases"].to_dict(), vision_config=VISION, mm_tokens_per_image=4,
        image_token_index=512,
    ),
    "gemma4": Gemma4Config(
        text_config=CASES["gemma4, keys of other layers"].to_dict(), audio_config=None, image_token_id=512, video_token_id=511,
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "gemma4, 2 of 5 beside": Gemma4Config(
        text_config=CASES["gemma4, 2 of 5 beside"].to_dict(), audio_config=None, image_token_id=512, video_token_id=511,
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    ),
    "mistral3": Mistral3Config(
        text_config=CASES["mistral, window"].to_dict(), vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=512,
    ),
    "pixtral": LlavaConfig(
        text_config=CASES["mistral, window"].to_dict(), vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=512, vision_feature_layer=-1, vision_feature_select_strategy="full",
    ),
    "mistral4": Mistral3Config(
        text_config=CASES["mistral4, 3 of 5 and shared"].to_dict(), image_token_index=512,
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "llama4": Llama4Config(
        text_config=CASES["llama4, 1 of 5 and shared in every second layer, chunks"].to_dict(), image_token_index=512,
        vision_config={"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16,
                       "vision_output_dim": 16},
    ),
    "cohere compass": CohereCompassConfig(
        text_config=CASES["cohere compass"].to_dict(), vision_config=QWEN3_VISION, **QWEN_IDS,
    ),
    "ernie 4.5 vl": Ernie4_5_VLMoeConfig(
        text_config={key: value for key, value in SMALL.items() if key not in ("head_dim", "pad_token_id")} | {
            "num_attention_heads": 3, "num_key_value_heads": 1, "moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 1,
            "moe_intermediate_size": [36, 20], "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        },
        vision_config=QWEN_VISION | {"hidden_size": 16, "intermediate_size": 16}, image_token_id=512, video_token_id=511,
    ),
    "mllama": MllamaConfig(
        text_config={key: value for key, value in SMALL.items() if key != "head_dim"} | {
            "num_hidden_layers": 5, "cross_attention_layers": [3], "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1,
                       "attention_heads": 2, "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0],
                       "vision_output_dim": 32},
    ),
    "lfm2-vl": Lfm2VlConfig(
        text_config=CASES["lfm2"].to_dict(), vision_config=VISION | {"model_type": "siglip2_vision_model"}, image_token_id=512,
        tie_word_embeddings=False,
    ),
    "qwen2-vl": Qwen2VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION | {"embed_dim": 16}, **QWEN_IDS),
    "qwen2.5-vl": Qwen2_5_VLConfig(
        text_config=QWEN_TEXT, vision_config=QWEN_VISION | {"intermediate_size": 16, "out_hidden_size": 48}, **QWEN_IDS
    ),
    "qwen3-vl": Qwen3VLConfig(text_config=QWEN_TEXT | {"head_dim": 32}, vision_config=QWEN3_VISION, **QWEN_IDS),
    "qwen3-vl, tied": Qwen3VLConfig(
        text_config=QWEN_TEXT | {"head_dim": 32}, vision_config=QWEN3_VISION, **QWEN_IDS, tie_word_embeddings=True
    ),
    "qwen3-vl, 2 of 5 experts": Qwen3VLMoeConfig(
        text_config=QWEN_TEXT | {"head_dim": 32, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 33},
        vision_config=QWEN3_VISION, **QWEN_IDS,
    ),
    "qwen3.5": Qwen3_5Config(
        text_config=CASES["qwen3.5"].to_dict(), vision_config=QWEN35_VISION, **QWEN_IDS, tie_word_embeddings=False
    ),
    "qwen3.5 moe": Qwen3_5MoeConfig(
        text_config=CASES["qwen3.5 moe, 2 of 5 and shared"].to_dict(), vision_config=QWEN35_VISION, **QWEN_IDS,
    ),
}  # fmt: skip


def check_what_it_writes(reference: Any, folder: Path) -> None:
    worker = worker_for(folder)
    tokens = prompts(500)
    with torch.inference_mode():
        inputs = worker.model.prepare(whole_batch(tokens))
        actual = worker.model.logits(worker.model.run(inputs, worker.runner.cache))
        for ids, rows in zip(tokens, actual.split([len(ids) for ids in tokens]), strict=True):
            expected = reference(torch.tensor([ids])).logits[0]
            assert float((rows[:, : expected.shape[1]] - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("case", ["gemma3", "mistral3", "pixtral", "mistral4", "llama4", "mllama", "cohere compass"])
@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_that_sees_the_part_that_writes(case: str, prefix: str, tmp_path: Path) -> None:
    """Under either prefix that its tensors have had on the hub; what sees is left aside."""
    reference = random_model(SEEING[case], auto=AutoModelForImageTextToText)
    folder = save(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    names = {name: name.replace("language_model.model.", prefix).replace("model.language_model.", prefix) for name in tensors}
    assert any("vis" in name for name in names)
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    check_what_it_writes(reference.language_model if case == "llama4" else reference, folder)  # whose whole fails on texts alone


@pytest.mark.parametrize("is_flat", [False, True])
def test_of_an_ernie_that_sees_the_part_that_writes(is_flat: bool, tmp_path: Path) -> None:
    """As transformers saves it, and as it was published: a config in one piece, with what is of texts and of images in lists."""
    reference = random_model(SEEING["ernie 4.5 vl"], auto=AutoModelForImageTextToText)
    folder = save(reference, tmp_path)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    assert tensors["model.layers.1.mlp.experts.9.up_proj.weight"].shape == (20, 48)
    if is_flat:
        text = config.pop("text_config")
        del text["mlp_layer_types"], text["rope_parameters"]
        own = {"moe_num_experts": [5, 5], "moe_layer_start_index": [1, 1], "moe_layer_end_index": [4, 3], "rope_theta": 1e4}
        (folder / "config.json").write_text(json.dumps(text | config | own | {"model_type": "ernie4_5_moe_vl"}))
    check_what_it_writes(reference, folder)


def test_of_an_lfm2_that_sees_the_part_that_writes(tmp_path: Path) -> None:
    reference = random_model(SEEING["lfm2-vl"], auto=AutoModelForImageTextToText)
    folder = save(reference, tmp_path)
    assert any("vision" in name for name in load_file(folder / "model.safetensors"))
    check_what_it_writes(reference, folder)


@pytest.mark.parametrize("case", [case for case in SEEING if case.startswith("qwen")])
@pytest.mark.parametrize("form", ["saved", "published", "nested"])
def test_of_a_qwen_that_sees_the_part_that_writes(case: str, form: str, tmp_path: Path) -> None:
    """As transformers saves it; as it was published, with the older ones' config in one piece and experts turned over; and with
    the older ones' tensors in the place where later ones have them."""
    reference = random_model(SEEING[case], auto=AutoModelForImageTextToText)
    folder = save(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert any("visual" in name for name in tensors)
    config = json.loads((folder / "config.json").read_text())
    is_flat = any(name.startswith("visual.") for name in tensors)
    assert is_flat == case.startswith("qwen2")
    if form == "published" and is_flat:
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        own = {"model_type": config["model_type"], "architectures": config["architectures"]}
        (folder / "config.json").write_text(json.dumps(config | text | own | {"rope_scaling": scaling, "rope_theta": 1e4}))
    if form == "published" and not case.startswith("qwen3.5"):
        turned = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
        save_file(tensors | turned, folder / "model.safetensors")
    if form == "nested" and is_flat:
        names = {name: name.replace("model.layers", "model.language_model.layers") for name in tensors}
        names |= {f"model.{name}": f"model.language_model.{name}" for name in ("embed_tokens.weight", "norm.weight")}
        names |= {name: f"model.{name}" for name in tensors if name.startswith("visual.")}
        save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    check_what_it_writes(reference, folder)


def test_gemma3_from_the_hub_leaves_most_to_be_known() -> None:
    """text_config of google/gemma-3-4b-it as published, and what its model card says of the rest."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    spec = spec_from_hf(config, hf_family(config))
    like = Gemma3Config(**config).text_config
    attention = spec.attentions
    assert (spec.vocab_size, spec.max_position, spec.tied_head) == (like.vocab_size, like.max_position_embeddings, True)
    assert {(a.num_heads, a.num_kv_heads, a.head_dim, a.scale) for a in attention} == {(8, 4, 256, 1 / 16)}
    assert [a.window for a in attention] == [1024 if kind == "sliding_attention" else None for kind in like.layer_types]
    for spec_of, kind in zip(attention, like.layer_types, strict=True):
        rope, wanted = spec_of.rope, like.rope_parameters[kind]
        assert rope is not None
        assert (rope.theta, rope.factor, rope.dim) == (wanted["rope_theta"], wanted.get("factor", 1.0), 256)


def test_a_mistral_of_another_kind_is_refused() -> None:
    config = SEEING["mistral3"].to_dict() | {"architectures": ["Mistral3ForConditionalGeneration"]}
    config["text_config"] |= {"model_type": "mistral5"}
    with pytest.raises(UnsupportedError, match="a text model of the kind 'mistral5'"):
        spec_from_hf(config, hf_family(config))


OF_EACH_KIND = {type(config): case for case, config in reversed(CASES.items()) if case != "exaone"}
UNSAID = {"dots1, 3 of 8 in two of four groups": {"n_shared_experts"}}  # None there, and what is published has some


@pytest.mark.parametrize("case", [*OF_EACH_KIND.values(), "qwen2, tied, window in later layers"])
def test_what_a_config_leaves_out_is_what_transformers_has(case: str) -> None:
    """Each key by itself; or it is refused."""
    kind = type(CASES[case])
    names = {"mistral4": "Mistral4ForCausalLM", **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[kind.model_type]
    named = {"architectures": [names] if isinstance(names, str) else [*names], "model_type": kind.model_type}
    whole = {key: value for key, value in CASES[case].to_dict().items() if key in vars(kind()) or key == "rope_parameters"}
    for key in whole.keys() - UNSAID.get(case, set()):
        rest = {name: value for name, value in whole.items() if name != key} | named
        with contextlib.suppress(CheckpointError, UnsupportedError, StrictDataclassError):
            found = spec_from_hf(rest, hf_family(rest))
            theirs = kind.from_dict(copy.deepcopy(rest)).to_dict() | named
            assert found == spec_from_hf(theirs, hf_family(theirs)), key


def test_a_length_outside_of_what_is_said_of_rotations_counts() -> None:
    raw = CASES["phi3, longrope of a part"].to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    raw["rope_parameters"] = raw["rope_parameters"] | {"original_max_position_embeddings": 77}
    rope = spec_from_hf(raw, hf_family(raw)).attention.rope
    theirs = Phi3Config.from_dict(copy.deepcopy(raw)).rope_parameters["original_max_position_embeddings"]
    assert rope is not None
    assert rope.original_len == theirs == ORIGINAL


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_keys_that_nobody_reads_are_left_aside(prefix: str, tmp_path: Path) -> None:
    """Published folders of Gemma 4 have them in all layers; transformers leaves them aside, and saves none."""
    config = CASES["gemma4, keys of other layers"]
    folder = save(random_model(config), tmp_path)
    expected = worker_for(folder)
    tensors = load_file(folder / "model.safetensors")
    for part, rows in (("k_proj.weight", (48, 48)), ("v_proj.weight", (48, 48)), ("k_norm.weight", (24,))):
        tensors |= {f"model.layers.{i}.self_attn.{part}": torch.full(rows, torch.nan) for i in (3, 4)}
    written = config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    if prefix != "model.":
        tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        written = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": written, "tie_word_embeddings": True}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(written))
    with open_checkpoint(folder) as checkpoint:
        numbers = sum(each.numbers for each in facts_of(checkpoint).classes)
    assert numbers == num_parameters(expected.spec)
    tokens = [(ids, greedy(8)) for ids in prompts(513)[:3]]
    wanted, found = (run(engine_for(worker), tokens) for worker in (expected, worker_for(folder)))
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in wanted]


def test_caps_and_windows_of_none_are_none() -> None:
    config = CASES["gemma2, caps, window in every other layer"].to_dict() | {"architectures": ["Gemma2ForCausalLM"]}
    none = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"))
    spec = spec_from_hf(config | none, hf_family(config))
    assert spec.logit_softcap is None
    assert {(block.mixer.softcap, block.mixer.window) for block in spec.blocks} == {(None, None)}


def test_positions_of_an_olmo3_described_the_old_way_are_stretched_where_there_is_no_window() -> None:
    """As allenai/Olmo-3-7B-Instruct has them; whoever reads its files of today gets a section for each kind."""
    config = CASES["olmo3"].to_dict() | {"architectures": ["Olmo3ForCausalLM"]}
    whole = dict(config.pop("rope_parameters")["full_attention"])
    theta, before = whole.pop("rope_theta"), spec_from_hf(CASES["olmo3"].to_dict() | config, hf_family(config))
    assert spec_from_hf(config | {"rope_scaling": whole, "rope_theta": theta}, hf_family(config)) == before
    assert {(a.window, a.rope.scaling) for a in before.attentions if a.rope} == {(20, "none"), (None, "yarn")}


def test_a_hunyuan_with_experts_is_described_layer_by_layer_where_it_is_published() -> None:
    """As tencent/Hunyuan-A13B-Instruct has it. Two of what all tokens take are one of twice the size."""
    config = CASES["hunyuan moe, 3 of 5 and shared, another base"].to_dict() | {"architectures": ["HunYuanMoEV1ForCausalLM"]}
    listed = {"moe_topk": [3, 3], "moe_intermediate_size": [33, 33], "num_shared_expert": [2, 2], "use_mla": False}
    plain, found = (spec_from_hf(config | more, hf_family(config)).mixture for more in ({}, listed))
    assert plain is not None
    assert found is not None
    assert plain.shared is not None
    assert found.shared is not None
    assert (plain.shared.intermediate_size, found.shared.intermediate_size) == (33, 66)
    assert replace(found, shared=None) == replace(plain, shared=None)
    renamed = {"num_experts_per_tok": config.pop("moe_topk"), "num_local_experts": config.pop("num_experts")}
    assert spec_from_hf(config | renamed, hf_family(config)).mixture == plain, "transformers takes these names, too"


def as_ling(folder: Path) -> None:
    """Makes a Sarvam's folder that of a Ling as it is published: inclusionAI/Ling-mini-2.0 has these keys."""
    config = json.loads((folder / "config.json").read_text())
    rotary = config.pop("rope_parameters")
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"}
    own = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "rope_theta": rotary["rope_theta"],
           "rope_scaling": None, "partial_rotary_factor": rotary["partial_rotary_factor"], "score_function": "sigmoid",
           "use_bias": False, "use_rmsnorm": True, "router_dtype": "fp32", "moe_router_enable_expert_bias": True,
           "moe_shared_expert_intermediate_size": config["moe_intermediate_size"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({renamed.get(key, key): value for key, value in config.items()} | own))


def test_a_ling_as_it_is_published_is_built_like_a_sarvam(tmp_path: Path) -> None:
    reference = random_model(CASES["sarvam moe, 3 of 8 in two of four groups"])
    as_ling(save(reference, tmp_path))
    check_what_it_writes(reference, tmp_path)
    assert worker_for(tmp_path).spec.architecture == "bailing_moe2"


def test_a_phi_with_experts_as_it_is_published() -> None:
    """Frequencies of long texts are their own, other than transformers has them; one factor is for both."""
    short, long = [1.0] * 64, [2.0] * 64
    scaling = {"type": "longrope", "short_factor": short, "long_factor": long, "short_mscale": 1.25, "long_mscale": 1.25,
               "original_max_position_embeddings": 4096}  # fmt: skip
    config = {"architectures": ["PhiMoEForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 1,
              "intermediate_size": 6400, "vocab_size": 32064, "attention_bias": True, "lm_head_bias": True, "rope_theta": 1e4,
              "rope_scaling": scaling, "sliding_window": 131072}  # fmt: skip
    spec = spec_from_hf(config, hf_family(config))
    rope = spec.attention.rope
    assert rope is not None
    assert (rope.short_divisors, rope.long_divisors, rope.attention_factor) == (tuple(short), tuple(long), 1.25)
    assert (rope.original_len, rope.theta, spec.max_position, spec.head_bias) == (4096, 1e4, 131072, True)
    assert spec.mixture is not None
    assert (spec.mixture.num_experts, spec.mixture.nearness) == (16, 0.02)


def test_windows_of_smollm3_are_where_there_are_no_positions() -> None:
    like = SmolLM3Config(**SMALL | {"num_hidden_layers": 5}, use_sliding_window=True, sliding_window=20)
    config = like.to_dict() | {"architectures": ["SmolLM3ForCausalLM"], "layer_types": None}
    found = [block.mixer.window for block in spec_from_hf(config, hf_family(config)).blocks]
    assert found == [20 if kind == "sliding_attention" else None for kind in like.layer_types]


def test_queries_of_a_ministral_described_the_old_way_grow() -> None:
    config = CASES["ministral3, queries that grow"].to_dict() | {"architectures": ["Ministral3ForCausalLM"]}
    before = spec_from_hf(config, hf_family(config))
    config["rope_scaling"] = config.pop("rope_parameters")
    assert spec_from_hf(config, hf_family(config)) == before
    assert {attention.temperature for attention in before.attentions} == {TemperatureSpec(ORIGINAL, 0.5)}
    config["rope_scaling"]["llama_4_scaling_beta"] = 0
    assert spec_from_hf(config, hf_family(config)).attention.temperature is None


@pytest.mark.parametrize("case", ["glm4 moe, 2 of 5 and shared", "ernie 4.5, 2 of 5 and shared"])
def test_layers_that_predict_further_tokens_are_left_aside(case: str, tmp_path: Path) -> None:
    """As the hub's folders have them: behind the others, or under a name of their own."""
    reference = random_model(CASES[case])
    folder = save(reference, tmp_path)
    expected = worker_for(folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    config.pop("num_nextn_predict_layers", None)
    (folder / "config.json").write_text(json.dumps(config))
    further = {name.replace("layers.2.", "layers.3."): tensor for name, tensor in tensors.items() if "layers.2." in name}
    if case.startswith("ernie"):
        further = {name.replace("layers.3", "mtp_block.0"): tensor for name, tensor in further.items()}
    further["model.mtp_emb_norm.0.weight" if case.startswith("ernie") else "model.layers.3.enorm.weight"] = torch.ones(48)
    save_file({name: tensor.clone() for name, tensor in (tensors | further).items()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{len(further)} not part of the model"):
        worker_for(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    found = worker_for(folder)
    assert found.spec == expected.spec
    assert found.weight_bytes == expected.weight_bytes
    with open_checkpoint(folder) as checkpoint:
        assert facts_of(checkpoint).num_parameters == num_parameters(found.spec)


TYPES = {"attention_layers": None}
ODD: dict[str, tuple[str, dict[str, Any], type[NanovllmError], str]] = {
    "kinds of other layers than there are, without a window": (
        "lfm3, without gates and outer norms", {"num_hidden_layers": 1}, CheckpointError, "a list of 1 kinds",
    ),
    "a bias of experts": (
        "qwen3 moe, 3 of 5, a dense layer between", {"mlp_bias": True}, UnsupportedError, "with 'experts.{e}.gate.bias'",
    ),
    "layer types that are no list": ("gemma3, ropes of two bases", {"layer_types": {"a": 1}}, CheckpointError, "must be a list"),
    "layers with positions that are no list": ("smollm3", {"no_rope_layers": {"a": 1}}, CheckpointError, "a list of 5 numbers"),
    "a rope for some layers": (
        "gemma3, ropes of two bases", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, CheckpointError,
        "says nothing of sliding_attention",
    ),
    "an activation that has a gate": ("arcee", {"hidden_act": "silu"}, UnsupportedError, "activation 'silu' is not supported"),
    "another activation": ("gemma", {"hidden_act": "silu"}, UnsupportedError, "activation 'silu' in a gemma model"),
    "another activation in Gemma 2": (
        "gemma2, caps, window in every other layer", {"hidden_activation": "silu"}, UnsupportedError, "in a gemma2 model",
    ),
    "groups that are not alike": ("glm4 moe, 2 of 5 and shared", {"n_group": 2}, CheckpointError, "don't make 2 groups"),
    "layers without experts at the end": (
        "ernie 4.5, 2 of 5 and shared", {"moe_layer_end_index": 1}, UnsupportedError, "last layers have no experts",
    ),
    "a least sum": ("ernie 4.5, 2 of 5 and shared", {"moe_norm_min": 0.1}, UnsupportedError, "divided by 0.1 at least"),
    "biases of experts": ("ernie 4.5, 2 of 5 and shared", {"use_bias": True}, UnsupportedError, "biases of experts"),
    "state spaces alone": ("granite 4, no positions", {"layer_types": ["mamba"] * 3}, UnsupportedError, "no layer has attention"),
    "layers of no kind": ("granite 4, no positions", {"layer_types": [[], {}, 1]}, CheckpointError, "must be a list of 3 kinds"),
    "states of several groups": ("granite 4 h", {"mamba_n_groups": 2}, UnsupportedError, "a state space of 2 groups"),
    "states of another size": ("granite 4 h", {"mamba_d_head": 15}, CheckpointError, "a state space can't have 6 heads of 15"),
    "states over too many tokens": ("granite 4 h", {"mamba_d_conv": 65}, CheckpointError, "and 65 taps"),
    "windows of fewer layers": ("gpt-neo", TYPES | {"attention_types": [[["global"], 2]]}, CheckpointError, "has 2 of 3 layers"),
    "windows of no kind": ("gpt-neo", TYPES | {"attention_types": [[["far"], 3]]}, CheckpointError, "must list pairs of kinds"),
    "windows that are endless": ("gpt-neo", TYPES | {"attention_types": [[["local"], 1 << 40]]}, CheckpointError, "list pairs"),
    "more dims that rotate than there are": ("gpt-j", {"rotary_dim": 26}, CheckpointError, "26 rotary dims do not fit"),
    "layers with attention that there are not": (
        "bamba", {"attn_layer_indices": [3]}, CheckpointError, "'attn_layer_indices' must be a list of layers below 3",
    ),
    "no layers with attention": ("bamba", {"attn_layer_indices": None}, UnsupportedError, "no layer has attention"),
    "biases of states": ("granite 4 h", {"mamba_proj_bias": True}, UnsupportedError, "biases of its state spaces"),
    "an activation of states": ("granite 4 h", {"hidden_act": "gelu"}, UnsupportedError, "a state space behind 'gelu'"),
    "bounded steps": ("granite 4 h", {"time_step_limit": [0.0, 0.1]}, UnsupportedError, "time steps of a state space"),
    "sublayers by a letter that none has": (
        "nemotron h", {"layers_block_type": None, "hybrid_override_pattern": "M-M*-MX--*"}, CheckpointError,
        "'hybrid_override_pattern' must say of 10 layers what they are: M, *, -, E",
    ),
    "a letter too few": (
        "nemotron h", {"layers_block_type": None, "hybrid_override_pattern": "M-M*-M--*", "num_hidden_layers": 10},
        CheckpointError, "'hybrid_override_pattern' must say of 10 layers",
    ),
    "sublayers that are no list": ("nemotron h", {"layers_block_type": {"a": 1}}, CheckpointError, "has no 'num_hidden_layers'"),
    "kinds that are no words": (
        "nemotron h", {"layers_block_type": [[], {}, 1]}, CheckpointError, "'layers_block_type' must say of 3 layers",
    ),
    "sublayers of no kind": ("nemotron h", {"layers_block_type": ["mlp", "conv"]}, CheckpointError, "must say of 2 layers"),
    "sublayers without attention": (
        "nemotron h", {"layers_block_type": ["mamba", "mlp"]}, UnsupportedError, "no layer has attention",
    ),
    "experts of which nothing is said": (
        "nemotron h", {"layers_block_type": ["attention", "moe"], "n_routed_experts": None}, CheckpointError,
        "nothing is said of the experts",
    ),
    "groups that heads can't share": ("nemotron h", {"n_groups": 4}, CheckpointError, "6 heads of a state space can't share 4"),
    "biases of a nemotron's states": ("nemotron h", {"use_bias": True}, UnsupportedError, "a Nemotron with biases of its state"),
    "states behind a gelu": ("nemotron h", {"mamba_hidden_act": "gelu"}, UnsupportedError, "state space behind 'gelu'"),
    "a nemotron with gates": ("nemotron h", {"mlp_hidden_act": "silu"}, UnsupportedError, "activation 'silu' is not supported"),
    "experts in fewer dims": (
        "nemotron h, 3 of 5 and shared", {"moe_latent_size": 0}, CheckpointError, "'moe_latent_size'",
    ),
    "biases of a nemotron's experts": (
        "nemotron h, 3 of 5 and shared", {"mlp_bias": True}, UnsupportedError, "with 'shared.up.bias'",
    ),
    "convolutions over nothing": ("lfm2", {"conv_L_cache": 0}, CheckpointError, "'conv_L_cache' must be"),
    "convolutions over too much": ("lfm2", {"conv_L_cache": 65}, CheckpointError, "at most 64 are believed"),
    "layers of a third kind": ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, UnsupportedError, "layer type 'mamba'"),
    "layers that are no list": ("lfm2", {"layer_types": "conv"}, CheckpointError, "must be a list of 3 kinds"),
    "a layer too few": ("lfm2", {"layer_types": ["conv", "full_attention"]}, CheckpointError, "must be a list of 3 kinds"),
    "convolutions alone": ("lfm2", {"layer_types": ["conv"] * 3}, CheckpointError, "no layer has attention"),
    "attention past the last layer": (
        "lfm2", {"layer_types": None, "full_attn_idxs": [3]}, CheckpointError, "'full_attn_idxs' must be a list of layers",
    ),
    "windows and nothing but convolutions": ("lfm3", {"layer_types": ["conv"] * 5}, CheckpointError, "no layer has attention"),
    "layers of another kind": (
        "lfm3", {"layer_types": ["conv", "conv", "mamba", "conv", "conv"]}, UnsupportedError, "layer type 'mamba'"
    ),
    "experts in layers of a third kind": (
        "laguna, 2 of 5 and shared", {"mlp_layer_types": ["dense", "shared", "sparse", "sparse"]}, CheckpointError,
        "'mlp_layer_types' must be a list of 4",
    ),
    "heads of too few layers": (
        "laguna, 2 of 5 and shared", {"num_attention_heads_per_layer": [4, 6]}, CheckpointError, "must be a list of 4 layers'",
    ),
    "heads that do not share": (
        "laguna, 2 of 5 and shared", {"num_attention_heads_per_layer": [4, 6, 5, 4]}, CheckpointError, "must be a list of 4",
    ),
    "gates of another kind": ("laguna, 2 of 5 and shared", {"gating": "per-layer"}, UnsupportedError, "gates 'per-layer'"),
    "a router with a cap": (
        "laguna, 2 of 5 and shared", {"moe_router_logit_softcapping": 5.0}, UnsupportedError, "a cap of the router's logits",
    ),
    "an MLP of a number below 1": ("lfm2", {"block_ff_dim": 1}, CheckpointError, "an MLP without a row"),
    "value heads that key heads can't share": (
        "qwen3.5", {"linear_num_value_heads": 5}, CheckpointError, "5 value heads can't share 2 key heads evenly",
    ),
    "taps over too much": ("qwen3.5", {"linear_conv_kernel_dim": 65}, CheckpointError, "at most 64 are believed"),
    "states alone": ("qwen3.5", {"layer_types": ["linear_attention"] * 4}, CheckpointError, "no layer has attention"),
    "states of another kind": (
        "qwen3.5", {"layer_types": ["mamba", *DELTA_LAYERS[1:]]}, UnsupportedError, "layer type 'mamba' is not supported",
    ),
    "too few kinds of layers": ("qwen3.5", {"layer_types": DELTA_LAYERS[:3]}, CheckpointError, "must be a list of 4 kinds"),
    "biases behind gates": ("qwen3.5", {"attention_bias": True}, UnsupportedError, "gated attention with biases"),
    "the delta rule behind another activation": ("qwen3.5", {"hidden_act": "gelu"}, UnsupportedError, "another activation than"),
    "states without heads": ("qwen3.5", {"linear_num_key_heads": 0}, CheckpointError, "'linear_num_key_heads' must be"),
    "a rope for no kind of layer": (
        "olmo3", {"rope_parameters": {"rope_type": "default"}}, CheckpointError, "says nothing of full_attention",
    ),
    "norms of heads with gains of their own": ("command r", {"use_qk_norm": True}, UnsupportedError, "layer norms of heads"),
    "heads that are not as wide as the model": ("command r7b", {"head_dim": 12}, UnsupportedError, "12 dims don't make 48"),
    "a base that is no number": (
        "hunyuan, another base", {"rope_parameters": {"type": "dynamic", "factor": 1.0, "alpha": "x"}}, CheckpointError,
        "'alpha' must be a number",
    ),
    "a base past what is believed": (
        "hunyuan, another base", {"rope_parameters": {"type": "dynamic", "factor": 1.0, "alpha": 1e-9}}, CheckpointError,
        "the rotary base must be above 1",
    ),
    "windows by letters": (
        "exaone 4, no window, tied", {"layer_types": None, "sliding_window": 20, "sliding_window_pattern": "LLLG"},
        CheckpointError, "'sliding_window_pattern' must be a whole number",
    ),
    "other norms of heads": ("minimax m2, 3 of 5", {"qk_norm_type": "per_head"}, UnsupportedError, "heads are normed otherwise"),
    "scores of another kind": (
        "minimax m2, 3 of 5", {"scoring_func": "softmax"}, UnsupportedError, "experts that are weighed by 'softmax'",
    ),
    "linear attention": ("minimax m2, 3 of 5", {"attn_type_list": [0, 1]}, UnsupportedError, "a MiniMax with linear attention"),
    "layers by letters": ("minimax m2, 3 of 5", {"attn_type_list": 1}, CheckpointError, "'attn_type_list' must be a list"),
    "too large a part of a head": (
        "minimax m2, 3 of 5", {"rope_parameters": None, "rotary_dim": 26}, CheckpointError,
        "26 rotary dims do not fit heads of 24",
    ),
    "scores of an AFMoE": ("afmoe, 2 of 5 and shared", {"score_func": "softmax"}, UnsupportedError, "weighed by 'softmax'"),
    "an AFMoE that sees everything": (
        "afmoe, 2 of 5 and shared", {"sliding_window": None}, UnsupportedError, "an AFMoE without a window",
    ),
    "biases of an AFMoE": ("afmoe, 2 of 5 and shared", {"attention_bias": True}, UnsupportedError, "gated attention with biases"),
    "bases of too few layers": (
        "granite swa, positions in some layers", {"layer_rope_theta": [1e4, 0]}, CheckpointError, "must be a list of 3 numbers",
    ),
    "a base below what is believed": (
        "granite swa, positions in some layers", {"layer_rope_theta": [1e4, 0, 1]}, CheckpointError, "must be above 1",
    ),
    "experts in layers between": (
        "exaone moe, 2 of 5 and shared, windows", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, UnsupportedError,
        "experts in other layers than all behind the first ones",
    ),
    "windows that begin nowhere": (
        "dots1, weights as they are, a window in the last layers", {"max_window_layers": -1}, CheckpointError,
        "'max_window_layers' must be",
    ),
    "another activation of experts": (
        "solar open, 3 of 5 and shared", {"hidden_act": "mish"}, UnsupportedError, "activation 'mish' is not supported",
    ),
    **{
        f"other scores of a {name}": (case, {"scoring_func": scores}, UnsupportedError, f"weighed by {scores!r}")
        for name, case, scores in (
            ("DeepSeek-V2", "deepseek v2, 3 of 5 and shared", "sigmoid"),
            ("DeepSeek-V3", "deepseek v3, 3 of 8 in two of four groups", "softmax"),
            ("DeepSeek-V3.2", "deepseek v3.2, 9 of what is before", "softmax"),
            ("GLM-5", "glm 5, a layer goes by another", "softmax"),
            ("GLM-4.7-Flash", "glm4 moe lite, 3 of 5 and shared", "softmax"),
        )
    },
    "another activation that is held": (
        "hy 4, a layer goes by another", {"hidden_act": "gelu"}, UnsupportedError, "activation 'gelu' that is held at",
    ),
    "scores of a Solar": ("solar open, 3 of 5 and shared", {"scoring_func": "sqrtsoftplus"}, UnsupportedError, "'sqrtsoftplus'"),
    "a Hunyuan of other sizes by layer": (
        "hunyuan moe, 3 of 5 and shared, another base", {"moe_topk": [3, 2]}, UnsupportedError,
        "a 'moe_topk' that is another in some layers",
    ),
    "keys of other layers in a Hunyuan": (
        "hunyuan moe, 3 of 5 and shared, another base", {"use_cla": True}, UnsupportedError, "a Hunyuan whose 'use_cla' is true",
    ),
    "a Hunyuan with a layer without experts": (
        "hunyuan moe, 3 of 5 and shared, another base", {"moe_layer_num_skipped": 1}, UnsupportedError, "layers without experts",
    ),
    "sizes that are no numbers": (
        "hunyuan moe, 3 of 5 and shared, another base", {"moe_intermediate_size": [{}, {}]}, CheckpointError,
        "'moe_intermediate_size' must be a whole number",
    ),
    "scores of a Ling": (
        "sarvam moe, 3 of 8 in two of four groups", {"score_function": "softmax"}, UnsupportedError, "weighed by 'softmax'",
    ),
    "biases of a Ling": (
        "sarvam moe, 3 of 8 in two of four groups", {"use_qkv_bias": True}, UnsupportedError,
        "a Ling whose 'attention_bias' is true",
    ),
    "a head that is normed": (
        "sarvam moe, 3 of 8 in two of four groups", {"norm_head": True}, UnsupportedError, "a Ling whose 'norm_head' is true",
    ),
    "two experts that read what is scaled": (
        "llama4, 1 of 7 and shared, no norms", {"num_experts_per_tok": 2}, UnsupportedError,
        "2 experts that each read a token scaled for it",
    ),
    "chunks of odd sizes": (
        "llama4, 1 of 7 and shared, no norms", {"attention_chunk_size": 100}, UnsupportedError, "in chunks of 100 tokens",
    ),
    "chunks of no layer": (
        "llama4, 1 of 7 and shared, no norms", {"layer_types": ["chunked_attention"] * 2}, CheckpointError,
        "'layer_types' must be a list of 3 kinds",
    ),
    "layers with experts that are no list": (
        "llama4, 1 of 7 and shared, no norms", {"moe_layers": {"a": 1}}, CheckpointError, "'moe_layers' must be a list",
    ),
    "groups of a Mistral's experts": (
        "mistral4, 3 of 5 and shared", {"n_routed_experts": 6, "n_group": 2, "topk_group": 1}, UnsupportedError,
        "experts of a Mistral that are chosen by groups",
    ),
    "queries that grow from nowhere": (
        "ministral3, queries that grow", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": "x"}},
        CheckpointError, "'llama_4_scaling_beta' must be a number",
    ),
    "linear layers alone": (
        "lara mini, 3 of 5 and shared", {"layer_types": ["linear_attention"] * 4}, CheckpointError, "no layer has attention",
    ),
    "a window of nothing": ("lara mini, 3 of 5 and shared", {"sliding_window": None}, CheckpointError, "no 'sliding_window'"),
    "positions of a Kimi": (
        "kimi linear, 3 of 5 and shared", {"mla_use_nope": False}, UnsupportedError, "attention has positions",
    ),
    "experts of a Kimi by a softmax": (
        "kimi linear, 3 of 5 and shared", {"moe_router_activation_func": "softmax"}, UnsupportedError, "weighed by 'softmax'",
    ),
    "experts of a Kimi between dense layers": (
        "kimi linear, 3 of 5 and shared", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"]}, UnsupportedError,
        "experts in other layers than all behind the first ones",
    ),
    "a layer of a Kimi that is in no list": (
        "kimi linear, 3 of 5 and shared",
        {"layer_types": None, "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [5]}}, CheckpointError,
        "its lists must name each of 5 layers once",
    ),
    "odd heads of a Kimi": ("kimi linear, 3 of 5 and shared", {"linear_head_dim": 13}, UnsupportedError, "not an even number"),
    "attention alone": ("olmo hybrid", {"layer_types": ["full_attention"] * 4}, CheckpointError, "all layers have attention"),
    "another activation of taps": ("olmo hybrid", {"hidden_act": "gelu"}, UnsupportedError, "another activation than silu"),
    "a layer of another kind": (
        "lara mini, 3 of 5 and shared", {"layer_types": ["linear_attention", "chunked_attention"] * 2}, UnsupportedError,
        "layer type 'chunked_attention'",
    ),
    "a Hy3 without shared experts": (
        "hy v3, 3 of 5 and shared", {"num_shared_experts": 0}, UnsupportedError, "a Hy3 without an expert that every token takes",
    ),
    "weights of a Hy3 as they are": (
        "hy v3, 3 of 5 and shared", {"route_norm": False}, UnsupportedError, "a Hy3 whose 'route_norm' is false",
    ),
    "kinds of a Hy3 that nobody knows": (
        "hy v3, 3 of 5 and shared", {"mlp_layer_types": ["dense", "sparse", "thin"]}, CheckpointError, "a list of 3 of dense",
    ),
    "windows of a Flint that are none": (
        "flint, 2 of 5 and shared", {"sliding_window": None}, CheckpointError, "config.json has no 'sliding_window'",
    ),
    "a NanoChat with a gate": ("nanochat", {"hidden_act": "silu"}, UnsupportedError, "activation 'silu' is not supported"),
    "three experts of a Phi": (
        "phimoe, no biases, a window, tied", {"num_experts_per_tok": 3}, UnsupportedError, "whose tokens take 3 experts",
    ),
    "a Phi with experts and yarn": (
        "phimoe, 2 of 5", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedError, "rope scaling 'yarn'",
    ),
    "two factors of rotations": (
        "phimoe, 2 of 5", {"rope_parameters": CASES["phimoe, 2 of 5"].rope_parameters | {"long_mscale": 1.3}}, UnsupportedError,
        "factors of rotations that are 1.24 or 1.3",
    ),
    "no factor of rotations": (
        "phimoe, 2 of 5", {"rope_parameters": CASES["phimoe, 2 of 5"].rope_parameters | {"short_mscale": None}}, CheckpointError,
        "has no 'short_mscale'",
    ),
    "less noise than none": (
        "phimoe, 2 of 5", {"router_jitter_noise": -0.1}, CheckpointError, "'router_jitter_noise' must be a number of at least 0",
    ),
    "queries clipped to nothing": ("olmo, clipped", {"clip_qkv": 0.0}, CheckpointError, "'clip_qkv' must be a number of at"),
    "queries clipped by a word": ("olmoe, 3 of 5", {"clip_qkv": "8"}, CheckpointError, "'clip_qkv' must be a number"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_configs_that_are_read_and_can_not_be_run(case: str, tmp_path: Path) -> None:
    name, changed, kind, message = ODD[case]
    folder = save(random_model(CASES[name]), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(kind, match=re.escape(message)):
        worker_for(folder)
    with open_checkpoint(folder) as checkpoint, pytest.raises(kind, match=re.escape(message)):
        facts_of(checkpoint)


INPUT = "model.layers.1.shared_mlp.input_linear.weight"
STACK = "model.layers.1.block_sparse_moe.input_linear.weight"
CHOOSES = "model.layers.2.mlp.moe_statics.e_score_correction_bias"
JOINED = "model.layers.0.linear_attn.in_proj.weight"
TAPS = "model.layers.2.conv.conv.weight"
MISSHAPEN: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "a row less": ("granite 4, all attention", INPUT, lambda t: t[:-1], "gate_proj.weight (expected [74, 48], found [73"),
    "no rows": ("granite 4, all attention", INPUT, lambda t: t[:0], "shared_mlp.gate_proj.weight (expected [74, 48], found [0"),
    "a vector": ("granite 4, all attention", INPUT, lambda t: t[0], f"1 not part of the model: {INPUT}"),
    "turned over": ("granite moe, 2 of 5", STACK, lambda t: t.transpose(1, 2), "experts.0.gate_proj.weight (expected [33, 48]"),
    "an expert less": ("granite moe, 2 of 5", STACK, lambda t: t[1:], "2 missing: model.layers.1.block_sparse_moe.experts.4"),
    "no experts": ("granite moe, 2 of 5", STACK, lambda t: t[:0], "10 missing: model.layers.1.block_sparse_moe.experts.0.gate"),
    "two biases": ("ernie 4.5, 2 of 5 and shared", CHOOSES, lambda t: t.repeat(2, 1), f"1 missing: {CHOOSES}.0"),
    "no bias": ("ernie 4.5, 2 of 5 and shared", CHOOSES, lambda t: t[:0], f"1 missing: {CHOOSES}.0"),
    "taps of another length": ("lfm2", TAPS, lambda t: t[:, :, 1:], f"{TAPS} (expected [48, 3], found [48, 2])"),
    "taps of fewer channels": ("lfm2", TAPS, lambda t: t[1:], f"{TAPS} (expected [48, 3], found [47, 3])"),
    "taps of two rows": ("lfm2", TAPS, lambda t: t.repeat(1, 2, 1), f"{TAPS} (expected [48, 3], found [48, 2, 3])"),
    "taps of no channel": ("lfm2", TAPS, lambda t: t[:0], f"{TAPS} (expected [48, 3], found [0, 3])"),
    "a row of a delta rule's too much": ("lara mini, 3 of 5 and shared", JOINED, lambda t: torch.cat([t, t[:1]]),
                                         f"1 not part of the model: {JOINED}"),
    "a bias too short": ("ernie 4.5, 2 of 5 and shared", CHOOSES, lambda t: t[:, :4], f"{CHOOSES}.0 (expected [5], found [4])"),
}


@pytest.mark.parametrize("case", MISSHAPEN)
def test_what_is_taken_apart_and_does_not_fit(case: str, tmp_path: Path) -> None:
    config, name, change, message = MISSHAPEN[case]
    folder = save(random_model(CASES[config]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        worker_for(folder)


@pytest.mark.parametrize("place", ["model.layers", "model.language_model.layers"])
def test_stacked_experts_of_qwen3_5_are_never_turned_over(place: str, tmp_path: Path) -> None:
    """As the hub's folders have them; an expert as wide as half of the model shows what can be told by shapes alone."""
    if place == "model.layers":
        config = type(CASES["qwen3.5 moe, 2 of 5 and shared"])(
            **CASES["qwen3.5 moe, 2 of 5 and shared"].to_dict() | {"moe_intermediate_size": 24}
        )
        reference = random_model(config)
    else:
        text = CASES["qwen3.5 moe, 2 of 5 and shared"].to_dict() | {"moe_intermediate_size": 24}
        config = Qwen3_5MoeConfig(text_config=text, vision_config=QWEN35_VISION, **QWEN_IDS)
        reference = random_model(config, auto=AutoModelForImageTextToText)
    folder = save(reference, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for i in range(3):
        parts = {part: torch.stack([tensors.pop(f"{place}.{i}.mlp.experts.{e}.{part}_proj.weight") for e in range(5)])
                 for part in ("gate", "up", "down")}  # fmt: skip
        tensors[f"{place}.{i}.mlp.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], 1)
        tensors[f"{place}.{i}.mlp.experts.down_proj"] = parts["down"]
    save_file(tensors, folder / "model.safetensors")
    check_what_it_writes(reference, folder)


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp."])
def test_what_guesses_in_qwen3_5_is_left_aside(prefix: str, tmp_path: Path) -> None:
    folder = save(random_model(CASES["qwen3.5"]), tmp_path)
    expected = worker_for(folder)
    tensors = load_file(folder / "model.safetensors")
    further = {f"{prefix}fc.weight": torch.ones(48, 96), f"{prefix}layers.0.input_layernorm.weight": torch.ones(48)}
    save_file(tensors | further, folder / "model.safetensors")
    assert worker_for(folder).weight_bytes == expected.weight_bytes
    with open_checkpoint(folder) as checkpoint:
        assert facts_of(checkpoint).num_parameters == num_parameters(expected.spec)


@pytest.mark.parametrize("case", ["granite 4, all attention", "granite moe, 2 of 5", "ernie 4.5, 2 of 5 and shared", "lfm2",
                                  "nemotron h, 3 of 5 and shared", "lara mini, 3 of 5 and shared", "olmo hybrid",
                                  "kimi linear, 3 of 5 and shared"])
def test_a_plan_counts_what_is_taken_apart(case: str, tmp_path: Path) -> None:
    folder = save(random_model(CASES[case]), tmp_path)
    with open_checkpoint(folder) as checkpoint:
        assert facts_of(checkpoint).num_parameters == num_parameters(worker_for(folder).spec)


def test_a_plan_counts_what_writes_alone(tmp_path: Path) -> None:
    folder = save(random_model(SEEING["gemma3"], auto=AutoModelForImageTextToText), tmp_path)
    with open_checkpoint(folder) as checkpoint:
        facts = facts_of(checkpoint)
    assert facts.num_parameters == num_parameters(facts.spec)
    assert worker_for(folder).spec == facts.spec
