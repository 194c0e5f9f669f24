"""Calls of GLM-4 up to 0414 (with GLM-Z1): an answer whose first line is a tool's name, and the next is JSON.

    weather
    {"city": "Köln"}

Nothing else marks them, so only the name of a tool makes one.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_grammar import Bound, CallGrammar, Writer, escaped, quoted
from nanovllm_cli.text.tool_json import read_named_call
from nanovllm_cli.text.tool_sections import Tools
from nanovllm_cli.text.tool_stream import Broken, CallStream, Reading


def read_glm4(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """Calls behind each other."""
    names = frozenset(tool.name for tool in tools)
    while True:
        yield from stream.skip_space()
        name = (yield from stream.until("\n"))[0].strip()
        if name not in names:
            raise Broken
        yield from read_named_call(stream, name)
        stream.mark()


def _call(writer: Writer, tool: Bound) -> str:
    head = quoted(f"{tool.name}\n")
    return f"{head} {tool.arguments(writer)}"


class LineGrammar(CallGrammar):
    """What an answer is, its first line says."""

    def free(self, writer: Writer, call: str, openers: Sequence[str], *, parallel: bool) -> str:
        """Lexemes that end together: which of them it was is known there."""
        names = "|".join(map(escaped, writer.names))
        line = writer.terminal(rf"/\s*[^\s][^\n]*\n/ & ~/\s*({names})[ \t]*\n/")
        only = writer.terminal(r"/\s*([^\s][^\n]*)?/")
        return f"{line} {writer.anything()} | {only}? | {self.section(writer, call, parallel=parallel)}"


GLM4 = ToolFormat(
    "glm4",
    (("<|observation|>", "请使用 Json 格式表示调用的参数"),),
    (),
    (),
    read_glm4,
    LineGrammar(_call, between=("\n",)),
    bare=read_glm4,
)
