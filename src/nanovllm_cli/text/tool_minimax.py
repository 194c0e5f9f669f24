"""MiniMax-M3's calls: each value between tags of its name, objects and lists as tags within tags, a token before each of them.

    ▌<tool_call>
    ▌<invoke name="weather">▌<city>Köln▌</city>▌<tags>▌<item>a▌</item>▌</tags>▌</invoke>
    ▌</tool_call>

where ▌ is `]<]minimax[>[`. What a text means, its schema says, as for other tags (`tool_xml`). Tags within it are a list where
they are items, unless the schema says that they are an object's. Not covered by the grammar: patterns and formats of strings,
tuples, objects that have properties and others besides. A strict tool that asks for those is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.text.tool_calls import alternatives, types_of
from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_grammar import (
    NOTES,
    TEXT_KEYWORDS,
    Bound,
    CallGrammar,
    Marked,
    Writer,
    check_keywords,
    choices_in,
    parameters,
    quoted,
)
from nanovllm_cli.text.tool_json import MAX_DEPTH, Give
from nanovllm_cli.text.tool_python import in_json_string
from nanovllm_cli.text.tool_sections import Tools, tagged
from nanovllm_cli.text.tool_stream import Broken, CallStream, Reading
from nanovllm_cli.text.tool_tagged_grammar import any_text
from nanovllm_cli.text.tool_xml import PLAIN, converted

_MARK = "]<]minimax[>["
_BEGIN, _INVOKE = Marked("", _MARK, "<tool_call>"), Marked("", _MARK, '<invoke name="')
_TAG, _END = f"{_MARK}<", f"{_MARK}</tool_call>"
_EMPTY = {"array": "[]", "object": "{}"}


def _read(stream: CallStream, tools: Tools) -> Reading[None]:
    name = (yield from stream.until('">'))[0].strip()
    if not name:
        raise Broken
    stream.begin(name)
    root = next((tool.parameters for tool in tools if tool.name == name), {})
    tag = yield from stream.expect(f"{_MARK}</invoke>", _TAG)
    key = (yield from _key(stream)) if tag == _TAG else None
    yield from _Values(stream, root).members({**root, "type": "object"}, "invoke", key, 0)
    stream.end()


def _key(stream: CallStream) -> Reading[str]:
    """What stands in a tag that begins a value. A tag that closes another is none."""
    key, _ = yield from stream.until(">")
    if key.startswith("/"):
        raise Broken
    return key


class _Values:
    """What stands between tags, given out as JSON while it comes."""

    def __init__(self, stream: CallStream, root: Mapping[str, Any]) -> None:
        self._stream, self._root = stream, root
        self._give: Give = stream.arguments

    def members(self, schema: Any, name: str, key: str | None, depth: int) -> Reading[None]:
        """Values up to the tag that closes `name`. key: of the first, whose tag was read."""
        if depth == MAX_DEPTH:
            raise Broken
        end, separator, is_list = "{}", "{", False
        while key is not None:
            if separator != ", ":
                is_list = key == "item" and not self._has(schema, key)
                separator, end = ("[", "]") if is_list else ("{", "}")
            if is_list and key != "item":
                raise Broken
            self._give(separator if is_list else f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value(self._child(schema, None if is_list else key), key, depth + 1)
            tag = yield from self._stream.expect(f"{_MARK}</{name}>", _TAG)
            key = (yield from _key(self._stream)) if tag == _TAG else None
        self._give(end)

    def _value(self, schema: Any, name: str, depth: int) -> Reading[None]:
        types, close = types_of(schema, self._root), f"{_MARK}</{name}>"
        if types in PLAIN and types:
            self._give('"')
            yield from self._stream.pass_to(lambda text: self._give(in_json_string(text)), close)
            self._give('"')
            return
        pieces: list[str] = []
        found = yield from self._stream.pass_to(pieces.append, close, _TAG)
        text = "".join(pieces)
        if found == _TAG:
            key = yield from _key(self._stream)
            if text.strip():
                raise Broken
            yield from self.members(schema, name, key, depth)
        elif not text.strip() and (empty := [_EMPTY[kind] for kind in _EMPTY if kind in types]) and "string" not in types:
            self._give(empty[0])
        else:
            self._give(json.dumps(text, ensure_ascii=False) if types in PLAIN else converted(text, types))

    def _has(self, schema: Any, key: str) -> bool:
        return any(key in _properties(each) for each in alternatives(schema, self._root))

    def _child(self, schema: Any, key: str | None) -> Any:
        """The schema of a member, or of an item."""
        for each in alternatives(schema, self._root):
            if key is None and "items" in each:
                return each["items"]
            if key is not None and (key in _properties(each) or "additionalProperties" in each):
                return _properties(each).get(key, each.get("additionalProperties"))
        return {}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


# ---- grammar ----

_OTHER_TAG = r"<([^\/]|\/([^i]|i([^n]|n([^v]|v([^o]|o([^k]|k([^e]|e[^>])))))))(?s:.*)"
"""Any but </invoke>, and what stands behind it: where any argument will do, its tags may be within each other."""
_HELD = {"object": frozenset(("properties", "required", "additionalProperties")), "array": frozenset(("items",))}


def _call(writer: Writer, tool: Bound) -> str:
    head = writer.sequence(_MARK, '<invoke name="')
    name = quoted(f'{tool.name}">')
    if not _properties(tool.schema) and tool.schema.get("additionalProperties") is not False:
        tags = f"{writer.sequence(_MARK)} ({writer.text_before(_MARK, _OTHER_TAG)})*"
        return f"{head} {name} {tags} {writer.sequence('</invoke>')}"
    return f"{head} {name} {_Call(writer, tool).members(tool.schema)} {writer.sequence(_MARK, '</invoke>')}"


class _Call:
    """What the arguments of one tool may be."""

    def __init__(self, writer: Writer, tool: Bound) -> None:
        self._writer, self._tool = writer, tool

    def members(self, schema: Mapping[str, Any]) -> str:
        """In the order of the schema: first those that must be there."""
        self._check(schema, "object")
        required, optional = parameters(self._tool._replace(schema=schema))
        body = [self._member(name, each) for name, each in required.items()]
        body += [f"({self._member(name, each)})?" for name, each in optional.items()]
        return " ".join(body)

    def _member(self, name: str, schema: Any) -> str:
        if name.startswith("/") or ">" in name:
            raise UnsupportedError(
                f"the tool {self._tool.name!r} has an argument {name!r}, which is no tag as this model writes them", "rename it"
            )
        return f"{self._writer.sequence(_MARK, f'<{name}>')} {self._value(schema, name)}"

    def _value(self, schema: Any, name: str) -> str:
        """A value and the tag that closes it."""
        known = alternatives(schema, self._tool.schema) or [{}]
        key = f"{self._tool.name} {name} {json.dumps(known)}"
        return self._writer.once(key, lambda _: " | ".join(said for each in known for said in self._said(each, name)))

    def _said(self, schema: Mapping[str, Any], name: str) -> list[str]:
        close = f"</{name}>"
        if (choices := choices_in(schema, self._tool)) is not None:
            texts = (choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
            return [f"{quoted(text) if text else ''} {self._writer.sequence(_MARK, close)}" for text in texts]
        said: list[str] = []
        kinds = types_of(schema, self._tool.schema)
        if not kinds or "string" in kinds:
            self._check(schema, *kinds)
            said.append(f"{any_text(self._writer, schema, _MARK)} {self._writer.sequence(close)}")
        if "array" in kinds and isinstance(schema.get("items", {}), Mapping):
            self._check(schema, *kinds)
            item = f"{self._writer.sequence(_MARK, '<item>')} {self._value(schema.get('items', {}), 'item')}"
            said.append(f"({item})* {self._writer.sequence(_MARK, close)}")
        if "object" in kinds and _properties(schema):
            said.append(f"{self.members(schema)} {self._writer.sequence(_MARK, close)}")
        rest = sorted(kinds - {"string", "array"} - ({"object"} if _properties(schema) else set()))
        if rest:
            value = self._tool.argument(self._writer, {**schema, "type": rest})
            said.append(f"{value} {self._writer.sequence(_MARK, close)}")
        return said

    def _check(self, schema: Mapping[str, Any], *kinds: str) -> None:
        known = NOTES.union(TEXT_KEYWORDS, *(_HELD.get(kind, frozenset()) for kind in kinds))
        check_keywords(schema, known, self._tool)


MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    ((_MARK, "<tool_call>"),),
    (_BEGIN, _INVOKE),
    (_MARK, "<tool_call>", "</tool_call>"),
    tagged(_BEGIN, _INVOKE, _END, _read),
    CallGrammar(_call, _MARK, ("<tool_call>", "\n"), ("\n",), ("\n", _MARK, "</tool_call>")),
)
