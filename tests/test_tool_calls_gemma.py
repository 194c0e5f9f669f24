"""Calls of Gemma 4: what a model and a template write in its notation, and grammars of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanovllm_cli.constrain.grammar import check
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.text.answer_format import answer_format
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.messages import template_messages
from nanovllm_cli.text.reasoning import thinking_switch
from nanovllm_cli.text.tool_calls import Tool
from test_tool_grammar import allows, known, tool
from tool_answers import NOW, ONE, TOOL_LIST, TOOLS, answer, form, raw_answer

GEMMA = form("gemma4", "gemma")
Q = '<|"|>'


def gemma(body: str, name: str = "f") -> str:
    return f"<|tool_call>call:{name}{{{body}}}<tool_call|>"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        (" ", {}),
        (f'a:{Q}say "x" \\n \\ {{[,:]}}<|{Q}', {"a": 'say "x" \\n \\ {[,:]}<|'}),
        (f"a:{Q}two\nlines\t東京 \U0001f600\x01{Q}", {"a": "two\nlines\t東京 \U0001f600\x01"}),
        (f"a:{Q}{Q}", {"a": ""}),
        ("a:1,b:-2.5,c:1e-07,d:true,e:false,f:null", {"a": 1, "b": -2.5, "c": 1e-07, "d": True, "e": False, "f": None}),
        ("a:None,b:True", {"a": None, "b": True}),  # as templates write Python's values
        (f"a:[],b:{{}},c:[1,{Q}x{Q},[{{d:{Q}y{Q}}}]]", {"a": [], "b": {}, "c": [1, "x", [{"d": "y"}]]}),
        (f" a : {Q}x{Q} , b : [ 1 , 2 ] ", {"a": "x", "b": [1, 2]}),
        (f'{Q}a:b{Q}:1,"c\\n":2,:3', {"a:b": 1, "c\n": 2, "": 3}),
        ('a:"x\\n",b:{"c":["d"]}', {"a": "x\n", "b": {"c": ["d"]}}),  # JSON
        ("a:New York,b:01234,c:NaN", {"a": "New York", "b": "01234", "c": "NaN"}),
        ("a:1 b:2;c", {"a": "1 b:2;c"}),
        ("a:1,", {"a": 1}),
        ("a-b.c:1,größe:2", {"a-b.c": 1, "größe": 2}),
    ],
)
def test_values(body: str, arguments: Any) -> None:
    for text in (gemma(body), gemma(body).removesuffix("<tool_call|>")):
        assert answer(GEMMA, text) == ("", "", [("f", arguments)])
        assert answer(GEMMA, text, whole_calls=True) == ("", "", [("f", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>",
        "<|tool_call>f{}<tool_call|>",
        "<|tool_call>call:{}<tool_call|>",
        "<|tool_call>call: {}<tool_call|>",
        "<|tool_call>call:f(a=1)<tool_call|>",
        "<|tool_call>call:" + "f" * 300 + "{}<tool_call|>",
        '<|tool_call>{"name": "f"}<tool_call|>',
    ],
)
def test_what_only_looks_like_a_call_is_content(text: str) -> None:
    for whole_calls in (False, True):
        assert answer(GEMMA, text, whole_calls=whole_calls) == ("", text, [])


@pytest.mark.parametrize(
    "body",
    [
        "a",
        "a,b:1",
        "a:",
        "a:,b:1",
        f"a:{Q}x{Q}y",
        "a:[1}",
        "a:x<",
        "a:" + "9" * 600,
        "k" * 300 + ":1",
        'a:"\\x"',
        "a:" + "[" * 70 + "]" * 70,
        "a:" + "{b:" * 70 + "}" * 70,
    ],
)
def test_a_call_that_breaks_in_its_arguments(body: str) -> None:
    text = gemma(body)
    assert raw_answer(GEMMA, text, whole_calls=True) == ("", text, [])
    _, content, [(name, arguments)] = raw_answer(GEMMA, text)
    assert name == "f"
    assert text.endswith(content)
    assert arguments == "" or arguments.startswith("{")


def test_nesting_has_a_bound() -> None:
    for deepest, whole in ((63, True), (64, False)):
        calls = raw_answer(GEMMA, gemma("a:" + "[" * deepest + "]" * deepest), whole_calls=True)[2]
        assert bool(calls) is whole


def test_a_string_streams_while_it_comes() -> None:
    parser = form("gemma4").parser("", TOOLS)
    text = gemma(f'a:{Q}x"\n<y').removesuffix("}<tool_call|>")
    told = [call.arguments for char in text for call in parser.push(char).calls if call.arguments]
    assert told == ['{"a": ', '"', "x", '\\"', "\\n", "<y"]


def test_calls_behind_thoughts_and_between_text() -> None:
    one, two = gemma("a:1"), gemma(f"b:{Q}x{Q}", "g")
    text = f"<|channel>thought\nNot {one} yet.\n<channel|>Let me look.\n{one}{two}<|channel>thought\n<channel|>"
    calls = [("f", {"a": 1}), ("g", {"b": "x"})]
    assert answer(GEMMA, text) == (f"Not {one} yet.", "Let me look.", calls)
    kept = f"<|channel>thought\nNot {one} yet.\n<channel|>Let me look."
    reasoning, content, found = answer(GEMMA, text, splits_reasoning=False)
    assert (reasoning, content.startswith(kept), found) == ("", True, calls)


def test_tokens_of_the_format_are_no_content() -> None:
    tokens = form("gemma4", "gemma", ("<|tool_call>", "<tool_call|>", Q, "<|channel>", "<channel|>"))
    assert answer(tokens, f"A {Q}word{Q}.<tool_call|>") == ("", "A word.", [])
    assert set(tokens.visible_ids(calls=True)) == {0, 1, 2, 3, 4}
    assert set(tokens.visible_ids(calls=False)) == {3, 4}


# ---- templates ----

VALUE = """{% macro value(v) %}{% if v is string %}{{ Q ~ v ~ Q }}{% elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}{{ '{' }}{% for k in v %}{{ k }}:{{ value(v[k]) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif v is iterable %}[{% for i in v %}{{ value(i) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ v }}{% endif %}{% endmacro %}"""
RESULT = "{{ '<|tool_response>response:' ~ name ~ '{value:' ~ value(said) ~ '}<tool_response|>' }}"
TURN = """{{ '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' }}
{%- for c in m.tool_calls or [] %}{{ '<|tool_call>call:' ~ c.function.name ~ value(c.function.arguments) ~ '<tool_call|>' }}
{%- endfor %}"""
START = (
    """{% set Q = '<|"|>' %}"""
    + VALUE
    + """{{ bos_token }}{% if enable_thinking or tools or messages[0].role == 'system' %}{{ '<|turn>system\\n' }}
{%- if enable_thinking %}{{ '<|think|>\\n' }}{% endif %}
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- for t in tools or [] %}{{ '<|tool>declaration:' ~ t.function.name ~ '<tool|>' }}{% endfor %}{{ '<turn|>\\n' }}{% endif %}"""
)
END = """{% if add_generation_prompt and not result.open %}{{ '<|turn>model\\n' }}
{%- if not enable_thinking %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}{% endif %}"""
LOOP = "{% set result = namespace(open=false) %}{% for m in messages if m.role != 'system' %}"
# Results in the message of their calls, as the first templates of the family have it.
WITHIN = f"""{START}{LOOP}{TURN}{{% set result.open = m.tool_responses and not m.content %}}
{{%- for r in m.tool_responses or [] %}}{{% set name, said = r.name, r.response %}}{RESULT}{{% endfor %}}
{{%- if m.content %}}{{{{ m.content }}}}{{% endif %}}
{{%- if not result.open %}}{{{{ '<turn|>\\n' }}}}{{% endif %}}{{% endfor %}}{END}"""
# As messages of their own, behind it.
BEHIND = f"""{START}{LOOP}{{% if m.role == 'tool' %}}{{% set name, said = m.name, m.content %}}{RESULT}
{{%- set result.open = true %}}{{% else %}}{TURN}{{{{ m.content }}}}{{% set result.open = false %}}
{{%- if not m.tool_calls %}}{{{{ '<turn|>\\n' }}}}{{% endif %}}{{% endif %}}{{% endfor %}}{END}"""
USER = {"role": "user", "content": "How is it?"}


def call(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


TRICKY = {
    "city": 'K"ö\\ln }]> <tool_call|> 東京\n{"a": 1}',
    "days": -3,
    "exact": True,
    "factor": 2.5e-7,
    "note": None,
    "place": {"deep": [1, None, {"b": "]"}], "": False},
    "tags": ["a", "'", ""],
}


@pytest.mark.parametrize("source", [WITHIN, BEHIND])
def test_what_a_template_writes_comes_back(source: str) -> None:
    template = ChatTemplate(source, bos_token="<bos>")
    known = answer_format(source)
    assert (known.name, known.reasoning and known.reasoning.name) == ("gemma4", "gemma")
    assert thinking_switch(source) == "enable_thinking"
    prompt = template.render([USER], tools=TOOL_LIST).removesuffix("<|channel>thought\n<channel|>")
    for calls in (
        [call("weather", TRICKY, "1")],
        [call("now", {}, "1"), call("weather", TRICKY, "2"), call("now", {}, "3")],
    ):
        said = {"role": "assistant", "content": None, "tool_calls": calls}
        full = template.render(template_messages([USER, said], template), tools=TOOL_LIST, add_generation_prompt=False)
        assert full.startswith(prompt)
        expected = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]
        assert answer(known, full[len(prompt) :].removesuffix("<turn|>\n"), prompt) == ("", "", expected)


def test_a_conversation_with_results() -> None:
    """Content stands behind results, where the answer to them belongs; what was said before a call has a turn of its own."""
    template = ChatTemplate(WITHIN, bos_token="<bos>")
    calls = [call("weather", {"days": 3}, "a"), call("now", {}, "b")]
    talk = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "12:00"},
        {"role": "tool", "tool_call_id": "a", "content": '{"sun": 1}'},
        {"role": "assistant", "content": "It shines."},
        {"role": "assistant", "content": "Again.", "tool_calls": calls[1:]},
        {"role": "tool", "name": "now", "content": "12:01"},
    ]
    called = "<|turn>model\n<|tool_call>call:weather{days:3}<tool_call|><|tool_call>call:now{}<tool_call|>"
    results = (
        f"<|tool_response>response:now{{value:{Q}12:00{Q}}}<tool_response|>"
        f'<|tool_response>response:weather{{value:{Q}{{"sun": 1}}{Q}}}<tool_response|>'
    )
    system = "<bos><|turn>system\n<|think|>\nBe brief.<|tool>declaration:now<tool|><turn|>\n"
    begun = f"{system}<|turn>user\nHow is it?<turn|>\n<|turn>model\nLet me look.<turn|>\n{called}{results}"
    again = (
        "<|turn>model\nAgain.<turn|>\n<|turn>model\n<|tool_call>call:now{}<tool_call|>"
        f"<|tool_response>response:now{{value:{Q}12:01{Q}}}<tool_response|>"
    )

    def prompt(length: int) -> str:
        messages = template_messages(talk[:length], template)
        return template.render(messages, tools=[NOW], enable_thinking=True)

    assert prompt(5) == begun
    assert prompt(8) == f"{begun}It shines.<turn|>\n{again}"
    assert "tool_responses" not in talk[2]


def test_results_without_a_call_and_of_another_template_stay_where_they_are() -> None:
    result = {"role": "tool", "content": "12:00"}
    said = {"role": "assistant", "content": "", "tool_calls": [call("now", {}, "a")]}
    within, behind = ChatTemplate(WITHIN), ChatTemplate(BEHIND)
    assert [message["role"] for message in template_messages([USER, result], within)] == ["user", "tool"]
    assert [message["role"] for message in template_messages([USER, said, result], behind)] == [
        "user",
        "assistant",
        "tool",
    ]
    [_, called] = template_messages([USER, said, result, result], within)
    assert called["tool_responses"] == [{"name": "now", "response": "12:00"}] * 2


# ---- grammars ----

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Unit": {"enum": ["C", "F", None]},
        "Tree": {"type": "object", "properties": {"leaf": {"type": "integer"}, "next": {"$ref": "#/$defs/Tree"}}},
    },
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "word": {"type": "string", "maxLength": 3},
        "kind": {"type": "string", "enum": ["a/b", 'c\n"', ""]},
        "one": {"const": {"x": [1, "y"]}},
        "count": {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "list": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "pairs": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "place": {
            "type": "object",
            "properties": {"b": {"type": "boolean"}, "a": {"type": "number"}, "c": {}},
            "required": ["b"],
            "additionalProperties": False,
        },
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
        "tree": {"$ref": "#/$defs/Tree"},
        "whole": {"$ref": "#"},
        "what ever:": {"type": "integer"},
    },
    "required": ["unit"],
    "additionalProperties": False,
}
UNIT = f"unit:{Q}C{Q}"


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (UNIT, True),
        ("unit:null", True),
        (f"unit:{Q}K{Q}", False),
        ("unit:C", False),
        ("", False),
        (f"note:null,{UNIT}", True),
        (f"{UNIT},note:null", False),  # not their order
        (f'note:{Q}any <text> |>\n"\\{Q},{UNIT},word:{Q}abc{Q}', True),
        (f"{UNIT},word:{Q}abcd{Q}", False),
        (f"{UNIT},word:abc", False),
        (f"kind:{Q}a/b{Q},{UNIT}", True),
        (f'kind:{Q}c\n"{Q},{UNIT}', True),
        (f"kind:{Q}{Q},{UNIT}", True),
        (f"kind:{Q}c{Q},{UNIT}", False),
        (f"one:{{x:[1,{Q}y{Q}]}},{UNIT}", True),
        (f"one:{{x:[1]}},{UNIT}", False),
        (f"count:2,{UNIT}", True),
        (f"count:null,{UNIT}", True),
        (f"count:1,{UNIT}", False),
        (f"count:{Q}2{Q},{UNIT}", False),
        (f"{UNIT},whole:{{{UNIT},whole:{{{UNIT}}}}}", True),
        (f"{UNIT},whole:{{}}", False),
        (f"list:[{Q}a{Q},{Q}{Q}],{UNIT}", True),
        (f"list:[],{UNIT}", False),
        (f"list:[{Q}a{Q},{Q}b{Q},{Q}c{Q}],{UNIT}", False),
        (f"pairs:[[1,2.5e3],[]],{UNIT}", True),
        (f"pairs:[],{UNIT}", True),
        (f"pairs:[1],{UNIT}", False),
        (f"place:{{b:true}},{UNIT}", True),
        (f"place:{{a:1,b:true,c:[{{d:{Q}x{Q}}},null,-1]}},{UNIT}", True),
        (f"place:{{b:true,c:{{}}}},{UNIT}", True),
        (f"place:{{a:1}},{UNIT}", False),
        (f"place:{{a:1,b:true,d:1}},{UNIT}", False),
        (f"map:{{x:1,y:2}},{UNIT}", True),
        (f"map:{{x:{Q}1{Q}}},{UNIT}", False),
        (f"tree:{{leaf:1,next:{{next:{{}}}}}},{UNIT}", True),
        (f"tree:{{next:{{leaf:{Q}1{Q}}}}},{UNIT}", False),
        (f"{UNIT},{Q}what ever:{Q}:1", True),
        (f"{UNIT},other:1", False),
        (f"{UNIT},", False),
    ],
)
def test_arguments_follow_their_schema(body: str, fits: bool) -> None:
    tools = (tool("f", PARAMETERS, strict=True),)
    assert allows(known("gemma4"), gemma(body), tools=tools) is fits
    if fits:
        [(_, arguments)] = answer(GEMMA, gemma(body), tools=tools)[2]
        jsonschema = pytest.importorskip("jsonschema")
        jsonschema.validate(arguments, PARAMETERS)


@pytest.mark.parametrize("required", [(), ("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")])
def test_commas_stand_between_whatever_is_there(required: tuple[str, ...]) -> None:
    numbers = {"properties": {name: {"type": "integer"} for name in "cab"}, "required": list(required)}
    tools = (tool("f", numbers),)
    for bits in range(8):
        there = [name for place, name in enumerate("abc") if bits >> place & 1]
        body = ",".join(f"{name}:{bits}" for name in there)
        assert allows(known("gemma4"), gemma(body), tools=tools) is set(required).issubset(there)


def test_what_has_no_schema_may_be_anything() -> None:
    tools = (tool("f", {"properties": {"a": {}, "b": {"type": "array"}}}), tool("g", {"type": "object"}))
    anything = f"[{Q}x{Q},-1.5,true,null,{{k-1:{{}},l:[]}},[[{Q}{Q}]]]"
    assert allows(known("gemma4"), gemma(f"a:{anything},b:{anything}"), tools=tools)
    assert allows(known("gemma4"), gemma(f"c:{anything},b:1", "g"), tools=tools)
    assert not allows(known("gemma4"), gemma("a:x"), tools=tools)
    assert not allows(known("gemma4"), gemma("c:1"), tools=tools)


def test_a_form_beside_calls_and_text_around_them() -> None:
    strict = (tool("f", PARAMETERS, strict=True), tool("g"))
    assert allows(known("gemma4"), f"Wait.\n{gemma(UNIT)} And {gemma('x:[1]', 'g')}", "auto", strict)
    assert not allows(known("gemma4"), f"Wait.\n{gemma('unit:1')}", "auto", strict)
    assert allows(known("gemma4", "gemma"), "\n" + ONE["gemma4"], "required")


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": ["string", "null"], "format": "date"}, "format"),
        ({"type": "array", "prefixItems": [{}]}, "prefixItems"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "allOf"),
        ({"anyOf": [{"type": "string"}], "minLength": 1}, "minLength"),
        ({"items": {"items": {"pattern": "a"}}}, "pattern"),
    ],
)
def test_what_a_strict_tool_cannot_be_held_to_is_refused(schema: dict[str, Any], word: str) -> None:
    def constraint(each: Tool) -> Constraint | None:
        return known("gemma4").constraint((each,), "required")

    parameters = {"properties": {"a": schema}}
    with pytest.raises(UnsupportedError, match=f"'f' has '{word}'"):
        constraint(tool("f", parameters, strict=True))
    check(constraint(tool("f", parameters)) or Constraint("json_object"))


def deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"type": 3},
        {"type": [{}]},
        {"enum": []},
        {"enum": "ab"},
        {"anyOf": 3},
        {"anyOf": []},
        {"type": "array", "minItems": -1},
        {"type": "array", "maxItems": "2"},
        {"$ref": "#/$defs/Nowhere"},
        deep(2000),
    ],
)
def test_a_schema_that_is_none_is_its_senders_mistake(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        known("gemma4").constraint((tool("f", {"properties": {"a": schema}}),), "required")


def test_the_grammar_of_a_schema_is_about_as_long_as_the_schema() -> None:
    """Nothing is written out twice, however it is nested, and a grammar of many tools is one that is taken."""
    sizes = []
    for depth in (10, 20, 40):
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            both = {"a": schema, "b": {"type": "string"}}
            schema = {"type": "object", "properties": both, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
        constraint = known("gemma4").constraint((tool("f", {"properties": {"x": schema}}),), "required")
        assert constraint is not None
        check(constraint)
        sizes.append(len(constraint.text))
    assert sizes[2] < 5 * sizes[0]
    many = known("gemma4").constraint([tool(f"tool{i}") for i in range(512)], "required")
    assert many is not None
    check(many)
