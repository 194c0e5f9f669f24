"""How the families write tool calls: a row for each, and what tells from a chat template which one it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tool_gemma import FUNCTION_GEMMA, GEMMA4, GemmaTags, read_gemma
from nanovllm_cli.text.tool_gemma_grammar import gemma_call
from nanovllm_cli.text.tool_grammar import (
    LINE,
    CallGrammar,
    HarmonyGrammar,
    SolarGrammar,
    cohere_call,
    json_call,
    kimi_call,
    mistral_call,
    named_call,
    python_call,
    solar_call,
    tagged_call,
)
from nanovllm_cli.text.tool_hy import HY_CLOSERS, HY_GRAMMAR, HY_OPENERS, HY_SIGNS, read_hy
from nanovllm_cli.text.tool_sections import (
    APERTUS_BEGIN,
    APERTUS_END,
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_NAME,
    KIMI_ARGUMENTS,
    KIMI_BEGIN,
    KIMI_CALL,
    KIMI_CALL_END,
    KIMI_END,
    OLMO_BEGIN,
    OLMO_END,
    SOLAR_ARGUMENTS,
    SOLAR_BEGIN,
    SOLAR_CALL,
    SOLAR_CALL_END,
    SOLAR_END,
    SOLAR_NAME,
    ReadSection,
    Tools,
    read_bare,
    read_deepseek,
    read_internlm,
    read_json,
    read_json_list,
    read_keyed,
    read_kimi,
    read_lfm2,
    read_llama,
    read_mistral,
    read_olmo,
    read_solar,
    read_xml,
    tagged,
)
from nanovllm_cli.text.tool_stream import CallStream, Reader, Reading
from nanovllm_cli.text.tool_xml import CODER, INVOKE, MINICPM, SEED, read_glm_call


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls. openers: what begins a call; tags: everything that must stay in the text for the reader.

    signs: a chat template with all of one of these writes it. section: reads what follows an opener. grammar: of calls that
    must come. bare: calls may stand without a tag, at the beginning. id_chars: of an id's letters. by_token: so does a template
    that says nothing, of a model whose vocabulary has the opener as a special token. in_reasoning: what begins a call where its
    models forget to close their reasoning.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    section: ReadSection
    grammar: CallGrammar | HarmonyGrammar
    bare: bool = False
    id_chars: int = 24
    by_token: bool = False
    in_reasoning: str = ""

    @property
    def tags(self) -> tuple[str, ...]:
        return self.openers + self.closers

    def reader(
        self, tools: Tools, hidden: Sequence[str] = (), kept: tuple[str, str] | None = None, starts_kept: bool = False
    ) -> Reader:
        """Reads an answer. hidden: tags to leave out of the content. kept: tags between which nothing is a call, and which are
        content; starts_kept: the prompt wrote the first of them."""

        def read(stream: CallStream) -> Reading[None]:
            keeps = kept
            if keeps and starts_kept and not (yield from _keep(stream, keeps[1], self.in_reasoning)):
                keeps = None
            if self.bare:
                yield from stream.attempt(read_bare(stream, "", tools))
            while True:
                tag = yield from stream.content_to(*self.openers, *hidden, *(keeps[:1] if keeps else ()))
                if tag in self.openers:
                    yield from stream.attempt(self.section(stream, tag, tools), tag)
                elif keeps and tag == keeps[0]:
                    stream.content(tag)
                    keeps = keeps if (yield from _keep(stream, keeps[1], self.in_reasoning)) else None

        return read


def read_plain(hidden: Sequence[str]) -> Reader:
    """Leaves tags out of a text without calls."""

    def read(stream: CallStream) -> Reading[None]:
        while True:
            yield from stream.content_to(*hidden)

    return read


def _keep(stream: CallStream, close: str, begins: str) -> Reading[bool]:
    """Content up to the tag. begins: what begins a call all the same where the tag does not come any more; returns False then,
    and the call is next."""
    tag = yield from stream.content_to(*filter(None, (close, begins)))
    if tag != close and not (yield from stream.hold_to(close, tag)):
        return False
    stream.content(close)
    return True


def tool_format(template_source: str, special_tokens: Collection[str] = ()) -> ToolFormat:
    """The format that a chat template asks for; plain JSON where nothing says which."""
    for known in FORMATS:
        if any(all(sign in template_source for sign in signs) for signs in known.signs):
            return known
    by_token = (known for known in FORMATS if known.by_token and known.openers[0] in special_tokens)
    return next(by_token, JSON)


# What vLLM calls them, where that is another name.
_ALIASES = {
    "cohere_command3": "cohere", "cohere_command4": "cohere", "deepseek_v3": "deepseek_r1", "deepseek_v31": "deepseek",
    "gigachat3": "gigachat", "glm45": "glm", "glm47": "glm", "granite-20b-fc": "granite", "hunyuan_a13b": "tool_calls",
    "kimi_k2": "kimi", "llama3_json": "llama", "llama4_json": "llama", "llama4_pythonic": "pythonic",
    "minimax_m2": "minimax", "olmo3": "olmo", "openai": "harmony", "phi4_mini_json": "phi", "qwen3_xml": "qwen3_coder",
    "seed_oss": "seed", "xlam": "json",
}  # fmt: skip


def tool_format_named(name: str) -> ToolFormat:
    """Raises UsageError for an unknown name."""
    for known in FORMATS:
        if known.name == _ALIASES.get(name, name):
            return known
    raise UsageError(f"unknown tool format {name!r}", f"known: {', '.join(known.name for known in FORMATS)}")


HARMONY = ToolFormat(
    "harmony", (("<|channel|>", "<|call|>"), ("<|channel|>", "to=functions")), (), (), read_bare, HarmonyGrammar()
)
JSON = ToolFormat("json", (), (), (), read_bare, CallGrammar(json_call(), between=("\n",)), bare=True)


def _listed(name: str, open: str, close: str) -> ToolFormat:
    """A list of JSON's calls between two tags."""
    grammar = CallGrammar(json_call(), open, ("[",), (", ",), ("]", close))
    return ToolFormat(name, ((open,),), (open,), (close,), read_json(close), grammar)


