"""A call of `weather(city="Köln", days=3)` as each family writes it, after its publisher's template or model card; its tools; and
answers taken apart in every way."""

from __future__ import annotations

import json
import random
from typing import Any

from nanovllm_cli.text.answer_format import AnswerFormat, AnswerParser, answer_format
from nanovllm_cli.text.tool_calls import tools_of

ONE: dict[str, str] = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Köln", "days": 3}}',
    "json": '{"name": "weather", "arguments": {"city": "Köln", "days": 3}}',
    "pythonic": '[weather(city="Köln", days=3)]',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 3}',
    "mistral_list": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Köln", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_r1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Köln", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln", "days": 3}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "hy3": (
        "<tool_calls:opensource>\n<tool_call:opensource>weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Köln</arg_value:opensource>\n"
        "<arg_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n"
        "</tool_call:opensource>\n</tool_calls:opensource>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    ),
    "gemma4": '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
    "apertus": '<|tools_prefix|>[{"weather": {"city": "Köln", "days": 3}}]<|tools_suffix|>',
    "lfm2": '<|tool_call_start|>[weather(city="Köln", days=3)]<|tool_call_end|>',
    "phi4": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]<|/tool_call|>',
    "phi": 'functools[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]',
    "functiongemma": "<start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>",
    "seed": (
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Köln</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Köln'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Köln'
        '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "minimax_m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Köln]<]minimax[>[</city>'
        "]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "minicpm": '<function name="weather"><param name="city">Köln</param><param name="days">3</param></function>',
    "tool_calls": '<tool_calls>[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]</tool_calls>',
    "minimax_m1": '<tool_calls>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_calls>',
    "nemotron": '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Köln", "days": 3}}]</TOOLCALL>',
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Köln", "days": 3}}'
        "\n]<|END_ACTION|>"
    ),
    "command_r": (
        'Action:\n```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {"city": "Köln", "days": 3}\n'
        "    }\n]```"
    ),
    "solar": (
        "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>weather<|tool_call:args|>"
        '{"city": "Köln", "days": 3}<|tool_call:end|>'
    ),
    "gigachat": '<|function_call|>{"name": "weather", "arguments": {"city": "Köln", "days": 3}}',
    "gigachat_role": (
        '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}'
    ),
    "olmo": '<function_calls>weather(city="Köln", days=3)</function_calls>',
    "functionary_v31": '<function=weather>{"city": "Köln", "days": 3}</function>',
    "functionary_v32": '>>>weather\n{"city": "Köln", "days": 3}',
    "internlm": (
        '<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Köln", "days": 3}}<|action_end|>'
    ),
    "muse": (
        ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Köln'
        '</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
    ),
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln", "days": 3}',
}

MESSAGES = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "muse": (" to=self<|message|>", "<|eom|><|start|>assistant"),
}
"""Where calls are messages of their own: what begins one of reasoning, and what stands between two."""

PROPERTIES = {
    "city": {"type": "string", "description": "where"},
    "days": {"type": "integer", "description": "how many"},
    "exact": {"type": "boolean", "description": "or not"},
    "factor": {"type": ["number", "null"], "description": "by"},
    "place": {"type": "object", "description": "there"},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "some"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "a word"},
    "unit": {"$ref": "#/$defs/Unit", "description": "C or F"},
    "level": {"enum": [1, 2, 3], "description": "one of"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Unit": {"type": "string", "enum": ["C", "F"]}}}
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "too", "parameters": {"type": "object", "properties": {}}},
}
TOOL_LIST: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": SCHEMA}},
    NOW,
]
TOOLS = tools_of(TOOL_LIST)

Answer = tuple[str, str, list[tuple[str, Any]]]


def read(parser: AnswerParser, *pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and the name and arguments of each call, as a client puts the deltas together."""
    reasoning, content = "", ""
    names: list[str] = []
    ids: list[str] = []
    arguments: list[str] = []
    for delta in (*map(parser.push, pieces), parser.finish()):
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for call in delta.calls:
            assert (call.name is None) == (call.id is None)
            if call.name is not None and call.id is not None:
                assert call.index == len(names)
                names, ids, arguments = [*names, call.name], [*ids, call.id], [*arguments, ""]
            arguments[call.index] += call.arguments
    assert len(set(ids)) == len(ids)
    assert parser.saw_calls == bool(names)
    return reasoning, content, list(zip(names, arguments, strict=True))


def raw_answer(
    known: AnswerFormat, text: str, prompt: str = "", **options: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """What an answer is: the same whole, character by character, split at every place, and in random pieces."""
    options = {"tools": TOOLS, **options}
    whole = read(known.parser(prompt, **options), text)
    assert read(known.parser(prompt, **options), *text) == whole
    for cut in range(1, len(text), 1 if len(text) < 300 else 7):
        assert read(known.parser(prompt, **options), text[:cut], text[cut:]) == whole
    draw = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(6))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(known.parser(prompt, **options), *pieces) == whole
    return whole


def answer(known: AnswerFormat, text: str, prompt: str = "", **options: Any) -> Answer:
    reasoning, content, found = raw_answer(known, text, prompt, **options)
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in found]


def form(name: str, reasoning: str = "none", special: tuple[str, ...] = ()) -> AnswerFormat:
    tokens = {tag: number for number, tag in enumerate(special)}
    return answer_format("", tools=name, reasoning=reasoning, special_tokens=tokens)
