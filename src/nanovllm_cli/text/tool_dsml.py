"""Calls of DeepSeek V3.2 and V4, whose tags have a token in their middle, and say whether a value is text.

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
"""

from __future__ import annotations

from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_grammar import CallGrammar, Marked
from nanovllm_cli.text.tool_sections import Tools, read_xml
from nanovllm_cli.text.tool_stream import CallStream, Reading
from nanovllm_cli.text.tool_tagged_grammar import arguments_call, kinded
from nanovllm_cli.text.tool_xml import XmlTags

_MARK = "｜DSML｜"


def _open(text: str) -> Marked:
    return Marked("<", _MARK, text)


def _close(text: str) -> Marked:
    return Marked("</", _MARK, text)


_TAGS = XmlTags(
    (_open('invoke name="'), '">'), (_open('parameter name="'), '">'), _close("parameter>"), _close("invoke>"),
    kind=('" string="', "true"),
)  # fmt: skip
_ARGUMENT = kinded(
    (_open('parameter name="'),),
    lambda kind: (f'" string="{"true" if kind == "string" else "false"}">',),
    (_close("parameter>"), "\n"),
)
_CALL = arguments_call((_open('invoke name="'), '">\n'), _ARGUMENT, (_close("invoke>"), "\n"))


def _format(name: str, block: str) -> ToolFormat:
    begin, end = _open(f"{block}>"), _close(f"{block}>")

    def read(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
        yield from read_xml(_TAGS, begin, end)(stream, tag, tools)

    grammar = CallGrammar(_CALL, begin, before=("\n",), between=("",), after=(end,))
    return ToolFormat(name, ((_MARK, block),), (begin, _TAGS.name[0]), (_MARK,), read, grammar, in_reasoning=begin)


DSML = (_format("deepseek_v32", "function_calls"), _format("deepseek_v4", "tool_calls"))
