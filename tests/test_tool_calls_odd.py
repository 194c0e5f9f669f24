"""Calls as models write them against their format: broken, doubled, in other words; and text made to be slow."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.tool_calls import MAX_TOOLS, Tool, tools_of
from tool_answers import MESSAGES, ONE, PROPERTIES, SCHEMA, TOOLS, answer, form, raw_answer, read

NOW = ("now", {})


def hermes(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


# ---- JSON ----


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "now", "arguments": {}}', NOW),
        ('{"name": "now"}', NOW),
        ('{"name": "now", "arguments": null}', NOW),
        ('{"arguments": {"a": 1}, "name": "now"}', ("now", {"a": 1})),
        ('{"name": "now", "parameters": {"a": 1}}', ("now", {"a": 1})),
        ('{"name": "now", "arguments": "{\\"a\\": \\"\\\\n\\"}"}', ("now", {"a": "\n"})),
        ('{"id": 7, "type": "function", "name": "now", "arguments": {}, "why": [{}]}', NOW),
        ('{"name": "unknown", "arguments": {}}', ("unknown", {})),
        (' [{"name": "now"}]', NOW),
        ('{"name":"now","arguments":{"a":[[],{},[{"b":{}}]],"c":-1.5e+3,"d":true,"":""}}',
         ("now", {"a": [[], {}, [{"b": {}}]], "c": -1500.0, "d": True, "": ""})),
        ('{"name": "n\\u00f6\\"w", "arguments": {"a": "\\ud83d\\ude00\\\\"}}', ('nö"w', {"a": "\U0001f600\\"})),
        ('{"name": "now", "arguments": {"a": "one\n\ttwo"}}', ("now", {"a": "one\n\ttwo"})),
    ],
)  # fmt: skip
def test_what_counts_as_a_call(body: str, call: Any) -> None:
    assert answer(form("hermes"), hermes(body)) == ("", "", [call])
    assert answer(form("hermes"), hermes(body), whole_calls=True) == ("", "", [call])


BROKEN = [
    "",
    "now",
    "{}",
    "[]",
    '{"name": ""}',
    '{"name": 3}',
    '{"name": "now", "arguments": 3}',
    '{"name": "now", "arguments": "3"}',
    '{"name": "now", "arguments": [1]}',
    '{"name" "now"}',
    "{'name': 'now'}",
    '{"arguments": {"a": 1}}',
    '{"name": "' + "n" * 300 + '"}',
]
BROKEN_INSIDE = [
    '{"name": "now", "arguments": {"a": NaN}}',
    '{"name": "now", "arguments": {"a": 01}}',
    '{"name": "now", "arguments": {"a": "\\x"}}',
    '{"name": "now", "arguments": {"a": "\\u12g4"}}',
    '{"name": "now", "arguments": {"a": 1,}}',
    '{"name": "now", "arguments": {a: 1}}',
    '{"name": "now", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}",
    '{"name": "now", "arguments": {"a": ' + "9" * 600 + "}}",
    '{"name": "now", "arguments": {}]',
]


@pytest.mark.parametrize("body", BROKEN)
def test_a_broken_call_is_content(body: str) -> None:
    text = f"So: {hermes(body)} and {hermes(json.dumps({'name': 'now'}))}"
    for whole_calls in (False, True):
        assert answer(form("hermes"), text, whole_calls=whole_calls) == ("", f"So: {hermes(body)} and", [NOW])


@pytest.mark.parametrize("body", BROKEN_INSIDE)
def test_a_call_that_breaks_in_its_arguments(body: str) -> None:
    """As a whole it is content. Where its arguments stream, they end where they break, and the rest is content."""
    text = hermes(body)
    assert raw_answer(form("hermes"), text, whole_calls=True) == ("", text, [])
    _, content, [(name, arguments)] = raw_answer(form("hermes"), text)
    assert name == "now"
    assert text.endswith(content)
    assert arguments.startswith("{")
    assert len(content) + len(arguments) > len(text) - 50  # nothing is lost but what the deltas say otherwise


def test_text_around_calls_is_content_without_the_white_space_next_to_them() -> None:
    text = f" One {{moment}}.\n\n{hermes(json.dumps({'name': 'now'}))}\n\nThen\n{hermes(json.dumps({'name': 'x'}))} \n"
    assert answer(form("hermes"), text) == ("", " One {moment}.Then", [NOW, ("x", {})])


def test_an_opening_tag_within_another_call_begins_a_new_one() -> None:
    text = "<tool_call>\n<tool_call>" + json.dumps({"name": "now"}) + "</tool_call>"
    assert answer(form("hermes"), text) == ("", "<tool_call>", [NOW])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "now", "parameters": {}}', [NOW]),
        (
            '\n {"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"days": 1}}',
            [NOW, ("weather", {"days": 1})],
        ),
        ('{"name": "now", "parameters": {}}\n{"name": "now", "parameters": {}}', [NOW, NOW]),
        ('[{"name": "now", "arguments": {}}, {"name": "now"}]', [NOW, NOW]),
        ('[now(), weather(city="a", days=2)]', [NOW, ("weather", {"city": "a", "days": 2})]),
        ('<|python_tag|>{"name": "other", "parameters": {}}', [("other", {})]),
        ('Let me see. <|python_tag|>brave_search.call(query="x y")', [("brave_search", {"query": "x y"})]),
        ('<function=now>{"a": 1}</function>', [("now", {"a": 1})]),
        ('```json\n{"name": "now"}\n```', [NOW]),
        ('```json\n{"name": "now"}\n{"name": "weather", "arguments": {"days": 1}}\n```', [NOW, ("weather", {"days": 1})]),
        ('```\n[{"name": "now"}]\n```', [NOW]),
    ],
)
def test_llama(text: str, calls: Any) -> None:
    assert answer(form("llama"), text)[2] == calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "parameters": {}}',
        '{"temperature": 3, "name": "now"}',
        '{"name": "now", "parameters": {}, "more": 1}x'.replace('"name": "now", ', ""),
        "[other()]",
        "[1, 2, 3]",
        "[see](https://example.org)",
        "now() is a function",
        'Sure: {"name": "now", "parameters": {}}',
        '```json\n{"name": "other"}\n```',
        '```json\n{"name": "Ann", "age": 7}\n```\nThat is it.',
        '```python\nnow()\n```',
        "```",
    ],
)
def test_without_a_tag_only_a_tools_name_makes_a_call(text: str) -> None:
    for name in ("llama", "json"):
        assert answer(form(name), text) == ("", text, [])


# ---- tags ----


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "3", "3"),
        ("city", " a \n\n", " a \n\n"),
        ("city", "null", "null"),
        ("city", '"quoted"', '"quoted"'),
        ("city", "", ""),
        ("new", "true", "true"),
        ("days", "3", 3),
        ("days", " 3\n", 3),
        ("days", "three", "three"),
        ("exact", "True", True),
        ("exact", "false", False),
        ("factor", "None", None),
        ("factor", "2.5", 2.5),
        ("place", '{"a": [1]}', {"a": [1]}),
        ("place", "{'a': [1, None, (2,)]}", {"a": [1, None, [2]]}),
        ("place", "{'a': [1, None", "{'a': [1, None"),
        ("tags", "['x', \"y\"]", ["x", "y"]),
        ("note", "null", None),
        ("note", "nothing", "nothing"),
        ("unit", "C", "C"),
        ("level", "2", 2),
        ("level", "high", "high"),
        ("either", "[1, 'a']", [1, "a"]),
        ("either", "7", 7),
        ("either", "7.5", "7.5"),
        ("either", "true", "true"),
        ("either", "[1", "[1"),
        ("either", '"seven"', '"seven"'),
        ("either", "007", "007"),  # of these JSON has no numbers, and a number would lose what they are
        ("either", "+4930123", "+4930123"),
        ("either", "1_000", "1_000"),
        ("days", "007", 7),
    ],
)
def test_values_between_tags_mean_what_the_schema_says(key: str, text: str, value: Any) -> None:
    qwen = f"<tool_call>\n<function=weather>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    either = {"anyOf": [{"type": "string"}, {"type": "array"}, {"type": "integer"}]}
    tools = [Tool("weather", {**SCHEMA, "properties": {**PROPERTIES, "either": either}})]
    assert answer(form("qwen3_coder"), qwen, tools=tools) == ("", "", [("weather", {key: value})])
    glm = f"<tool_call>weather\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert answer(form("glm"), glm, tools=tools) == ("", "", [("weather", {key: value})])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("qwen3_coder", "<function=now></function>", [NOW]),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [NOW]),
        ("qwen3_coder", "<function=x>\n<parameter=a>1</parameter></function>", [("x", {"a": "1"})]),
        ("qwen3_coder", "<function=now>\n</function>\n</tool_call><function=now>\n</function>", [NOW, NOW]),
        ("glm", "<tool_call>now</tool_call><tool_call>now\n</tool_call>", [NOW, NOW]),
        ("hy3", "<tool_call:opensource>now</tool_call:opensource>", [NOW]),
        ("hy3", ONE["hy3"].replace("\n", "") * 2, [("weather", {"city": "Köln", "days": 3})] * 2),
        ("glm", "<tool_call>x<arg_key>a</arg_key><arg_value></arg_value></tool_call>", [("x", {"a": ""})]),
        ("mistral", '[TOOL_CALLS]now{"a": 1}', [("now", {"a": 1})]),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {"a": 1}}]', [("now", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {"a": 1}}', [("now", {"a": 1})]),
        ("deepseek", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', [("now", {"a": 1})]),
        ("granite", '<tool_call>[{"name": "now", "arguments": {}}]', [NOW]),
        ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call>', [NOW, NOW]),
        ("tool_calls", '<tool_calls>\n{"name": "now"}\n{"name": "x", "arguments": {}}\n</tool_calls>', [NOW, ("x", {})]),
        ("nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}]', [NOW]),
        ("seed", "<function=x>\n<parameter=a>\n1\n</parameter></function>", [("x", {"a": "\n1\n"})]),
        ("minimax", '<minimax:tool_call><invoke name="now"></invoke><invoke name="now">\n</invoke>', [NOW, NOW]),
        ("minimax", '<minimax:tool_call><invoke name="x"><parameter name="a"><b></parameter></invoke>', [("x", {"a": "<b>"})]),
        ("minicpm", '<function name="x"><param name="a"><![CDATA[</param>]]]></param></function>', [("x", {"a": "</param>]"})]),
        ("minicpm", '<function name="now"></function>\n<function name="now"></function>', [NOW, NOW]),
        ("cohere", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}, "tool_call_id": "3"}]<|END_ACTION|>', [NOW]),
        ("solar", '<|tool_call:begin|>a<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>', [NOW]),
        ("olmo", '<function_calls>\nnow()\nx(a=1)\n</function_calls>', [NOW, ("x", {"a": 1})]),
        ("internlm", '<|action_start|> <|plugin|>{"name": "now"}', [NOW]),
    ],
)
def test_other_ways_to_write_it(name: str, text: str, calls: Any) -> None:
    assert answer(form(name), text) == ("", "", calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\nnow\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
        ("qwen3_coder", "<function=" + "n" * 300 + ">"),
        ("glm", "<tool_call></tool_call>"),
        ("hy3", "<tool_calls:opensource>\n</tool_calls:opensource>"),
        ("hy3", "<tool_call:opensource><b>now</b></tool_call:opensource>"),
        ("glm", "<tool_call><b>now</b></tool_call>"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("mistral", "[TOOL_CALLS]now[ARGS]x"),
        ("deepseek", "<｜tool▁calls▁begin｜>now"),
        ("phi", "functools[1]"),
        ("seed", "<seed:tool_call>\nnow\n</seed:tool_call>"),
        ("minimax", '<minimax:tool_call>\n<invoke name="">'),
        ("minicpm", '<function name=""></function>'),
        ("cohere", "<|START_ACTION|>[1]<|END_ACTION|>"),
        ("solar", "<|tool_calls|>now"),
        ("olmo", "<function_calls>\nnow\n</function_calls>"),
        ("internlm", "<|action_start|><|interpreter|>\n1 + 1"),
    ],
)
def test_what_only_looks_like_a_call_is_content(name: str, text: str) -> None:
    for whole_calls in (False, True):
        assert answer(form(name), text, whole_calls=whole_calls) == ("", text, [])


def test_a_call_behind_a_tag_that_begins_none() -> None:
    assert answer(form("glm"), f"Write <tool_call>, as in {ONE['glm']}") == (
        "", "Write <tool_call>, as in", [("weather", {"city": "Köln", "days": 3})]
    )  # fmt: skip


def test_words_that_begin_like_a_tag_are_content() -> None:
    assert answer(form("phi"), "functools.partial") == ("", "functools.partial", [])


# ---- Python ----


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("'it\\'s \"x\" \\n \\\\'", 'it\'s "x" \n \\'),
        ('"\\x41\\u00e9\\U0001F600\\q"', "Aé\U0001f600\\q"),
        ("1", 1),
        ("-2", -2),
        ("+.5", 0.5),
        ("1e3", 1000.0),
        ("True", True),
        ("None", None),
        ("false", False),
        ("[]", []),
        ("()", []),
        ("{}", {}),
        ("[1, (2, 'a',), {'k': [None]},]", [1, [2, "a"], {"k": [None]}]),
    ],
)
def test_literals(literal: str, value: Any) -> None:
    assert answer(form("pythonic"), f"[weather(city={literal}, days = 1 )]") == (
        "",
        "",
        [("weather", {"city": value, "days": 1})],
    )


@pytest.mark.parametrize("key", ["user-id", "a.b", "two words", "größe", "$x", "_"])
def test_an_argument_may_have_a_name_that_is_none_of_pythons(key: str) -> None:
    assert answer(form("pythonic"), f"[weather({key}=1,\n  {key}2 = [2])]")[2] == [("weather", {key: 1, f"{key}2": [2]})]
    for text in ("[weather(=1)]", "[weather( =1)]", "[weather('a'=1)]", "[weather(f(x)=1)]", "[weather(" + "k" * 300 + "=1)]"):
        assert answer(form("pythonic"), text) == ("", text, [])


def test_half_of_a_surrogate_pair_stays_an_escape() -> None:
    _, _, [(_, arguments)] = raw_answer(form("pythonic"), '[now(a="\\ud83d\\ude00 \\ud83d")]')
    arguments.encode()
    assert json.loads(arguments) == {"a": "\U0001f600 \ud83d"}


@pytest.mark.parametrize("number", ["1e999", "-0.1000000000000000055", "12345678901234567890123", "1.50E+3"])
def test_a_number_that_is_jsons_stays_as_it_is(number: str) -> None:
    """A strict tool's grammar lets through any of them."""
    arguments = f'{{"a": {number}}}'
    assert raw_answer(form("pythonic"), f"[now(a={number})]")[2] == [("now", arguments)]
    assert raw_answer(form("hermes"), hermes(f'{{"name": "now", "arguments": {arguments}}}'))[2] == [("now", arguments)]


