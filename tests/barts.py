"""BARTs and their kin, tiny and random, by transformers; and what they make of a text."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from engines import random_model, save
from test_llm import write_byte_tokenizer

START, PADDING, END, VOCAB = 2, 1, 2, 300
"""The first are as in published models, of which one begins to write by the token that ends a text."""
SHAPE = {
    "vocab_size": VOCAB, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 70, "decoder_ffn_dim": 90, "max_position_embeddings": 200,
    "pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": END, "decoder_start_token_id": START, "forced_eos_token_id": None,
}  # fmt: skip
"""Heads and MLPs of encoder and decoder differ."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", {}),
    "mbart": ("MBart", {"scale_embedding": True, "activation_function": "relu"}),
    "marian": ("Marian", {"scale_embedding": True, "activation_function": "swish", "decoder_start_token_id": PADDING}),
    "m2m100": ("M2M100", {}),
    "pegasus": ("Pegasus", {"scale_embedding": True, "activation_function": "relu"}),
    "blenderbot": ("Blenderbot", {"activation_function": "gelu", "encoder_no_repeat_ngram_size": 0}),
}
"""By what they are known as: transformers' name, and what differs from SHAPE."""


@functools.cache
def bart(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """With biases of logits, where such models have them. Positions that are no weights of a model stay what they are."""
    import transformers

    name, changes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    model = random_model(config, 1, dtype, transformers.AutoModelForSeq2SeqLM)
    for part, weight in model.named_parameters():  # whose norms, or one token, would else decide it all
        if part.endswith("bias"):
            weight.data *= 0.2
        elif weight.dim() > 1 and "embed" not in part and "shared" not in part:
            weight.data *= 1.7
    for half in (model.model.encoder, model.model.decoder):
        if hasattr(half.embed_positions, "create_weight"):
            half.embed_positions.weight = torch.nn.Parameter(half.embed_positions.create_weight().to(dtype))
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)) * 0.5)
    return model


def bart_folder(folder: Path, kind: str = "bart", dtype: torch.dtype = torch.float32) -> Path:
    """With a tokenizer whose tokens are bytes."""
    save(bart(kind, dtype), folder)
    write_byte_tokenizer(folder, ("<pad>", "</s>"), bos_token="<pad>", eos_token="</s>")
    return folder


def begun_by(kind: str) -> int:
    return int(KINDS[kind][1].get("decoder_start_token_id", START))


@torch.inference_mode()
def expected(kind: str, source: tuple[int, ...], text: tuple[int, ...], *, begins: tuple[int, ...] = ()) -> torch.Tensor:
    """Log-probabilities behind each token of a text, in front of which is what the decoder begins with."""
    begins = begins or (begun_by(kind),)
    found = bart(kind)(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[*begins, *text]]))
    logprobs: torch.Tensor = found.logits[0, len(begins) - 1 :].log_softmax(-1)
    return logprobs


def a_source(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (*torch.randint(3, VOCAB, (length - 1,), generator=generator).tolist(), END)
