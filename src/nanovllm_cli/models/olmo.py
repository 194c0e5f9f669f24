"""OLMo 2 and 3: norms of what attention and MLP add, none of what they read, and norms of all heads of q, and of k, together.
Most layers of an OLMo 3 have a window, and positions as they are, whatever those of the others are stretched by. OLMoE: Qwen's
experts, and such norms of heads, in a Llama; FlexOlmo: the same experts in an OLMo 2. OLMo 1 (Groeneveld et al. 2024): a Llama
with layer norms that have no weights, and queries, keys and values that some clip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.exaone import window_pattern
from nanovllm_cli.models.experts import QWEN_KEYS
from nanovllm_cli.models.families import FULL
from nanovllm_cli.models.family import Family, GGUFField, has_all, no_file
from nanovllm_cli.models.names import OUT_BIAS, POST_HF_NAMES, QWEN_NAMES, SANDWICH_GGUF_NAMES
from nanovllm_cli.rope_spec import RopeSpec


def _with_local(spec: ModelSpec, change: Callable[[RopeSpec], RopeSpec]) -> ModelSpec:
    """The same with positions of layers with a window as `change` makes them of what they are."""
    whole = next((attention.rope for attention in spec.attentions if attention.window is None), None)

    def local(layer: int, attention: AttentionSpec) -> AttentionSpec:
        if attention.window is None or attention.rope is None:
            return attention
        rope = change(attention.rope)
        length = rope.original_len if whole is None or rope.scaling != "none" else whole.original_len  # of no meaning there
        return replace(attention, rope=replace(rope, original_len=length))

    return spec.each_attention(local)


def _plain(rope: RopeSpec) -> RopeSpec:
    return RopeSpec(rope.dim, rope.theta, rope.interleaved, original_len=rope.original_len)


def _third_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """ "rope_scaling" is of layers without a window alone; "rope_parameters" has a section for each kind."""
    if not isinstance(sections := read.values.get("rope_parameters"), Mapping):
        return _with_local(spec, _plain)
    if FULL not in sections:
        raise CheckpointError(f"{read.where}: 'rope_parameters' says nothing of {FULL}", BROKEN)
    return _with_local(spec, lambda rope: rope)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Both: a file with a window is of an OLMo 3."""
    theta = key("rope.freq_base_swa")
    return _with_local(spec, lambda rope: replace(_plain(rope), theta=read.number(theta, rope.theta)))


def _third_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    local = [a.rope.theta for a in spec.attentions if a.window is not None and a.rope is not None]
    return {"rope.freq_base_swa": local[0], **window_pattern(spec)} if local else {}


_CLIP = "attention.clamp_kqv"


def _first(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What its configs don't have is the same in all of them."""
    return {**config, "layer_norm_eps": 1e-5, "mlp_bias": False}


def _clipped(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    return spec.with_attention(clip=read.number("clip_qkv")) if read.has("clip_qkv") else spec


def _without_gains(spec: ModelSpec) -> ModelSpec:
    return replace(spec, norm=replace(spec.norm, gains=False))


def _first_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """llama.cpp clips by numbers above 0."""
    clip = read.number(key(_CLIP), 0.0, positive=False)
    return _without_gains(spec.with_attention(clip=clip) if clip > 0 else spec)


def _first_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    attention = spec.attention
    has_all(spec.architecture, output_without_a_bias=not attention.out_bias,
            heads_as_wide_as_the_model=attention.num_heads * attention.head_dim == spec.hidden_size)  # fmt: skip
    return {} if attention.clip is None else {_CLIP: attention.clip}


_EXPERTS = replace(QWEN_KEYS, size="intermediate_size", norm_in_gguf=True)
OLMO = Family(
    "olmo",
    layer_norm=True,
    interleaved_gguf=True,
    config=_first,
    hf=lambda spec, read: _without_gains(_clipped(spec, read)),
    gguf=_first_from_gguf,
    gguf_keys=_first_keys,
)
OLMO2 = Family(
    "olmo2",
    order="post",
    attention={"qk_norm_of": "all heads"},
    qk_norm=True,
    full_every=4,
    defaults={"rms_norm_eps": 1e-5},
    hf_names=POST_HF_NAMES,
    gguf_names=SANDWICH_GGUF_NAMES,
    gguf=_from_gguf,
    gguf_homeless=(OUT_BIAS,),
)
OLMO3 = replace(
    OLMO2,
    name="olmo3",
    gguf_name="olmo2",
    has_window=True,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096},
    hf=_third_from_hf,
    gguf_keys=_third_keys,
)
OLMOE = Family(
    "olmoe",
    attention={"qk_norm_of": "all heads"},
    qk_norm=True,
    experts=_EXPERTS,
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    hf_names=QWEN_NAMES,
    hf=_clipped,
)
FLEX_OLMO = replace(
    OLMO2,
    name="flex_olmo",
    experts=_EXPERTS,
    defaults={"rope_theta": 5e5, "max_position_embeddings": 4096, "num_experts": 7, "num_experts_per_tok": 5},
    hf_names=QWEN_NAMES | POST_HF_NAMES,
    gguf_like=no_file("FlexOlmo"),
)
