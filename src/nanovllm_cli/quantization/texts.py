"""Texts for calibration and measuring: the bundled ones, and a user's files.

The bundled two are made by `scripts/bundled_texts.py`; they have no document in common. A .jsonl file has an object a line, with
"text", "prompt", or "messages", which the model's chat template renders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanovllm_cli.errors import UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.tokenizer import Tokenizer

WINDOW = 512
MAX_LINE_CHARS = 10_000_000
_SOME_DAY = datetime(2026, 1, 1)  # templates may write the date, and equal runs give equal bytes
_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "texts"


class NamedText(NamedTuple):
    """name: what the text is called where it is mentioned."""

    name: str
    text: str


def bundled_text(split: Literal["calibration", "verification"]) -> NamedText:
    return NamedText(f"the bundled {split} text", (_FOLDER / f"{split}.txt").read_text(encoding="utf-8"))


def window_of(spec: ModelSpec) -> int:
    """Tokens that a model reads at once of a text: it has no more positions than it says."""
    return min(WINDOW, spec.max_position)


def windows(
    tokenizer: Tokenizer, text: NamedText, vocab_size: int, *, size: int = WINDOW, ended: bool = False
) -> Iterator[list[int]]:
    """Token ids of the text's documents in pieces of at most `size`, each behind what the tokenizer puts before every text; with
    `ended`, before what it puts behind one. UsageError names the line of a .jsonl file that means nothing, and refuses a size
    that has no room for any of it."""
    prefix = list(tokenizer.prefix_ids)
    suffix = tokenizer.encode("")[len(prefix) :] if ended else []
    step = size - len(prefix) - len(suffix)
    if step < 1:
        raise UsageError(f"the model's context of {size} tokens has no room for a text", "its config is of another model")
    for document in documents(text, tokenizer):
        ids = [i for i in tokenizer.encode(document, add_special_tokens=False) if i < vocab_size]
        for first in range(0, len(ids), step):
            if len(piece := [*prefix, *ids[first : first + step], *suffix]) > 1:
                yield piece


def documents(text: NamedText, tokenizer: Tokenizer) -> Iterator[str]:
    """The whole text, or what the lines of a .jsonl file say. UsageError names a line that means nothing."""
    if not text.name.endswith((".jsonl", ".ndjson")):
        yield text.text
        return
    for number, line in enumerate(text.text.split("\n"), 1):  # splitlines would cut within JSON's strings
        if line.strip():
            yield _document(line, f"{text.name}, line {number}", tokenizer)


def _document(line: str, where: str, tokenizer: Tokenizer) -> str:
    if len(line) > MAX_LINE_CHARS:
        raise UsageError(f"{where}: longer than {MAX_LINE_CHARS} characters")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as failure:
        raise UsageError(f"{where}: not JSON: {failure}") from failure
    if isinstance(value, dict):
        for key in ("text", "prompt"):
            if isinstance(value.get(key), str):
                return str(value[key])
        messages = value.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return _rendered(messages, where, tokenizer)
    raise UsageError(f'{where}: no "text", "prompt" or "messages" in it', 'write {"text": "..."} on each line')


def _rendered(messages: list[dict[str, Any]], where: str, tokenizer: Tokenizer) -> str:
    if "default" not in tokenizer.chat_templates:
        raise UsageError(f"{where}: messages, and the model has no chat template", 'write {"text": "..."} instead')
    return ChatTemplate.of(tokenizer).render(messages, add_generation_prompt=False, now=_SOME_DAY)
