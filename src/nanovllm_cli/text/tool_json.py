"""JSON as it streams: values to the letter, and calls written as objects, {"name": …, "arguments": {…}}.

What is given out is JSON text that a strict reader takes (RFC 8259). One thing is forgiven: a line break inside a string, which
models write, is given out as its escape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

from nanovllm_cli.text.tool_stream import MAX_HEADER_CHARS, Broken, CallStream, Reading

Give = Callable[[str], None]

MAX_DEPTH = 64
MAX_SCALAR_CHARS = 512
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters", "args")
_OTHERS = ("id", "type")
_HEX = frozenset("0123456789abcdefABCDEF")


def read_value(stream: CallStream, give: Give, depth: int = 0) -> Reading[None]:
    """A value, given out as it comes. Raises Broken where it is not JSON, or nested more than MAX_DEPTH deep."""
    first = yield from stream.skip_space()
    if first == '"':
        yield from _string(stream, give)
    elif first in "{[":
        if depth == MAX_DEPTH:
            raise Broken
        yield from _container(stream, give, "}" if first == "{" else "]", depth + 1)
    else:
        yield from _scalar(stream, give)


def read_text(stream: CallStream) -> Reading[str]:
    """A short string, decoded."""
    if (yield from stream.skip_space()) != '"':
        raise Broken
    return str((yield from _decoded(stream, MAX_HEADER_CHARS)))


def _container(stream: CallStream, give: Give, close: str, depth: int) -> Reading[None]:
    give(stream.take())
    if (yield from stream.skip_space()) == close:
        give(stream.take())
        return
    while True:
        if close == "}":
            if (yield from stream.skip_space()) != '"':
                raise Broken
            yield from _string(stream, give)
            give((yield from stream.expect(":")) + " ")
        yield from read_value(stream, give, depth)
        mark = yield from stream.expect(",", close)
        give(mark if mark == close else ", ")
        if mark == close:
            return


def _string(stream: CallStream, give: Give) -> Reading[None]:
    give(stream.take())
    while True:
        yield from stream.peek()
        text, start = stream.text, stream.position
        quote = text.find('"', start)
        end = len(text) if quote < 0 else quote
        escape = text.find("\\", start, end)
        if escape >= 0:
            end = escape
        if end > start:
            give(_without_controls(stream.take(end - start)))
        elif escape >= 0:
            yield from _escape(stream, give)
        else:
            give(stream.take())
            return


def _escape(stream: CallStream, give: Give) -> Reading[None]:
    escape = stream.take() + (yield from stream.peek())
    stream.take()
    if escape[1] == "u":
        for _ in range(4):
            escape += yield from stream.peek()
            stream.take()
        if not _HEX.issuperset(escape[2:]):
            raise Broken
    elif escape[1] not in '"\\/bfnrt':
        raise Broken
    give(escape)


def _scalar(stream: CallStream, give: Give) -> Reading[None]:
    text = yield from stream.word(lambda char: char not in ",]}" and not char.isspace(), MAX_SCALAR_CHARS)
    if not is_json(text):
        raise Broken
    give(text)


def _without_controls(text: str) -> str:
    if min(text) >= " ":
        return text
    return "".join(char if char >= " " else json.dumps(char)[1:-1] for char in text)


def is_json(text: str) -> bool:
    """Whether a text is one JSON value; NaN and infinity are none."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _decoded(stream: CallStream, max_chars: int | None = None) -> Reading[Any]:
    """A whole value. max_chars: Broken where its text is longer."""
    pieces: list[str] = []
    num_chars = 0

    def give(piece: str) -> None:
        nonlocal num_chars
        num_chars += len(piece)
        if max_chars is not None and num_chars > max_chars:
            raise Broken
        pieces.append(piece)

    yield from read_value(stream, give)
    return json.loads("".join(pieces))


# ---- calls ----


def read_named_call(stream: CallStream, name: str, call_id: str | None = None) -> Reading[None]:
    """A call whose name is known, up to the end of its arguments."""
    if (yield from stream.skip_space()) != "{" or not name.strip():
        raise Broken
    stream.begin(name.strip(), call_id)
    yield from read_value(stream, stream.arguments)
    stream.end()


def read_call(
    stream: CallStream, known: Collection[str] | None = None, dropped: Collection[str] = ()
) -> Reading[None]:
    """One call, an object with a name and arguments in either order, behind its brace.

    known: names that count; without it, any does. dropped: names of what is written like a call, and is none.
    """
    name, held, begun = "", "", False
    while True:
        key = yield from read_text(stream)
        yield from stream.expect(":")
        if key in _NAMES and not name:
            name = yield from read_text(stream)
            if not name or (known is not None and name not in known):
                raise Broken
        elif key in _ARGUMENTS and not held and not begun:
            if (yield from stream.skip_space()) != "{":
                held = yield from _loose_arguments(stream)
            elif name and name not in dropped:
                stream.begin(name)
                begun = True
                yield from read_value(stream, stream.arguments)
            else:
                pieces: list[str] = []
                yield from read_value(stream, pieces.append)
                held = "".join(pieces)
        elif known is None or key in _OTHERS:
            yield from read_value(stream, _nothing)
        else:
            raise Broken
        if (yield from stream.expect(",", "}")) == "}":
            break
    if not name:
        raise Broken
    if name in dropped:
        stream.drop()
        return
    if not begun:
        stream.begin(name)
        stream.arguments(held or "{}")
    stream.end()


def read_calls(
    stream: CallStream, known: Collection[str] | None = None, dropped: Collection[str] = ()
) -> Reading[None]:
    """Calls up to the bracket that ends their list. known, dropped: see `read_call`."""
    while True:
        yield from stream.expect("{")
        yield from read_call(stream, known, dropped)
        stream.mark()
        if (yield from stream.expect(",", "]")) == "]":
            stream.settle()
            return


def _loose_arguments(stream: CallStream) -> Reading[str]:
    """Arguments that are null, which is none, or a string that holds the object."""
    value = yield from _decoded(stream)
    text = value if isinstance(value, str) else "{}" if value is None else ""
    if not text.lstrip().startswith("{") or not is_json(text):
        raise Broken
    return text


def _nothing(piece: str) -> None:
    """For values that nobody wants."""
