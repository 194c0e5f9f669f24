"""Shapes of models that people know, as the config.json that each publishes, for weights that are made up (random_weights.py).

Only what decides how large a model is and how it computes is kept. Sources: config.json of each repository named in `aliases.py`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm_cli.errors import ModelNotFoundError, UsageError
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file

RANDOM = "random:"
"""A model's name that begins so means made-up weights: random:qwen3-0.6b, random:path/to/config.json."""


def _config(
    family: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, *, tied: bool, **more: Any
) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    return plain | more


_QWEN3: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6}
_QWEN25: dict[str, Any] = {"max_position_embeddings": 32768, "rope_theta": 1e6}


_QWEN35: dict[str, Any] = {
    "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
    "rope_theta": 1e7, "partial_rotary_factor": 0.25,
}  # fmt: skip
_LFM2: dict[str, Any] = {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 128000}


def _llama3_rope(factor: float, high: float = 4.0) -> dict[str, Any]:
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high,
            "original_max_position_embeddings": 8192}  # fmt: skip


def _windows(layers: int, every: int = 4) -> list[str]:
    """Each so many-th layer sees everything."""
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]


def _llama(factor: float) -> dict[str, Any]:
    scaling = _llama3_rope(factor)
    return {"max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": scaling, "rms_norm_eps": 1e-5}


def _gemma4(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, every: int, **more: Any) -> dict[str, Any]:
    own = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512, "layer_types": _windows(layers, every),
           "final_logit_softcapping": 30.0}  # fmt: skip
    return _config("Gemma4", layers, hidden, inner, heads, kv_heads, 262144, tied=True, **own | more)


