"""How the families write tool calls: a reader for each, and what tells from a chat template which one it is.

A call whose name is not among the tools is passed on where tags say that it is a call, as vLLM does: the caller can tell the
model so. Where nothing but its looks makes JSON or Python a call, only a tool's name does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tool_calls import Tool
from nanovllm_cli.text.tool_gemma import CLOSE, OPEN, QUOTE, read_gemma_call
from nanovllm_cli.text.tool_gemma_grammar import gemma_call
from nanovllm_cli.text.tool_grammar import (
    CallGrammar,
    HarmonyGrammar,
    json_call,
    kimi_call,
    named_call,
    python_call,
    tagged_call,
)
from nanovllm_cli.text.tool_json import read_call, read_calls, read_named_call, read_text
from nanovllm_cli.text.tool_python import read_python_call, read_python_calls
from nanovllm_cli.text.tool_stream import Broken, CallStream, Reader, Reading
from nanovllm_cli.text.tool_xml import read_glm_call, read_xml_call

Tools = Sequence[Tool]
Names = frozenset[str] | None
ReadSection = Callable[[CallStream, str, Tools], Reading[None]]
"""Reads what follows an opening tag. Ends behind its closing tag, or where something else follows."""


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. openers: what begins a call; tags: everything that must stay in the text for the reader.

    signs: a chat template with all of one of these writes it. section: reads what follows an opener. grammar: of calls that
    must come. bare: calls may stand without a tag, at the beginning. id_chars: of an id's letters.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    section: ReadSection
    grammar: CallGrammar | HarmonyGrammar
    bare: bool = False
    id_chars: int = 24

    @property
    def tags(self) -> tuple[str, ...]:
        return self.openers + self.closers

    def reader(
        self, tools: Tools, hidden: Sequence[str] = (), kept: tuple[str, str] | None = None, starts_kept: bool = False
    ) -> Reader:
        """Reads an answer. hidden: tags to leave out of the content. kept: tags between which nothing is a call, and which are
        content; starts_kept: the prompt wrote the first of them."""

        def read(stream: CallStream) -> Reading[None]:
            if kept and starts_kept:
                yield from _keep(stream, kept[1])
            if self.bare:
                yield from stream.attempt(_read_bare(stream, "", tools))
            tags = (*self.openers, *hidden, *(kept[:1] if kept else ()))
            while True:
                tag = yield from stream.content_to(*tags)
                if tag in self.openers:
                    yield from stream.attempt(self.section(stream, tag, tools), tag)
                elif kept and tag == kept[0]:
                    stream.content(tag)
                    yield from _keep(stream, kept[1])

        return read


def read_plain(hidden: Sequence[str]) -> Reader:
    """Leaves tags out of a text without calls."""

    def read(stream: CallStream) -> Reading[None]:
        while True:
            yield from stream.content_to(*hidden)

    return read


def _keep(stream: CallStream, close: str) -> Reading[None]:
    stream.content((yield from stream.content_to(close)))


def tool_format(template_source: str) -> ToolFormat:
    """The format that a chat template asks for; plain JSON where it says nothing."""
    for known in FORMATS:
        if any(all(sign in template_source for sign in signs) for signs in known.signs):
            return known
    return JSON


def tool_format_named(name: str) -> ToolFormat:
    """Raises UsageError for an unknown name."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise UsageError(f"unknown tool format {name!r}", f"known: {', '.join(known.name for known in FORMATS)}")


# ---- sections ----

DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_NAME, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
APERTUS_BEGIN, APERTUS_END = "<|tools_prefix|>", "<|tools_suffix|>"
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


