"""The Hugging Face folder of the bundled model: tokenizer, configuration, weights, model card.

Every file is written beside its place and renamed, so that a reader sees the old or the new one and never a part.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tiny_model import TinyConfig, TinyModel

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Qwen2's pre-tokenizer: contractions, words with one leading mark, single digits, punctuation, line ends, spaces.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = Path(__file__).with_name("tiny_chat_template.jinja")


@dataclass(frozen=True)
class Report:
    """What the model card says about the training."""

    minutes: float
    steps: int
    tokens: int
    documents: int
    perplexity: float
    answer_perplexity: float
    held_out_documents: int


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab_size` ids; the special ones come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return tokenizer


def export(folder: Path, model: TinyModel, config: TinyConfig, tokenizer: Tokenizer, report: Report) -> None:
    """Write the whole folder."""
    folder.mkdir(parents=True, exist_ok=True)
    template = CHAT_TEMPLATE.read_text()
    ids = {token: tokenizer.token_to_id(token) for token in (*SPECIAL, *MARKUP)}
    weights = {f"model.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    files = {
        "config.json": _json(model_config(config, ids)),
        "generation_config.json": _json(generation_config(ids)),
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": _json(tokenizer_config(config, ids, template)),
        "chat_template.jinja": template.encode(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
        "README.md": model_card(config, model, report).encode(),
    }
    for name, content in files.items():
        temporary = folder / f".{name}.part"
        temporary.write_bytes(content)
        os.replace(temporary, folder / name)


def model_config(config: TinyConfig, ids: dict[str, int]) -> dict[str, Any]:
    """config.json, as transformers' Qwen3ForCausalLM reads it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def generation_config(ids: dict[str, int]) -> dict[str, Any]:
    """generation_config.json: what to sample with when the user says nothing."""
    return {
        "bos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


def tokenizer_config(config: TinyConfig, ids: dict[str, int], template: str) -> dict[str, Any]:
    """tokenizer_config.json, with the chat template inside for readers that look only there."""
    added = {
        str(i): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token in SPECIAL,
        }
        for token, i in ids.items()
    }  # fmt: skip
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": config.max_positions,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def model_card(config: TinyConfig, model: TinyModel, report: Report) -> str:
    """README.md."""
    parameters = sum(p.numel() for p in model.parameters())
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tiny

A language model of {parameters / 1e6:.2f} million parameters that comes with the package, so that every feature of an
inference tool can be shown and tested without a network. It has a real distribution: it tells short stories, answers
simple chats, thinks in a `<think>` block when asked to, calls the tools that it is given and writes small JSON objects.
It knows nothing of the world. Do not ask it for advice.

## Architecture

Qwen3 (`Qwen3ForCausalLM`): {config.num_layers} layers, hidden size {config.hidden_size}, {config.num_heads} query heads
and {config.num_kv_heads} key-value heads of {config.head_dim}, intermediate size {config.intermediate_size}, QK-norm,
rotary positions with theta {config.rope_theta:.0f}, tied embeddings, bfloat16. The tokenizer is a byte-level BPE of
{config.vocab_size} tokens with Qwen3's special tokens; the chat template renders ChatML with Hermes tool calls, in the
same format as Qwen3's, but without thinking unless `enable_thinking` is true.

## Data

All text comes from a seeded grammar (`scripts/tiny_corpus.py`), written for this model: stories of ten plots, chats
over a closed world (sums, animals, capitals, what the user said before), JSON on demand, short Python functions, and
tool calls of which half use invented names, so that copying from the context is learnt. Nothing else went in. A
document is held out by a hash of its text, so the held-out split is disjoint by construction; one invented tool name of
twelve never occurs in training.

## Training

`python scripts/train_tiny.py` regenerates this folder on a CPU: {report.minutes:.0f} minutes of one core,
{report.steps} steps, {report.tokens / 1e6:.1f} million tokens in {report.documents} documents, none seen twice on
purpose. Muon for the matrices, Adam for the rest, a linear decay to zero. It starts with noise that comes twice, from
which a model learns in two minutes to copy from its context, then short documents, then all.

## Measured

On {report.held_out_documents} held-out documents:

| tokens | perplexity |
|---|---|
| answers (what the assistant says, and stories) | {report.answer_perplexity:.3f} |
| all, with the users' turns, tool schemas and random values in them | {report.perplexity:.3f} |

The answers' perplexity is low because most answers follow from the question; in stories it is a choice among sentences.

## Limits

English only, and only the small world of its grammar. Most sums are wrong, long chats drift, rare words may
be misspelt when copied. Trained on sequences of up to 1024 tokens; positions up to {config.max_positions} are allowed.
"""


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
