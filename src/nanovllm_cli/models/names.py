"""Our names of tensors -> the checkpoints'. {i} is the layer. Families that differ change a few lines of these."""

from __future__ import annotations

import re

from nanovllm_cli.models.experts import GGUF_EXPERT_NAMES

HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    **{f"blocks.{{i}}.attention_norm.{kind}": f"model.layers.{{i}}.input_layernorm.{kind}" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.mlp_norm.{kind}": f"model.layers.{{i}}.post_attention_layernorm.{kind}" for kind in ("weight", "bias")},
    **{
        f"blocks.{{i}}.{part}.{kind}": f"model.layers.{{i}}.self_attn.{part}_proj.{kind}"
        for part in "qkvo"
        for kind in ("weight", "bias")
    },
    **{f"blocks.{{i}}.{part}_norm.weight": f"model.layers.{{i}}.self_attn.{part}_norm.weight" for part in "qk"},
    **{
        f"blocks.{{i}}.{part}.{kind}": f"model.layers.{{i}}.mlp.{part}_proj.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    **{f"blocks.{{i}}.qkv.{kind}": f"model.layers.{{i}}.self_attn.qkv_proj.{kind}" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.gate_up.{kind}": f"model.layers.{{i}}.mlp.gate_up_proj.{kind}" for kind in ("weight", "bias")},
    **{f"norm.{kind}": f"model.norm.{kind}" for kind in ("weight", "bias")},
    **{f"head.{kind}": f"lm_head.{kind}" for kind in ("weight", "bias")},
}

GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    **{f"blocks.{{i}}.attention_norm.{kind}": f"blk.{{i}}.attn_norm.{kind}" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.mlp_norm.{kind}": f"blk.{{i}}.ffn_norm.{kind}" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.{part}.{kind}": f"blk.{{i}}.attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.o.{kind}": f"blk.{{i}}.attn_output.{kind}" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.{part}_norm.weight": f"blk.{{i}}.attn_{part}_norm.weight" for part in "qk"},
    **GGUF_EXPERT_NAMES,
    **{
        f"blocks.{{i}}.{part}.{kind}": f"blk.{{i}}.ffn_{part}.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    **{f"blocks.{{i}}.qkv.{kind}": f"blk.{{i}}.attn_qkv.{kind}" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.gate_up.{kind}": f"blk.{{i}}.ffn_up.{kind}" for kind in ("weight", "bias")},
    **{f"norm.{kind}": f"output_norm.{kind}" for kind in ("weight", "bias")},
    **{f"head.{kind}": f"output.{kind}" for kind in ("weight", "bias")},
}

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

XIELU_PARTS = ("alpha_p", "alpha_n", "beta", "eps")
"""Numbers of Apertus' activations, which a folder has as tensors."""
HF_IGNORED = (*_OF_NO_USE, *(f".mlp.act_fn.{part}" for part in XIELU_PARTS))
"""What no layer asks for."""
