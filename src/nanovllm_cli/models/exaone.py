"""EXAONE 4: norms of what attention and MLP add, none of what they read, as in OLMo 2. Where most layers have a window, only
those have positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import Family, GGUFField
from nanovllm_cli.models.names import POST_HF_NAMES, SANDWICH_GGUF_NAMES


def turned_in_windows(spec: ModelSpec) -> ModelSpec:
    """The same with positions in layers with a window alone."""
    return spec.each_attention(lambda layer, a: a if a.window is not None else replace(a, rope=None))


def _exaone(spec: ModelSpec, is_hybrid: bool) -> ModelSpec:
    spec = spec.in_order("post")
    return turned_in_windows(spec) if is_hybrid else spec


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A window counts whenever a file has one; to llama.cpp, in models of 64 layers, which are those that have one."""
    return _exaone(spec, read.integer(key("attention.sliding_window"), 0, least=0) > 0)


def window_pattern(spec: ModelSpec) -> dict[str, GGUFField]:
    """Which layers have a window, where some do."""
    windows = [attention.window is not None for attention in spec.attentions]
    return {"attention.sliding_window_pattern": windows} if any(windows) else {}


EXAONE4 = Family(
    "exaone4",
    qk_norm=True,
    qkv_bias=False,
    has_window=True,
    full_every=4,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096},
    hf_names=POST_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    hf=lambda spec, read: _exaone(spec, read.has("sliding_window")),
    gguf=_from_gguf,
    gguf_keys=window_pattern,
)
