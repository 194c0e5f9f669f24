"""How the families write tool calls: a row for each, and what tells from a chat template which one it is."""

from __future__ import annotations

from collections.abc import Collection

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text import tool_grammar as written
from nanovllm_cli.text import tool_sections as sections
from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_formats_tagged import TAGGED
from nanovllm_cli.text.tool_functionary import FUNCTION, PYTHON, TO, RecipientGrammar, read_function, read_recipient
from nanovllm_cli.text.tool_gemma import FUNCTION_GEMMA, GEMMA4, GemmaTags, read_gemma
from nanovllm_cli.text.tool_gemma_grammar import gemma_call
from nanovllm_cli.text.tool_glm4 import GLM4
from nanovllm_cli.text.tool_grammar import GAP, LINE, CallGrammar, WriteCall, json_call, named_call
from nanovllm_cli.text.tool_harmony import read_harmony
from nanovllm_cli.text.tool_muse import MUSE_TAGS, MuseGrammar, read_muse
from nanovllm_cli.text.tool_sections import DEEPSEEK, KIMI, SOLAR, ReadCall, SectionTags, read_json


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
    "ernie45": "hermes", "gigachat3": "gigachat", "glm45": "glm", "glm47": "glm", "granite-20b-fc": "granite",
    "hunyuan_a13b": "tool_calls", "hy_v3": "hy3", "kimi_k2": "kimi", "llama3_json": "llama", "llama4_json": "llama",
    "llama4_pythonic": "pythonic", "minicpm5": "minicpm", "minimax_m2": "minimax", "muse_glimmer": "muse", "olmo3": "olmo",
    "openai": "harmony", "phi4_mini_json": "phi", "poolside_v1": "glm", "qwen3_xml": "qwen3_coder", "seed_oss": "seed",
    "step3p5": "qwen3_coder", "xlam": "json",
}  # fmt: skip


def tool_format_named(name: str) -> ToolFormat:
    """Raises UsageError for an unknown name."""
    for known in FORMATS:
        if known.name == _ALIASES.get(name, name):
            return known
    raise UsageError(f"unknown tool format {name!r}", f"known: {', '.join(known.name for known in FORMATS)}")


HARMONY = ToolFormat(
    "harmony", (("<|channel|>", "<|call|>"), ("<|channel|>", "to=functions")), (), (), sections.read_bare,
    written.HarmonyGrammar(), body=read_harmony,
)  # fmt: skip
MUSE = ToolFormat(
    "muse", (("<atem:function_calls>", "<|eom|>"),), (), MUSE_TAGS, sections.read_bare, MuseGrammar(), body=read_muse
)
JSON = ToolFormat(
    "json", (), (), (), sections.read_bare, CallGrammar(json_call(), between=("\n",)), bare=sections.read_bare
)


def _listed(name: str, open: str, close: str, *others: str, signs: tuple[str, ...] = ()) -> ToolFormat:
    """A list of JSON's calls between two tags. others: that close it, too, and are not written."""
    grammar = CallGrammar(json_call(), open, ("[",), (", ",), ("]", close))
    return ToolFormat(name, (signs or (open,),), (open,), (close,), read_json(close, *others), grammar)


def _sectioned(
    name: str,
    tags: SectionTags,
    read: ReadCall,
    call: WriteCall,
    *,
    signs: tuple[str, ...] = (),
    between: str = "",
    in_reasoning: str = "",
) -> ToolFormat:
    """Calls with a tag before each, in a section. between: what stands between them beside their tags."""
    closers = tuple(filter(None, (tags.name, tags.arguments, tags.call_end, tags.end)))
    section = sections.tagged(tags.begin, tags.call, tags.end, read)
    grammar = CallGrammar(call, tags.begin, (tags.call,), (between, tags.call), (tags.end,))
    openers = (tags.begin, tags.call)
    return ToolFormat(name, (signs or (tags.begin,),), openers, closers, section, grammar, in_reasoning=in_reasoning)


def _gemma(name: str, tags: GemmaTags, *signs: tuple[str, ...]) -> ToolFormat:
    grammar = CallGrammar(gemma_call(tags), tags.open, between=(tags.open,))
    return ToolFormat(name, signs, (tags.open,), (tags.close, tags.quote), read_gemma(tags), grammar)


FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    MUSE,
    *TAGGED,
    _gemma("gemma4", GEMMA4, (GEMMA4.open + "call:",), (GEMMA4.open, GEMMA4.quote)),
    _gemma("functiongemma", FUNCTION_GEMMA, (FUNCTION_GEMMA.open,)),
    _sectioned("kimi", KIMI, sections.read_kimi, written.kimi_call, in_reasoning=KIMI.begin),
    ToolFormat(
        "apertus", ((sections.APERTUS_BEGIN,),), (sections.APERTUS_BEGIN,), (sections.APERTUS_END,), sections.read_keyed,
        CallGrammar(
            named_call(('{"',), ('": ',), ("}",)), sections.APERTUS_BEGIN, ("[",), (", ",), ("]", sections.APERTUS_END)
        ),
    ),
    _sectioned(
        "deepseek_r1", DEEPSEEK, sections.read_deepseek,
        named_call(("function", DEEPSEEK.name), ("\n```json\n",), ("\n```", DEEPSEEK.call_end)),
        signs=(DEEPSEEK.begin, "```json"), between="\n",
    ),
    _sectioned(
        "deepseek", DEEPSEEK, sections.read_deepseek, named_call((), (DEEPSEEK.name,), (DEEPSEEK.call_end,))
    ),
    ToolFormat(
        "mistral", (("[TOOL_CALLS]", "[ARGS]"),), ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]"), sections.read_mistral,
        CallGrammar(written.mistral_call, "[TOOL_CALLS]", between=("[TOOL_CALLS]",)), id_chars=9,
    ),
    ToolFormat(
        "mistral_list", (("[TOOL_CALLS]",),), ("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]"), sections.read_mistral,
        CallGrammar(json_call(), "[TOOL_CALLS]", ("[",), (", ",), ("]",)), id_chars=9,
    ),
    ToolFormat(
        "minimax_m1", (("<tool_calls>", "<beginning_of_sentence>"),), ("<tool_calls>",), ("</tool_calls>",),
        read_json("</tool_calls>"), CallGrammar(json_call(), "<tool_calls>", ("\n",), ("\n",), ("\n", "</tool_calls>")),
    ),
    _listed("tool_calls", "<tool_calls>", "</tool_calls>"),
    _listed("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    ToolFormat(
        "cohere", (("<|START_ACTION|>",),), ("<|START_ACTION|>",), ("<|END_ACTION|>",), read_json("<|END_ACTION|>"),
        CallGrammar(written.cohere_call, "<|START_ACTION|>", ("[\n    ",), (",\n    ",), ("\n]", "<|END_ACTION|>")),
    ),
    ToolFormat(
        "command_r", (("Action:", "```json", '"tool_name"'),), ("Action:",), (), sections.read_actions,
        CallGrammar(written.action_call, "Action:", (GAP, "```json\n[\n    "), (",\n    ",), ("\n]", LINE, "```")),
    ),
    ToolFormat(
        "solar", ((SOLAR.call,),), (SOLAR.begin, SOLAR.call), (SOLAR.name, SOLAR.arguments, SOLAR.call_end, SOLAR.end),
        sections.tagged(SOLAR.begin, SOLAR.call, SOLAR.end, sections.read_solar),
        written.SolarGrammar(written.solar_call, SOLAR.begin, (SOLAR.call,), (SOLAR.call,)),
    ),
    ToolFormat(
        "gigachat", (("<|function_call|>", "<|message_sep|>"),), ("<|function_call|>",), (), read_json(),
        CallGrammar(json_call(), "<|function_call|>"),
    ),
    ToolFormat(  # GigaChat 3.0: a message of a role of its own
        "gigachat_role", (("'function call'", "<|role_sep|>", "<|message_sep|>"),),
        ("<|message_sep|>\n\nfunction call<|role_sep|>\n",), ("<|message_sep|>", "<|role_sep|>"), read_json(),
        CallGrammar(json_call(), "<|message_sep|>", ("\n\nfunction call", "<|role_sep|>", "\n")),
    ),
    ToolFormat(
        "olmo", ((sections.OLMO_BEGIN,),), (sections.OLMO_BEGIN,), (sections.OLMO_END,), sections.read_olmo,
        CallGrammar(written.python_call, sections.OLMO_BEGIN, between=("\n",), after=(sections.OLMO_END,)),
    ),
    ToolFormat(
        "hermes", (("<tool_call>",),), ("<tool_call>",), ("</tool_call>",), read_json("</tool_call>"),
        CallGrammar(json_call(open="\n", close=("\n", "</tool_call>")), "<tool_call>", between=(LINE, "<tool_call>")),
    ),
    ToolFormat(
        "lfm2", (("<|tool_list_start|>",), ("<|tool_call_start|>",), ("List of tools: [", "keep_past_thinking")),
        ("<|tool_call_start|>",), ("<|tool_call_end|>",), sections.read_lfm2,
        CallGrammar(written.python_call, "<|tool_call_start|>", ("[",), (", ",), ("]", "<|tool_call_end|>")), by_token=True,
    ),
    ToolFormat(
        "internlm", (("<|action_start|>",),), ("<|action_start|>",), ("<|plugin|>", "<|action_end|>"), sections.read_internlm,
        CallGrammar(
            json_call("parameters", close=("<|action_end|>",)),
            "<|action_start|>", ("<|plugin|>", "\n"), ("<|action_start|>", "<|plugin|>", "\n"),
        ),
        by_token=True,
    ),
    _listed("phi4", "<|tool_call|>", "<|/tool_call|>", "</tool_call>", signs=("<|/tool_call|>",)),
    ToolFormat(
        "granite", (("<|tool_call|>",),), ("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>",),
        read_json("</tool_call>", "<|/tool_call|>"), CallGrammar(json_call(), "<|tool_call|>", ("[",), (", ",), ("]",)),
    ),
    ToolFormat(
        "phi", (("functools",),), ("functools[",), (), sections.read_json_list,
        CallGrammar(json_call(), "functools[", between=(", ",), after=("]",)),
    ),
    ToolFormat(
        "functionary_v31", (("<function=", "</function>"),), (FUNCTION, PYTHON), ("</function>",), read_function,
        CallGrammar(named_call((), (">",), ("</function>",)), FUNCTION, between=(LINE, FUNCTION)),
    ),
    ToolFormat(
        "functionary_v32", ((">>>all", ">>>${recipient}"),), (TO,), (), read_recipient,
        RecipientGrammar(named_call((), ("\n",)), TO, between=(TO,)), opened=TO,
    ),
    GLM4,
    ToolFormat(
        "pythonic", (("func_name1(",),), ("<|python_start|>",), ("<|python_end|>",), sections.read_llama,
        CallGrammar(written.python_call, before=("[",), between=(", ",), after=("]",)), bare=sections.read_bare,
    ),
    ToolFormat(
        "llama", (("<|start_header_id|>",), ("<|python_tag|>",)), ("<|python_tag|>", "<function="), (), sections.read_llama,
        CallGrammar(json_call("parameters"), between=("; ",)), bare=sections.read_bare,
    ),
    JSON,
)  # fmt: skip