@pytest.mark.parametrize(
    "text", ["weather(1)", "weather(a=b)", "weather(a=.1e999)", "weather(a=nan)", "weather(a={1: 2})", "weather(a='", "now"]
)
def test_what_is_no_literal_breaks_the_call(text: str) -> None:
    assert raw_answer(form("pythonic"), f"[{text}]", whole_calls=True)[2] in ([], [("weather", '{"a": "]')])


# ---- harmony ----

START = "<|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"<|channel|>commentary<|message|>I will look.<|end|>{START}{ONE['harmony']}<|call|>",
            ("", "I will look.", [("weather", {"city": "Köln", "days": 3})]),
        ),
        (" to=functions.now<|channel|>commentary json<|message|>{}<|call|>", ("", "", [NOW])),
        (f"<|channel|>commentary to=functions.now<|message|>{{}}<|call|>{START}{ONE['harmony']}",
         ("", "", [NOW, ("weather", {"city": "Köln", "days": 3})])),
        ("<|channel|>commentary to=browser.open<|message|>{}", ("", "", [("browser.open", {})])),
        ("<|channel|>commentary to=functions.now<|message|>now, please", ("", "now, please", [])),
        ("<|channel|>analysis<|message|>to=functions.now {}<|end|>", ("to=functions.now {}", "", [])),
        ("<|channel|>final<|message|>{}", ("", "{}", [])),
    ],
)  # fmt: skip
def test_harmony(text: str, expected: Any) -> None:
    assert answer(form("harmony", "harmony"), text) == expected


