"""Hy3's calls: GLM's, with a tag behind the name and all of them in a section, and a word in each tag that tells the published
model from its maker's own.

    <tool_calls:opensource>
    <tool_call:opensource>NAME<tool_sep:opensource>
    <arg_key:opensource>KEY</arg_key:opensource>
    <arg_value:opensource>VALUE</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>
"""

from __future__ import annotations

from nanovllm_cli.text.tool_grammar import LINE, CallGrammar
from nanovllm_cli.text.tool_sections import Tools
from nanovllm_cli.text.tool_stream import CallStream, Reading
from nanovllm_cli.text.tool_tagged_grammar import tagged_call
from nanovllm_cli.text.tool_xml import PairTags, read_pairs

HY_SIGNS = ("<tool_sep{}>", ":opensource")
_BEGIN, _END, _CALL = "<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>"
_TAGS = PairTags(
    "<tool_sep:opensource>", ("<arg_key:opensource>", "</arg_key:opensource>"),
    ("<arg_value:opensource>", "</arg_value:opensource>"), "</tool_call:opensource>",
)  # fmt: skip
HY_OPENERS = (_BEGIN, _CALL)
HY_CLOSERS = (_TAGS.name, *_TAGS.key, *_TAGS.value, _TAGS.end, _END)
HY_GRAMMAR = CallGrammar(
    tagged_call(("", _TAGS.name, LINE), (*_TAGS.key, LINE, _TAGS.value[0]), (_TAGS.value[1], LINE), (_TAGS.end, LINE)),
    _BEGIN,
    (LINE, _CALL),
    (_CALL,),
    (_END,),
)


def read_hy(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """Calls, in a section or without one."""
    if tag == _BEGIN:
        tag = yield from stream.expect(_CALL)
    while tag == _CALL:
        yield from read_pairs(stream, _TAGS, tools)
        tag = yield from stream.accept(_CALL, _END)
        if tag == _CALL:
            stream.mark(tag)
