"""dots.llm1: DeepSeek-V3's experts behind attention that is Qwen3's."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import DEEPSEEK_KEYS, scored_by_sigmoids
from nanovllm_cli.models.family import Family, weight_keys
from nanovllm_cli.models.names import BIAS_NAME, SHARED_NAMES


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Where "layer_types" says nothing, layers from this one on have a window, which in what is published are none."""
    if read.text("scoring_func", "sigmoid") == "noaux_tc":  # its first config had the "topk_method" there
        read = ConfigReader({**read.values, "scoring_func": "sigmoid"}, read.where)
    first = read.integer("max_window_layers", least=0)
    listed = read.values.get("layer_types") is not None

    def windows(layer: int, attention: AttentionSpec) -> AttentionSpec:
        return attention if listed or layer >= first else replace(attention, window=None)

    return scored_by_sigmoids(spec.each_attention(windows), read)


DOTS1 = Family(
    "dots1",
    qk_norm=True,
    has_window=True,
    experts=DEEPSEEK_KEYS,
    defaults={"num_key_value_heads": 32, "moe_intermediate_size": 1408, "sliding_window": 4096, "max_window_layers": 62,
              "n_shared_experts": 2},
    hf_names=SHARED_NAMES | BIAS_NAME,
    hf=_from_hf,
    gguf_keys=weight_keys,
)  # fmt: skip
