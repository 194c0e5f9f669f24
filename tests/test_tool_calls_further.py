"""Calls of Command R, Functionary, Muse, DeepSeek V3.2, MiniMax and Kimi K3: what is only theirs."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.messages import template_tools
from nanovllm_cli.text.tool_calls import in_order, tools_of
from test_tool_grammar import STRICT, allows, known, tool
from tool_answers import MESSAGES, ONE, TOOLS, answer, form

NOW = ("now", {})
WEATHER = ("weather", {"city": "Köln", "days": 3})


# ---- Command R ----

DIRECTLY = '{"tool_name": "directly_answer", "parameters": {}}'
FENCED = 'Action: ```json\n[\n    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]```'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (FENCED, "", [NOW]),
        (f"Plan: I will look.\n{FENCED}\n", "Plan: I will look.", [NOW]),
        ('Action:```json\n[{"tool_name": "x", "parameters": {"a": 1}},{"tool_name": "now"}]\n```', "", [("x", {"a": 1}), NOW]),
        ('Action:\n```\n[{"parameters": {}, "tool_name": "now"}]', "", [NOW]),
        (f"Action: ```json\n[{DIRECTLY}]```", "", []),
        (f'Yes.\nAction: ```json\n[{DIRECTLY.replace("_answer", "-answer")}]```\nNo.', "Yes.No.", []),
        (f'Action: ```json\n[{DIRECTLY}, {{"tool_name": "now", "parameters": {{}}}}]```', "", [NOW]),
        (f'Action: ```json\n[{{"parameters": {{}}, "tool_name": "directly_answer"}}, {DIRECTLY}', "", []),
        (f"Action: ```json\n[{DIRECTLY[:30]}", f"Action: ```json\n[{DIRECTLY[:30]}", []),
        ("Action: none. Action:", "Action: none. Action:", []),
        ("Action: ```json\n[]```", "Action: ```json\n[]```", []),
        ("Action: ```json\n[1]```", "Action: ```json\n[1]```", []),
        (f"Action: {FENCED}", "Action:", [NOW]),
    ],
)  # fmt: skip
def test_a_command_r_acts(text: str, content: str, calls: Any) -> None:
    """What it calls to say that it needs no tool is none."""
    for whole_calls in (False, True):
        assert answer(form("command_r"), text, whole_calls=whole_calls) == ("", content, calls)


def test_a_command_r_may_call_a_tool_of_that_name() -> None:
    directly = {"type": "function", "function": {"name": "directly_answer"}}
    text = f"Action: ```json\n[{DIRECTLY}]```"
    assert answer(form("command_r"), text, tools=tools_of([directly])) == ("", "", [("directly_answer", {})])
    assert answer(form("command_r"), f"{text} {FENCED}", parallel=False) == ("", "", [NOW])


def test_the_fence_of_a_command_r_may_follow_in_three_ways() -> None:
    for between in ("", " ", "\n"):
        assert allows(known("command_r"), ONE["command_r"].replace("Action:\n", f"Action:{between}"))
        assert allows(known("command_r"), f"Plan: now.\n{ONE['command_r']}", "auto", STRICT)
    assert not allows(known("command_r"), "Action: I look.", "auto", STRICT)


# ---- Functionary and Firefunction ----

PYTHON = tools_of([{"type": "function", "function": {"name": "python"}}])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('Look.\n<function=x>{"a": 1}</function><function=now>{}</function> Done.', "Look.Done.", [("x", {"a": 1}), NOW]),
        ("<function=now>\n{}", "", [NOW]),
        ("<function=>{}</function>", "<function=>{}</function>", []),
        ("<function=now></function>", "<function=now></function>", []),
        ("<function=now>[1]</function>", "<function=now>[1]</function>", []),
        ('<|python_tag|>{"code": "1"}', '<|python_tag|>{"code": "1"}', []),
        ('{"name": "now", "parameters": {}}', '{"name": "now", "parameters": {}}', []),
    ],
)  # fmt: skip
def test_functions_of_a_functionary(text: str, content: str, calls: Any) -> None:
    for whole_calls in (False, True):
        assert answer(form("functionary_v31"), text, whole_calls=whole_calls) == ("", content, calls)


def test_what_a_functionary_has_for_python_is_for_a_tool_of_that_name() -> None:
    text = '<|python_tag|>{"code": "1"}'
    assert answer(form("functionary_v31"), text, tools=PYTHON) == ("", "", [("python", {"code": "1"})])
    assert answer(form("functionary_v31"), "<|python_tag|>print(1)", tools=PYTHON) == ("", "<|python_tag|>print(1)", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("now\n{}", "", [NOW]),
        ("all\nLet me look.\n>>>now\n{}", "Let me look.", [NOW]),
        ('weather\n{"city": "Köln", "days": 3}>>>now\n{}\n>>>now\n{}', "", [WEATHER, NOW, NOW]),
        ("all\n>>> 1 + 1 >>>> 2\n>>>now", ">>> 1 + 1 >>>> 2\n>>>now", []),
        ("all\nall\nnow\n{}", "all\nnow\n{}", []),
        ("all\nOne.>>>all\n", "One.", []),
        ("whether\n{}", "whether\n{}", []),
        ("now\nor never", "now\nor never", []),
        ("now", "now", []),
        ("al", "al", []),
        ("", "", []),
        ("all\n", "", []),
    ],
)
def test_recipients_of_a_functionary(text: str, content: str, calls: Any) -> None:
    for whole_calls in (False, True):
        assert answer(form("functionary_v32"), text, "assistant\n\n>>>", whole_calls=whole_calls) == ("", content, calls)
    assert answer(form("functionary_v32"), f">>>{text}", whole_calls=True)[2] == calls


def test_a_functionary_without_tools_speaks_to_all() -> None:
    for text, content in (("all\nYes.", "Yes."), ("now\n{}", "now\n{}"), ("Yes.", "Yes.")):
        assert answer(form("functionary_v32"), text, ">>>", tools=()) == ("", content, [])
    assert answer(form("functionary_v32"), "all\nof it", "they took ") == ("", "all\nof it", [])


def test_the_prompt_of_a_functionary_may_begin_what_it_is_held_to() -> None:
    for call in (ONE["functionary_v32"], ONE["functionary_v32"].removeprefix(">>>")):
        assert allows(known("functionary_v32"), call)
        assert allows(known("functionary_v32"), call, "auto", STRICT)
        assert allows(known("functionary_v32"), f"all\nI look.>>>{call.removeprefix('>>>')}", "auto", STRICT)
        assert not allows(known("functionary_v32"), call.replace("3", "few"), "auto", STRICT)
    assert not allows(known("functionary_v32"), "all\nYes.")
    assert not allows(known("functionary_v32"), "all\nYes.>>>whether\n{}", "auto", STRICT)


def test_a_template_that_knows_no_tools_gets_functions_as_text() -> None:
    source = "{{ 'functools[' + functions + datetime }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template, asked, date = ChatTemplate(source), [{"role": "user", "content": "?"}], datetime(2026, 2, 28, 23, 59)
    tool = {"type": "function", "function": {"name": "now", "description": "the time"}}
    shaped = template_tools([tool], template)
    text = json.dumps([tool["function"]], indent=4)
    assert template.render(asked, tools=shaped, now=date) == f"functools[{text}Feb 28 2026?"
    assert template.render(asked, now=date) == "functools[Feb 28 2026?"
    assert template.render(asked, tools=shaped, now=date, functions="f", datetime="d") == "functools[fd?"
    other = ChatTemplate("{{ functions is defined }}{% if tools %}{{ tools[0].function.name }}{% endif %}")
    assert other.render(asked, tools=shaped) == "Falsenow"


# ---- Muse ----

ON = "<|eom|><|start|>assistant"


def muse(*invoked: str, to: str = "now") -> str:
    return f" to={to}<|message|><atem:function_calls>\n{''.join(invoked)}</atem:function_calls>"


def invoke(name: str, *parameters: str) -> str:
    return f'<atem:invoke name="{name}">\n{"".join(parameters)}</atem:invoke>\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f" to=self<|message|>Hm.{ON}{muse(invoke('now'))}<|eot|>", ("Hm.", "", [NOW])),
        (f" to=user<|message|>I look.{ON}{muse(invoke('now'))}{ON}{ONE['muse']}<|eot|>", ("", "I look.", [NOW, WEATHER])),
        (muse(invoke("x"), invoke("now")), ("", "", [("x", {}), NOW])),
        (muse(invoke("x", '<atem:parameter name="a"> <b>\n</atem:parameter>\n'), to="y"), ("", "", [("x", {"a": " <b>\n"})])),
        (muse(invoke("now")).replace("\n", ""), ("", "", [NOW])),
        (f" to=now<|message|>{invoke('now')}", ("", "", [NOW])),
        (" to=now<|message|>now, please<|eot|>", ("", "now, please", [])),
        (muse(), ("", "<atem:function_calls>\n</atem:function_calls>", [])),
        (muse(invoke("")), ("", muse(invoke("")).partition("<|message|>")[2], [])),
        (f"{muse(invoke('now'))} So.", ("", "So.", [NOW])),
        (f" to=self<|message|>{muse(invoke('now'))[1:]}", (muse(invoke("now"))[1:], "", [])),
        (f" to=user<|message|>{invoke('now')}", ("", invoke("now"), [])),
    ],
)  # fmt: skip
def test_a_muse_calls_in_messages(text: str, expected: Any) -> None:
    """As its publisher's template has it, and llama.cpp reads it."""
    for whole_calls in (False, True):
        assert answer(form("muse", "muse"), text, whole_calls=whole_calls) == expected


