"""Which part of a model a tensor belongs to, by its name in a Hugging Face folder or a GGUF file."""

from __future__ import annotations

_MARKS = (
    ("n-grams", ("ngram_embedding",)),
    ("norms", ("norm", ".ln_", "ln_f.")),
    ("other", ("altup", "laurel", "_hc.", ".hc_", "hyper_connection", ".ple.")),
    ("head", ("embed_out",)),
    ("per layer", ("per_layer", "inp_gate")),
    ("embedding", ("embed", "token_embd", "position_embd", "wte.", "wpe.")),
    ("head", ("lm_head", "output.weight")),
    ("mlp", ("mixer.up_", "mixer.down_", "mixer.gate", "mixer.experts", "mixer.shared_", "mixer.fc", "mixer.suv_", "dory_suv_")),
    ("attention", ("attn", "ssm", "mixer.", ".mamba.", "attention", "Attention", "dory_s", "time_mix")),
    ("conv", ("conv",)),
    ("mlp", ("mlp", "ffn", "feed_forward", "block_sparse_moe", "router", "experts", ".fc1.", ".fc2.", "channel_mix",
             "DenseRelu")),
    ("per layer", (".proj.weight",)),
)
_OUTER = "language_model.", "thinker."
"""What heads of models that see or hear may begin with."""
_SHARED = "shared.weight", "model.shared.weight"
"""A T5's or a BART's embedding, which encoder and decoder have in common."""
CLASSES = ("embedding", "n-grams", "per layer", "attention", "conv", "mlp", "norms", "head", "other")


def class_of(name: str) -> str:
    """One of CLASSES. A head's name begins with its mark: blk.0.attn_output.weight is another."""
    for outer in _OUTER:
        name = name.removeprefix(outer)
    if name in _SHARED:
        return "embedding"
    for kind, marks in _MARKS:
        if any(name.startswith(mark) if kind == "head" else mark in name for mark in marks):
            return kind
    return "other"
