"""Calls whose arguments stand between tags, a key and a value each, as Qwen3-Coder, Seed, MiniMax, MiniCPM, Muse, DeepSeek V3.2,
GLM and Hy3 write them.

Values are text without quotes. What they mean follows from the tool's schema: text stays text, to the letter; where something
else is wanted, the value is read as JSON, or as the Python that these models fall into (True, None, single quotes). Where either
may be, what is JSON of one of the other types is that, unless the tag itself says which.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from nanovllm_cli.text.tool_calls import Tool, type_of
from nanovllm_cli.text.tool_json import is_json
from nanovllm_cli.text.tool_python import in_json_string, read_literal
from nanovllm_cli.text.tool_sections import ReadCall
from nanovllm_cli.text.tool_stream import Broken, CallStream, CutOff, Reading

PLAIN: tuple[frozenset[str], ...] = (frozenset(), frozenset({"string"}))
_NO_TEXT = frozenset({"null", "boolean", "number", "object", "array"})
_MAX_LOOSE_CHARS = 1 << 16


class XmlTags(NamedTuple):
    """name, key: around the call's name and an argument's. value: behind a value. end: behind the call. lines: a value stands on
    lines of its own. kind: what stands between a key and what its value is, and what that is of text."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: str
    end: str
    lines: bool = False
    kind: tuple[str, str] = ("", "")


CODER = XmlTags(("<function=", ">"), ("<parameter=", ">"), "</parameter>", "</function>", lines=True)
SEED = CODER._replace(lines=False)
INVOKE = XmlTags(('<invoke name="', '">'), ('<parameter name="', '">'), "</parameter>", "</invoke>")
MINICPM = XmlTags(('<function name="', '">'), ('<param name="', '">'), "</param>", "</function>")


def read_xml(tags: XmlTags) -> ReadCall:
    """NAME> (<KEY> VALUE </…>)* </…>, behind the tag that begins it. A value may be CDATA, which is what that holds."""
    closers = (f"\n{tags.value}", tags.value) if tags.lines else (tags.value,)

    def read(stream: CallStream, tools: Sequence[Tool]) -> Reading[None]:
        name, _ = yield from stream.until(tags.name[1])
        arguments = Arguments(stream, name, tools)
        while (yield from stream.expect(tags.key[0], tags.end)) == tags.key[0]:
            key, _ = yield from stream.until(tags.key[1])
            kind = ""
            if tags.kind[0]:
                key, _, kind = key.partition(tags.kind[0])
            begun = yield from stream.match("\n" if tags.lines else "<![CDATA[")
            is_text = kind == tags.kind[1] if kind else None
            yield from arguments.read(key, *((f"]]>{tags.value}",) if begun == "<![CDATA[" else closers), is_text=is_text)
        arguments.end()

    return read


class PairTags(NamedTuple):
    """name: behind the call's. key, value: around an argument's. end: behind the call."""

    name: str
    key: tuple[str, str]
    value: tuple[str, str]
    end: str


GLM = PairTags("\n", ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")
HY = PairTags(
    "<tool_sep:opensource>", ("<arg_key:opensource>", "</arg_key:opensource>"),
    ("<arg_value:opensource>", "</arg_value:opensource>"), "</tool_call:opensource>",
)  # fmt: skip


def read_pairs(tags: PairTags) -> ReadCall:
    """NAME (<KEY> </KEY> <VALUE> </VALUE>)* </…>, behind the tag that begins it."""

    def read(stream: CallStream, tools: Sequence[Tool]) -> Reading[None]:
        name, mark = yield from stream.until(tags.name, tags.key[0], tags.end, "<")
        if mark == "<":
            stream.position -= 1  # it may begin another call
            raise Broken
        arguments = Arguments(stream, name, tools)
        while True:
            if mark == tags.name:
                mark = yield from stream.expect(tags.key[0], tags.end)
            if mark == tags.end:
                break
            key, _ = yield from stream.until(tags.key[1])
            yield from stream.expect(tags.value[0])
            yield from arguments.read(key, tags.value[1])
            mark = tags.name
        arguments.end()

    return read


class Arguments:
    """The arguments of one call, given out as the members of a JSON object."""

    def __init__(self, stream: CallStream, name: str, tools: Sequence[Tool]) -> None:
        self._stream = stream
        self._tool = next((tool for tool in tools if tool.name == name.strip()), None)
        self._separator = "{"
        if not name.strip():
            raise Broken
        stream.begin(name.strip())

    def read(self, key: str, *closers: str, is_text: bool | None = None) -> Reading[None]:
        """A value up to one of `closers`. One that may only be text streams. is_text: what the model says of it, which counts
        where the schema leaves it open."""
        types = self._tool.types(key.strip()) if self._tool is not None else frozenset[str]()
        if is_text is not None and (not types or "string" in types):
            types = PLAIN[1] if is_text else types - PLAIN[1] or (types or _NO_TEXT)
        give = self._stream.arguments
        give(f"{self._separator}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        self._separator = ", "
        if types in PLAIN:
            give('"')
            yield from self._stream.pass_to(lambda text: give(in_json_string(text)), *closers)
            give('"')
            return
        pieces: list[str] = []
        yield from self._stream.pass_to(pieces.append, *closers)
        give(converted("".join(pieces), types))

    def end(self) -> None:
        self._stream.arguments("{}" if self._separator == "{" else "}")
        self._stream.end()


def converted(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that may be something else than text."""
    value = text.strip()
    found = value if is_json(value) else _as_literal(value)
    if found is None or ("string" in types and not _is_of(json.loads(found), types, written=value)):
        return json.dumps(text, ensure_ascii=False)
    return found


def _is_of(value: Any, types: frozenset[str], written: str) -> bool:
    """Whether a value is of one of these types, and no string. A number that JSON would write otherwise (+49, 007) may be one."""
    known = type_of(value)
    if known in ("integer", "number") and not is_json(written):
        return False
    return known != "string" and (known in types or (known == "integer" and "number" in types))


def _as_literal(text: str) -> str | None:
    """The JSON text of a Python literal, if it is one."""
    if len(text) > _MAX_LOOSE_CHARS:
        return None
    pieces: list[str] = []

    def read(stream: CallStream) -> Reading[None]:
        try:
            yield from read_literal(stream, pieces.append)
        except (Broken, CutOff):
            pieces.clear()

    stream = CallStream(read)
    stream.push(text + " ")
    stream.finish()
    return "".join(pieces) if pieces and stream.position >= len(text) else None
