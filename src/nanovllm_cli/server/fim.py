"""Prompts that ask for what lies between two texts, for models whose vocabulary has tokens for that.

The tokens of a family say it all; where a model was not trained with them nobody can tell, and it answers anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.text.tokenizer import Tokenizer

_PREFIX, _SUFFIX = object(), object()

# As the families' papers and model cards write it: Qwen2.5-Coder and Granite, StarCoder, SantaCoder, Code Llama, DeepSeek-Coder,
# CodeGeeX, Codestral.
_FORMATS: tuple[tuple[object, ...], ...] = (
    ("<|fim_prefix|>", _PREFIX, "<|fim_suffix|>", _SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", _PREFIX, "<fim_suffix>", _SUFFIX, "<fim_middle>"),
    ("<fim-prefix>", _PREFIX, "<fim-suffix>", _SUFFIX, "<fim-middle>"),
    ("▁<PRE>", _PREFIX, "▁<SUF>", _SUFFIX, "▁<MID>"),
    ("<｜fim▁begin｜>", _PREFIX, "<｜fim▁hole｜>", _SUFFIX, "<｜fim▁end｜>"),
    ("<|code_prefix|>", _PREFIX, "<|code_suffix|>", _SUFFIX, "<|code_middle|>"),
    ("[SUFFIX]", _SUFFIX, "[PREFIX]", _PREFIX),
)
_FILE_SEPARATORS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")


def fill_in_the_middle(
    tokenizer: Tokenizer, prefix: str | Sequence[int], suffix: str, files: Sequence[tuple[str, str]] = (), begun: str = ""
) -> list[int]:
    """The ids of a prompt. files: (name, text) of what else there is to know; begun: how the middle begins.

    Control tokens in the texts stay text. Raises UnsupportedError for a vocabulary without tokens for it.
    """
    form = _format(tokenizer)
    if form is None:
        raise UnsupportedError("this model has no tokens for filling in the middle", "leave the suffix out")
    ids = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    ids += _before(tokenizer, files)
    for part in form:
        if part is _PREFIX:
            ids += _plain(tokenizer, prefix) if isinstance(prefix, str) else prefix
        elif part is _SUFFIX:
            ids += _plain(tokenizer, suffix)
        else:
            ids.append(_id(tokenizer, part))
    return ids + _plain(tokenizer, begun)


def fills_in(tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary has tokens for it."""
    return _format(tokenizer) is not None


def _format(tokenizer: Tokenizer) -> tuple[object, ...] | None:
    return next((form for form in _FORMATS if all(_has(tokenizer, part) for part in form)), None)


def _before(tokenizer: Tokenizer, files: Sequence[tuple[str, str]]) -> list[int]:
    """Other files, each behind the vocabulary's own mark, or behind a blank line where it has none."""
    ids: list[int] = []
    mark = next((_id(tokenizer, name) for name in _FILE_SEPARATORS if _has(tokenizer, name)), None)
    for name, text in files:
        ids += _plain(tokenizer, f"{name}\n{text}\n\n") if mark is None else [mark, *_plain(tokenizer, f"{name}\n{text}")]
    return ids + ([mark] if mark is not None and files else [])


def _has(tokenizer: Tokenizer, part: object) -> bool:
    return part is _PREFIX or part is _SUFFIX or tokenizer.token_to_id(str(part)) is not None


def _id(tokenizer: Tokenizer, name: object) -> int:
    token_id = tokenizer.token_to_id(str(name))
    assert token_id is not None
    return token_id


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False) if text else []