def _gemma(name: str, tags: GemmaTags, *signs: tuple[str, ...]) -> ToolFormat:
    grammar = CallGrammar(gemma_call(tags), tags.open, between=(tags.open,))
    return ToolFormat(name, signs, (tags.open,), (tags.close, tags.quote), read_gemma(tags), grammar)


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
    _gemma("gemma4", GEMMA4, (GEMMA4.open + "call:",), (GEMMA4.open, GEMMA4.quote)),
    _gemma("functiongemma", FUNCTION_GEMMA, (FUNCTION_GEMMA.open,)),
    ToolFormat(
        "kimi",
        ((KIMI_BEGIN,),),
        (KIMI_BEGIN, KIMI_CALL),
        (KIMI_ARGUMENTS, KIMI_CALL_END, KIMI_END),
        tagged(KIMI_BEGIN, KIMI_CALL, KIMI_END, read_kimi),
        CallGrammar(kimi_call, KIMI_BEGIN, (KIMI_CALL,), (KIMI_CALL,), (KIMI_END,)),
        in_reasoning=KIMI_BEGIN,
    ),
    ToolFormat(
        "apertus",
        ((APERTUS_BEGIN,),),
        (APERTUS_BEGIN,),
        (APERTUS_END,),
        read_keyed,
        CallGrammar(named_call(('{"',), ('": ',), ("}",)), APERTUS_BEGIN, ("[",), (", ",), ("]", APERTUS_END)),
    ),
    ToolFormat(
        "deepseek_r1",
        ((DEEPSEEK_BEGIN, "```json"),),
        (DEEPSEEK_BEGIN, DEEPSEEK_CALL),
        (DEEPSEEK_NAME, DEEPSEEK_CALL_END, DEEPSEEK_END),
        tagged(DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_END, read_deepseek),
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
        tagged(DEEPSEEK_BEGIN, DEEPSEEK_CALL, DEEPSEEK_END, read_deepseek),
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
        read_mistral,
        CallGrammar(mistral_call, "[TOOL_CALLS]", between=("[TOOL_CALLS]",)),
        id_chars=9,
    ),
    ToolFormat(
        "mistral_list",
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]",),
        ("[ARGS]", "[CALL_ID]"),
        read_mistral,
        CallGrammar(json_call(), "[TOOL_CALLS]", ("[",), (", ",), ("]",)),
        id_chars=9,
    ),
    _listed("tool_calls", "<tool_calls>", "</tool_calls>"),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    ToolFormat(
        "cohere",
        (("<|START_ACTION|>",),),
        ("<|START_ACTION|>",),
        ("<|END_ACTION|>",),
        read_json("<|END_ACTION|>"),
        CallGrammar(cohere_call, "<|START_ACTION|>", ("[\n    ",), (",\n    ",), ("\n]", "<|END_ACTION|>")),
    ),
    ToolFormat(
        "solar",
        ((SOLAR_CALL,),),
        (SOLAR_BEGIN, SOLAR_CALL),
        (SOLAR_NAME, SOLAR_ARGUMENTS, SOLAR_CALL_END, SOLAR_END),
        tagged(SOLAR_BEGIN, SOLAR_CALL, SOLAR_END, read_solar),
        SolarGrammar(solar_call, SOLAR_BEGIN, (SOLAR_CALL,), (SOLAR_CALL,)),
    ),
    ToolFormat(
        "gigachat",
        (("<|function_call|>", "<|message_sep|>"),),
        ("<|function_call|>",),
        (),
        read_json(),
        CallGrammar(json_call(), "<|function_call|>"),
    ),
    ToolFormat(  # GigaChat 3.0: a message of a role of its own
        "gigachat_role",
        (("'function call'", "<|role_sep|>", "<|message_sep|>"),),
        ("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
        ("<|message_sep|>", "<|role_sep|>"),
        read_json(),
        CallGrammar(json_call(), "<|message_sep|>", ("\n\nfunction call", "<|role_sep|>", "\n")),
    ),
    ToolFormat(
        "olmo",
        ((OLMO_BEGIN,),),
        (OLMO_BEGIN,),
        (OLMO_END,),
        read_olmo,
        CallGrammar(python_call, OLMO_BEGIN, between=("\n",), after=(OLMO_END,)),
    ),
    ToolFormat(
        "hermes",
        (("<tool_call>",),),
        ("<tool_call>",),
        ("</tool_call>",),
        read_json("</tool_call>"),
        CallGrammar(json_call(open="\n", close=("\n", "</tool_call>")), "<tool_call>", between=(LINE, "<tool_call>")),
    ),
    ToolFormat(
        "lfm2",
        (("<|tool_list_start|>",), ("<|tool_call_start|>",), ("List of tools: [", "keep_past_thinking")),
        ("<|tool_call_start|>",),
        ("<|tool_call_end|>",),
        read_lfm2,
        CallGrammar(python_call, "<|tool_call_start|>", ("[",), (", ",), ("]", "<|tool_call_end|>")),
        by_token=True,
    ),
    ToolFormat(
        "internlm",
        (("<|action_start|>",),),
        ("<|action_start|>",),
        ("<|plugin|>", "<|action_end|>"),
        read_internlm,
        CallGrammar(
            json_call("parameters", close=("<|action_end|>",)),
            "<|action_start|>",
            ("<|plugin|>", "\n"),
            ("<|action_start|>", "<|plugin|>", "\n"),
        ),
        by_token=True,
    ),
    ToolFormat(
        "phi4",
        (("<|/tool_call|>",),),
        ("<|tool_call|>",),
        ("<|/tool_call|>",),
        read_json("</tool_call>", "<|/tool_call|>"),
        CallGrammar(json_call(), "<|tool_call|>", ("[",), (", ",), ("]", "<|/tool_call|>")),
    ),
    ToolFormat(
        "granite",
        (("<|tool_call|>",),),
        ("<|tool_call|>", "<tool_call>"),
        ("<|/tool_call|>",),
        read_json("</tool_call>", "<|/tool_call|>"),
        CallGrammar(json_call(), "<|tool_call|>", ("[",), (", ",), ("]",)),
    ),
    ToolFormat(
        "phi",
        (("functools",),),
        ("functools[",),
        (),
        read_json_list,
        CallGrammar(json_call(), "functools[", between=(", ",), after=("]",)),
    ),
    ToolFormat(
        "pythonic",
        (("func_name1(",),),
        ("<|python_start|>",),
        ("<|python_end|>",),
        read_llama,
        CallGrammar(python_call, before=("[",), between=(", ",), after=("]",)),
        bare=True,
    ),
    ToolFormat(
        "llama",
        (("<|start_header_id|>",), ("<|python_tag|>",)),
        ("<|python_tag|>", "<function="),
        (),
        read_llama,
        CallGrammar(json_call("parameters"), between=("; ",)),
        bare=True,
    ),
    JSON,
)
