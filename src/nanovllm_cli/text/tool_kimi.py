"""Kimi K3's calls, between tags of three tokens, which say of what type a value is. (K2's are in `tool_sections`.)

    <|open|>tools<|sep|>
    <|open|>call tool="weather" index="1"<|sep|>
    <|open|>argument key="city" type="string"<|sep|>Köln<|close|>argument<|sep|>
    <|close|>call<|sep|>
    <|close|>tools<|sep|>

without the line breaks. What is said stands in such tags, too: `reasoning.KIMI`. Of names `&` and `"` are written as in HTML.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_grammar import Bound, CallGrammar, Marked, Writer, quoted
from nanovllm_cli.text.tool_json import read_value
from nanovllm_cli.text.tool_sections import Tools, tagged
from nanovllm_cli.text.tool_stream import Broken, CallStream, Reading
from nanovllm_cli.text.tool_tagged_grammar import kinded, written_arguments
from nanovllm_cli.text.tool_xml import Arguments

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_TOOLS, _CALL = Marked("", _OPEN, "tools<|sep|>"), Marked("", _OPEN, 'call tool="')
_ARGUMENT, _JSON = '<|open|>argument key="', '<|open|>json type="object"<|sep|>'
_ARGUMENT_END, _JSON_END, _CALL_END = "<|close|>argument<|sep|>", "<|close|>json<|sep|>", "<|close|>call<|sep|>"
_TOOLS_END, _MESSAGE_END = "<|close|>tools<|sep|>", "<|close|>message<|sep|>"


def _read_call(stream: CallStream, tools: Tools) -> Reading[None]:
    """NAME" index="NUMBER", and arguments, each by itself or all in one object."""
    head, _ = yield from stream.until(_SEP)
    name = _read_name(head)
    tag = yield from stream.expect(_ARGUMENT, _JSON, _CALL_END)
    if tag == _JSON:
        if (yield from stream.skip_space()) != "{" or not name:
            raise Broken
        stream.begin(name)
        yield from read_value(stream, stream.arguments)
        stream.end()
        yield from stream.accept(_JSON_END)
        yield from stream.accept(_CALL_END)
        return
    arguments = Arguments(stream, name, tools)
    while tag == _ARGUMENT:
        said, _ = yield from stream.until(_SEP)
        kind = said.partition('" type="')[2].partition('"')[0]
        yield from arguments.read(_read_name(said), _ARGUMENT_END, is_text=kind == "string" if kind else None)
        tag = yield from stream.expect(_ARGUMENT, _CALL_END)
    arguments.end()


_SECTION = tagged(_TOOLS, _CALL, _TOOLS_END, _read_call)


def _read(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """Calls, in a section or without one."""
    yield from _SECTION(stream, tag, tools)
    yield from stream.accept(_MESSAGE_END)


def _read_name(said: str) -> str:
    return said.partition('"')[0].replace("&quot;", '"').replace("&amp;", "&")


def _written_name(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


# ---- grammar ----


def _kind(kind: str) -> tuple[str, ...]:
    return f'" type="{"number" if kind == "integer" else kind}"', _SEP


_WRITE_ARGUMENT = kinded((_OPEN, 'argument key="'), _kind, (_CLOSE, "argument", _SEP))


def _call(writer: Writer, tool: Bound) -> str:
    name = quoted(_written_name(tool.name) + '"')
    number = writer.terminal('/ index="[0-9]{1,4}"/')
    head = f"{writer.sequence(_CALL)} {name} {number} {writer.sequence(_SEP)}"
    arguments = written_arguments(writer, tool, _WRITE_ARGUMENT, _written_name)
    return f"{head} {arguments} {_end(writer, 'call')}"


class KimiGrammar(CallGrammar):
    """A response, which may be empty, and perhaps calls behind it."""

    def demanded(self, writer: Writer, call: str, *, parallel: bool, reasons: bool) -> str:
        return f"({_begin(writer)} {_end(writer, 'response')})? {self._tools(writer, call, parallel=parallel)}"

    def content(self, writer: Writer, form: str) -> str:
        return f"({_begin(writer)})? {form} ({_end(writer, 'response')} ({_end(writer, 'message')})?)?"

    def free(self, writer: Writer, call: str, openers: Sequence[str], *, parallel: bool) -> str:
        if not writer.is_token(self.trigger):
            return super().free(writer, call, openers, parallel=parallel)
        said = f"({_begin(writer)})? {writer.text_before(_CLOSE)} {writer.sequence('response', _SEP)}"
        text = f"({_begin(writer)})? {writer.anything()}"
        return f"({said})? {self._tools(writer, call, parallel=parallel)} | {said} ({_end(writer, 'message')})? | {text}"

    def _tools(self, writer: Writer, call: str, *, parallel: bool) -> str:
        section = self.section(writer, call, parallel=parallel)
        return f"{writer.sequence(self.trigger)} {section} ({_end(writer, 'message')})?"


def _begin(writer: Writer) -> str:
    return writer.sequence(_OPEN, "response", _SEP)


def _end(writer: Writer, name: str) -> str:
    return writer.sequence(_CLOSE, name, _SEP)


KIMI_K3 = ToolFormat(
    "kimi_k3",
    ((_OPEN, _CLOSE, "<|end_of_msg|>"),),
    (_TOOLS, _CALL),
    (_OPEN, _CLOSE, _SEP),
    _read,
    KimiGrammar(_call, Marked("", _OPEN, "tools"), (_SEP,), ("",), (_CLOSE, "tools", _SEP)),
)
