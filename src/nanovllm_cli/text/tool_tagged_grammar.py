"""Grammars of calls whose arguments stand between tags of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.text.tool_calls import alternatives, type_of, types_of
from nanovllm_cli.text.tool_grammar import (
    ANY_KEY,
    COMBINATIONS,
    TEXT_KEYWORDS,
    Bound,
    WriteCall,
    Writer,
    choices_in,
    parameters,
    quoted,
)

_KINDS = ("string", "number", "boolean", "null", "object", "array")
WriteArgument = Callable[[Writer, Bound, str, Mapping[str, Any]], str]
"""An expression for one argument, of an expression for its name and its schema."""


def tagged_call(head: tuple[str, ...], key: tuple[str, ...], close: tuple[str, ...], end: tuple[str, ...]) -> WriteCall:
    """Arguments between tags. head: around the call's name; key: around an argument's key; close: behind its value, its tag first
    but for a line break, without which text is read as well; end: behind the call."""

    def argument(writer: Writer, tool: Bound, name: str, schema: Mapping[str, Any]) -> str:
        return f"{writer.sequence(key[0])} {name} {writer.sequence(*key[1:])} {_value(writer, tool, schema, close)}"

    return arguments_call(head, argument, end)


def kinded(key: tuple[str, ...], kind: Callable[[str], tuple[str, ...]], close: tuple[str, ...]) -> WriteArgument:
    """An argument whose tag says what the value is. kind: what stands behind the key, of a JSON type."""

    def argument(writer: Writer, tool: Bound, name: str, schema: Mapping[str, Any]) -> str:
        values: dict[str, list[str]] = {}
        for each in alternatives(schema, tool.schema) or [{}]:
            for found in sorted(types_of(each, tool.schema)) or _KINDS:
                value = _value(writer, tool, _narrowed(each, found), close)
                values.setdefault(writer.sequence(*kind(found)), []).append(value)
        said = " | ".join(f"{tag} ({' | '.join(each)})" for tag, each in values.items())
        return f"{writer.sequence(*key)} {name} ({said})"

    return argument


def arguments_call(head: tuple[str, ...], argument: WriteArgument, end: tuple[str, ...]) -> WriteCall:
    """head: around the call's name; end: behind the call."""

    def write(writer: Writer, tool: Bound) -> str:
        name = f"{writer.sequence(head[0])} {quoted(tool.name)} {writer.sequence(*head[1:])}"
        return f"{name} {written_arguments(writer, tool, argument)} {writer.sequence(*end)}"

    return write


def written_arguments(
    writer: Writer, tool: Bound, argument: WriteArgument, written_name: Callable[[str], str] = str
) -> str:
    """Arguments in the order of the schema: first those that must be there."""
    required, optional = parameters(tool)
    body = [argument(writer, tool, quoted(written_name(name)), schema) for name, schema in required.items()]
    body += [f"({argument(writer, tool, quoted(written_name(name)), schema)})?" for name, schema in optional.items()]
    if not body and tool.schema.get("additionalProperties") is not False:
        body = [f"({argument(writer, tool, writer.terminal(ANY_KEY), {})})*"]
    return " ".join(body)


def _narrowed(schema: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """A schema as it is for values of one type."""
    choices = schema.get("enum")
    if not isinstance(choices, Sequence):
        return {**schema, "type": kind}
    kinds = ("integer", "number") if kind == "number" else (kind,)
    return {**schema, "type": kind, "enum": [choice for choice in choices if type_of(choice) in kinds]}


def _value(writer: Writer, tool: Bound, schema: Mapping[str, Any], close: tuple[str, ...]) -> str:
    """An argument between tags, with what closes it: text as it is, anything else as JSON. Where text may be, so may anything."""
    known = alternatives(schema, tool.schema)
    texts = [each for each in known if _is_text(each)]
    if not texts:
        return f"{tool.argument(writer, schema)} {writer.sequence(*close)}"
    choices = [choices_in(each, tool) for each in texts]
    if None not in choices:
        shown = [quoted(choice if isinstance(choice, str) else json.dumps(choice)) for some in choices for choice in some or ()]
        shown += [tool.argument(writer, each) for each in known if each not in texts]
        return f"({' | '.join(shown)}) {writer.sequence(*close)}"
    open_ended = sorted(frozenset[str]().union(*known) - TEXT_KEYWORDS)
    if open_ended and tool.strict:
        raise UnsupportedError(
            f"the strict tool {tool.name!r} limits text by {open_ended[0]!r}, which this model's calls can't be held to",
            "leave that keyword out, or leave strict out",
        )
    lined = close[0] == "\n"
    text = any_text(writer, known[0] if len(known) == 1 else {}, close[lined], lined=lined)
    return f"{text} {writer.sequence(*close[1 + lined :])}"


def any_text(writer: Writer, schema: Mapping[str, Any], tag: str, *, lined: bool = False) -> str:
    """Text as it is, as long as the schema says, and the tag behind it, where that stands first, as readers have it. lined: a
    line break in front of the tag is none of the text. Raises UsageError."""
    shortest, longest = schema.get("minLength"), schema.get("maxLength")
    shortest = 0 if shortest is None else shortest
    if any(type(length) is not int or length < 0 for length in (shortest, 0 if longest is None else longest)):
        raise UsageError(f"a text of {shortest!r} to {longest!r} characters, in the schema of a tool, is none")
    if not shortest and longest is None:
        return writer.text_before(tag)
    pattern = f"(?s:.){{{shortest},{'' if longest is None else longest}}}"
    if lined:
        pattern += r"\n"
        if longest != 0:
            pattern += f"|(?s:.){{{max(shortest - 1, 0)},{'' if longest is None else longest - 1}}}[^\\n]"
    return writer.text_before(tag, pattern)


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value between tags is text without quotes."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds == "string"
    return "string" in kinds if isinstance(kinds, Sequence) else not COMBINATIONS.intersection(schema)
