"""Calls of Command R, Functionary, GLM-4 and Muse: what is only theirs; the order of texts and calls."""

from __future__ import annotations

import json
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm_cli.cli.model import Prompting
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.text.answer_format import answer_format
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.messages import template_messages, template_tools
from nanovllm_cli.text.tool_calls import in_order, tools_of
from test_chat_template_encode import byte_tokenizer
from test_tool_grammar import STRICT, allows, known
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
        ("all\n>>> a >>>now\n{}", ">>> a", [NOW]),
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


def test_the_command_line_leaves_out_whom_a_functionary_answers() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}\n>>>{# >>>all >>>${recipient} #}"
    for raw, template in ((False, ChatTemplate(source)), (True, ChatTemplate(source)), (False, ChatTemplate("{{ messages }}"))):
        llm: Any = SimpleNamespace(chat_template=template, tokenizer=byte_tokenizer())
        make = Prompting(llm, raw=raw).parser_for(llm.tokenizer.encode("x\n>>>"))
        if raw or template.source != source:
            assert make is None
            continue
        assert make is not None
        for pieces in ("all\nYes.\n", ("all\nYes.\n",), ("al", "l\nYes.", "\n")):
            parser = make()
            assert "".join(parser.push(piece).content for piece in pieces) + parser.finish().content == "Yes.\n"


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


# ---- GLM-4 ----

NAMED = 'weather\n{"city": "Köln", "days": 3}'
GLM_TEMPLATE = (
    "[gMASK]{% for tool in tools or [] %}## {{ tool.function | tojson }}\n请使用 Json 格式表示调用的参数。{% endfor %}"
    "{% for m in messages %}{% if m.role == 'observation' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}"
    "{{ m.get('metadata', '') }}\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (NAMED, "", [WEATHER]),
        (f"\n {NAMED}\nnow\n{{}}", "", [WEATHER, NOW]),
        (f"{NAMED}\nThat is it.\n", "That is it.\n", [WEATHER]),
        ("now \n{}", "", [NOW]),
        ("\nIt rains.\nnow\n{}", "\nIt rains.\nnow\n{}", []),
        ("whether\n{}", "whether\n{}", []),
        ("now\nor never", "now\nor never", []),
        ("now", "now", []),
        ("", "", []),
    ],
)
def test_the_first_line_of_a_glm(text: str, content: str, calls: Any) -> None:
    for whole_calls in (False, True):
        assert answer(form("glm4"), text, whole_calls=whole_calls) == ("", content, calls)


def test_what_a_glm_is_held_to() -> None:
    glm = known("glm4")
    assert allows(glm, NAMED)
    assert allows(glm, f"{NAMED}\nnow\n{{}}")
    for bad in (f"{NAMED}\nnow\n{{}}", NAMED.replace("3", "few"), "It rains.", ""):
        assert not allows(glm, bad, parallel=False)
    for good in (NAMED, "", "\n", "It rains {a}.\n\nnow", "\nweather?\n{}", "now", "nowhere\n{}", "weather"):
        assert allows(glm, good, "auto", STRICT), good
    for bad in (NAMED.replace("3", "few"), "\n weather \n{}", "weather\nis fine"):
        assert not allows(glm, bad, "auto", STRICT), bad
    with pytest.raises(UnsupportedError, match="not marked"):
        glm.constraint(TOOLS, "auto", form=Constraint("json_object"))


def test_a_glms_template_is_told_names_beside_roles() -> None:
    template = ChatTemplate(GLM_TEMPLATE)
    assert answer_format(GLM_TEMPLATE).name == "glm4"
    called = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]
    talk = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "I look.", "tool_calls": called},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    text = template.render(template_messages(talk, template, tools=[]), add_generation_prompt=False)
    assert text == '[gMASK]<|user|>\nHow is it?<|assistant|>\nI look.<|assistant|>weather\n{"city": "Köln"}<|observation|>\nrain'


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


def test_what_was_held_to_the_end_has_its_order_too() -> None:
    """Of models that forget to close their reasoning."""
    text = f"<think>Hm. {ONE['qwen3_coder']}Two. {ONE['qwen3_coder']} Three. {ONE['qwen3_coder'][:60]}"
    for whole_calls in (False, True):
        parser = form("qwen3_coder", "think").parser("", TOOLS, whole_calls=whole_calls)
        assert order([text], parser) == [0, "Two.", 1, "Three.", 2]
