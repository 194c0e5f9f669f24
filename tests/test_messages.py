"""Conversations in OpenAI's form, made into what templates read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.text.builtin_templates import builtin_template
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.messages import template_messages, template_tools, wants_text_arguments, writes_one_call

CHATML = ChatTemplate(builtin_template("chatml"))
OBJECTS = ChatTemplate(
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.type }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
TEXTS = ChatTemplate(
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% if m['content'] is not none %}{{ m.content }}{% endif %}{% endfor %}"
)
SHORT_IDS = ChatTemplate("[TOOL_CALLS]{% for m in messages %}{{ m.tool_calls }}{{ m.content }}{% endfor %}")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def answer(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "function": {"name": "find", "arguments": arguments}}
    return [{"role": "assistant", "content": None, "tool_calls": [call], **more}]


def test_parts_become_lines() -> None:
    parts = [
        {"type": "text", "text": "one"},
        {"type": "input_text", "text": "two"},
        {"type": "refusal", "refusal": "no"},
    ]
    assert template_messages(user(parts), CHATML) == user("one\ntwo\nno")
    assert template_messages(user([]), CHATML) == user("")
    assert template_messages(user(None), CHATML) == user("")


def test_reasoning_has_the_name_that_templates_know() -> None:
    for given in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "what", "reasoning_content": "hm"}):
        (message,) = template_messages([{"role": "assistant", "content": "yes", **given}], CHATML)
        assert message["reasoning_content"] == "hm"


def test_nulls_are_left_out() -> None:
    message = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "name": None}
    assert template_messages([message], CHATML) == [{"role": "assistant", "content": "yes"}]
    assert "tool_calls" not in template_messages([{**message, "tool_calls": []}], CHATML)[0]


def test_only_an_assistants_content_may_be_null() -> None:
    writes_all = ChatTemplate(
        "{% for m in messages %}{% if m.content is not none %}{{ m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = [{"role": role, "tool_calls": [call]} for role in ("system", "assistant")]
    system, assistant = template_messages(given, writes_all, tools=tools)
    assert system["content"].startswith("You can call functions")
    assert assistant["content"] is None


def test_tools_have_what_a_template_fails_without() -> None:
    """gpt-oss' writes `"// " + tool.description`, Hermes' looks into `parameters`; others would show what nobody said."""
    by_name = "{% for t in tools %}{{ t.function.name }}"
    needs = "{{ '// ' + t.function.description }}{{ t.function.parameters.properties | tojson }}{% endfor %}"
    picky = ChatTemplate(by_name + needs)
    plain = ChatTemplate(by_name + "{{ t | tojson }}{% endfor %}")
    broken = ChatTemplate("{{ raise_exception('no tools') }}")
    schema = {"type": "object", "properties": {"a": {}}}
    for given in ({}, {"description": None, "parameters": None}):
        tool = {"type": "function", "function": {"name": "f", **given}}
        empty = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
        assert template_tools([tool], picky) == [{"type": "function", "function": empty}]
        for template in (plain, broken):
            assert template_tools([tool], template) == [{"type": "function", "function": {"name": "f"}}]
    full = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    assert template_tools([full], picky) == template_tools([full], plain) == [full]
    assert template_tools([{"name": "f"}], picky) == [{"name": "f"}]


ALTERNATING = ChatTemplate(
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


ONE_SYSTEM = ChatTemplate(
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
)
EITHER = ChatTemplate(
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{{ m.role }}: {{ m.thinking or '' }}|{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %};"
    "{% endfor %}"
)


@pytest.mark.parametrize("template", [EITHER, OBJECTS], ids=["refuses", "takes"])
def test_what_is_said_between_thought_and_call_is_not_refused(template: ChatTemplate) -> None:
    """gpt-oss' template takes one of the two, and its model writes both."""
    calling = {**answer("{}")[0], "content": "Wait.", "reasoning_content": "Hm."}
    told = template_messages([*user("where?"), calling, {"role": "assistant", "content": "b", "reasoning": "a"}], template)
    if template is OBJECTS:
        assert (told[1]["content"], told[1]["reasoning_content"]) == ("Wait.", "Hm.")
    else:
        assert template.render(told) == "user: |where?;assistant: Hm.\n\nWait.|!find;assistant: a|b;"


DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TEMPLATES = sorted(DATA.glob("templates/*.jinja"))
needs_data = pytest.mark.skipif(not TEMPLATES, reason="the real templates are not here")


def said(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_texts_of_a_role_in_a_row_are_one_where_the_template_refuses_two() -> None:
    """Gemma's and Mistral's do; OpenAI's clients may send them, and a call that was cut off leaves them behind."""
    talk = said(("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    turns = template_messages(talk, ALTERNATING)
    assert turns == said(("user", "a\n\nb"), ("assistant", "c\n\nd"), ("user", "e"))
    assert ALTERNATING.render(turns) == "<user>a\n\nb<assistant>c\n\nd<user>e"
    assert template_messages(talk, CHATML) == talk
    named = [{"role": "user", "content": "a", "name": "x"}, {"role": "user", "content": "b"}]
    assert template_messages(named, ALTERNATING) == named


def test_turns_stay_apart_where_the_template_reads_parts_alone() -> None:
    """What it makes of roles is tried out by such messages as it reads."""
    source = "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source)
    talk = said(("system", "s"), ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"))
    assert template_messages(talk, template) == talk
    assert template.render(talk) == "systemsuserauserbassistantcassistantdusere"


def test_a_second_system_is_not_lost() -> None:
    """gpt-oss' template writes the first alone, DeepSeek-R1's the last."""
    talk = said(("system", "s"), ("system", "t"), ("user", "a"), ("user", "b"))
    assert template_messages(talk, ONE_SYSTEM) == said(("system", "s\n\nt"), ("user", "a"), ("user", "b"))


def test_a_system_that_the_template_refuses_begins_the_first_users_message() -> None:
    """As llama.cpp has it. Gemma's authors say so, too."""
    talk = said(("system", "s"), ("developer", "t"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    assert template_messages(talk, ALTERNATING) == said(("user", "s\n\nt\n\na"), ("assistant", "b"), ("user", "c"))
    assert template_messages(talk, CHATML)[0] == {"role": "system", "content": "s"}
    alone = said(("system", "s"))
    assert template_messages(alone, ALTERNATING) == alone
    amid = said(("user", "a"), ("system", "s"), ("user", "b"), ("assistant", "c"), ("system", "t"))
    assert template_messages(amid, ALTERNATING) == said(("user", "a\n\ns\n\nb"), ("assistant", "c"), ("user", "t"))


def test_a_system_amid_a_conversation_is_not_lost() -> None:
    """Templates of gpt-oss and SmolLM3 leave it out, Qwen3.5's and Mistral's refuse it."""
    talk = said(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("user", "c"), ("system", "v"))
    expected = said(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "t\n\nc"), ("user", "v"))
    assert template_messages(talk, ONE_SYSTEM) == expected
    assert template_messages(talk, CHATML) == talk
    assert template_messages(said(("system", "s")), ONE_SYSTEM) == said(("system", "s"))


def test_50_000_messages_that_become_one_are_copied_once() -> None:
    """A copy of all of them with each would move 10^12 bytes."""
    many = ["x" * 2000] * 50_000
    (turn,) = template_messages(said(*(("user", text) for text in many)), ALTERNATING)
    assert turn["content"] == "\n\n".join(many)
    system, turn = template_messages(said(("system", "s"), *(("system", text) for text in many), ("user", "a")), ONE_SYSTEM)
    assert (system["content"], turn["content"]) == ("\n\n".join(["s", *many]), "a")
    talk = said(("user", "a"), ("assistant", "b"), *(("system", text) for text in many), ("user", "c"))
    assert template_messages(talk, ONE_SYSTEM)[2:] == said(("user", "\n\n".join([*many, "c"])))
    alternate = [pair for text in many[::2] for pair in (("user", text), ("system", text))]
    assert template_messages(said(*alternate), ALTERNATING) == said(("user", "\n\n".join(many)))


def test_a_system_that_no_user_follows_is_a_users_where_the_template_loses_it() -> None:
    amid = said(("user", "a"), ("system", "s"), ("assistant", "b"), ("user", "c"))
    assert template_messages(amid, ONE_SYSTEM) == said(("user", "a"), ("user", "s"), ("assistant", "b"), ("user", "c"))
    assert template_messages(amid, ALTERNATING) == said(("user", "a\n\ns"), ("assistant", "b"), ("user", "c"))
    assert template_messages(amid, CHATML) == amid
    row = said(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "t"), ("system", "v"), ("assistant", "c"))
    assert template_messages(row, ONE_SYSTEM) == [*row[:3], *said(("user", "t\n\nv"), ("assistant", "c"))]
    start = said(("system", "s"), ("system", "t"), ("assistant", "b"), ("user", "c"))
    assert template_messages(start, ONE_SYSTEM) == said(("system", "s\n\nt"), ("assistant", "b"), ("user", "c"))
    assert template_messages(start, ALTERNATING) == said(("user", "s\n\nt"), ("assistant", "b"), ("user", "c"))
    named = [*said(("user", "a"), ("assistant", "b")), {"role": "system", "content": "s", "name": "x"}, *said(("user", "c"))]
    assert template_messages(named, ONE_SYSTEM) == [*named[:2], {**named[2], "role": "user"}, named[3]]


def test_a_developer_amid_a_conversation_is_not_lost() -> None:
    """gpt-oss' template reads one, at the beginning; another may have them anywhere."""
    talk = said(("developer", "d"), ("developer", "e"), ("user", "a"), ("developer", "f"), ("assistant", "b"), ("developer", "g"))
    once = ChatTemplate(
        "{% if messages[0].role in ('developer', 'system') %}{{ messages[0].content }}{% endif %}"
        "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    )
    expected = said(("developer", "d\n\ne"), ("user", "a"), ("user", "f"), ("assistant", "b"), ("user", "g"))
    assert template_messages(talk, once) == expected
    behind = said(("system", "s"), ("developer", "d"), ("user", "a"), ("assistant", "b"), ("developer", "e"), ("user", "c"))
    expected = said(("system", "s\n\nd"), ("user", "a"), ("assistant", "b"), ("user", "e\n\nc"))
    assert template_messages(behind, once) == expected
    anywhere = ChatTemplate("{# developer #}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    for each in (talk, behind):
        assert template_messages(each, anywhere) == each


@needs_data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
@pytest.mark.parametrize("initials", ["usau", "susau", "susu", "uasau", "uassau", "dduduau", "sdudau", "uadau", "uds"])
def test_no_real_template_loses_or_refuses_a_message(path: Path, initials: str) -> None:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    talk = said(*((names[initial], f"needle{place}") for place, initial in enumerate(initials)))
    template = ChatTemplate(path.read_text())
    prompt = template.render(template_messages(talk, template))
    assert [prompt.count(message["content"]) for message in talk] == [1] * len(talk)


@needs_data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
@pytest.mark.parametrize("initials", ["uctu", "uctuau", "ucu", "uctsu", "uctuu", "suctctdu"])
def test_no_real_template_refuses_who_interrupts_a_tool(path: Path, initials: str) -> None:
    """Agents' users do, behind a result and before one; Mistral's templates want an answer first."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    other: dict[str, Any] = {"c": answer("{}")[0], "t": {"role": "tool", "tool_call_id": "call_1", "name": "find"}}
    kinds = {**other, **{initial: {"role": role} for initial, role in names.items()}}
    talk = [{**kinds[initial], "content": f"needle{place}"} for place, initial in enumerate(initials)]
    template = ChatTemplate(path.read_text())
    if "gemma-2" in path.stem and "t" in initials:  # which takes no tool's result
        return
    prompt = template.render(template_messages(talk, template))
    users = [each["content"] for each in talk if each["role"] == "user"]
    assert [prompt.count(each) for each in users] == [1] * len(users)


def test_a_user_behind_a_result_follows_an_empty_answer_where_the_template_wants_one() -> None:
    alternating = ChatTemplate(
        "{% set ns = namespace(i=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
        "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% set ns.i = ns.i + 1 %}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}!{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    talk = [*user("q"), *answer("{}"), result, *user("x"), *said(("assistant", "y")), *user("z"), *answer("{}"), *user("w")]
    shown = alternating.render(template_messages(talk, alternating))
    assert shown == "<user>q<assistant>!find<tool>3<assistant><user>x<assistant>y<user>z<assistant>!find<assistant><user>w"
    assert len(template_messages(talk, OBJECTS)) == len(talk)


def test_developers_are_system_where_the_template_does_not_know_them() -> None:
    developer = [{"role": "developer", "content": "be brief"}]
    assert template_messages(developer, OBJECTS)[0]["role"] == "system"
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}{{ messages[0].content }}{% endif %}")
    assert template_messages(developer, knows)[0]["role"] == "developer"
    assert template_messages([{"role": "function", "content": "3"}], OBJECTS)[0]["role"] == "tool"


def test_arguments_are_what_the_template_wants() -> None:
    for given in ('{"a": [1, "é"]}', {"a": [1, "é"]}):
        as_object = template_messages(answer(given), OBJECTS)[0]
        assert as_object["tool_calls"][0]["function"]["arguments"] == {"a": [1, "é"]}
        assert as_object["tool_calls"][0]["type"] == "function"
        assert as_object["content"] == ""
        as_text = template_messages(answer(given), TEXTS)[0]
        assert json.loads(as_text["tool_calls"][0]["function"]["arguments"]) == {"a": [1, "é"]}
        assert as_text["content"] is None
        assert "é" in TEXTS.render([as_text])
    assert wants_text_arguments(TEXTS)
    assert not wants_text_arguments(OBJECTS)
    assert not wants_text_arguments(CHATML)
    for empty in ("", " ", None, "{}"):
        assert template_messages(answer(empty), OBJECTS)[0]["tool_calls"][0]["function"]["arguments"] == {}


BROKEN = ("{", '{"path": "a', "[]", "null", "7", "ls -l", "[" * 100_000)


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:12])
def test_a_broken_call_stays_the_text_that_it_was(arguments: str) -> None:
    """Frameworks bring it back, with what was wrong with it: refused, such a conversation could never go on."""
    for template in (OBJECTS, TEXTS):
        [message] = template_messages(answer(arguments), template)
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
    [message] = template_messages(answer(arguments), CHATML)  # which writes no calls: they are told
    assert arguments in message["content"]
    assert json.dumps(arguments) in OBJECTS.render(template_messages(answer(arguments), OBJECTS))


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:12])
def test_a_broken_call_is_refused_where_the_template_takes_objects_alone(arguments: str) -> None:
    items = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for name, value in c.function.arguments | items %}{{ name }}={{ value }}{% endfor %}{% endfor %}{% endfor %}"
    )
    assert items.render(template_messages(answer('{"a": 1}'), items)) == "a=1"
    with pytest.raises(UsageError, match=r"messages\[0\].tool_calls\[0\] are not a JSON object, and this chat template takes"):
        template_messages(answer(arguments), items)


ONLY_OBJECTS = ("GLM-4.6", "Qwen3-Coder", "Qwen3.5-4B")


@needs_data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_real_templates_show_a_broken_call_or_refuse_it(path: Path) -> None:
    template = ChatTemplate(path.read_text())
    result = {"role": "tool", "tool_call_id": "call_1", "name": "find", "content": "cut off"}
    talk = [*user("where?"), *answer('{"needle'), result]
    if path.stem in ONLY_OBJECTS:
        with pytest.raises(UsageError, match="takes nothing else"):
            template_messages(talk, template)
    elif "gemma-2" not in path.stem:  # which takes no tool's result
        whole = [*user("where?"), *answer('{"needle": 1}'), result]
        shown, expected = (template.render(template_messages(each, template)) for each in (talk, whole))
        assert ("needle" in shown) == ("needle" in expected)


def test_ids_of_nine_letters_where_the_template_insists() -> None:
    result = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    call, told = template_messages([*answer("{}"), result], SHORT_IDS)
    short = call["tool_calls"][0]["id"]
    assert short == told["tool_call_id"]
    assert len(short) == 9
    assert short.isalnum()
    other = template_messages([{**result, "tool_call_id": "call_2"}], SHORT_IDS)[0]["tool_call_id"]
    assert other != short
    assert template_messages([{**result, "tool_call_id": "abcDEF123"}], SHORT_IDS)[0]["tool_call_id"] == "abcDEF123"
    assert template_messages([result], OBJECTS)[0]["tool_call_id"] == "call_1"


def test_calls_come_apart_where_the_template_writes_one() -> None:
    """Each with its result behind it, whatever order the results came in."""
    first_only = ChatTemplate(
        "{% for m in messages %}{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    refuses = ChatTemplate(
        first_only.source + "{% if messages[1].tool_calls | length > 1 %}{{ raise_exception('no') }}{% endif %}"
    )
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b", "c")]
    said = {"role": "assistant", "content": "look", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in ("a", "c", "b")]
    talk = [*user("q"), said, *results, *user("x"), {**said, "tool_calls": calls[:2]}, results[0], *user("y")]
    for template in (first_only, refuses):
        assert writes_one_call(template)
        apart = template_messages(talk, template)
        assert template.render(apart) == "q[a]A[c]C[b]Bx[a]A[b]y"
        assert [message["content"] for message in apart if "tool_calls" in message] == ["look", "", "", "look", ""]
    assert not writes_one_call(OBJECTS)
    assert template_messages(talk, OBJECTS)[1]["tool_calls"][2]["function"]["name"] == "c"


def test_10_000_calls_of_a_message_come_apart_in_one_pass() -> None:
    """Each result looked for among all calls would be 5 * 10^7 comparisons: counted, of ids that count."""
    compared = 0

    class Id(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    first = "{{ m.tool_calls[0].function.name if m.tool_calls }}"
    first_only = ChatTemplate("{% for m in messages %}" + first + "{{ m.content }}{% endfor %}")
    count = 10_000
    calls = [{"id": Id(f"id{place}"), "function": {"name": "f", "arguments": "{}"}} for place in range(count)]
    results = [{"role": "tool", "tool_call_id": Id(f"id{place}"), "content": "x"} for place in reversed(range(count))]
    apart = template_messages([*user("q"), {"role": "assistant", "tool_calls": calls}, *results], first_only)
    assert len(apart) == 1 + 2 * count
    assert apart[2]["tool_calls"][0]["id"] == apart[3]["tool_call_id"] == f"id{count - 1}"
    assert compared < 10 * count


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hello", "list"),
        ({"role": "user"}, "list"),
        ([None], r"messages\[0\]"),
        ([{"content": "x"}], "no role"),
        ([{"role": 3, "content": "x"}], "no role"),
        ([*user("x"), {"role": "wizard", "content": "x"}], r"messages\[1\] has the unknown role 'wizard'"),
        (user(7), "neither text nor a list"),
        (user({"type": "text"}), "neither text nor a list"),
        (user([7]), r"messages\[0\].content\[0\]"),
        (user([{"type": "text"}]), "has no text"),
        (user([{"type": "text", "text": None}]), "has no text"),
        (user([{"type": []}]), "no part"),
        (user([{"type": "spell"}]), "no part"),
        (answer(7), "not a JSON object"),
        (answer([]), "not a JSON object"),
        ([{"role": "assistant", "tool_calls": [{}]}], "no function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 3}}]}], "no function"),
        ([{"role": "assistant", "tool_calls": "find"}], "not a list"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        template_messages(messages, OBJECTS)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_what_is_not_text_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"content\[1\] is of type '{kind}'"):
        template_messages(user([{"type": "text", "text": "look"}, {"type": kind}]), OBJECTS)


def test_roles_that_a_template_knows_pass() -> None:
    knows = ChatTemplate("{% if messages[0]['role'] == 'ipython' %}{{ messages[0].content }}{% endif %}")
    assert template_messages([{"role": "ipython", "content": "3"}], knows) == [{"role": "ipython", "content": "3"}]


@needs_data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_every_template_takes_thought_words_calls_and_results(path: Path) -> None:
    template = ChatTemplate(path.read_text())
    calls = [{"id": f"call_{n}", "type": "function", "function": {"name": "find", "arguments": '{"n": 1}'}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "name": "find", "content": f"here {n}"} for n in range(2)]
    calling = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": calls}
    tools = [{"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}]
    for after in ([], user("and now?"), [{"role": "assistant", "content": "There."}, *user("and now?")]):
        told = template_messages([*user("where?"), calling, *results, *after], template, tools=tools)
        text = template.render(told, tools=template_tools(tools, template))
        assert [text.count("here 0"), text.count("here 1")] == [1, 1]
