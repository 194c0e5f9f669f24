"""Families that write each argument of a call between tags of its own: rows of `tool_formats`."""

from __future__ import annotations

from nanovllm_cli.text.tool_dsml import DSML
from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_grammar import LINE, CallGrammar
from nanovllm_cli.text.tool_hy import HY_CLOSERS, HY_GRAMMAR, HY_OPENERS, HY_SIGNS, read_hy
from nanovllm_cli.text.tool_kimi import KIMI_K3
from nanovllm_cli.text.tool_minimax import MINIMAX_M3
from nanovllm_cli.text.tool_sections import read_xml
from nanovllm_cli.text.tool_tagged_grammar import tagged_call
from nanovllm_cli.text.tool_xml import CODER, INVOKE, MINICPM, SEED, read_glm_call

TAGGED: tuple[ToolFormat, ...] = (
    ToolFormat(
        "glm",
        (("<arg_key>",),),
        ("<tool_call>",),
        ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        read_glm_call,
        CallGrammar(
            tagged_call(
                ("", LINE),
                ("<arg_key>", "</arg_key>", LINE, "<arg_value>"),
                ("</arg_value>", LINE),
                ("</tool_call>",),
            ),
            "<tool_call>",
            between=(LINE, "<tool_call>"),
        ),
    ),
    ToolFormat("hy3", (HY_SIGNS,), HY_OPENERS, HY_CLOSERS, read_hy, HY_GRAMMAR),
    ToolFormat(
        "seed",
        (("<seed:tool_call>",),),
        ("<seed:tool_call>", "<function="),
        ("</seed:tool_call>",),
        read_xml(SEED, "<seed:tool_call>", "</seed:tool_call>"),
        CallGrammar(
            tagged_call(
                ("\n<function=", ">\n"),
                ("<parameter=", ">"),
                ("</parameter>\n",),
                ("</function>\n", "</seed:tool_call>"),
            ),
            "<seed:tool_call>",
            between=("\n", "<seed:tool_call>"),
        ),
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        ("<tool_call>", "<function="),
        ("</tool_call>",),
        read_xml(CODER, "<tool_call>", "</tool_call>"),
        CallGrammar(
            tagged_call(
                ("\n<function=", ">\n"),
                ("<parameter=", ">\n"),
                ("\n</parameter>\n",),
                ("</function>\n", "</tool_call>"),
            ),
            "<tool_call>",
            between=(LINE, "<tool_call>"),
        ),
        in_reasoning="<tool_call>\n<function=",
    ),
    ToolFormat(
        "minimax",
        (("<minimax:tool_call>",),),
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
        read_xml(INVOKE, "<minimax:tool_call>", "</minimax:tool_call>"),
        CallGrammar(
            tagged_call(
                ('<invoke name="', '">\n'), ('<parameter name="', '">'), ("</parameter>\n",), ("</invoke>\n",)
            ),
            "<minimax:tool_call>",
            before=("\n",),
            between=("",),
            after=("</minimax:tool_call>",),
        ),
    ),
    *DSML,
    KIMI_K3,
    MINIMAX_M3,
    ToolFormat(
        "minicpm",
        (('<function name="', '<param name="'),),
        ('<function name="',),
        (),
        read_xml(MINICPM, "", ""),
        CallGrammar(
            tagged_call(("", '">'), ('<param name="', '">'), ("</param>",), ("</function>",)),
            '<function name="',
            between=('\n<function name="',),
        ),
    ),
)
