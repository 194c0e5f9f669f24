"""Texts for calibration and measuring: the bundled ones, and a user's files.

The bundled two are made by `scripts/bundled_texts.py`; they have no document in common. A .jsonl file has an object a line, with
"text", "prompt", or "messages", which the model's chat template renders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nanovllm_cli.errors import UsageError

MAX_LINE_CHARS = 10_000_000
_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "texts"


class NamedText(NamedTuple):
    """name: what the text is called where it is mentioned."""

    name: str
    text: str


def bundled_text(split: Literal["calibration", "verification"]) -> NamedText:
    return NamedText(f"the bundled {split} text", (_FOLDER / f"{split}.txt").read_text(encoding="utf-8"))


def documents(text: NamedText, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> list[str]:
    """The whole text, or what the lines of a .jsonl file say. render: what a chat template makes of messages. UsageError names
    the line that means nothing."""
    if not text.name.endswith((".jsonl", ".ndjson")):
        return [text.text]
    found = []
    for number, line in enumerate(text.text.splitlines(), 1):
        if line.strip():
            found.append(_document(line, f"{text.name}, line {number}", render))
    return found


def _document(line: str, where: str, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
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
            return render(messages)
    raise UsageError(f'{where}: no "text", "prompt" or "messages" in it', 'write {"text": "..."} on each line')
