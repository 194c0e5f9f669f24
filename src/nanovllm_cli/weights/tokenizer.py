"""The tokenizer that a checkpoint holds. What a tokenizer does is in `text`."""

from __future__ import annotations

from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import folder_of
from nanovllm_cli.weights.random_weights import RandomCheckpoint


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Bytes for made-up weights. Raises what the tokenizer's own readers raise."""
    if isinstance(checkpoint, RandomCheckpoint):
        return byte_tokenizer()
    if checkpoint.format == "gguf":
        return Tokenizer.from_gguf(checkpoint.config)
    return Tokenizer.from_folder(folder_of(checkpoint.path))
