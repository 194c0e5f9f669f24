"""How the families write tool calls: a row for each, and what tells from a chat template which one it is."""

from __future__ import annotations

from collections.abc import Collection

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tool_format import ToolFormat
from nanovllm_cli.text.tool_formats_tagged import TAGGED
from nanovllm_cli.text.tool_functionary import (
    FUNCTION,
    PYTHON,
    TO,
    RecipientGrammar,
    read_function,
    read_recipient,
)
from nanovllm_cli.text.tool_gemma import FUNCTION_GEMMA, GEMMA4, GemmaTags, read_gemma
from nanovllm_cli.text.tool_gemma_grammar import gemma_call
from nanovllm_cli.text.tool_glm4 import GLM4
from nanovllm_cli.text.tool_grammar import (
    GAP,
    LINE,
    CallGrammar,
    HarmonyGrammar,
    SolarGrammar,
    action_call,
    cohere_call,
    json_call,
    kimi_call,
    mistral_call,
    named_call,
    python_call,
    solar_call,
)
from nanovllm_cli.text.tool_harmony import read_harmony
from nanovllm_cli.text.tool_muse import MUSE_TAGS, MuseGrammar, read_muse
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
    read_actions,
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
    tagged,
)


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
    "harmony",
    (("<|channel|>", "<|call|>"), ("<|channel|>", "to=functions")),
    (),
    (),
    read_bare,
    HarmonyGrammar(),
    body=read_harmony,
)
MUSE = ToolFormat("muse", (("<atem:function_calls>", "<|eom|>"),), (), MUSE_TAGS, read_bare, MuseGrammar(), body=read_muse)
JSON = ToolFormat("json", (), (), (), read_bare, CallGrammar(json_call(), between=("\n",)), bare=read_bare)


def _listed(name: str, open: str, close: str) -> ToolFormat:
    """A list of JSON's calls between two tags."""
    grammar = CallGrammar(json_call(), open, ("[",), (", ",), ("]", close))
    return ToolFormat(name, ((open,),), (open,), (close,), read_json(close), grammar)


def _gemma(name: str, tags: GemmaTags, *signs: tuple[str, ...]) -> ToolFormat:
    grammar = CallGrammar(gemma_call(tags), tags.open, between=(tags.open,))
    return ToolFormat(name, signs, (tags.open,), (tags.close, tags.quote), read_gemma(tags), grammar)


FORMATS: tuple[ToolFormat, ...] = (
    HARMONY,
    MUSE,
    *TAGGED,
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
    ToolFormat(
        "minimax_m1",
        (("<tool_calls>", "<beginning_of_sentence>"),),
        ("<tool_calls>",),
        ("</tool_calls>",),
        read_json("</tool_calls>"),
        CallGrammar(json_call(), "<tool_calls>", ("\n",), ("\n",), ("\n", "</tool_calls>")),
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
        "command_r",
        (("Action:", "```json", '"tool_name"'),),
        ("Action:",),
        (),
        read_actions,
        CallGrammar(action_call, "Action:", (GAP, "```json\n[\n    "), (",\n    ",), ("\n]", LINE, "```")),
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
        "functionary_v31",
        (("<function=", "</function>"),),
        (FUNCTION, PYTHON),
        ("</function>",),
        read_function,
        CallGrammar(named_call((), (">",), ("</function>",)), FUNCTION, between=(LINE, FUNCTION)),
    ),
    ToolFormat(
        "functionary_v32",
        ((">>>all", ">>>${recipient}"),),
        (TO,),
        (),
        read_recipient,
        RecipientGrammar(named_call((), ("\n",)), TO, between=(TO,)),
        opened=TO,
    ),
    GLM4,
    ToolFormat(
        "pythonic",
        (("func_name1(",),),
        ("<|python_start|>",),
        ("<|python_end|>",),
        read_llama,
        CallGrammar(python_call, before=("[",), between=(", ",), after=("]",)),
        bare=read_bare,
    ),
    ToolFormat(
        "llama",
        (("<|start_header_id|>",), ("<|python_tag|>",)),
        ("<|python_tag|>", "<function="),
        (),
        read_llama,
        CallGrammar(json_call("parameters"), between=("; ",)),
        bare=read_bare,
    ),
    JSON,
)