def _read_json(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    if (yield from stream.expect("[", "{")) == "[":
        yield from read_calls(stream)
    else:
        yield from read_call(stream)
    yield from stream.accept("</tool_call>", "<|/tool_call|>")


def _read_json_list(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    yield from read_calls(stream)


def _read_keyed(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
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


def _read_mistral(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
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


def _tagged(begin: str, call: str, end: str, read: Reader) -> ReadSection:
    """Calls with a tag before each, in a section of their own or without one."""

    def section(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
        if tag == begin:
            tag = yield from stream.expect(call)
        while tag == call:
            yield from read(stream)
            tag = yield from stream.accept(call, end)
            if tag == call:
                stream.mark(tag)

    return section


def _read_deepseek(stream: CallStream) -> Reading[None]:
    """V3.1 writes name and JSON; R1 and V3 a type, a name, and JSON in a fence."""
    name, _ = yield from stream.until(DEEPSEEK_NAME)
    fenced = (yield from stream.peek()) != "{"
    if fenced:
        name, _ = yield from stream.until("\n")
        yield from stream.expect("```json")
    yield from read_named_call(stream, name)
    if fenced:
        yield from stream.accept("```")
    yield from stream.accept(DEEPSEEK_CALL_END)


def _read_kimi(stream: CallStream) -> Reading[None]:
    """functions.NAME:NUMBER, which is the call's id, and JSON."""
    call_id = (yield from stream.until(KIMI_ARGUMENTS))[0].strip()
    yield from read_named_call(stream, call_id.removeprefix("functions.").partition(":")[0], call_id)
    yield from stream.accept(KIMI_CALL_END)


def _read_llama(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
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


def _read_lfm2(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """Python's calls in a list; JSON's, where it was asked for those."""
    yield from _read_loose(stream, None)
    yield from stream.accept("<|tool_call_end|>")


def _read_bare(stream: CallStream, tag: str, tools: Tools) -> Reading[None]:
    """What stands at the beginning of an answer: a call only by the name of a tool."""
    yield from _read_loose(stream, frozenset(tool.name for tool in tools))


def _read_loose(stream: CallStream, names: Names) -> Reading[None]:
    """JSON objects behind each other or in a list, or a list of Python's calls."""
    if (yield from stream.expect("[", "{")) == "{":
        yield from read_call(stream, names)
        yield from _further_calls(stream, names)
        return
    if (yield from stream.skip_space()) == "{":
        yield from read_calls(stream, names)
    else:
        yield from read_python_calls(stream, names)


def _further_calls(stream: CallStream, names: Names) -> Reading[None]:
    """Llama writes semicolons between its calls, or nothing."""
    while True:
        stream.mark()
        mark = yield from stream.expect(";", "{")
        if mark == ";":
            yield from stream.expect("{")
        yield from read_call(stream, names)


HARMONY = ToolFormat(
    "harmony", (("<|channel|>", "<|call|>"), ("<|channel|>", "to=functions")), (), (), _read_bare, HarmonyGrammar()
)
JSON = ToolFormat("json", (), (), (), _read_bare, CallGrammar(json_call(), between=("\n",)), bare=True)
FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    ToolFormat(
        "glm",
        (("<arg_key>",),),
        ("<tool_call>",),
        ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        read_glm_call,
        CallGrammar(
            tagged_call(
                ("", "\n"),
                ("<arg_key>", "</arg_key>", "\n", "<arg_value>"),
                ("</arg_value>", "\n"),
                ("</tool_call>",),
            ),
            "<tool_call>",
            between=("\n", "<tool_call>"),
        ),
    ),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        ("<tool_call>", "<function="),
        ("</tool_call>",),
        read_xml_call,
        CallGrammar(
            tagged_call(
                ("\n<function=", ">\n"),
                ("<parameter=", ">\n"),
                ("\n</parameter>\n",),
                ("</function>\n", "</tool_call>"),
            ),
            "<tool_call>",
            between=("\n", "<tool_call>"),
        ),
    ),
    ToolFormat(
        "gemma4",
        ((OPEN + "call:",), (OPEN, QUOTE)),
        (OPEN,),
        (CLOSE, QUOTE),
        read_gemma_call,
        CallGrammar(gemma_call, OPEN, between=(OPEN,)),
    ),
    ToolFormat(
        "kimi",
        ((KIMI_BEGIN,),),
        (KIMI_BEGIN, KIMI_CALL),
        (KIMI_ARGUMENTS, KIMI_CALL_END, KIMI_END),
        _tagged(KIMI_BEGIN, KIMI_CALL, KIMI_END, _read_kimi),
        CallGrammar(kimi_call, KIMI_BEGIN, (KIMI_CALL,), (KIMI_CALL,), (KIMI_END,)),
    ),
    ToolFormat(
        "apertus",
        ((APERTUS_BEGIN,),),
        (APERTUS_BEGIN,),
        (APERTUS_END,),
        _read_keyed,
        CallGrammar(named_call(('{"',), ('": ',), ("}",)), APERTUS_BEGIN, ("[",), (", ",), ("]", APERTUS_END)),
    ),
    ToolFormat(
        "deepseek_r1",
        ((DEEPSEEK_BEGIN, "```json"),),
        (DEEPSEEK_BEGIN, DEEPSEEK_CALL),
        (DEEPSEEK_NAME, DEEPSEEK_CALL_END, DEEPSEEK_END),
        _tagged(DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_END, _read_deepseek),
        CallGrammar(
            named_call(("function", DEEPSEEK_NAME), ("\n```json\n",), ("\n```", DEEPSEEK_CALL_END)),
            DEEPSEEK_BEGIN,
            (DEEPSEEK_CALL,),
            ("\n", DEEPSEEK_CALL),
            (DEEPSEEK_END,),
        ),
    ),
    ToolFormat(
        "deepseek",
        ((DEEPSEEK_BEGIN,),),
        (DEEPSEEK_BEGIN, DEEPSEEK_CALL),
        (DEEPSEEK_NAME, DEEPSEEK_CALL_END, DEEPSEEK_END),
        _tagged(DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_END, _read_deepseek),
        CallGrammar(
            named_call((), (DEEPSEEK_NAME,), (DEEPSEEK_CALL_END,)),
            DEEPSEEK_BEGIN,
            (DEEPSEEK_CALL,),
            (DEEPSEEK_CALL,),
            (DEEPSEEK_END,),
        ),
    ),
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]", "[ARGS]"),),
        ("[TOOL_CALLS]",),
        ("[ARGS]", "[CALL_ID]"),
        _read_mistral,
        CallGrammar(named_call((), ("[ARGS]",)), "[TOOL_CALLS]", between=("[TOOL_CALLS]",)),
        id_chars=9,
    ),
    ToolFormat(
        "mistral_list",
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]",),
        ("[ARGS]", "[CALL_ID]"),
        _read_mistral,
        CallGrammar(json_call(), "[TOOL_CALLS]", ("[",), (", ",), ("]",)),
        id_chars=9,
    ),
    ToolFormat(
        "hermes",
        (("<tool_call>",),),
        ("<tool_call>",),
        ("</tool_call>",),
        _read_json,
        CallGrammar(json_call(open="\n", close=("\n", "</tool_call>")), "<tool_call>", between=("\n", "<tool_call>")),
    ),
    ToolFormat(
        "lfm2",
        (("<|tool_list_start|>",), ("<|tool_call_start|>",)),
        ("<|tool_call_start|>",),
        ("<|tool_call_end|>",),
        _read_lfm2,
        CallGrammar(python_call, "<|tool_call_start|>", ("[",), (", ",), ("]", "<|tool_call_end|>")),
    ),
    ToolFormat(
        "phi4",
        (("<|/tool_call|>",),),
        ("<|tool_call|>",),
        ("<|/tool_call|>",),
        _read_json,
        CallGrammar(json_call(), "<|tool_call|>", ("[",), (", ",), ("]", "<|/tool_call|>")),
    ),
    ToolFormat(
        "granite",
        (("<|tool_call|>",),),
        ("<|tool_call|>", "<tool_call>"),
        ("<|/tool_call|>",),
        _read_json,
        CallGrammar(json_call(), "<|tool_call|>", ("[",), (", ",), ("]",)),
    ),
    ToolFormat(
        "phi",
        (("functools",),),
        ("functools[",),
        (),
        _read_json_list,
        CallGrammar(json_call(), "functools[", between=(", ",), after=("]",)),
    ),
    ToolFormat(
        "pythonic",
        (("func_name1(",),),
        ("<|python_start|>",),
        ("<|python_end|>",),
        _read_llama,
        CallGrammar(python_call, before=("[",), between=(", ",), after=("]",)),
        bare=True,
    ),
    ToolFormat(
        "llama",
        (("<|start_header_id|>",), ("<|python_tag|>",)),
        ("<|python_tag|>", "<function="),
        (),
        _read_llama,
        CallGrammar(json_call("parameters"), between=("; ",)),
        bare=True,
    ),
    JSON,
)
