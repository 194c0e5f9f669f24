"""Families that write each argument of a call between tags of its own: rows of `tool_formats`."""

from __future__ import annotations

from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_grammar import LINE, CallGrammar, Marked, WriteCall
from nanovllm_cli.text.tool_kimi import KIMI_K3
from nanovllm_cli.text.tool_minimax import MINIMAX_M3
from nanovllm_cli.text.tool_sections import tagged
from nanovllm_cli.text.tool_tagged_grammar import arguments_call, kinded, tagged_call
from nanovllm_cli.text.tool_xml import CODER, GLM, HY, INVOKE, MINICPM, SEED, PairTags, XmlTags, read_pairs, read_xml


def _in_lines(tags: XmlTags, before: str, *after: str) -> WriteCall:
    """A line for each tag. before, after: what stands around the call."""
    key = (tags.key[0], f"{tags.key[1]}\n" if tags.lines else tags.key[1])
    value = ("\n", tags.value, "\n") if tags.lines else (tags.value, "\n")
    return tagged_call((before + tags.name[0], f"{tags.name[1]}\n"), key, value, (f"{tags.end}\n", *after))


def _in_pairs(tags: PairTags, head: tuple[str, ...], *end: str) -> WriteCall:
    """head: around the call's name; end: behind the call."""
    return tagged_call(head, (*tags.key, LINE, tags.value[0]), (tags.value[1], LINE), end)


def _glm() -> ToolFormat:
    begin, read = "<tool_call>", read_pairs(GLM)
    grammar = CallGrammar(_in_pairs(GLM, ("", LINE), GLM.end), begin, between=(LINE, begin))
    closers = (GLM.end, *GLM.key, *GLM.value)
    return ToolFormat("glm", (("<arg_key>",),), (begin,), closers, lambda stream, _, tools: read(stream, tools), grammar)


def _hy3() -> ToolFormat:
    """GLM's calls, with a tag behind the name and all of them in a section, and a word in each tag that tells the published model
    from its maker's own."""
    begin, end, call = "<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>"
    grammar = CallGrammar(_in_pairs(HY, ("", HY.name, LINE), HY.end, LINE), begin, (LINE, call), (call,), (end,))
    closers = (HY.name, *HY.key, *HY.value, HY.end, end)
    section = tagged(begin, call, end, read_pairs(HY))
    return ToolFormat("hy3", (("<tool_sep{}>", ":opensource"),), (begin, call), closers, section, grammar)


def _deepseek(name: str, block: str) -> ToolFormat:
    """Of DeepSeek V3.2 and V4, whose tags have a token in their middle, and say whether a value is text:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="weather">
    <｜DSML｜parameter name="city" string="true">Köln</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>
    """
    mark = "｜DSML｜"
    begin, call, key = (Marked("<", mark, text) for text in (f"{block}>", 'invoke name="', 'parameter name="'))
    end, call_end, value_end = (Marked("</", mark, text) for text in (f"{block}>", "invoke>", "parameter>"))
    tags = XmlTags((call, '">'), (key, '">'), value_end, call_end, kind=('" string="', "true"))
    argument = kinded(
        (key,), lambda kind: (f'" string="{"true" if kind == "string" else "false"}">',), (value_end, "\n")
    )
    write = arguments_call((call, '">\n'), argument, (call_end, "\n"))
    return ToolFormat(
        name, ((mark, block),), (begin, call), (mark,), tagged(begin, call, end, read_xml(tags)),
        CallGrammar(write, begin, ("\n",), ("",), (end,)), in_reasoning=begin,
    )  # fmt: skip


TAGGED: tuple[ToolFormat, ...] = (
    _glm(),
    _hy3(),
    ToolFormat(
        "seed", (("<seed:tool_call>",),), ("<seed:tool_call>", SEED.name[0]), ("</seed:tool_call>",),
        tagged("<seed:tool_call>", SEED.name[0], "</seed:tool_call>", read_xml(SEED)),
        CallGrammar(_in_lines(SEED, "\n", "</seed:tool_call>"), "<seed:tool_call>", between=("\n", "<seed:tool_call>")),
    ),
    ToolFormat(
        "qwen3_coder", (("<function=", "<parameter="),), ("<tool_call>", CODER.name[0]), ("</tool_call>",),
        tagged("<tool_call>", CODER.name[0], "</tool_call>", read_xml(CODER)),
        CallGrammar(_in_lines(CODER, "\n", "</tool_call>"), "<tool_call>", between=(LINE, "<tool_call>")),
        in_reasoning="<tool_call>\n<function=",
    ),
    ToolFormat(
        "minimax", (("<minimax:tool_call>",),), ("<minimax:tool_call>",), ("</minimax:tool_call>",),
        tagged("<minimax:tool_call>", INVOKE.name[0], "</minimax:tool_call>", read_xml(INVOKE)),
        CallGrammar(_in_lines(INVOKE, ""), "<minimax:tool_call>", ("\n",), ("",), ("</minimax:tool_call>",)),
    ),
    _deepseek("deepseek_v32", "function_calls"),
    _deepseek("deepseek_v4", "tool_calls"),
    KIMI_K3,
    MINIMAX_M3,
    ToolFormat(
        "minicpm", (MINICPM.name[:1] + MINICPM.key[:1],), (MINICPM.name[0],), (),
        tagged("", MINICPM.name[0], "", read_xml(MINICPM)),
        CallGrammar(
            tagged_call(("", '">'), MINICPM.key, (MINICPM.value,), (MINICPM.end,)),
            MINICPM.name[0], between=(f"\n{MINICPM.name[0]}",),
        ),
    ),
)  # fmt: skip
