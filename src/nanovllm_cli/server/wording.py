"""What pydantic and msgspec find wrong with a request, in our words: what must stand there, as JSON calls it. What they say
rarely is left as it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_THINGS = {
    "list": "a list", "dict": "an object", "model": "an object", "model_attributes": "an object", "string": "a string",
    "int": "a whole number", "float": "a number", "bool": "true or false",
}  # fmt: skip
"""By pydantic's kinds of problems, which are these with _type or _parsing behind them."""
_TYPES = {
    "array": "a list", "object": "an object", "str": "a string", "int": "a whole number", "float": "a number",
    "bool": "true or false", "null": "null",
}  # fmt: skip
"""By msgspec's names."""
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
_IN_JSON = {"True": "true", "False": "false", "None": "null"}
_MUST_BE = "must be "
_THERE = "must be there"


def of_pydantic(problem: Mapping[str, Any]) -> str:
    """What is wrong with one field."""
    kind, about = problem["type"], problem.get("ctx", {})
    thing = _THINGS.get(re.sub("_(type|parsing)$", "", kind))
    if thing is not None:
        return _MUST_BE + thing
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"{_MUST_BE}{words} {str(about[bound]).removesuffix('.0')}"
    if kind == "missing":
        return _THERE
    if kind == "literal_error":
        return _MUST_BE + re.sub(r"\b(True|False|None)\b", lambda found: _IN_JSON[found[0]], about["expected"])
    if kind == "string_pattern_mismatch":
        return f"must match {about['pattern']}"
    for bound, sign in (("min_length", ">="), ("max_length", "<=")):
        if bound in about:
            return _length(sign, about[bound], "characters" if kind.startswith("string") else "entries")
    return str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input ")


def either(texts: Iterable[str]) -> str:
    """What is wrong with a field that may be several things, none of which it is."""
    found = list(dict.fromkeys(texts))
    if all(text.startswith(_MUST_BE) for text in found):
        return _MUST_BE + _one_of([text.removeprefix(_MUST_BE) for text in found])
    return ", or ".join(found)


def of_msgspec(text: str, choices: Sequence[str] = ()) -> tuple[str, str]:
    """What its message adds to the path that it names, and what is wrong there. choices: what the field there may be."""
    if found := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f".{found[1]}", _THERE
    if found := re.fullmatch(r"Expected `([a-z |]+)`, got `[a-z]+`", text):
        return "", _MUST_BE + _one_of([_TYPES.get(name, name) for name in found[1].split(" | ")])
    if found := re.fullmatch(r"Expected `(str|array)` of length ([<>]=) (\d+)", text):
        return "", _length(found[2], int(found[3]), "characters" if found[1] == "str" else "entries")
    if choices and text.startswith("Invalid enum value"):
        return "", _MUST_BE + _one_of(list(map(repr, choices)))
    return "", text


def _one_of(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _length(sign: str, bound: int, what: str) -> str:
    if (sign, bound) == (">=", 1):
        return "must not be empty"
    if (sign, bound) == ("<=", 0):
        return "must be empty"
    return f"must have at {'least' if sign == '>=' else 'most'} {bound} {what}"
