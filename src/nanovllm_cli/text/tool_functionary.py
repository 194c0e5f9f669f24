"""Functionary's calls. 3.1 writes each between tags, a name and JSON; 3.2 addresses what it says to a tool or to all:

    >>>all
    Let me look.>>>weather
    {"city": "Köln"}

The prompt writes the first of those marks. As it may stand in any text, only the name of a tool behind it makes a call.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.text.tool_grammar import CallGrammar, Writer
from nanovllm_cli.text.tool_json import read_named_call
from nanovllm_cli.text.tool_sections import Tools
from nanovllm_cli.text.tool_stream import Broken, CallStream, Reading

FUNCTION, PYTHON = "<function=", "<|python_tag|>"
TO = ">>>"
_TO_ALL = "all\n"


def read_function(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """NAME>{…}</function>. What is behind the other tag is for a tool of that name."""
    name = "python"
    if tag == FUNCTION:
        name, _ = yield from stream.until(">")
    elif all(tool.name != name for tool in tools):
        raise Broken
    yield from read_named_call(stream, name)
    yield from stream.accept("</function>")


def read_recipient(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """A name, a line break, and JSON; or whom the content is for."""
    name, mark = yield from stream.until("\n", TO)
    if mark == TO:
        stream.position -= len(TO)  # it may begin another
        raise Broken
    if name + mark == _TO_ALL:
        stream.drop()
    elif any(tool.name == name for tool in tools):
        yield from read_named_call(stream, name)
    else:
        raise Broken


class RecipientGrammar(CallGrammar):
    """Of 3.2. The prompt may have written the first mark."""

    def demanded(self, writer: Writer, call: str, *, parallel: bool, reasons: bool) -> str:
        return f"{self._begin(writer)} {self.section(writer, call, parallel=parallel)}"

    def content(self, writer: Writer, form: str) -> str:
        return f"{self._begin(writer)} {writer.sequence(_TO_ALL)} {form}"

    def free(self, writer: Writer, call: str, openers: Sequence[str], *, parallel: bool) -> str:
        said = f"{writer.sequence(_TO_ALL)} {super().free(writer, call, openers, parallel=parallel)}"
        return f"{self._begin(writer)} ({said} | {self.section(writer, call, parallel=parallel)})"

    def _begin(self, writer: Writer) -> str:
        return f"({writer.sequence(self.trigger)})?"