def test_a_muses_parameters_are_what_their_schema_says() -> None:
    values = {"city": "null", "days": " 7\n", "exact": "true", "place": '{"a": [1]}', "note": "null", "level": "2"}
    text = muse(invoke("weather", *(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in values.items())))
    expected = {"city": "null", "days": 7, "exact": True, "place": {"a": [1]}, "note": None, "level": 2}
    assert answer(form("muse", "muse"), text) == ("", "", [("weather", expected)])


def test_only_the_first_of_a_muses_calls_where_they_are_not_parallel() -> None:
    for text in (muse(invoke("now"), invoke("x")), f"{muse(invoke('now'))}{ON}{ONE['muse']}"):
        assert answer(form("muse", "muse"), text, parallel=False) == ("", "", [NOW])


def test_what_a_muse_may_say_before_it_calls() -> None:
    call, two = ONE["muse"], f"{ONE['muse']}{ON}{muse(invoke('now'))}"
    said = f" to=self<|message|>Hm.{ON} to=user<|message|>I look.{ON}"
    assert allows(known("muse"), f"<|start|>assistant{call}")
    for wanted in (call, two):
        assert allows(known("muse"), said + wanted, "auto", STRICT)
        assert not allows(known("muse"), said + wanted)
        assert not allows(known("muse"), said + wanted.replace("3", "few"), "auto", STRICT)
    assert not allows(known("muse"), said + two, "auto", STRICT, parallel=False)
    assert not allows(known("muse"), call.replace("to=weather", "to=now"))


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


