"""What follows the tag that begins a call, in every family's way: readers for the rows of `tool_formats`.

A call whose name is not among the tools is passed on where tags say that it is a call, as vLLM does: the caller can tell the
model so. Where nothing but its looks makes JSON or Python a call, only a tool's name does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanovllm_cli.text.tool_calls import Tool
from nanovllm_cli.text.tool_json import read_call, read_calls, read_named_call, read_text
from nanovllm_cli.text.tool_python import read_python_call, read_python_calls
from nanovllm_cli.text.tool_stream import Broken, CallStream, Reading

Tools = Sequence[Tool]
Names = frozenset[str] | None
ReadSection = Callable[[CallStream, str, Tools], Reading[None]]
"""Reads what follows an opening tag. Ends behind its closing tag, or where something else follows."""
ReadCall = Callable[[CallStream, Tools], Reading[None]]
"""Reads one call, behind the tag that begins it."""


class SectionTags(NamedTuple):
    """begin, end: around all calls. call, call_end: around each. name, arguments: in front of these, where that has a tag."""

    begin: str
    end: str
    call: str
    call_end: str
    arguments: str = ""
    name: str = ""


DEEPSEEK = SectionTags(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", name="<｜tool▁sep｜>"
)
KIMI = SectionTags(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)  # fmt: skip
SOLAR = SectionTags(
    "<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:end|>", "<|tool_call:args|>", "<|tool_call:name|>"
)
APERTUS_BEGIN, APERTUS_END = "<|tools_prefix|>", "<|tools_suffix|>"
OLMO_BEGIN, OLMO_END = "<function_calls>", "</function_calls>"
DIRECTLY = frozenset(("directly_answer", "directly-answer"))
"""What a Command R calls where it needs no tool."""


def read_json(*closers: str) -> ReadSection:
    """A list of calls, or one behind the other."""

    def section(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
        if (yield from stream.expect("[", "{")) == "[":
            yield from read_calls(stream)
            yield from stream.accept(*closers)
            return
        yield from read_call(stream)
        while (yield from stream.accept("{", *closers)) == "{":
            stream.mark("{")
            yield from read_call(stream)

    return section


def read_json_list(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    yield from read_calls(stream)


def tagged(begin: str, call: str, end: str, read: ReadCall) -> ReadSection:
    """Calls with a tag before each, in a section of their own or without one, where it has a tag at all."""

    def section(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
        if tag == begin:
            tag = yield from stream.expect(call)
        while tag == call:
            yield from read(stream, tools)
            tag = yield from stream.accept(call, end)
            if tag == call:
                stream.mark(tag)

    return section


def read_keyed(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """A list of objects of one key each, which is the name, arguments being its value."""
    yield from stream.expect("[")
    while True:
        yield from stream.expect("{")
        name = yield from read_text(stream)
        yield from stream.expect(":")
        yield from read_named_call(stream, name)
        yield from stream.expect("}")
        stream.mark()
        if (yield from stream.expect(",", "]")) == "]":
            stream.settle()
            break
    yield from stream.accept(APERTUS_END)


def read_mistral(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """[{…}, …]; or name [CALL_ID]id [ARGS]{…}, each call with a tag of its own."""
    first = yield from stream.accept("[CALL_ID]", "[ARGS]", "[", "{")
    if first == "[":
        yield from read_calls(stream)
        return
    if first == "{":
        yield from read_call(stream)
        return
    if first:
        raise Broken
    name, mark = yield from stream.until("[CALL_ID]", "[ARGS]", "{")
    call_id = None
    if mark == "[CALL_ID]":
        call_id, mark = yield from stream.until("[ARGS]", "{")
    if mark == "{":
        stream.position -= 1
    yield from read_named_call(stream, name, call_id)


def read_deepseek(stream: CallStream, tools: Tools) -> Reading[None]:
    """V3.1 writes name and JSON; R1 and V3 a type, a name, and JSON in a fence."""
    name, _ = yield from stream.until(DEEPSEEK.name)
    fenced = (yield from stream.peek()) != "{"
    if fenced:
        name, _ = yield from stream.until("\n")
        yield from stream.expect("```json")
    yield from read_named_call(stream, name)
    if fenced:
        yield from stream.accept("```")
    yield from stream.accept(DEEPSEEK.call_end)


def read_kimi(stream: CallStream, tools: Tools) -> Reading[None]:
    """functions.NAME:NUMBER, which is the call's id, and JSON."""
    call_id = (yield from stream.until(KIMI.arguments))[0].strip()
    yield from read_named_call(stream, call_id.removeprefix("functions.").partition(":")[0], call_id)
    yield from stream.accept(KIMI.call_end)


def read_solar(stream: CallStream, tools: Tools) -> Reading[None]:
    """An id, a name, and JSON, each behind a tag of its own."""
    call_id, _ = yield from stream.until(SOLAR.name)
    name, _ = yield from stream.until(SOLAR.arguments)
    yield from read_named_call(stream, name, call_id.strip())
    yield from stream.accept(SOLAR.call_end)


def read_llama(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    if tag == "<function=":
        name, _ = yield from stream.until(">")
        yield from read_named_call(stream, name)
        yield from stream.accept("</function>")
        return
    if (yield from stream.skip_space()) in "[{":
        yield from _read_loose(stream, None)
    else:
        yield from read_python_call(stream, frozenset(tool.name for tool in tools))
    yield from stream.accept("<|python_end|>")


def read_olmo(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """Python's calls, a line each."""
    while True:
        yield from stream.skip_space()
        yield from read_python_call(stream)
        if (yield from stream.accept(OLMO_END)):
            return
        stream.mark()


def read_actions(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """A list of calls in a fence. One of Cohere's own that says that no tool is needed is none, unless it is among the tools."""
    yield from stream.expect("```json", "```")
    yield from stream.expect("[")
    yield from read_calls(stream, dropped=DIRECTLY.difference(tool.name for tool in tools))
    yield from stream.accept("```")


def read_internlm(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """JSON for a plugin; what is for the interpreter is none of a request's tools."""
    yield from stream.expect("<|plugin|>")
    yield from read_json("<|action_end|>")(stream, tag, tools)


def read_lfm2(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """Python's calls in a list; JSON's, where it was asked for those."""
    yield from _read_loose(stream, None)
    yield from stream.accept("<|tool_call_end|>")


def read_bare(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """What stands at the beginning of an answer: a call only by the name of a tool. Some put it in a fence."""
    fenced = yield from stream.accept("```json", "```tool_call", "```")
    yield from _read_loose(stream, frozenset(tool.name for tool in tools), ("```",) if fenced else ())


def _read_loose(stream: CallStream, names: Names, fence: tuple[str, ...] = ()) -> Reading[None]:
    """JSON objects behind each other or in a list, or a list of Python's calls."""
    if (yield from stream.expect("[", "{")) == "{":
        yield from read_call(stream, names)
        yield from _further_calls(stream, names, fence)
        return
    if (yield from stream.skip_space()) == "{":
        yield from read_calls(stream, names)
    else:
        yield from read_python_calls(stream, names)
    yield from stream.accept(*fence)


def _further_calls(stream: CallStream, names: Names, fence: tuple[str, ...]) -> Reading[None]:
    """Llama writes semicolons between its calls, or nothing."""
    while True:
        stream.mark()
        mark = yield from stream.expect(";", "{", *fence)
        if mark in fence:
            stream.settle()
            return
        if mark == ";":
            yield from stream.expect("{")
        yield from read_call(stream, names)
