"""iFLYTEK's Spark-X2.5: Llama with gates of what heads find, a sigmoid a head, and windows in three of four layers, which rotate
heads whole, by a base of their own; the others rotate a quarter of them. q, k and v are one tensor."""

from __future__ import annotations

from collections.abc import Callable

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.exaone import window_pattern
from nanovllm_cli.models.families import FULL, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all

_LAYER = "model.layers.{i}"


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Spark", headwise_attn_output_gate=True, attention_bias=False, mlp_bias=False)
    if (kind := read.text("gate_attn_act_mode", "sigmoid")) != "sigmoid":
        raise UnsupportedError(f"{read.where}: gates {kind[:40]!r} of a Spark", "known: sigmoid")
    return spec


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return spec.with_mlps(activation="gelu")


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    ropes = [attention.rope for attention in spec.attentions if attention.window is not None and attention.rope is not None]
    has_all(spec.architecture, layers_with_a_window=bool(ropes))
    if any(block.mlp.activation != "gelu" for block in spec.blocks):  # type: ignore[union-attr]
        raise UnsupportedError("GGUF cannot say this of a spark2_5 model: another activation than GELU", ANOTHER)
    return {"rope.freq_base_swa": ropes[0].theta, "rope.dimension_count_swa": ropes[0].dim, **window_pattern(spec)}


SPARK = Family(
    "spark2_5",
    attention={"gated": True, "gate_apart": True, "gate_by_head": True},
    qkv_bias=False,
    fused_qkv=True,
    has_window=True,
    full_every=4,
    defaults={
        "hidden_act": "gelu", "head_dim": 256, "num_key_value_heads": 2, "sliding_window": 512, "max_position_embeddings": 8192,
        "rope_parameters": {FULL: {"rope_theta": 5e6, "partial_rotary_factor": 0.25}, SLIDING: {"rope_theta": 1e4}},
    },
    hf_names={
        "embedding.weight": "model.embedding.weight",
        "blocks.{i}.qkv.weight": f"{_LAYER}.self_attn.q_k_v_proj.weight",
        "blocks.{i}.o.weight": f"{_LAYER}.self_attn.out_proj.weight",
        "blocks.{i}.attention_gate.weight": f"{_LAYER}.self_attn.g_proj.weight",
    },
    gguf_names={"blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight"},
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="gelu",
    gguf_keys=_keys,
)  # fmt: skip
