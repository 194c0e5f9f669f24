"""Calls of DeepSeek V3.2, Kimi K3 and MiniMax-M3, whose tags say more of a value than its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanovllm_cli.errors import UnsupportedError
from test_tool_grammar import STRICT, allows, known, tool
from tool_answers import ONE, TOOLS, answer, form, raw_answer, read

NOW = ("now", {})


# ---- DeepSeek V3.2 ----


def dsml(*parameters: tuple[str, str, str], name: str = "weather") -> str:
    said = "".join(f'<｜DSML｜parameter name="{key}"{kind}>{text}</｜DSML｜parameter>\n' for key, kind, text in parameters)
    return f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n{said}</｜DSML｜invoke>\n</｜DSML｜function_calls>'


TEXT, OTHER = ' string="true"', ' string="false"'


@pytest.mark.parametrize(
    ("key", "kind", "text", "value"),
    [
        ("city", TEXT, " a <b>\n", " a <b>\n"),
        ("city", OTHER, "3", "3"),  # the schema knows better
        ("days", OTHER, " 3\n", 3),
        ("days", TEXT, "3", 3),
        ("days", OTHER, "few", "few"),
        ("note", TEXT, "null", "null"),
        ("note", OTHER, "null", None),
        ("note", OTHER, "word", "word"),
        ("note", "", "null", None),
        ("new", TEXT, "3", "3"),
        ("new", OTHER, "3", 3),
        ("new", OTHER, '{"a": [1, null]}', {"a": [1, None]}),
        ("new", OTHER, "[True, 'a']", [True, "a"]),
        ("new", OTHER, "word", "word"),
        ("new", "", "3", "3"),
    ],
)
def test_a_deepseek_says_which_values_are_text(key: str, kind: str, text: str, value: Any) -> None:
    assert answer(form("deepseek_v32"), dsml((key, kind, text))) == ("", "", [("weather", {key: value})])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I look.\n\n{dsml(name='now')}", "I look.", [NOW]),
        ('<｜DSML｜invoke name="now">\n</｜DSML｜invoke>', "", [NOW]),
        ("<｜DSML｜function_calls>\n</｜DSML｜function_calls>", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>", []),
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="">', '<｜DSML｜function_calls>\n<｜DSML｜invoke name="">', []),
        ("a ｜DSML｜ b", "a ｜DSML｜ b", []),
    ],
)
def test_blocks_of_a_deepseek(text: str, content: str, calls: Any) -> None:
    """A V4's have another name."""
    for name, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls")):
        named = (each.replace("function_calls", block) for each in (text, content))
        assert answer(form(name), next(named)) == ("", next(named), calls)


def test_a_mark_that_is_a_token_is_left_out_of_what_is_no_call() -> None:
    assert answer(form("deepseek_v32", special=("｜DSML｜",)), "a ｜DSML｜b <｜DSML｜invoke x") == ("", "a b <invoke x", [])


def kimi(*calls: tuple[str, list[tuple[str, str, str]]]) -> str:
    said = ""
    for number, (name, arguments) in enumerate(calls, 1):
        said += f'<|open|>call tool="{name}" index="{number}"<|sep|>'
        for key, kind, text in arguments:
            said += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
        said += "<|close|>call<|sep|>"
    return f"<|open|>tools<|sep|>{said}<|close|>tools<|sep|>"


