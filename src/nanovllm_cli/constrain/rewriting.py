"""Schemas, as llguidance holds answers to them: what it takes in a wider sense is said in a narrower one.

Patterns: it takes a quote and a backslash, as JSON escapes them, for members of every set that has all control characters, or all
but the line break, also where the set leaves them out (`[^"]`, `[^\\\\/]`). So a set that says what is not in it leaves out NUL,
too, which no answer needs. Not covered: sets of that kind that are written as ranges (`[\\x00-!#-~]`).

Bounds: it lets a whole number through that is an exclusive bound, where the other one is less than 1 away. A number just beside
it is the bound then, and no exclusive one.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# Dashes, or a bracket, that a set begins with are its members only there.
_SETS = re.compile(r"\\P(?:\{[^{}]*\}|[A-Z])|\\.|\[\^(?:-+|\])?", re.DOTALL)
_NAMED = frozenset(("properties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose members are schemas."""
_DATA = frozenset(("const", "enum", "default", "examples"))
_EMBEDDED = "%json"
_STEP, _STEP_ULPS = 1e-12, 64  # less than that from a whole number is one to it
_MAX_WHOLE = 1 << 32


def rewritten(schema: Any) -> Any:
    """The same schema, as llguidance should read it."""
    if isinstance(schema, list):
        return [rewritten(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _keyword(key, value) for key, value in _with_bounds(schema).items()}


def rewritten_grammar(grammar: str) -> str:
    """A Lark grammar with the same done to the schemas in it."""
    start, *rest = grammar.split(_EMBEDDED)
    pieces, read_json = [start], json.JSONDecoder()
    for text in rest:
        begun = len(text) - len(text.lstrip())
        try:
            schema, end = read_json.raw_decode(text, begun)
        except (ValueError, RecursionError):  # whose error is llguidance's to tell
            schema = None
        safe = rewritten(schema)
        pieces += [_EMBEDDED, text if safe == schema else f" {json.dumps(safe, ensure_ascii=False)}{text[end:]}"]
    return "".join(pieces)


def _keyword(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key == "pattern" and isinstance(value, str):
        return _pattern(value)
    if key == "patternProperties" and isinstance(value, dict):
        return {_pattern(each): rewritten(member) for each, member in value.items()}
    if key in _NAMED and isinstance(value, dict):
        return {name: rewritten(member) for name, member in value.items()}
    return rewritten(value)


def _pattern(pattern: str) -> str:
    def without_nul(match: re.Match[str]) -> str:
        found = match.group()
        if found.startswith("[^"):
            return rf"{found}[\x00]"
        return rf"[{found}&&[^\x00]]" if found.startswith(r"\P") else found

    return _SETS.sub(without_nul, pattern)


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    bounds = {key: schema[key] for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum") if key in schema}
    if not all(type(bound) in (int, float) for bound in bounds.values()):
        return schema
    lower, upper = bounds.get("exclusiveMinimum", math.nan), bounds.get("exclusiveMaximum", math.nan)
    least = max(bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf))
    most = min(bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf))
    kept = dict(schema)
    if _is_whole(lower) and most < lower + 1:
        kept["minimum"] = max(kept.get("minimum", lower), kept.pop("exclusiveMinimum") + _step(lower))
    if _is_whole(upper) and least > upper - 1:
        kept["maximum"] = min(kept.get("maximum", upper), kept.pop("exclusiveMaximum") - _step(upper))
    return kept


def _is_whole(bound: float) -> bool:
    return abs(bound) < _MAX_WHOLE and bound == int(bound)


def _step(bound: float) -> float:
    return max(_STEP, _STEP_ULPS * math.ulp(bound))
