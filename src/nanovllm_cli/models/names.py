"""Our names of tensors -> the checkpoints'. {i} is the layer. Families that differ change a few lines of these."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

MATRICES = ("gate", "up", "down")
"""Of an MLP."""


def weights_and_biases(names: Mapping[str, str]) -> dict[str, str]:
    """Names of modules -> of their weights and biases."""
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in names.items() for kind in ("weight", "bias")}


def modules(ours: str, theirs: str, parts: Mapping[str, str]) -> dict[str, str]:
    """The same with these in front of their names."""
    return {f"{ours}{part}": f"{theirs}{their_part}" for part, their_part in parts.items()}


def projections(ours: str, theirs: str, parts: Iterable[str] = MATRICES) -> dict[str, str]:
    """Of weights of such parts of a module."""
    return {f"{ours}{part}.weight": f"{theirs}{part}_proj.weight" for part in parts}


def each_expert(place: str, parts: Iterable[str] = MATRICES) -> dict[str, str]:
    """The same of experts, whose module is at `place`."""
    return projections("blocks.{i}.experts.{e}.", f"{place}.{{e}}.", parts)


_LAYER = "model.layers.{i}"
HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    **weights_and_biases({
        **modules("blocks.{i}.", f"{_LAYER}.", {
            "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
            **{part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o", "qkv")},
            **{part: f"mlp.{part}_proj" for part in (*MATRICES, "gate_up")},
        }),
        "norm": "model.norm", "head": "lm_head",
    }),
    **{f"blocks.{{i}}.{part}_norm.weight": f"{_LAYER}.self_attn.{part}_norm.weight" for part in "qk"},
}  # fmt: skip
QWEN_NAMES = {"blocks.{i}.router.weight": f"{_LAYER}.mlp.gate.weight", **each_expert(f"{_LAYER}.mlp.experts")}
SHARED_NAMES = QWEN_NAMES | projections("blocks.{i}.shared.", f"{_LAYER}.mlp.shared_experts.")
BIAS_NAME = {"blocks.{i}.router.selection_bias": f"{_LAYER}.mlp.gate.e_score_correction_bias"}
MIXTRAL_NAMES = {
    "blocks.{i}.router.weight": f"{_LAYER}.block_sparse_moe.gate.weight",
    **{
        f"blocks.{{i}}.experts.{{e}}.{part}.weight": f"{_LAYER}.block_sparse_moe.experts.{{e}}.{theirs}.weight"
        for part, theirs in zip(MATRICES, ("w1", "w3", "w2"), strict=True)
    },
}

GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    **weights_and_biases({
        **modules("blocks.{i}.", "blk.{i}.", {
            "attention_norm": "attn_norm", "mlp_norm": "ffn_norm", "o": "attn_output", "router": "ffn_gate_inp",
            **{part: f"attn_{part}" for part in ("q", "k", "v", "qkv")},
            **{f"experts.{{e}}.{part}": f"ffn_{part}_exps.{{e}}" for part in MATRICES},
            **{part: f"ffn_{part}" for part in MATRICES}, "gate_up": "ffn_up",
        }),
        "norm": "output_norm", "head": "output",
    }),
    **{f"blocks.{{i}}.{part}_norm.weight": f"blk.{{i}}.attn_{part}_norm.weight" for part in "qk"},
    "blocks.{i}.router.selection_bias": "blk.{i}.exp_probs_b.bias",
    **{f"blocks.{{i}}.shared.{part}.weight": f"blk.{{i}}.ffn_{part}_shexp.weight" for part in MATRICES},
}  # fmt: skip
"""A file has the experts of a layer in one tensor; weights/stacked.py takes it apart."""

OUT_BIAS = "attn_output.bias"
MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
"""As GGUF files call them; see `Family.gguf_homeless`."""

POST_HF_NAMES = {
    "blocks.{i}.after_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blocks.{i}.after_mlp_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
}

SANDWICH_GGUF_NAMES = {
    "blocks.{i}.after_attention_norm.weight": "blk.{i}.post_attention_norm.weight",
    "blocks.{i}.after_mlp_norm.weight": "blk.{i}.post_ffw_norm.weight",
}

MTP_HF_NAMES = {
    "embedding_norm.weight": "model.layers.{i}.enorm.weight",
    "hidden_norm.weight": "model.layers.{i}.hnorm.weight",
    "join.weight": "model.layers.{i}.eh_proj.weight",
    "norm.weight": "model.layers.{i}.shared_head.norm.weight",
}
"""Of a layer behind the model's own that predicts further tokens (`models/mtp.py`), where it is one more of its layers."""

MTP_GGUF_NAMES = {
    "embedding_norm.weight": "blk.{i}.nextn.enorm.weight",
    "hidden_norm.weight": "blk.{i}.nextn.hnorm.weight",
    "join.weight": "blk.{i}.nextn.eh_proj.weight",
    "norm.weight": "blk.{i}.nextn.shared_head_norm.weight",
}

MTP_SHARED = re.compile(r"(?:model\.layers\.\d+\.|blk\.\d+\.nextn\.)(?:embed_tokens|shared_head[._]head)\.weight")
"""The model's embedding and head once more, which such a layer shares."""

# Left by some exporters, and worth nothing to us: frequencies follow from the config, what tokens see from their order.
_OF_NO_USE = (
    ".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached",
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
)  # fmt: skip

ADAPTERS_OF_SENSES = tuple(f".lora_{side}.{sense}.weight" for side in "AB" for sense in ("vision", "speech"))
"""Which a text alone does not go through (Phi-4-multimodal)."""

XIELU_PARTS = ("alpha_p", "alpha_n", "beta", "eps")
"""Numbers of Apertus' activations, which a folder has as tensors."""
TALKIE_GAINS = (".attn.head_gain.head_g", ".attn_gain.a_g", ".mlp_gain.a_g", ".embed_skip.a_g", "lm_head_gain.w_g")
"""Of a Talkie's layers, and of its head."""
NGRAM_BUFFERS = (".layer_multipliers", ".ngram_heads_vocab_sizes", ".ngram_heads_offsets")
"""Of a Qwen4-Exp's tables, which a spec has."""
HF_IGNORED = (*_OF_NO_USE, *NGRAM_BUFFERS, *(f".mlp.act_fn.{part}" for part in XIELU_PARTS), *TALKIE_GAINS)
"""What no layer asks for."""