VALUES: dict[str, Any] = {
    "type": "object",
    "$defs": {"Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "either": {"type": ["string", "integer"], "maxLength": 3},
        "mode": {"enum": ["a", 1, None]},
        "any": {},
        "loop": {"$ref": "#/$defs/Loop"},
        "a/b c": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "same": {"$ref": "#/properties/a~1b%20c/anyOf/1"},
        "nowhere": {"$ref": "#/properties/a~1b%20c/anyOf/2"},
    },
}
KINDED = [
    ("either", "string", "abc", "abc"),
    ("either", "string", "abcd", None),
    ("either", "string", "12", "12"),
    ("either", "number", "12", 12),
    ("either", "number", "1.5", None),
    ("either", "null", "null", None),
    ("mode", "string", "a", "a"),
    ("mode", "string", "1", None),
    ("mode", "number", "1", 1),
    ("mode", "number", "2", None),
    ("mode", "null", "null", ...),
    ("any", "string", "1", "1"),
    ("any", "number", "1", 1),
    ("any", "array", "[1, {}]", [1, {}]),
    ("any", "number", "word", None),
    ("loop", "boolean", "true", True),
    ("same", "number", "12", 12),
    ("same", "string", "12", None),
    ("nowhere", "string", "12", "12"),
]
"""What may be of several types, and the value that is read; None where it is not allowed, ... for null."""


@pytest.mark.parametrize(("key", "kind", "text", "value"), KINDED)
def test_whoever_says_what_a_value_is_is_held_to_it(key: str, kind: str, text: str, value: Any) -> None:
    tools = (tool("f", VALUES),)
    deepseek = dsml((key, TEXT if kind == "string" else OTHER, text), name="f")
    for name, call in (("deepseek_v32", deepseek), ("kimi_k3", kimi(("f", [(key, kind, text)])))):
        assert allows(known(name), call, tools=tools) == (value is not None)
        if value is not None:
            assert answer(known(name), call, tools=tools)[2] == [("f", {key: None if value is ... else value})]


def test_a_deepseeks_block_begins_with_its_mark_wherever_it_stands() -> None:
    call = ONE["deepseek_v32"]
    assert allows(known("deepseek_v32"), f"a < b\n\n{call}", "auto", STRICT)
    assert not allows(known("deepseek_v32"), f"a < b {call.replace('3', 'few')}", "auto", STRICT)
    assert not allows(known("deepseek_v32"), call.removeprefix("<"))
    call = call.replace("function_calls", "tool_calls")
    assert allows(known("deepseek_v4"), call)
    assert not allows(known("deepseek_v32"), call)


# ---- Kimi K3 ----

RESPONSE, END = "<|open|>response<|sep|>{}<|close|>response<|sep|>", "<|close|>message<|sep|>"
THOUGHT = "<|close|>think<|sep|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Hm.{THOUGHT}{RESPONSE.format('Yes.')}{END}", ("Hm.", "Yes.", [])),
        (f"Hm.{THOUGHT}{RESPONSE.format('I look.')}{kimi(('now', []))}{END}", ("Hm.", "I look.", [NOW])),
        (f"{THOUGHT}{RESPONSE.format('')}{kimi(('x', [('a', 'string', ' <b> ')]), ('now', []))}{END}",
         ("", "", [("x", {"a": " <b> "}), NOW])),
        (f"{THOUGHT}{kimi(('now', []))}", ("", "", [NOW])),
        (f"{THOUGHT}<|open|>response<|sep|>I look.{kimi(('now', []))}", ("", "I look.", [NOW])),
        (f"{THOUGHT}{kimi(('a&amp;b', [('&quot;', 'number', '1')]))}", ("", "", [("a&b", {'"': 1})])),
        (f"{THOUGHT}{kimi(('now', [])).replace('<|open|>tools<|sep|>', '')}{END}", ("", "", [NOW])),
        (f"Hm.{THOUGHT}{RESPONSE.format('Yes.')[:-5]}", ("Hm.", "Yes." + "<|close|>response<|sep|>"[:-5], [])),
        (f"{THOUGHT}<|open|>tools<|sep|><|close|>tools<|sep|>", ("", "<|open|>tools<|sep|><|close|>tools<|sep|>", [])),
        (f"Hm. {kimi(('now', []))}", (f"Hm. {kimi(('now', []))}", "", [])),
    ],
)  # fmt: skip
def test_sections_of_a_kimi(text: str, expected: Any) -> None:
    """As its publisher's template has them, and llama.cpp reads them."""
    prompt = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    for whole_calls in (False, True):
        assert answer(form("kimi_k3", "kimi_k3"), text, prompt, whole_calls=whole_calls) == expected
    if not expected[2] and not text.endswith("tools<|sep|>"):
        assert answer(form("kimi_k3", "kimi_k3"), text, prompt, tools=()) == expected


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('<|open|>json type="object"<|sep|>{"a": [1]}<|close|>json<|sep|><|close|>call<|sep|>', {"a": [1]}),
        ('<|open|>json type="object"<|sep|>[1]<|close|>json<|sep|><|close|>call<|sep|>', None),
        ('<|open|>argument key="note" type="null"<|sep|>null<|close|>argument<|sep|><|close|>call<|sep|>', {"note": None}),
        ('<|open|>argument key="note" type="string"<|sep|>null<|close|>argument<|sep|><|close|>call<|sep|>', {"note": "null"}),
        ('<|open|>argument key="days"<|sep|>7<|close|>argument<|sep|><|close|>call<|sep|>', {"days": 7}),
        ("now", None),
    ],
)
def test_arguments_of_a_kimi(body: str, arguments: Any) -> None:
    text = f'<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>{body}<|close|>tools<|sep|>'
    expected = ("", "", [("weather", arguments)]) if arguments is not None else ("", text, [])
    assert answer(form("kimi_k3"), text, whole_calls=True) == expected


