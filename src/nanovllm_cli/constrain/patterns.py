"""Patterns of JSON's strings, for llguidance: it takes a quote and a backslash, as JSON escapes them, for members of every set
that has all control characters, or all but the line break, also where the set leaves them out (`[^"]`, `[^\\\\/]`).

So a set that says what is not in it leaves out NUL, too, which no answer needs. Not covered: sets of that kind that are written
as ranges (`[\\x00-!#-~]`).
"""

from __future__ import annotations

import json
import re
from typing import Any

# Dashes, or a bracket, that a set begins with are its members only there.
_SETS = re.compile(r"\\P(?:\{[^{}]*\}|[A-Z])|\\.|\[\^(?:-+|\])?", re.DOTALL)
_NAMED = frozenset(("properties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose members are schemas."""
_DATA = frozenset(("const", "enum", "default", "examples"))
_EMBEDDED = "%json"


def with_safe_patterns(schema: Any) -> Any:
    """The same schema, its patterns as llguidance holds answers to them."""
    if isinstance(schema, list):
        return [with_safe_patterns(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _keyword(key, value) for key, value in schema.items()}


def with_safe_schemas(grammar: str) -> str:
    """A Lark grammar with the same done to the schemas in it."""
    start, *rest = grammar.split(_EMBEDDED)
    pieces, read_json = [start], json.JSONDecoder()
    for text in rest:
        begun = len(text) - len(text.lstrip())
        try:
            schema, end = read_json.raw_decode(text, begun)
        except (ValueError, RecursionError):  # whose error is llguidance's to tell
            schema = None
        safe = with_safe_patterns(schema)
        pieces += [_EMBEDDED, text if safe == schema else f" {json.dumps(safe, ensure_ascii=False)}{text[end:]}"]
    return "".join(pieces)


def _keyword(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key == "pattern" and isinstance(value, str):
        return _safe(value)
    if key == "patternProperties" and isinstance(value, dict):
        return {_safe(pattern): with_safe_patterns(each) for pattern, each in value.items()}
    if key in _NAMED and isinstance(value, dict):
        return {name: with_safe_patterns(each) for name, each in value.items()}
    return with_safe_patterns(value)


def _safe(pattern: str) -> str:
    def without_nul(match: re.Match[str]) -> str:
        found = match.group()
        if found.startswith("[^"):
            return rf"{found}[\x00]"
        return rf"[{found}&&[^\x00]]" if found.startswith(r"\P") else found

    return _SETS.sub(without_nul, pattern)
