"""The tokenizer that a checkpoint holds, and how it goes with the model. What a tokenizer does is in `text`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.text.builtin_templates import builtin_template
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import folder_of
from nanovllm_cli.weights.random_weights import RandomCheckpoint
from nanovllm_cli.weights.tensor_names import family_of


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Bytes for made-up weights. With the template that its family means, where it brings none. Raises what the tokenizer's own
    readers raise."""
    if isinstance(checkpoint, RandomCheckpoint):
        return byte_tokenizer()
    is_file = checkpoint.format == "gguf"
    tokenizer = Tokenizer.from_gguf(checkpoint.config) if is_file else Tokenizer.from_folder(folder_of(checkpoint.path))
    with suppress(NanovllmError):  # a tokenizer needs no model that is known
        if "default" not in tokenizer.chat_templates and (template := family_of(checkpoint).template):
            tokenizer.chat_templates["default"] = builtin_template(template)
    return tokenizer


def check_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    """CheckpointError where it has more tokens than the model, of `vocab_size`."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model {vocab_size}",
            "the folder mixes files of different models",
        )


def end_ids(generation_config: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """What ends an answer: generation_config.json's eos_token_id, and what the tokenizer knows as ends."""
    return tuple(dict.fromkeys([*declared_ends(generation_config, vocab_size), *tokenizer.eos_ids]))


def declared_ends(generation_config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Those of generation_config.json alone: one, a list, or none."""
    declared = generation_config.get("eos_token_id")
    listed = declared if isinstance(declared, list) else [declared]
    return [i for i in listed if type(i) is int and 0 <= i < vocab_size]
