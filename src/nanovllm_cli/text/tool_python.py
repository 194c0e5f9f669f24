"""Calls written as Python, `name(argument=literal, …)`, and the JSON text of Python's literals, as they stream."""

from __future__ import annotations

import json
import math
from collections.abc import Collection

from nanovllm_cli.text.tool_json import MAX_DEPTH, MAX_SCALAR_CHARS, Give, is_json
from nanovllm_cli.text.tool_stream import MAX_HEADER_CHARS, Broken, CallStream, Reading

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_NO_KEY = ("=", ",", "(", ")", "[", "]", "{", "}", "'", '"', "\n")


def read_python_calls(stream: CallStream, known: Collection[str] | None = None) -> Reading[None]:
    """Calls up to the bracket that ends their list. known: names that count; without it, any does."""
    while True:
        yield from stream.skip_space()
        yield from read_python_call(stream, known)
        stream.mark()
        if (yield from stream.expect(",", "]")) == "]":
            stream.settle()
            return


def read_python_call(stream: CallStream, known: Collection[str] | None = None) -> Reading[None]:
    """name(argument=literal, …). Llama's own tools are written name.call(…), which counts whoever is known."""
    name = yield from stream.word(lambda char: char.isalnum() or char in "_.-", MAX_HEADER_CHARS)
    if not name or (known is not None and name not in known and not name.endswith(".call")):
        raise Broken
    if (yield from stream.peek()) != "(":
        raise Broken
    stream.take()
    separator = "{"
    while (yield from stream.skip_space()) != ")":
        key = yield from _key(stream)
        if separator == "{":
            stream.begin(name.removesuffix(".call"))
        stream.arguments(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from read_literal(stream, stream.arguments)
        if not (yield from stream.accept(",")):
            break
    yield from stream.expect(")")
    if separator == "{":
        stream.begin(name.removesuffix(".call"))
    stream.arguments("{}" if separator == "{" else "}")
    stream.end()


def read_literal(stream: CallStream, give: Give, depth: int = 0) -> Reading[None]:
    """One literal, given out as JSON while it comes: strings, numbers, True, False, None, lists, tuples, dicts.

    Raises Broken for anything else, and where it is nested more than MAX_DEPTH deep.
    """
    first = yield from stream.skip_space()
    if first in "'\"":
        yield from _string(stream, give)
    elif first in "[({":
        if depth == MAX_DEPTH:
            raise Broken
        stream.take()
        yield from _container(stream, give, {"[": "]", "(": ")", "{": "}"}[first], depth + 1)
    else:
        yield from _scalar(stream, give)


def _container(stream: CallStream, give: Give, close: str, depth: int) -> Reading[None]:
    separator, end = ("{", "}") if close == "}" else ("[", "]")
    opening = separator
    while (yield from stream.skip_space()) != close:
        give(separator)
        separator = ", "
        if close == "}":
            if (yield from stream.peek()) not in "'\"":
                raise Broken  # JSON's keys are strings
            yield from _string(stream, give)
            yield from stream.expect(":")
            give(": ")
        yield from read_literal(stream, give, depth)
        if not (yield from stream.accept(",")):
            break
    yield from stream.expect(close)
    give(end if separator != opening else opening + end)


def _string(stream: CallStream, give: Give) -> Reading[None]:
    quote = stream.take()
    give('"')
    while True:
        yield from stream.peek()
        text, start = stream.text, stream.position
        at = start
        while at < len(text) and text[at] not in (quote, "\\"):
            at += 1
        if at > start:
            give(in_json_string(stream.take(at - start)))
        elif stream.take() == quote:
            give('"')
            return
        else:
            give(json.dumps((yield from _escaped(stream)))[1:-1])  # in ASCII: it may be half a pair of surrogates


def _escaped(stream: CallStream) -> Reading[str]:
    """What stands for the character behind a backslash."""
    yield from stream.peek()
    letter = stream.take()
    if letter not in _HEX_DIGITS:
        return _ESCAPES.get(letter, letter if letter in "\\'\"" else "\\" + letter)
    digits = ""
    for _ in range(_HEX_DIGITS[letter]):
        digits += yield from stream.peek()
        stream.take()
    try:
        return chr(int(digits, 16))
    except (ValueError, OverflowError):
        raise Broken from None


def _scalar(stream: CallStream, give: Give) -> Reading[None]:
    text = yield from stream.word(lambda char: char.isalnum() or char in "+-._", MAX_SCALAR_CHARS)
    give(_WORDS.get(text) or _number(text))


def _number(text: str) -> str:
    """A number's JSON text; to the letter where it is one already, however large."""
    if is_json(text):
        return text
    try:
        return str(int(text))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise Broken from None
    if not math.isfinite(number):
        raise Broken
    return json.dumps(number)


def _key(stream: CallStream) -> Reading[str]:
    """A keyword and the sign behind it. A tool's argument may have a name that is none of Python's."""
    key, mark = yield from stream.until(*_NO_KEY)
    if mark != "=" or not key.strip():
        raise Broken
    return key.strip()


def in_json_string(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