def test_harmony_with_reasoning_in_the_content() -> None:
    text = f"<|channel|>analysis<|message|>Hm.<|end|>{START}{ONE['harmony']}"
    assert answer(form("harmony", "harmony"), text, splits_reasoning=False)[:2] == ("", "Hm.")


# ---- ids ----


def ids(name: str, text: str) -> list[str]:
    parser = form(name).parser("", TOOLS)
    return [call.id for call in (*parser.push(text).calls, *parser.finish().calls) if call.id]


def test_ids_are_what_clients_and_templates_know() -> None:
    [one] = ids("hermes", ONE["hermes"])
    assert one.startswith("call_")
    assert len(one) == 29
    [short] = ids("mistral", ONE["mistral"])
    assert len(short) == 9
    assert short.isalnum()
    text = "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}"
    first, second = ids("mistral", text * 2)
    assert first == "abcDEF123"
    assert second != first


# ---- tools ----


@pytest.mark.parametrize(
    "tools",
    [
        [None],
        [{}],
        [{"type": "code_interpreter"}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": ""}}],
        [{"type": "function", "function": {"name": "n" * 257}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        [{"type": "function", "function": {"name": "f"}}] * 2,
        [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + 1)],
    ],
)
def test_bad_tools_are_refused(tools: list[Any]) -> None:
    with pytest.raises(UsageError):
        tools_of(tools)


def test_schemas_that_refer_to_themselves_say_nothing() -> None:
    loop = {"$ref": "#/$defs/A"}
    tool = Tool("f", {"properties": {"a": loop, "b": {"anyOf": [loop] * 64}, "c": 3}, "$defs": {"A": loop}})
    assert tool.types("a") == tool.types("b") == tool.types("c") == tool.types("d") == frozenset()


# ---- text of any kind ----

PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        '{"name": "now"',
        '"arguments": ',
        "{",
        "}",
        "[",
        "]",
        ", ",
        ": ",
        '"',
        "\\",
        "\\u00e9",
    ),
    *(
        "now",
        "weather",
        "(",
        ")",
        "=",
        "1",
        "-2.5",
        "true",
        "None",
        "\n",
        " ",
        "city",
        "days",
        ";",
        "x",
        "'",
        "</think>",
    ),
    *("<function=", "<parameter=", ">", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *("<|tool_call>", "call:", '<|"|>', "<tool_call|>", ":", ","),
    *("<|eom|>", " to=now", "<atem:function_calls>", '<atem:invoke name="now">', "</atem:invoke>", ">>>", "Action:", "```json"),
    *(
        "<|python_tag|>",
        "functools[",
        "<|channel|>",
        "commentary to=functions.now",
        "<|message|>",
        "<|call|>",
        "<|start|>",
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(ONE)),
    st.floats(0, 1),
    st.lists(st.sampled_from(PIECES), max_size=12),
    st.sampled_from([{}, {"whole_calls": True}, {"splits_reasoning": False}, {"parallel": False}]),
)
def test_pieces_do_not_matter_and_nothing_is_lost(
    name: str, place: float, parts: list[str], options: dict[str, bool]
) -> None:
    """A sound call with anything in it, whole and character by character; without a call in it, all of it is content."""
    cut = int(place * len(ONE[name]))
    text = ONE[name][:cut] + "".join(parts) + ONE[name][cut:]
    known = form(name, name if name in MESSAGES else "none")
    whole = read(known.parser("", TOOLS, **options), text)
    assert read(known.parser("", TOOLS, **options), *text) == whole
    if options.get("whole_calls") and not whole[2] and name not in MESSAGES:
        assert whole[1] == text
    for _, arguments in whole[2][:-1] if options.get("whole_calls") else ():
        json.loads(arguments)  # only the last may have been cut off


# ---- text made to be slow ----

SLOW = [
    ("hermes", "", "<tool_call>", 520_000),
    ("hermes", "", "<tool_cal", 520_000),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "', " ", 520_000),
    ("qwen3_coder", "<function=weather><parameter=days>", "</parameter", 520_000),
    ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>", "\n", 520_000),
    ("mistral", "", "[TOOL_CALLS][", 520_000),
    ("gemma4", '<|tool_call>call:now{a:<|"|>', "<|", 160_000),
    ("gemma4", "<|tool_call>call:now{a:[", "<|tool_call>call:now{a:[", 160_000),
    ("llama", '{"name": "now", "parameters": {"a": [', "{},", 160_000),
    ("pythonic", "[now(a='", "\\", 160_000),
    ("harmony", "", "<|channel|>analysis to=x<|message|>{<|end|>", 160_000),
]


@pytest.mark.parametrize(("name", "begun", "part", "size"), SLOW)
def test_any_text_is_read_in_linear_time(name: str, begun: str, part: str, size: int) -> None:
    """Eight times the text takes about eight times as long; with a square in it, up to sixty-four times, whenever it is asked."""

    def seconds(size: int, step: int) -> float:
        text = begun + part * (size // len(part))
        parser = form(name, "think").parser("", TOOLS)
        gc.disable()  # it goes through everything that other tests have left
        try:
            began = time.thread_time()
            for at in range(0, len(text), step):
                parser.push(text[at : at + step])
            parser.finish()
            return time.thread_time() - began
        finally:
            gc.enable()

    for step in (size, 997):
        once = (seconds(size, step) < 20 * max(min(seconds(size // 8, step) for _ in range(3)), 0.002) for _ in range(8))
        assert any(once), "also when nobody disturbs"
