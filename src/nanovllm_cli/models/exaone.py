"""EXAONE 3, 3.5 and Deep: Llama by other names. EXAONE 4: norms of what attention and MLP add, none of what they read, as in
OLMo 2. Where most layers have a window, only those have positions, in K-EXAONE, whose experts are DeepSeek-V3's, as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys, only_behind_the_first, scored_by_sigmoids
from nanovllm_cli.models.family import Family, GGUFField, usual_keys, weight_keys
from nanovllm_cli.models.names import HF_NAMES, POST_HF_NAMES, SANDWICH_GGUF_NAMES, SHARED_NAMES


def turned_in_windows(spec: ModelSpec) -> ModelSpec:
    """The same with positions in layers with a window alone."""
    return spec.each_attention(lambda layer, a: a if a.window is not None else replace(a, rope=None))


def _turned(spec: ModelSpec, is_hybrid: bool) -> ModelSpec:
    return turned_in_windows(spec) if is_hybrid else spec


def _has_window(read: ConfigReader, key: Callable[[str], str]) -> bool:
    """Whenever a file has one; an EXAONE 4's counts to llama.cpp in models of 64 layers, which are those that have one."""
    return read.integer(key("attention.sliding_window"), 0, least=0) > 0


def window_pattern(spec: ModelSpec) -> dict[str, GGUFField]:
    """Which layers have a window, where some do."""
    windows = [attention.window is not None for attention in spec.attentions]
    return {"attention.sliding_window_pattern": windows} if any(windows) else {}


def _keys_of_experts(spec: ModelSpec) -> dict[str, GGUFField]:
    return window_pattern(spec) | weight_keys(spec)


_KEYS = {"num_layers": "num_hidden_layers", "activation_function": "hidden_act", "layer_norm_epsilon": "rms_norm_eps"}
_NAMES = {
    "attention_norm": "ln_1", "mlp_norm": "ln_2", "gate": "mlp.c_fc_0", "up": "mlp.c_fc_1", "down": "mlp.c_proj",
    "o": "attn.attention.out_proj", **{part: f"attn.attention.{part}_proj" for part in "qkv"},
}  # fmt: skip
EXAONE = Family(
    "exaone",
    qkv_bias=False,
    outer="transformer.",
    config=lambda config: {**config, **usual_keys(config, _KEYS)},
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": 8, "rope_theta": 5e5},
    hf_names={
        "embedding.weight": "transformer.wte.weight", "norm.weight": "transformer.ln_f.weight",
        **{f"blocks.{{i}}.{ours}.weight": f"transformer.h.{{i}}.{theirs}.weight" for ours, theirs in _NAMES.items()},
    },
    peft_names=HF_NAMES,
)  # fmt: skip
EXAONE4 = Family(
    "exaone4",
    order="post",
    qk_norm=True,
    qkv_bias=False,
    has_window=True,
    full_every=4,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096},
    hf_names=POST_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    hf=lambda spec, read: _turned(spec, read.has("sliding_window")),
    gguf=lambda spec, read, key: _turned(spec, _has_window(read, key)),
    gguf_keys=window_pattern,
)

EXAONE_MOE = replace(
    EXAONE4,
    name="exaone_moe",
    gguf_name="exaone-moe",
    order="pre",
    experts=ExpertKeys(
        ("num_experts",), "moe_intermediate_size", "norm_topk_prob", first="first_k_dense_replace", shared="num_shared_experts",
        scale="routed_scaling_factor", groups=("n_group", "topk_group"), length_in_gguf=True, scoring="sigmoid",
        selection_bias=True,
    ),
    defaults={**EXAONE4.defaults, "norm_topk_prob": True, "first_k_dense_replace": 1, "num_shared_experts": 1,
              "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "routed_scaling_factor": 2.5},
    hf_names=SHARED_NAMES | {"blocks.{i}.router.selection_bias": "model.layers.{i}.mlp.e_score_correction_bias"},
    gguf_names={},
    hf=lambda spec, read: _turned(scored_by_sigmoids(only_behind_the_first(spec, read), read), read.has("sliding_window")),
    gguf_keys=_keys_of_experts,
)  # fmt: skip
"""K-EXAONE: norms of what attention and MLP read, as usual. What guesses further tokens is left aside."""
