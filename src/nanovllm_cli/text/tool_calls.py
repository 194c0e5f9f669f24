"""Tools as a request names them, and calls as an answer holds them: plain values. Who finds calls in a text is `tool_stream`."""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import unquote

from nanovllm_cli.errors import UsageError

MAX_TOOLS = 512
MAX_NAME_CHARS = 256
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
BRANCHES = ("anyOf", "oneOf", "allOf")

ToolChoice = str
"""none, auto, required, or the name of the one tool that must be called."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call. index: which call of this answer. id and name: on its first piece, whole. arguments: a piece of the
    JSON text of its arguments. place: how many characters of the content that came together with it stand in front of it."""

    index: int
    id: str | None
    name: str | None
    arguments: str
    place: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. parameters: the JSON schema of its arguments. strict: they must match it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False

    def types(self, parameter: str) -> frozenset[str]:
        """The JSON types that an argument may have; empty where the schema doesn't say."""
        properties = self.parameters.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return types_of(schema, self.parameters)


def tools_of(values: Sequence[Any]) -> tuple[Tool, ...]:
    """Tools in OpenAI's form, {"type": "function", "function": {"name", "parameters", "strict"}}.

    Raises UsageError for anything else, and where two have one name.
    """
    if len(values) > MAX_TOOLS:
        raise UsageError(f"{len(values)} tools are more than {MAX_TOOLS}")
    tools = tuple(_tool(value) for value in values)
    if len({tool.name for tool in tools}) < len(tools):
        raise UsageError("two tools have the same name", "give each a name of its own")
    return tools


def new_call_id(length: int = 24) -> str:
    """An id that no other call has: letters and digits; short ones, which some templates insist on, have no prefix."""
    letters = "".join(secrets.choice(LETTERS) for _ in range(length))
    return letters if length < 16 else f"call_{letters}"


def is_object(arguments: str) -> bool:
    """Whether the arguments of a call are whole: the JSON text of an object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def joined_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """The same deltas, the pieces of each call in one."""
    if len(deltas) < 2:
        return tuple(deltas)
    pieces: dict[int, list[str]] = {}
    heads: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        heads.setdefault(delta.index, delta)
        pieces.setdefault(delta.index, []).append(delta.arguments)
    return tuple(replace(head, arguments="".join(pieces[index])) for index, head in heads.items())


def placed(calls: Sequence[ToolCallDelta], num_chars: int) -> tuple[ToolCallDelta, ...]:
    """The same behind so much content more."""
    return tuple(replace(call, place=call.place + num_chars) for call in calls) if num_chars else tuple(calls)


def in_order(content: str, calls: Sequence[ToolCallDelta]) -> Iterator[str | ToolCallDelta]:
    """What came together, as the model wrote it: texts, none of them empty, and calls."""
    at = 0
    for call in calls:
        if content[at : call.place]:
            yield content[at : call.place]
        at = max(at, call.place)
        yield call
    if content[at:]:
        yield content[at:]


def _tool(value: Any) -> Tool:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise UsageError("a tool is not a function", 'write {"type": "function", "function": {"name": …}}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise UsageError(f"a tool's name has 1 to {MAX_NAME_CHARS} characters")
    if not isinstance(parameters, Mapping | None):
        raise UsageError(f"the parameters of the tool {name!r} are not a JSON schema")
    return Tool(name, parameters or {}, function.get("strict") is True)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema lets through; empty where it doesn't say. root: what its references are into."""
    return frozenset[str]().union(*map(_types, alternatives(schema, root)))


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schemas of which a value matches one: references are followed, and branches taken apart, each once. Branches that all
    count are one schema, where they say different things."""
    found: list[Mapping[str, Any]] = []
    waiting, seen = deque([schema]), set[int]()
    while waiting:
        each = waiting.popleft()
        if not isinstance(each, Mapping) or id(each) in seen:
            continue
        seen.add(id(each))
        kind = next((key for key in BRANCHES if key in each), "")
        branches = each.get(kind)
        if isinstance(each.get("$ref"), str):
            waiting.appendleft(resolved(each["$ref"], root))
        elif _says_types(each) or not isinstance(branches, Sequence):
            found.append(each)
        elif kind == "allOf" and (whole := _together(branches, root)) is not None:
            found.append(whole)
        else:
            waiting.extendleft(reversed(branches))
    return found


def _says_types(schema: Mapping[str, Any]) -> bool:
    return "type" in schema or "const" in schema or isinstance(schema.get("enum"), Sequence)


def _together(branches: Sequence[Any], root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """One schema for all of these; None where that would take more than putting them together."""
    said: list[tuple[str, Any]] = []
    for branch in branches:
        if isinstance(branch, Mapping) and isinstance(branch.get("$ref"), str):
            branch = resolved(branch["$ref"], root)
        if not isinstance(branch, Mapping) or not branch.keys().isdisjoint(("$ref", *BRANCHES)):
            return None
        said += ((key, value) for key, value in branch.items() if key not in ("title", "description"))
    return dict(said) if len(dict(said)) == len(said) else None


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, Sequence):
        return frozenset(name for name in declared if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, Sequence):
        return frozenset(type_of(value) for value in values)
    return frozenset()


def resolved(reference: str, root: Any) -> Any:
    """What `#/$defs/Name` stands for, or another JSON pointer (RFC 6901): only references inside the schema."""
    start, *parts = unquote(reference).split("/")
    place = root if start == "#" else None
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            place = place[int(key)] if key.isdecimal() and len(key) < 9 and int(key) < len(place) else None
        else:
            place = place.get(key) if isinstance(place, Mapping) else None
    return place


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")