def test_what_a_kimi_may_say_before_it_calls() -> None:
    call, two = ONE["kimi_k3"], kimi(("now", []), ("weather", [("city", "string", "Köln")]))
    for said in (RESPONSE.format(""), "", RESPONSE.format("I look."), "I look.<|close|>response<|sep|>"):
        for end in ("", END):
            assert allows(known("kimi_k3"), f"{said}{two}{end}", "auto", STRICT)
            assert not allows(known("kimi_k3"), f"{said}{call.replace('3', 'few')}{end}", "auto", STRICT)
            assert allows(known("kimi_k3"), f"{said}{call}{end}") == (said in ("", RESPONSE.format("")))
            assert not allows(known("kimi_k3"), f"{said}{two}{end}", "auto", STRICT, parallel=False)
    assert allows(known("kimi_k3"), RESPONSE.format("Yes.") + END, "auto", STRICT)
    named = (tool('a&"', {"type": "object", "properties": {'"': {"type": "integer"}}}),)
    assert allows(known("kimi_k3"), kimi(("a&amp;&quot;", [("&quot;", "number", "1")])), tools=named)


# ---- MiniMax-M3 ----

NESTED: dict[str, Any] = {
    "type": "object",
    "$defs": {"Node": {"type": "object", "properties": {"name": {"type": "string"}, "kids": {"$ref": "#/$defs/Nodes"}}},
              "Nodes": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
    "properties": {
        "tree": {"$ref": "#/$defs/Node"},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        "box": {"type": "object", "properties": {"item": {"type": "integer"}}, "required": ["item"]},
        "free": {"type": "object"},
        "list": {"type": ["array", "null"], "items": {"enum": ["a", 1]}},
        "text": {"type": "string"},
    },
}  # fmt: skip


def m3(value: Any) -> str:
    """As the publisher's template writes it, in short: `^` is the token in front of each tag."""
    if isinstance(value, dict):
        return "".join(f"^<{key}>{m3(item)}^</{key}>" for key, item in value.items())
    if isinstance(value, list):
        return "".join(f"^<item>{m3(item)}^</item>" for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def minimax(body: str, name: str = "f") -> str:
    return f'^<tool_call>\n^<invoke name="{name}">{body}^</invoke>\n^</tool_call>'.replace("^", "]<]minimax[>[")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tree": {"name": "a", "kids": [{"name": "b"}, {"kids": [{"name": " <c>\n"}]}]}},
        {"rows": [[1, 2], [3]], "box": {"item": 7}, "text": "a ] <b> \n"},
        {"list": ["a", 1], "text": ""},
        {"list": None},
    ],
)
def test_tags_within_tags(arguments: dict[str, Any]) -> None:
    tools = (tool("f", NESTED),)
    text = minimax(m3(arguments))
    assert answer(form("minimax_m3"), text, tools=tools) == ("", "", [("f", arguments)])
    assert allows(known("minimax_m3"), text, tools=tools)


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("^<rows>^</rows>", {"rows": []}),
        ("^<free>^</free>", {"free": {}}),
        ('^<free>{"a": [1]}^</free>', {"free": {"a": [1]}}),
        ("^<free>^<a>1^</a>\n^<b>^<item>x^</item>^</b>^</free>", {"free": {"a": "1", "b": ["x"]}}),
        ("^<rows>[[1]]^</rows>", {"rows": [[1]]}),
        ("\n^<new>^<item>1^</item>\n^</new>\n", {"new": ["1"]}),
        ("^<new>^<>1^</>^</new>", {"new": {"": "1"}}),
        ("^<new>", "{"),
        ("^<new>a ^<b>c^</b>^</new>", None),
        ("^<new>^<item>1^</item>^<other>2^</other>^</new>", None),
        ("^<new>1^</old>^</new>", None),
        ("^</new>", None),
    ],
)
def test_other_tags_of_a_minimax(body: str, arguments: Any) -> None:
    text, tools = minimax(body), (tool("f", NESTED),)
    expected = [("f", arguments)] if isinstance(arguments, dict) else []
    if arguments == "{":
        _, content, [(name, found)] = raw_answer(form("minimax_m3"), text, tools=tools)
        assert (name, found) == ("f", '{"new": ')
        assert text.endswith(content)
    else:
        content = "" if expected else text
        assert answer(form("minimax_m3"), text, tools=tools, whole_calls=True) == ("", content, expected)


