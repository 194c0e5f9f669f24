"""GTE's encoders (Zhang et al. 2024; gte-multilingual, gte-en-v1.5, arctic-embed-m-v2.0 embed texts by them): BERT with rotary
positions and gated MLPs, whose up and gate are one tensor (`weights/stacked.py`).
"""

from __future__ import annotations

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.bert import encoder
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, no_file
from nanovllm_cli.models.names import modules, weights_and_biases

_PARTS = {
    "qkv": "attention.qkv_proj", "o": "attention.o_proj", "after_attention_norm": "attn_ln", "gate": "mlp.gate_proj",
    "up": "mlp.up_proj", "down": "mlp.down_proj", "after_mlp_norm": "mlp_ln",
}  # fmt: skip
_OTHERWISE = {"logn_attention_scale": False, "logn_attention_clip1": False, "pack_qkv": True}


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    others = [name for name, usual in _OTHERWISE.items() if read.flag(name, usual) is not usual]
    kinds = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm"}
    others += [name for name, usual in kinds.items() if read.text(name, usual) != usual]
    if others:
        raise UnsupportedError(f"a GTE encoder with {', '.join(others)} is not supported", ANOTHER)
    segments = read.integer("type_vocab_size", 1, least=0)
    return encoder(spec.with_mlps(bias=False, down_bias=True), EntrySpec(spec.norm, segments=segments))


def _family(outer: str) -> Family:
    """By the prefix that names of tensors have in front of a head."""
    return Family(
        "gte",
        layer_norm=True,
        both_ways=True,
        fused_qkv=True,
        outer=outer,
        aside=(f"{outer}pooler.", "pooler.", "lm_head.", "classifier."),
        tied_by_default=True,
        defaults={
            "hidden_act": "gelu", "layer_norm_eps": 1e-12, "max_position_embeddings": 8192, "rope_theta": 160000.0,
            "attention_bias": True,
        },
        hf_names={
            "embedding.weight": f"{outer}embeddings.word_embeddings.weight",
            "segments.weight": f"{outer}embeddings.token_type_embeddings.weight",
            **weights_and_biases(
                {"entry_norm": f"{outer}embeddings.LayerNorm", **modules("blocks.{i}.", f"{outer}encoder.layer.{{i}}.", _PARTS)}
            ),
        },
        hf=_from_hf,
        gguf_like=no_file("GTE encoder"),
    )  # fmt: skip


GTE, GTE_NEW = _family("gte."), _family("new.")
"""As transformers names it, and as Alibaba's own code does."""
