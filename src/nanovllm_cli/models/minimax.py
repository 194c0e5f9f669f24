"""MiniMax-M2: Llama with a half of each head rotated, norms of all heads of q, and of k, together, and in every layer experts
that are chosen by sigmoids and a bias, as DeepSeek-V3's are, of which none is shared."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import MIXTRAL_KEYS, scored_by_sigmoids
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.names import MIXTRAL_NAMES
from nanovllm_cli.models.rotary import checked_rope, rope_section

_PER_LAYER = "per_layer"


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """What is published says "rotary_dim", in place of the share of a head that transformers makes of it."""
    kind = read.text("qk_norm_type", _PER_LAYER)
    if not read.flag("use_qk_norm", True) or kind != _PER_LAYER:
        raise UnsupportedError(f"{read.where}: a MiniMax whose heads are normed otherwise", f"known: {_PER_LAYER}")
    if not read.flag("use_routing_bias", True) or read.integer("shared_intermediate_size", 0, least=0):
        raise UnsupportedError(f"{read.where}: a MiniMax without a routing bias, or with an expert for all tokens", ANOTHER)
    kinds = read.values.get("attn_type_list") or []
    if not isinstance(kinds, list):
        raise CheckpointError(f"{read.where}: 'attn_type_list' must be a list", BROKEN)
    if any(kind != 1 for kind in kinds):
        raise UnsupportedError(f"{read.where}: a MiniMax with linear attention", ANOTHER)
    spec = scored_by_sigmoids(spec, read)
    if rope_section(read).has("partial_rotary_factor") or not read.has("rotary_dim"):
        return spec
    dim, head_dim = read.integer("rotary_dim"), spec.attention.head_dim
    return spec.each_rope(lambda rope: checked_rope(replace(rope, dim=dim), head_dim, read))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    return {} if spec.mixture is None else {"expert_feed_forward_length": spec.mixture.expert.intermediate_size}


MINIMAX_M2 = Family(
    "minimax_m2",
    gguf_name="minimax-m2",
    attention={"qk_norm_of": "all heads"},
    qk_norm=True,
    qkv_bias=False,
    experts=replace(MIXTRAL_KEYS, scoring="sigmoid", selection_bias=True),
    defaults={"rope_theta": 5e6, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
              "num_experts_per_tok": 8, "num_local_experts": 256},
    hf_names=MIXTRAL_NAMES
    | {"blocks.{i}.router.selection_bias": "model.layers.{i}.block_sparse_moe.e_score_correction_bias"},
    hf=_from_hf,
    gguf_keys=_keys,
)  # fmt: skip