def test_any_arguments_of_a_minimax() -> None:
    """Of a tool that is not strict, beside one that is."""
    tools = (tool("f", NESTED, strict=True), tool("g"))
    for body in ("", "^<index>1^</index>^<i>^<item>a^</item>^</i>", "^<in>x^</in>"):
        assert allows(known("minimax_m3"), minimax(body, "g"), "auto", tools), body
        assert len(answer(form("minimax_m3"), minimax(body, "g"), tools=tools)[2]) == 1
    assert not allows(known("minimax_m3"), minimax("^<index>1^</index>", "f"), "auto", tools)


def test_how_deep_a_minimax_may_nest() -> None:
    for depth, calls in ((64, 1), (65, 0)):
        text = minimax("^<a>" * depth + "^</a>" * depth)
        _, content, found = read(form("minimax_m3").parser("", TOOLS, whole_calls=True), text)
        assert (content, len(found)) == ("" if calls else text, calls)


@pytest.mark.parametrize(
    "body",
    [
        "^<rows>^<item>^<item>x^</item>^</item>^</rows>", "^<box>^</box>", "^<box>^<item>1^</item>^<item>2^</item>^</box>",
        "^<list>^<item>b^</item>^</list>", "^<tree>^<name>a^</tree>", "^<other>1^</other>", "^<rows>1^</rows>",
    ],
)  # fmt: skip
def test_what_a_minimax_is_held_to(body: str) -> None:
    assert not allows(known("minimax_m3"), minimax(body), tools=(tool("f", NESTED),))


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        ({"a": {"type": "array", "items": {"type": "string"}, "minItems": 1}}, True),
        ({"a": {"type": "object", "properties": {"b": {}}, "minProperties": 1}}, True),
        ({"a": {"type": "string", "pattern": "x"}}, True),
        ({"a>b": {"type": "string"}}, False),
        ({"/a": {"type": "string"}}, False),
    ],
)
def test_what_a_minimax_cannot_be_held_to_is_refused(schema: dict[str, Any], strict: bool) -> None:
    with pytest.raises(UnsupportedError, match=r"the (strict )?tool 'f' has"):
        known("minimax_m3").constraint((tool("f", {"type": "object", "properties": schema}, strict=strict),), "required")
    if strict:
        assert known("minimax_m3").constraint((tool("f", {"type": "object", "properties": schema}),), "required")