# ---- the order of texts and calls ----


def order(pieces: Any, parser: Any) -> list[Any]:
    """Texts and numbers of calls, as the deltas have them; pieces of one text together."""
    said: list[Any] = []
    for delta in (*map(parser.push, pieces), parser.finish()):
        for part in in_order(delta.content, delta.calls):
            if isinstance(part, str) and said and isinstance(said[-1], str):
                said[-1] += part
            elif isinstance(part, str) or part.id is not None:
                said.append(part if isinstance(part, str) else part.index)
    return said


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize("name", ["hermes", "command_r", "functionary_v32", "harmony", "muse"])
def test_texts_and_calls_have_one_order_however_they_arrive(name: str, whole_calls: bool) -> None:
    """So a stream and a whole answer are the same."""
    known = form(name, name if name in MESSAGES else "none")
    texts, begin, between = ["One. ", " Two. ", "Three."], "", ""
    if name in MESSAGES:
        begin, between = {"harmony": "<|channel|>final<|message|>", "muse": " to=user<|message|>"}[name], MESSAGES[name][1]
    elif name == "functionary_v32":
        begin = ">>>all\n"
    one, two, three = (begin + text for text in texts)
    text = between.join((one, ONE[name], two, ONE[name], three))
    expected = ["One. ", 0, " Two. ", 1, "Three."] if name in MESSAGES else ["One.", 0, "Two.", 1, "Three."]
    for pieces in (text, *((text[:cut], text[cut:]) for cut in range(0, len(text), 2))):
        assert order(pieces, known.parser("", TOOLS, whole_calls=whole_calls)) == expected
