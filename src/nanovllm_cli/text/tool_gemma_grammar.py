"""Calls of Gemma 4 and FunctionGemma as a grammar: a JSON schema as rules of their notation (`tool_gemma`), which is not JSON.

Members come in the order in which the models' templates write them everywhere, by name, and without white space. Numbers,
booleans and null are llguidance's, with its keywords. Not covered: patterns and formats of strings, tuples, objects that have
properties and others besides. A strict tool that asks for those is refused; of another they are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tool_calls import BRANCHES, resolved
from nanovllm_cli.text.tool_gemma import GemmaTags
from nanovllm_cli.text.tool_grammar import (
    ANY_KEY,
    NOTES,
    TEXT_KEYWORDS,
    Bound,
    WriteCall,
    Writer,
    check_keywords,
    choices_in,
    listed,
    quoted,
)
from nanovllm_cli.text.tool_json import MAX_DEPTH
from nanovllm_cli.text.tool_tagged_grammar import any_text

_NUMERIC = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_KEYWORDS: Mapping[str, Set[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": TEXT_KEYWORDS - NOTES,
    "integer": _NUMERIC,
    "number": _NUMERIC,
    "boolean": frozenset(),
    "null": frozenset(),
}
_ANY_TYPE = ("object", "array", "string", "number", "boolean", "null")
_BARE_KEY = re.compile(r"[\w.$-]+")


def gemma_call(tags: GemmaTags) -> WriteCall:
    """call:NAME{key:value,…} and the tag that closes it."""

    def write(writer: Writer, tool: Bound) -> str:
        values = _Values(writer, tool, tags.quote)
        values.check(tool.schema, _KEYWORDS["object"])
        return f"{quoted(f'call:{tool.name}')} {values.object(tool.schema, 0)} {writer.sequence(tags.close)}"

    return write


class _Values:
    """What the arguments of one tool may be. depth: of what an expression stands in."""

    def __init__(self, writer: Writer, tool: Bound, quote: str) -> None:
        self._writer, self._tool, self._quote = writer, tool, quote

    def check(self, schema: Mapping[str, Any], known: Set[str]) -> None:
        check_keywords(schema, known | NOTES, self._tool)

    def object(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties", {})
        if not isinstance(properties, Mapping):
            raise UsageError(f"the properties of the tool {self._tool.name!r} are not an object")
        required = listed(schema, "required", self._tool) if "required" in schema else []
        if properties:
            names = sorted(properties, key=str.lower)
            members = [(self._member(name, properties[name], depth), name in required) for name in names]
            return f'"{{" {self._in_order(members)} "}}"'
        others = schema.get("additionalProperties", {})
        if others is False:
            return '"{" "}"'
        return self._any_members(self._value(others, depth))

    def _member(self, name: str, schema: Any, depth: int) -> str:
        return self._writer.rule(f"{self._key(name)} {self._value(schema, depth)}")

    def _key(self, name: str) -> str:
        """A key and the colon behind it; what could be read as more than a key is written as a string."""
        return quoted(f"{name}:") if _BARE_KEY.fullmatch(name) else f'{self._literal(name, 0)} ":"'

    def _in_order(self, members: Sequence[tuple[str, bool]]) -> str:
        """With commas between them, which depend on who is there: what may follow a member is a rule of its own."""
        firsts: list[str] = []
        rest = ""
        for member, is_required in reversed(members):
            firsts = [f"{member} {rest}", *([] if is_required else firsts)]
            rest = self._writer.rule(f'("," {member}){"" if is_required else "?"} {rest}')
        return f"({' | '.join(firsts)}){'' if any(is_required for _, is_required in members) else '?'}"

    def _any_members(self, value: str) -> str:
        member = self._writer.rule(f'{self._writer.terminal(ANY_KEY)} ":" {value}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        least, most = self._count(schema, "minItems") or 0, self._count(schema, "maxItems")
        if most == 0:
            return '"[" "]"'
        item = self._writer.rule(self._value(schema.get("items"), depth))
        further = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" ({item} {further}){"" if least else "?"} "]"'

    def _count(self, schema: Mapping[str, Any], keyword: str) -> int | None:
        count = schema.get(keyword)
        if count is not None and (type(count) is not int or count < 0):
            raise UsageError(f"{keyword!r} in the schema of the tool {self._tool.name!r} is not a number of items")
        return count

    def _value(self, schema: Any, depth: int) -> str:
        if depth == MAX_DEPTH:
            raise UsageError(f"the schema of the tool {self._tool.name!r} is nested more than {MAX_DEPTH} levels deep")
        if not isinstance(schema, Mapping):
            return self._any()
        if isinstance(schema.get("$ref"), str):
            self.check(schema, {"$ref"})
            return self._reference(schema["$ref"], depth + 1)
        if (choices := choices_in(schema, self._tool)) is not None:
            return self._one_of([self._literal(choice, depth) for choice in choices])
        branching = next((key for key in BRANCHES if key in schema), "")
        if branching and (self._tool.strict or not schema.keys() - NOTES - {branching}):
            return self._branches(schema, branching, depth + 1)
        return self._of_types(schema, depth)

    def _of_types(self, schema: Mapping[str, Any], depth: int) -> str:
        kinds = schema.get("type")
        if kinds is None:
            said = [kind for kind in ("object", "array", "string") if not _KEYWORDS[kind].isdisjoint(schema)]
            kinds = said or _ANY_TYPE
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, Sequence) or not all(isinstance(kind, str) and kind in _KEYWORDS for kind in kinds):
            known_types = f"known: {', '.join(_KEYWORDS)}"
            raise UsageError(f"{kinds!r} in the schema of the tool {self._tool.name!r} is no type", known_types)
        known = frozenset[str]().union(*(_KEYWORDS[kind] for kind in kinds))
        self.check(schema, known)
        if set(kinds) >= set(_ANY_TYPE) and known.isdisjoint(schema):
            return self._any()
        return self._one_of([self._of_type(kind, schema, depth + 1) for kind in kinds])

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        kept = {key: schema[key] for key in _KEYWORDS[kind] if key in schema}
        if kind == "string":
            return f"{self._writer.sequence(self._quote)} {any_text(self._writer, kept, self._quote)}"
        return self._tool.argument(self._writer, {**kept, "type": kind})

    def _branches(self, schema: Mapping[str, Any], keyword: str, depth: int) -> str:
        self.check(schema, {keyword})
        branches = listed(schema, keyword, self._tool)
        if keyword == "allOf" and len(branches) > 1:
            self.check(schema, frozenset())
            return self._any()
        outside = {"type": schema["type"]} if "type" in schema else {}
        return self._one_of([self._value({**outside, **each}, depth) for each in branches if isinstance(each, Mapping)])

    def _reference(self, reference: str, depth: int) -> str:
        found = resolved(reference, self._tool.schema)
        if not isinstance(found, Mapping):
            raise UsageError(f"the schema of the tool {self._tool.name!r} has no {reference!r}")
        return self._writer.once(f"{self._tool.name} {reference}", lambda _: self._value(found, depth))

    def _one_of(self, expressions: Sequence[str]) -> str:
        if not expressions:
            raise UsageError(f"the schema of the tool {self._tool.name!r} leaves an argument nothing that it may be")
        return self._writer.rule(" | ".join(expressions))

    def _any(self) -> str:
        def build(name: str) -> str:
            text = f"{self._writer.sequence(self._quote)} {self._writer.text_before(self._quote)}"
            plain = self._writer.json({"type": ["number", "boolean", "null"]}, strict=False)
            return f'{text} | {plain} | "[" ({name} ("," {name})*)? "]" | {self._any_members(name)}'

        return self._writer.once("any value", build)

    def _literal(self, value: Any, depth: int) -> str:
        """A value that is known, as it is written."""
        if depth == MAX_DEPTH:
            raise UsageError(f"the schema of the tool {self._tool.name!r} is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, str):
            return f"{self._writer.sequence(self._quote)} {quoted(value) if value else ''} {self._writer.sequence(self._quote)}"
        if isinstance(value, Mapping):
            names = sorted(value, key=str.lower)
            members = (f"{self._key(name)} {self._literal(value[name], depth + 1)}" for name in names)
            return '"{" ' + ' "," '.join(members) + ' "}"'
        if isinstance(value, Sequence):
            return '"[" ' + ' "," '.join(self._literal(item, depth + 1) for item in value) + ' "]"'
        return quoted(json.dumps(value))
