"""A vocabulary of the 256 bytes, for models that bring none: made-up weights say nothing in any language."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.text.vocabulary import TokenizerParts


def byte_tokenizer() -> Tokenizer:
    """A token a byte of UTF-8, in the order of GPT-2's alphabet; no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend))
