"""Models with sparse attention: DeepSeek-V3.2, of which every layer chooses the tokens that its own see, and GLM-5, where layers
may go by what one in front of them has chosen. All else is DeepSeek-V3's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.index_spec import IndexerSpec
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.deepseek import (
    DEEPSEEK3,
    GLM4_MOE_LITE,
    LATENT_GGUF_NAMES,
    LATENT_HF_NAMES,
    MAX_DIM,
    latent_from_gguf,
    latent_from_hf,
    latent_keys,
)
from nanovllm_cli.models.experts import only_behind_the_first
from nanovllm_cli.models.family import ANOTHER, GGUFField
from nanovllm_cli.models.names import BIAS_NAME, SHARED_NAMES

MOST_CHOSEN = 1 << 20
"""Tokens that one sees: more is not believed."""
LONG = 1 << 20
"""The context of GLM-5.2, whose files need not say which layers choose."""
_PARTS = {
    "index_q.weight": ("wq_b.weight", "attn_q_b.weight"),
    "index_k.weight": ("wk.weight", "attn_k.weight"),
    "index_k_norm.weight": ("k_norm.weight", "k_norm.weight"),
    "index_k_norm.bias": ("k_norm.bias", "k_norm.bias"),
    "index_weights.weight": ("weights_proj.weight", "proj.weight"),
}
_HF_NAMES = {f"blocks.{{i}}.{ours}": f"model.layers.{{i}}.self_attn.indexer.{hf}" for ours, (hf, _) in _PARTS.items()}
_GGUF_NAMES = {f"blocks.{{i}}.{ours}": f"blk.{{i}}.indexer.{gguf}" for ours, (_, gguf) in _PARTS.items()}


def _indexed(spec: ModelSpec, indexer: IndexerSpec, chooses: list[bool], where: str) -> ModelSpec:
    """chooses: of each layer, whether it does so itself."""
    latent = spec.attention.latent
    assert latent is not None
    if latent.query_rank is None:
        raise UnsupportedError(f"{where}: sparse attention whose queries are made of the hidden state", ANOTHER)
    numbers = (("heads", indexer.heads, MAX_DIM), ("dims", indexer.dim, MAX_DIM), ("tokens", indexer.most, MOST_CHOSEN))
    for name, number, most in numbers:
        if number > most:
            raise CheckpointError(f"{where}: an indexer of {number} {name}; at most {most} are believed", BROKEN)
    if indexer.dim % 2 or indexer.dim < latent.rotary_dim:
        raise UnsupportedError(f"{where}: an indexer's heads of {indexer.dim} dims, of which {latent.rotary_dim} rotate", ANOTHER)
    if not chooses[0]:
        raise CheckpointError(f"{where}: the first layer goes by what one in front of it has chosen", BROKEN)

    def own(layer: int, attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, latent=replace(latent, indexer=replace(indexer, chooses=chooses[layer])))

    return spec.each_attention(own)


def sparse_from_hf(spec: ModelSpec, read: ConfigReader, *, interleaved: bool) -> ModelSpec:
    return indexed_from_hf(only_behind_the_first(spec, read), read, interleaved=interleaved)


def indexed_from_hf(spec: ModelSpec, read: ConfigReader, *, interleaved: bool) -> ModelSpec:
    """With latent attention, and what chooses the tokens that it sees. interleaved: as `RopeSpec` has it, of the latter."""
    spec = latent_from_hf(spec, read)
    indexer = IndexerSpec(
        read.integer("index_n_heads"), read.integer("index_head_dim"), read.integer("index_topk"),
        read.flag("indexer_rope_interleave", interleaved),
    )  # fmt: skip
    return _indexed(spec, indexer, _chooses(read, spec.num_layers), read.where)


def _chooses(read: ConfigReader, layers: int) -> list[bool]:
    """By a list, by a letter for each layer, or by each so many-th."""
    if (kinds := read.kinds("indexer_types", layers, "full", "shared")) is not None:
        return [kind == "full" for kind in kinds]
    if read.has("index_topk_pattern"):
        pattern = read.text("index_topk_pattern")
        if len(pattern) != layers or set(pattern) - {"F", "S"}:
            raise CheckpointError(f"{read.where}: 'index_topk_pattern' must be F or S for each of {layers} layers", BROKEN)
        return [letter == "F" for letter in pattern]
    every, first = read.integer("index_topk_freq", 1), read.integer("index_skip_topk_offset", 2, least=0)
    return [max(layer - first + 1, 0) % every == 0 for layer in range(layers)]


def sparse_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str], *, interleaved: bool) -> ModelSpec:
    spec = latent_from_gguf(spec, read, key)
    heads, dim, most = (read.integer(key(f"attention.indexer.{name}")) for name in ("head_count", "key_length", "top_k"))
    indexer = IndexerSpec(heads, dim, most, interleaved)
    return _indexed(spec, indexer, _chooses_in_gguf(read, key("attention.indexer.types"), spec), read.where)


def _chooses_in_gguf(read: ConfigReader, key: str, spec: ModelSpec) -> list[bool]:
    said = read.values.get(key)
    if said is None:
        is_long = spec.architecture == GLM_DSA.name and spec.max_position >= LONG
        return [not is_long or layer < 2 or layer % 4 == 2 for layer in range(spec.num_layers)]
    if not isinstance(said, list) or len(said) < spec.num_layers or not all(each in (0, 1) for each in said):
        raise CheckpointError(f"{read.where}: {key!r} must be true or false for each layer", BROKEN)
    return [bool(each) for each in said[: spec.num_layers]]


def sparse_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    indexers = [attention.indexer for attention in spec.attentions if attention.indexer is not None]
    keys: dict[str, GGUFField] = {
        "attention.indexer.head_count": indexers[0].heads, "attention.indexer.key_length": indexers[0].dim,
        "attention.indexer.top_k": indexers[0].most,
    }  # fmt: skip
    chooses = [each.chooses for each in indexers]
    is_said = not all(chooses) or spec.max_position >= LONG
    return latent_keys(spec) | keys | ({"attention.indexer.types": chooses} if is_said else {})


SPARSE_HF_NAMES = SHARED_NAMES | LATENT_HF_NAMES | BIAS_NAME | _HF_NAMES
SPARSE_GGUF_NAMES = LATENT_GGUF_NAMES | _GGUF_NAMES
_ALL_NAMES: dict[str, Any] = {"hf_names": SPARSE_HF_NAMES, "gguf_names": SPARSE_GGUF_NAMES}
DEEPSEEK32 = replace(
    DEEPSEEK3,
    name="deepseek32",
    gguf_name="deepseek32",
    template="deepseek-v3.2",
    defaults={**DEEPSEEK3.defaults, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
              "max_position_embeddings": 163840},
    hf=lambda spec, read: sparse_from_hf(spec, read, interleaved=False),
    gguf=lambda spec, read, key: sparse_from_gguf(spec, read, key, interleaved=False),
    gguf_keys=sparse_keys,
    gguf_indexer_apart=True,
    mtp_names={},
    **_ALL_NAMES,
)  # fmt: skip
GLM_DSA = replace(
    GLM4_MOE_LITE,
    name="glm_dsa",
    gguf_name="glm-dsa",
    defaults={**GLM4_MOE_LITE.defaults, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "q_lora_rank": 2048,
              "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "num_experts_per_tok": 8},
    hf=lambda spec, read: sparse_from_hf(spec, read, interleaved=True),
    gguf=lambda spec, read, key: sparse_from_gguf(spec, read, key, interleaved=True),
    gguf_keys=sparse_keys,
    mtp_names={},
    **_ALL_NAMES,
)  # fmt: skip
"""Both have a layer behind the model's own that guesses, with an indexer of its own; it is left aside."""
