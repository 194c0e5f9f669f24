"""Llama but for a norm, its positions or a name: Maincoder (norms of heads behind their rotation), openPangu (biases around
attention), Orion (layer norms), XVERSE. Older ones, of which GGUF files alone are read: Qwen 1, Baichuan, Refact and Jais 1
(positions by distance, in Baichuan's larger one, too), PLaMo 1 (one norm for attention and MLP), CodeShell (a StarCoder 2),
OpenELM (layers of several sizes), DBRX (layer norms and experts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.bloom import told_by_distance
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.deci import of_layers, with_sizes
from nanovllm_cli.models.experts import MIXTRAL_KEYS
from nanovllm_cli.models.families import LLAMA
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, has_all, usual_keys
from nanovllm_cli.models.names import projections
from nanovllm_cli.models.rotary import normed_when_turned
from nanovllm_cli.models.starcoder2 import STARCODER2

_WITHOUT_ROTATION = 40
"""Layers of Baichuan 13B, by which llama.cpp knows it from the one that rotates heads."""


def _maincoder_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What Llama 4's configs call the size of an MLP, beside that of experts, which it has not."""
    return {**config, **usual_keys(config, {"intermediate_size_mlp": "intermediate_size"})}


def _maincoder_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return normed_when_turned(spec) if read.flag("use_qk_norm", True) else spec.with_attention(qk_norm=False)


def _maincoder_gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, norms_of_heads=spec.attention.qk_norm)
    return {}


def _pangu_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, "attention_bias": config.get("bias", True)}


def _pangu_gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, bias_behind_attention=spec.attention.out_bias)
    return {}


def _orion_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its norms are layer norms, by the name of others."""
    return {**config, **usual_keys(config, {"rms_norm_eps": "layer_norm_eps"})}


def _head_apart(spec: ModelSpec) -> dict[str, GGUFField]:
    has_all(spec.architecture, head_of_its_own=not spec.tied_head)
    return {}


def _qwen_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Its files say the size of gate and up together."""
    return spec.with_mlps(intermediate_size=read.integer(key("feed_forward_length"), least=2) // 2)


def _baichuan_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if spec.num_layers != _WITHOUT_ROTATION:
        return spec
    return told_by_distance(spec.with_attention(rope=None), read)


def _jais_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Scores are divided by heads' dims, not by their root (muP). Factors of embeddings and logits are in the weights."""
    if (most := read.number(key("attention.max_alibi_bias"), 0.0, positive=False)) != 8.0:
        raise UnsupportedError(f"{read.where}: a Jais whose scores are told by {most:g}", "known: 8")
    return told_by_distance(spec.with_attention(scale=1 / spec.attention.head_dim), read)


def _dbrx_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return spec.with_attention(clip=read.number(key("attention.clamp_kqv")))


def _openelm_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    names = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
    heads, counts, widths = (of_layers(read, key(name), spec.num_layers, least=1) for name in names)
    if not spec.attention.fused_qkv:
        raise UnsupportedError(f"{read.where}: an OpenELM whose queries, keys and values are tensors of their own", ANOTHER)
    return with_sizes(spec, counts, widths, read, heads)


MAINCODER = Family(
    "maincoder",
    qk_norm=True,
    interleaved=True,
    interleaved_gguf=True,
    tied_by_default=True,
    config=_maincoder_keys,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 4, "head_dim": 96},
    hf_names=projections("blocks.{i}.", "model.layers.{i}.feed_forward."),
    hf=_maincoder_from_hf,
    gguf=lambda spec, read, key: normed_when_turned(spec),
    gguf_keys=_maincoder_gguf_keys,
)
PANGU = Family("pangu_embedded", gguf_name="pangu-embedded", config=_pangu_keys, gguf_keys=_pangu_gguf_keys,
               defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 32768})  # fmt: skip
KORMO = Family("kormo", gguf_name="qwen2", hf_names={
    f"blocks.{{i}}.{part}_norm.weight": f"model.layers.{{i}}.pre_{part}_layernorm.weight" for part in ("attention", "mlp")
})  # fmt: skip
INTERNLM = replace(LLAMA, name="internlm", gguf_name="llama", config=_pangu_keys)
XVERSE = Family("xverse", interleaved_gguf=True, gguf_keys=_head_apart)
ORION = Family(
    "orion", layer_norm=True, shifted=True, config=_orion_keys, gguf_keys=_head_apart, defaults={"layer_norm_eps": 1e-5},
)  # fmt: skip
QWEN = Family("qwen", gguf=_qwen_from_gguf, gguf_keys=None)
BAICHUAN = Family("baichuan", interleaved_gguf=True, gguf=_baichuan_from_gguf, gguf_keys=None)
REFACT = Family("refact", attention={"rope": None}, gguf=lambda spec, read, key: told_by_distance(spec, read), gguf_keys=None)
JAIS = Family("jais", attention={"rope": None}, layer_norm=True, shifted=True, gguf=_jais_from_gguf, gguf_keys=None)
PLAMO = Family("plamo", order="parallel", gguf_keys=None)
CODESHELL = replace(STARCODER2, name="codeshell", gguf_keys=None)
DBRX = Family(
    "dbrx", layer_norm=True, experts=MIXTRAL_KEYS, gguf=_dbrx_from_gguf, gguf_keys=None,
    gguf_names={"blocks.{i}.mlp_norm.weight": "blk.{i}.attn_output_norm.weight"},
)  # fmt: skip
OPENELM = Family("openelm", qk_norm=True, varied=True, gguf=_openelm_from_gguf, gguf_keys=None)
