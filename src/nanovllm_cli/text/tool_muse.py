"""Muse's calls: messages of their own, as gpt-oss' are, with arguments between tags.

     to=weather<|message|><atem:function_calls>
    <atem:invoke name="weather">
    <atem:parameter name="city">Köln</atem:parameter>
    </atem:invoke>
    </atem:function_calls>
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.text.tool_grammar import LINE, Bound, HarmonyGrammar, Writer, quoted
from nanovllm_cli.text.tool_sections import Tools, tagged
from nanovllm_cli.text.tool_stream import CallStream, Reading
from nanovllm_cli.text.tool_tagged_grammar import tagged_call
from nanovllm_cli.text.tool_xml import XmlTags, read_xml

_BEGIN, _END = "<atem:function_calls>", "</atem:function_calls>"
_TAGS = XmlTags(('<atem:invoke name="', '">'), ('<atem:parameter name="', '">'), "</atem:parameter>", "</atem:invoke>")
MUSE_TAGS = (_BEGIN, "<atem:invoke", "<atem:parameter", _TAGS.value, _TAGS.end, _END)
"""What of them may be tokens."""
_SECTION = tagged(_BEGIN, _TAGS.name[0], _END, read_xml(_TAGS))
_CALL = tagged_call((_TAGS.name[0], '">\n'), _TAGS.key, (_TAGS.value, "\n"), (_TAGS.end, "\n", _END))


def read_muse(stream: CallStream, name: str, tools: Tools) -> Reading[None]:
    """The body of a message to a tool, whose tags have the name again, which counts."""
    tag = yield from stream.expect(_BEGIN, _TAGS.name[0])
    yield from _SECTION(stream, tag, tools)


class MuseGrammar(HarmonyGrammar):
    """A call is a message of its own, which others may follow."""

    def call(self, writer: Writer, tool: Bound) -> str:
        return f"{writer.sequence(f' to={tool.name}', '<|message|>', _BEGIN, LINE)} {_CALL(writer, tool)}"

    def demanded(self, writer: Writer, call: str, *, parallel: bool, reasons: bool) -> str:
        return f"({self.begin(writer)})? {self._calls(writer, call, parallel=parallel)}"

    def content(self, writer: Writer, form: str) -> str:
        return f"({self.begin(writer)})? {writer.sequence(' to=user', '<|message|>')} {form}"

    def free(self, writer: Writer, call: str, openers: Sequence[str], *, parallel: bool) -> str:
        head = f"({quoted(' to=self')} | {quoted(' to=user')})? {writer.sequence('<|message|>')}"
        message = f"{head} {writer.text_before('<|eom|>')} {self.begin(writer)}"
        last = f"{head} {writer.anything()} | {self._calls(writer, call, parallel=parallel)}"
        return f"({self.begin(writer)})? ({message})* ({last})"

    def _calls(self, writer: Writer, call: str, *, parallel: bool) -> str:
        return f"{call} ({writer.sequence('<|eom|>')} {self.begin(writer)} {call})*" if parallel else call
