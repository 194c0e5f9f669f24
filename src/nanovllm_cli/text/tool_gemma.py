"""Calls of Gemma 4 and FunctionGemma, `call:NAME{key:value,…}`: what looks like JSON has bare keys, and strings between tokens of
their own.

Between those a string is text to the letter, without escapes. What else models and templates write is read as well: keys in
quotes, JSON's strings, Python's None, and words without any quotes, which are strings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from nanovllm_cli.text.tool_calls import Tool
from nanovllm_cli.text.tool_json import MAX_DEPTH, MAX_SCALAR_CHARS, Give, is_json, read_text, read_value
from nanovllm_cli.text.tool_python import in_json_string
from nanovllm_cli.text.tool_sections import ReadSection
from nanovllm_cli.text.tool_stream import Broken, CallStream, Reading


class GemmaTags(NamedTuple):
    """open, close: around a call. quote: around a string."""

    open: str
    close: str
    quote: str


GEMMA4 = GemmaTags("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaTags("<start_function_call>", "<end_function_call>", "<escape>")
_WORDS = {"None": "null", "True": "true", "False": "false"}


def read_gemma(tags: GemmaTags) -> ReadSection:
    """call:NAME{…}, up to the tag that closes it."""

    def section(stream: CallStream, tag: str, tools: Sequence[Tool]) -> Reading[None]:
        yield from stream.expect("call:")
        name, mark = yield from stream.until("{", "<", "\n")
        if mark != "{" or not name.strip():
            raise Broken
        stream.begin(name.strip())
        yield from _container(stream, stream.arguments, "}", 0, tags.quote)
        stream.end()
        yield from stream.accept(tags.close)

    return section


def _value(stream: CallStream, give: Give, depth: int, quote: str) -> Reading[None]:
    """One value, given out as JSON while it comes. Raises Broken where it is nested more than MAX_DEPTH deep."""
    first = yield from stream.skip_space()
    if first == '"':
        yield from read_value(stream, give)
    elif first in "{[":
        if depth == MAX_DEPTH:
            raise Broken
        stream.take()
        yield from _container(stream, give, "}" if first == "{" else "]", depth, quote)
    elif (yield from stream.match(quote)):
        give('"')
        yield from stream.pass_to(lambda text: give(in_json_string(text)), quote)
        give('"')
    else:
        yield from _scalar(stream, give)


def _container(stream: CallStream, give: Give, close: str, depth: int, quote: str) -> Reading[None]:
    """What stands in an object or a list, behind what opens it, and what closes it."""
    opening = "{" if close == "}" else "["
    separator = opening
    while (yield from stream.skip_space()) != close:
        key = f"{json.dumps((yield from _key(stream, quote)), ensure_ascii=False)}: " if close == "}" else ""
        give(separator + key)
        separator = ", "
        yield from _value(stream, give, depth + 1, quote)
        if not (yield from stream.accept(",")):
            break
    yield from stream.expect(close)
    give(opening + close if separator == opening else close)


def _key(stream: CallStream, quote: str) -> Reading[str]:
    """A key and the colon behind it."""
    if (yield from stream.peek()) == '"':
        key = yield from read_text(stream)
    elif (yield from stream.match(quote)):
        key, _ = yield from stream.until(quote)
    else:
        key, mark = yield from stream.until(":", "}", ",", "<", "\n")
        if mark != ":":
            raise Broken
        return key.strip()
    yield from stream.expect(":")
    return key


def _scalar(stream: CallStream, give: Give) -> Reading[None]:
    text = (yield from stream.word(lambda char: char not in ",]}<\n", MAX_SCALAR_CHARS)).strip()
    if not text:
        raise Broken
    give(_WORDS.get(text) or (text if is_json(text) else json.dumps(text, ensure_ascii=False)))
