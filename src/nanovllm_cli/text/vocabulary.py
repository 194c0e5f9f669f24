"""What a loader of vocabularies finds: the parts of a tokenizer, the tokens that end a turn, the tokens that are control.

The bytes behind a token are in `token_bytes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from nanovllm_cli.errors import CheckpointError, NanovllmError
from nanovllm_cli.reading_spec import LanguageTokens

# Tokens that end an answer in one of the known prompt formats; llama.cpp keeps the same list ("end of generation").
END_TOKENS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
        "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
        "[EOS]", "</s>", "<eos>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
        "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<|repo_name|>", "<|file_sep|>",
    }
)  # fmt: skip


# Gemma 4's tokens that llama.cpp's converter does not write as control tokens, so that its own parser sees them.
GEMMA_TAGS = frozenset(
    {
        "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
    }
)  # fmt: skip


FOREIGN = "\U0010ffff\U0010ffff"
"""In front of tokens that a model writes, and that no text is cut into."""


@dataclass
class TokenizerParts:
    """What a loader found: a backend with every added token, and the roles of some ids.

    `prefix_ids` and `suffix_ids` go around a text that is encoded with its special tokens, `between_ids` between two that a
    model reads together, empty where it was not made for that; the backend's own post-processor is not used. `end_ids` are those
    that the files declare as ends of an answer.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    unk_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    between_ids: tuple[int, ...] = ()
    cls_id: int | None = None
    sep_id: int | None = None
    mask_id: int | None = None
    end_ids: list[int] = field(default_factory=list)
    chat_templates: dict[str, str] = field(default_factory=dict)
    is_world: bool = False  # see `world.py`
    languages: LanguageTokens | None = None
    num_known: int | None = None  # ids from there on are the unknown token's: pieces that the model has no row for


def end_token_ids(control: Mapping[str, int], declared: list[int]) -> tuple[int, ...]:
    """Ids that end an answer: what the files declare, first, then what the known formats end with.

    `control` maps the vocabulary's added tokens to ids. Two formats use an end token of another format inside an
    answer: with `<|return|>` and `<|call|>`, `<|end|>` closes only a channel; with `<|tool_response>`, `</s>` is a
    plain tag.
    """
    found = END_TOKENS & control.keys()
    calls = bool({"<|call|>", "<|calls|>"} & found)
    if calls and ("<|return|>" in found or "<|flush|>" in found):
        found -= {"<|end|>"}
    if "<|tool_response>" in found:
        found -= {"</s>"}
    return tuple(dict.fromkeys([*declared, *sorted(control[text] for text in found)]))


def looks_like_control(text: str) -> bool:
    """`<|…|>`, in ASCII or in DeepSeek's full-width bars: control in every known format, whatever the files flag."""
    return len(text) > 4 and text[:2] in ("<|", "<\uff5c") and text[-2:] in ("|>", "\uff5c>")


@contextmanager
def guard_library(what: str) -> Iterator[None]:
    """Whatever the tokenizer library raises over what a model's files made of it is that model's broken file.

    Its panics do not derive from Exception.
    """
    try:
        yield
    except (NanovllmError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise CheckpointError(f"{what} is broken: {reason}", "download the model again, or use another copy") from error
