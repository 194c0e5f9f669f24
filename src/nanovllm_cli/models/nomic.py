"""nomic-bert (Nussbaum et al. 2024; nomic-embed-text 1 and 1.5): BERT with rotary positions, gated MLPs, and no biases but its
norms'. Its configs have GPT-2's keys, or since transformers knows it the usual ones. Version 2, of which GGUF files are read, has
biases, MLPs without a gate, and in every second layer experts instead; Jina's third BERT is the same without these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.bert import GGUF_ENTRY, LONE, encoder
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.family import ANOTHER, Family, usual_keys
from nanovllm_cli.models.names import modules, weights_and_biases

_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}  # fmt: skip
_OTHERWISE = {
    "prenorm": False, "use_rms_norm": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
    "rotary_emb_interleaved": False,
}  # fmt: skip
"""What there are other nomic-berts with, and how it is here."""
_PARTS = {
    "qkv": "attn.Wqkv", "o": "attn.out_proj", "up": "mlp.fc11", "gate": "mlp.fc12", "down": "mlp.fc2",
    "after_attention_norm": "norm1", "after_mlp_norm": "norm2",
}  # fmt: skip


def _usual_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {**config, **usual_keys(config, _KEYS)}
    activation = config.get("activation_function")
    return found if activation is None else found | {"hidden_act": {"swiglu": "silu"}.get(str(activation), activation)}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    others = [name for name, usual in _OTHERWISE.items() if read.flag(name, usual) is not usual]
    others += [name for name in ("num_experts", "rotary_emb_scale_base", "rotary_scaling_factor") if read.values.get(name)]
    if others:
        hint = "of those with experts GGUF files are read" if read.values.get("num_experts") else ANOTHER
        raise UnsupportedError(f"a nomic-bert with {', '.join(others)} is not supported", hint)
    return encoder(spec, EntrySpec(spec.norm, segments=read.integer("type_vocab_size", 2, least=0)))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return encoder(spec, EntrySpec(spec.norm, segments=read.integer("tokenizer.ggml.token_type_count", 2)))


NOMIC_BERT = Family(
    "nomic_bert",
    gguf_name="nomic-bert",
    layer_norm=True,
    qkv_bias=False,
    both_ways=True,
    fused_qkv=True,
    tied_by_default=True,
    outer="bert.",
    aside=("cls.", "pooler.", "bert.pooler."),
    config=_usual_keys,
    defaults={"hidden_act": "silu", "layer_norm_eps": 1e-12, "rope_theta": 1000.0, "max_position_embeddings": 2048},
    hf_names={
        "embedding.weight": "bert.embeddings.word_embeddings.weight",
        "segments.weight": "bert.embeddings.token_type_embeddings.weight",
        **weights_and_biases({"entry_norm": "bert.emb_ln", **modules("blocks.{i}.", "bert.encoder.layers.{i}.", _PARTS)}),
    },
    gguf_names=GGUF_ENTRY,
    hf=_from_hf,
    gguf=_from_gguf,
)


def _moe_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Its experts have no biases, and a token's weights are shares of all."""

    def own(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        return replace(mlp, expert=replace(mlp.expert, bias=False)) if isinstance(mlp, MoESpec) else mlp

    return _from_gguf(spec.each_mlp(own), read, key)


NOMIC_BERT_MOE = replace(
    NOMIC_BERT,
    name="nomic_bert_moe",
    gguf_name="nomic-bert-moe",
    qkv_bias=True,
    ungated=LONE,
    gguf_activation="lone_gelu",
    experts=ExpertKeys(("num_experts",), "intermediate_size", False, taken="moe_top_k", norm_in_gguf=True),
    gguf=_moe_from_gguf,
)
JINA_BERT_3 = replace(NOMIC_BERT_MOE, name="jina_bert_v3", gguf_name="jina-bert-v3", experts=None, gguf=_from_gguf)
"""Its adapters are files of their own."""