def _granite_h(hidden: int, inner: int, shared: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    types = ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]
    own = {
        "layer_types": types, "shared_intermediate_size": shared, "mamba_n_heads": hidden // 32, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "num_local_experts": 0,
        "num_experts_per_tok": 0, "position_embedding_type": "nope", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return _config("GraniteMoeHybrid", 40, hidden, inner, heads, kv_heads, 100352, tied=True, **own | more)


def _nemotron(pattern: str, hidden: int, inner: int, kv_heads: int, heads: int, size: int, **more: Any) -> dict[str, Any]:
    """heads, size: of a state space. Attention is 128 wide."""
    own = {
        "model_type": "nemotron_h", "hybrid_override_pattern": pattern, "head_dim": 128, "mlp_hidden_act": "relu2",
        "mamba_num_heads": heads, "mamba_head_dim": size, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    queries = {4480: 40}.get(hidden, 32)
    return _config("NemotronH", len(pattern), hidden, inner, queries, kv_heads, 131072, tied=False, **own | more)


def _latent(
    family: str, layers: int, hidden: int, inner: int, heads: int, vocab: int, dims: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """dims: of a key without positions, of one that rotates, of a value."""
    key, rotary, value = dims
    own = {"kv_lora_rank": 512, "qk_nope_head_dim": key, "qk_rope_head_dim": rotary, "v_head_dim": value, "tied": False}
    return _config(family, layers, hidden, inner, heads, heads, vocab, **own | more)


def _apertus(layers: int, hidden: int, inner: int, heads: int) -> dict[str, Any]:
    own = _llama(8.0) | {"hidden_act": "xielu", "max_position_embeddings": 65536, "rope_theta": 12e6}
    return _config("Apertus", layers, hidden, inner, heads, 8, 131072, tied=False, **own)


def _ling(layers: int, hidden: int, inner: int, heads: int, expert: int) -> dict[str, Any]:
    own = {
        "head_dim": 128, "num_experts": 256, "num_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": expert,
        "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.5, "rope_theta": 6e5, "max_position_embeddings": 32768, "score_function": "sigmoid",
    }  # fmt: skip
    return _config("BailingMoeV2", layers, hidden, inner, heads, 4, 157184, tied=False, **own)


def _olmo(generation: int, layers: int, hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    own: dict[str, Any] = {"rope_theta": 5e5, "max_position_embeddings": 4096}
    if generation == 3:
        own = {
            "rope_theta": 5e5, "max_position_embeddings": 65536, "sliding_window": 4096,
            "layer_types": _windows(layers),
            "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32,
                             "beta_slow": 1, "attention_factor": 1.2079441541679836},
        }  # fmt: skip
    vocab = 100278 if generation == 3 else 100352
    return _config(f"Olmo{generation}", layers, hidden, inner, heads, kv_heads, vocab, tied=False, **own)


def _exaone4(layers: int, hidden: int, inner: int, heads: int, *, tied: bool, window: int | None) -> dict[str, Any]:
    types = _windows(layers) if window else ["full_attention"] * layers
    own = {"sliding_window": window, "layer_types": types, "rope_theta": 1e6, "rope_scaling": _llama3_rope(16.0),
           "rms_norm_eps": 1e-5}  # fmt: skip
    most = 131072 if window else 65536
    return _config("Exaone4", layers, hidden, inner, heads, 8, 102400, tied=tied, max_position_embeddings=most, **own)


_GEMMA4_SMALL: dict[str, Any] = {
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "sliding_window": 512,
    "max_position_embeddings": 131072,
}
_GEMMA4_LARGE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144, "attention_k_eq_v": True,
}


def _rwkv7(layers: int, hidden: int, decay: int, value: int, gate: int) -> dict[str, Any]:
    """Ranks: rates have that of decays."""
    return {
        "architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7", "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "head_dim": 64, "vocab_size": 65536, "hidden_act": "sqrelu", "norm_eps": 1e-5,
        "decay_low_rank_dim": decay, "a_low_rank_dim": decay, "v_low_rank_dim": value, "gate_low_rank_dim": gate,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _config("Qwen3", 28, 1024, 3072, 16, 8, 151936, tied=True, **_QWEN3),
    "qwen3-1.7b": _config("Qwen3", 28, 2048, 6144, 16, 8, 151936, tied=True, **_QWEN3),
    "qwen3-4b": _config("Qwen3", 36, 2560, 9728, 32, 8, 151936, tied=True, **_QWEN3),
    "qwen3-8b": _config("Qwen3", 36, 4096, 12288, 32, 8, 151936, tied=False, **_QWEN3),
    "qwen3-14b": _config("Qwen3", 40, 5120, 17408, 40, 8, 151936, tied=False, **_QWEN3),
    "qwen3-32b": _config("Qwen3", 64, 5120, 25600, 64, 8, 151936, tied=False, **_QWEN3),
    "qwen3-30b-a3b": _config(
        "Qwen3Moe", 48, 2048, 6144, 32, 4, 151936, tied=False, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        norm_topk_prob=True, **_QWEN3
    ),
    "qwen3.5-0.8b": _config("Qwen3_5", 24, 1024, 3584, 8, 2, 248320, tied=True, **_QWEN35 | {"linear_num_value_heads": 16}),
    "qwen3.5-2b": _config("Qwen3_5", 24, 2048, 6144, 8, 2, 248320, tied=True, **_QWEN35 | {"linear_num_value_heads": 16}),
    "qwen3.5-4b": _config("Qwen3_5", 32, 2560, 9216, 16, 4, 248320, tied=True, **_QWEN35),
    "qwen3.5-9b": _config("Qwen3_5", 32, 4096, 12288, 16, 4, 248320, tied=False, **_QWEN35),
    "qwen3.5-27b": _config("Qwen3_5", 64, 5120, 17408, 24, 4, 248320, tied=False, **_QWEN35 | {"linear_num_value_heads": 48}),
    "qwen3.5-35b-a3b": _config(
        "Qwen3_5Moe", 40, 2048, 512, 16, 2, 248320, tied=False, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, **_QWEN35
    ),
    "qwen2.5-0.5b": _config("Qwen2", 24, 896, 4864, 14, 2, 151936, tied=True, **_QWEN25),
    "qwen2.5-1.5b": _config("Qwen2", 28, 1536, 8960, 12, 2, 151936, tied=True, **_QWEN25),
    "qwen2.5-3b": _config("Qwen2", 36, 2048, 11008, 16, 2, 151936, tied=True, **_QWEN25),
    "qwen2.5-7b": _config("Qwen2", 28, 3584, 18944, 28, 4, 152064, tied=False, **_QWEN25),
    "qwen2.5-14b": _config("Qwen2", 48, 5120, 13824, 40, 8, 152064, tied=False, **_QWEN25),
    "lfm2-350m": _config("Lfm2", 16, 1024, 6656, 16, 8, 65536, tied=True, **_LFM2),
    "lfm2-1.2b": _config("Lfm2", 16, 2048, 12288, 32, 8, 65536, tied=True, **_LFM2),
    "lfm2-8b-a1b": _config(
        "Lfm2Moe", 24, 2048, 7168, 32, 8, 65536, tied=True, full_attn_idxs=[2, 6, 10, 14, 18, 21], num_experts=32,
        num_experts_per_tok=4, moe_intermediate_size=1792, num_dense_layers=2, max_position_embeddings=128000,
    ),
    "gemma-3n-e2b": _config("Gemma3n", 30, 2048, 8192, 8, 2, 262400, tied=True, num_kv_shared_layers=10, head_dim=256),
    "gemma-3n-e4b": _config("Gemma3n", 35, 2048, 16384, 8, 2, 262400, tied=True, num_kv_shared_layers=15, head_dim=256),
    "gemma-4-e2b": _gemma4(35, 1536, 6144, 8, 1, 5, **_GEMMA4_SMALL, num_kv_shared_layers=20, use_double_wide_mlp=True),
    "gemma-4-e4b": _gemma4(42, 2560, 10240, 8, 2, 6, **_GEMMA4_SMALL, num_kv_shared_layers=18),
    "gemma-4-26b-a4b": _gemma4(
        30, 2816, 2112, 16, 8, 6, **_GEMMA4_LARGE, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128,
        top_k_experts=8, moe_intermediate_size=704,
    ),
    "gemma-4-31b": _gemma4(60, 5376, 21504, 32, 16, 6, **_GEMMA4_LARGE, num_global_key_value_heads=4),
    "deepseek-v2-lite": _latent(
        "DeepseekV2", 27, 2048, 10944, 16, 102400, (128, 64, 128), q_lora_rank=None, n_routed_experts=64, num_experts_per_tok=6,
        moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1, max_position_embeddings=163840,
        rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
                      "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "moonlight-16b-a3b": _latent(
        "DeepseekV3", 27, 2048, 11264, 16, 163840, (128, 64, 128), q_lora_rank=None, n_routed_experts=64, num_experts_per_tok=6,
        moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1,
        routed_scaling_factor=2.446, max_position_embeddings=8192, rope_theta=50000.0, rms_norm_eps=1e-5,
    ),
    "glm-4.7-flash": _latent(
        "Glm4MoeLite", 47, 2048, 10240, 20, 154880, (192, 64, 256), q_lora_rank=768, n_routed_experts=64, num_experts_per_tok=4,
        moe_intermediate_size=1536, n_shared_experts=1, routed_scaling_factor=1.8, max_position_embeddings=202752,
        rope_theta=1e6, rms_norm_eps=1e-5,
    ),
    "youtu-2b": _latent(
        "Youtu", 32, 2048, 6144, 16, 128256, (128, 64, 128), q_lora_rank=1536, tied=True, max_position_embeddings=131072,
        rope_theta=1.6e6,
    ),
    "nemotron-h-8b": _nemotron(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 21504, 8, 128, 64, max_position_embeddings=8192,
    ),
    "nemotron-nano-9b-v2": _nemotron(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 4480, 15680, 8, 128, 80, max_position_embeddings=131072,
    ),
    "nemotron-3-nano-30b-a3b": _nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 1856, 2, 64, 64, max_position_embeddings=262144,
        n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1, topk_group=1,
    ),
    "afm-4.5b": _config(
        "Arcee", 36, 2560, 18432, 20, 4, 128004, tied=False, hidden_act="relu2", rms_norm_eps=1e-5,
        max_position_embeddings=65536, rope_theta=1e4,
        rope_scaling={"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                      "beta_slow": 1.0, "mscale": 1.0},
    ),
    "granite-4.0-h-1b": _granite_h(1536, 4096, 4096, 12, 4),
    "granite-4.0-h-micro": _granite_h(2048, 8192, 8192, 32, 8),
    "granite-4.0-h-tiny": _granite_h(1536, 512, 1024, 12, 4, num_local_experts=64, num_experts_per_tok=6),
    "granite-4.0-h-small": _granite_h(4096, 768, 1536, 32, 8, num_local_experts=72, num_experts_per_tok=10),
    "olmo-2-1b": _olmo(2, 16, 2048, 8192, 16, 16),
    "olmo-2-7b": _olmo(2, 32, 4096, 11008, 32, 32),
    "olmo-2-13b": _olmo(2, 40, 5120, 13824, 40, 40),
    "olmo-2-32b": _olmo(2, 64, 5120, 27648, 40, 8),
    "olmo-3-7b": _olmo(3, 32, 4096, 11008, 32, 32),
    "olmo-3-32b": _olmo(3, 64, 5120, 27648, 40, 8),
    "exaone-4.0-1.2b": _exaone4(30, 2048, 4096, 32, tied=True, window=None),
    "exaone-4.0-32b": _exaone4(64, 5120, 27392, 40, tied=False, window=4096),
    "trinity-mini": _config(
        "Afmoe", 32, 2048, 6144, 32, 4, 200192, tied=False, head_dim=128, num_experts=128, num_experts_per_tok=8,
        num_shared_experts=1, moe_intermediate_size=1024, num_dense_layers=2, route_norm=True, route_scale=2.826,
        score_func="sigmoid", mup_enabled=True, global_attn_every_n_layers=4, sliding_window=2048,
        max_position_embeddings=131072, rope_theta=1e4, rms_norm_eps=1e-5,
    ),
    "olmoe-7b-a1b": _config(
        "Olmoe", 16, 2048, 1024, 16, 16, 50304, tied=False, num_experts=64, num_experts_per_tok=8, norm_topk_prob=False,
        max_position_embeddings=4096, rope_theta=1e4, rms_norm_eps=1e-5,
    ),
    "minimax-m2": _config(
        "MiniMaxM2", 62, 3072, 1536, 48, 8, 200064, tied=False, head_dim=128, rotary_dim=64, num_local_experts=256,
        num_experts_per_tok=8, scoring_func="sigmoid", use_qk_norm=True, use_routing_bias=True, qk_norm_type="per_layer",
        max_position_embeddings=196608, rope_theta=5e6,
    ),
    "dots.llm1-142b": _config(
        "Dots1", 62, 4096, 10944, 32, 32, 152064, tied=False, n_routed_experts=128, num_experts_per_tok=6, n_shared_experts=2,
        moe_intermediate_size=1408, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5, n_group=1,
        topk_group=1, max_position_embeddings=32768, rope_theta=1e7, rms_norm_eps=1e-5, sliding_window=None,
    ),
    "solar-open-100b": _config(
        "SolarOpen", 48, 4096, 10240, 64, 8, 196608, tied=False, head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
        n_shared_experts=1, moe_intermediate_size=1280, norm_topk_prob=True, routed_scaling_factor=1.0, n_group=1, topk_group=1,
        max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-5,
        rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536},
    ),
    "k-exaone-236b-a23b": _config(
        "ExaoneMoE", 48, 6144, 18432, 64, 8, 153600, tied=False, head_dim=128, num_experts=128, num_experts_per_tok=8,
        num_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, n_group=1, topk_group=1, sliding_window=128, max_position_embeddings=262144, rope_theta=1e6,
        rms_norm_eps=1e-5, layer_types=_windows(48),
    ),
    "hunyuan-1.8b": _config(
        "HunYuanDenseV1", 32, 2048, 6144, 16, 4, 120818, tied=True, rms_norm_eps=1e-5, max_position_embeddings=262144,
        rope_theta=1e4, rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "hunyuan-80b-a13b": _config(
        "HunYuanMoEV1", 32, 4096, 3072, 32, 8, 128167, tied=True, num_experts=64, moe_topk=8, moe_intermediate_size=3072,
        num_shared_expert=1, rms_norm_eps=1e-5, max_position_embeddings=32768, rope_theta=1e4,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    ),
    "apertus-8b": _apertus(32, 4096, 21504, 32),
    "apertus-70b": _apertus(80, 8192, 43008, 64),
    "ling-mini-2.0": _ling(20, 2048, 5120, 16, 512),
    "ling-flash-2.0": _ling(32, 4096, 9216, 32, 1024),
    "command-r-35b": _config(
        "Cohere", 40, 8192, 22528, 64, 64, 256000, tied=True, layer_norm_eps=1e-5, logit_scale=0.0625, rope_theta=8e6,
        max_position_embeddings=8192, model_max_length=131072,
    ),
    "command-r7b": _config(
        "Cohere2", 32, 4096, 14336, 32, 8, 256000, tied=True, layer_norm_eps=1e-5, logit_scale=0.25, rope_theta=5e4,
        max_position_embeddings=132096, sliding_window=4096,
    ),
    "llama-4-scout": _config(
        "Llama4", 48, 5120, 8192, 40, 8, 202048, tied=False, intermediate_size_mlp=16384, num_local_experts=16,
        interleave_moe_layer_step=1, rope_theta=5e5, rms_norm_eps=1e-5, max_position_embeddings=10485760, use_qk_norm=True,
        rope_scaling=_llama3_rope(16.0, high=1.0),
    ),
    "llama-4-maverick": _config(
        "Llama4", 48, 5120, 8192, 40, 8, 202048, tied=False, intermediate_size_mlp=16384, num_local_experts=128,
        interleave_moe_layer_step=2, rope_theta=5e5, rms_norm_eps=1e-5, max_position_embeddings=1048576, use_qk_norm=False,
    ),
    "llama-3.2-1b": _config("Llama", 16, 2048, 8192, 32, 8, 128256, tied=True, **_llama(32.0)),
    "llama-3.2-3b": _config("Llama", 28, 3072, 8192, 24, 8, 128256, tied=True, **_llama(32.0)),
    "llama-3.1-8b": _config("Llama", 32, 4096, 14336, 32, 8, 128256, tied=False, **_llama(8.0)),
    "llama-3.1-70b": _config("Llama", 80, 8192, 28672, 64, 8, 128256, tied=False, **_llama(8.0)),
    "mistral-7b": _config(
        "Mistral", 32, 4096, 14336, 32, 8, 32768, tied=False, max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-5,
        sliding_window=None,
    ),
    "mixtral-8x7b": _config(
        "Mixtral", 32, 4096, 14336, 32, 8, 32000, tied=False, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-5,
        sliding_window=None,
    ),
    "gpt-oss-20b": _config(
        "GptOss", 24, 2880, 2880, 64, 8, 201088, tied=False, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        max_position_embeddings=131072, rope_theta=150000.0, rms_norm_eps=1e-5, attention_bias=True, sliding_window=128,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "tinyllama-1.1b": _config(
        "Llama", 22, 2048, 5632, 32, 4, 32000, tied=False, max_position_embeddings=2048, rope_theta=1e4, rms_norm_eps=1e-5
    ),
    "rwkv7-0.1b": _rwkv7(12, 768, 64, 32, 128),
    "rwkv7-0.4b": _rwkv7(24, 1024, 64, 32, 128),
    "rwkv7-1.5b": _rwkv7(24, 2048, 96, 64, 256),
    "rwkv7-2.9b": _rwkv7(32, 2560, 96, 64, 320),
    "smollm2-135m": _config(
        "Llama", 30, 576, 1536, 9, 3, 49152, tied=True, max_position_embeddings=8192, rope_theta=1e5, rms_norm_eps=1e-5
    ),
}


def refuse_made_up(name: str) -> None:
    """UsageError for a model that is no use in a file: it has neither a tokenizer nor anything to say."""
    if name.startswith(RANDOM):
        hint = f"nanovllm bench --random-weights {name.removeprefix(RANDOM)} --quant FORMAT measures them"
        raise UsageError(f"{name} has made-up weights, of which no file is written", hint)


def shape_config(shape: str) -> dict[str, Any]:
    """config.json of a known shape, or of a file (or of the folder that it is in). What it says of quantization is left out:
    made-up weights are plain. Raises ModelNotFoundError, CheckpointError."""
    if shape.lower() in SHAPES:
        return dict(SHAPES[shape.lower()])
    path = Path(os.path.expanduser(shape))
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        near = difflib.get_close_matches(shape.lower(), SHAPES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(SHAPES)}; or the path of a config.json"
        raise ModelNotFoundError(f"no shape is called {shape}", hint)
    config = read_json_file(path, MAX_CONFIG_BYTES, infinity=True)
    return {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
