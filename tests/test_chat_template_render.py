"""Rendering of real templates against transformers, and the dialect's corners."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest

from nanovllm_cli.errors import TemplateError, UsageError
from nanovllm_cli.models.registry import HF_ARCHITECTURES
from nanovllm_cli.text.builtin_templates import BUILTIN_TEMPLATES, builtin_template
from nanovllm_cli.text.chat_template import ChatTemplate
from nanovllm_cli.text.tool_formats import tool_format

TEMPLATES = Path(__file__).resolve().parents[2] / "shared" / "data" / "templates"
NAMES = sorted(path.name for path in TEMPLATES.glob("*.jinja"))

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Gets <weather> for a "city" & more \u00e9',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city", "enum": ["Berlin", "K\u00f6ln"]},
                    "days": {"type": "integer", "default": 3},
                    "options": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}},
}
TEXT_CALL = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Berlin"}'}}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefgh1", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("Hello <b>x</b> \u00e9\n ")],
    "system": [SYSTEM, user("Hi")],
    "turns": [SYSTEM, user("Hi"), assistant("Hello!"), user("More")],
    "turns without system": [user("Hi"), assistant("Hello!"), user("More")],
    "thinking in the text": [user("Hi"), assistant("<think>\nhm\n</think>\n\nHello!"), user("More")],
    "thinking apart": [user("Hi"), assistant("Hello!", reasoning_content="hm"), user("More")],
    "thinking under another name": [user("Hi"), assistant("Hello!", thinking="hm")],
    "thinking last": [user("Hi"), assistant("Hello!", reasoning_content="hm")],
    "answer last": [user("Hi"), assistant("Hello!")],
    "tool": [user("Weather?"), assistant("", tool_calls=[CALL]), tool("sunny")],
    "tool, then an answer": [
        user("Weather?"), assistant(None, tool_calls=[CALL]), tool('{"t": 20}'), assistant("20 degrees"), user("thx"),
    ],
    "tool arguments as text": [user("Weather?"), assistant("let me see", tool_calls=[TEXT_CALL]), tool("rain")],
    "two tools": [user("Weather?"), assistant("", tool_calls=[CALL, CALL]), tool("sunny"), tool("rain")],
    "parts": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
    "two users": [user("a"), user("b")],
    "nothing": [],
    "unknown role": [{"role": "wizard", "content": "a"}],
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"tools": TOOLS},
    {"tools": TOOLS, "add_generation_prompt": False},
    {"tools": []},
    {"enable_thinking": False, "tools": TOOLS},
    {"documents": [{"title": "T", "text": "x"}]},
]


@pytest.mark.skipif(not NAMES, reason="the real templates are not here")
@pytest.mark.parametrize("name", NAMES)
def test_real_templates_render_as_in_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (TEMPLATES / name).read_text()
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    rendered = refused = 0
    for label, messages in CONVERSATIONS.items():
        for variant in VARIANTS:
            options = {"add_generation_prompt": True, **variant}
            refusal = ""
            given = {"tools": [], **options} if "Hermes" in name else options  # it fails without a list, and ours goes on
            try:
                expected = render_jinja_template(
                    [messages], chat_template=source, bos_token="<s>", eos_token="</s>", **given
                )[0][0]
            except Exception as error:
                refusal = str(error)
            if refusal:
                with pytest.raises(TemplateError) as caught:
                    template.render(messages, **options)
                assert refusal in caught.value.message, label
                refused += 1
            else:
                assert template.render(messages, **options) == expected, label
                rendered += 1
    assert rendered >= 40, (rendered, refused)


@pytest.mark.skipif(not NAMES, reason="the real templates are not here")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", ["Hel", "Hel ", "Hel\n\nlo  "])
def test_an_answer_is_continued_as_in_transformers(name: str, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (TEMPLATES / name).read_text()
    messages = [user("Hi"), assistant(content)]
    expected = render_jinja_template(
        [messages], tools=TOOLS, chat_template=source, bos_token="<s>", eos_token="</s>", continue_final_message=True
    )[0][0]
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert template.render(messages, tools=TOOLS, continue_final_message=True) == expected
    assert expected.endswith((content, content.rstrip()))
    assert messages[-1]["content"] == content


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source).render(list(messages), **options)


LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLVLM = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% else %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@pytest.mark.parametrize("source", [LLAVA, SMOLVLM, "{% for m in messages %}{{ m.content[0]['text'] + m.role }}{% endfor %}"])
def test_templates_that_read_parts_alone_lose_no_text(source: str) -> None:
    """Of models that see; some fail where a message is a text."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def parts(text: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text}]

    template = ChatTemplate(source)
    picture = user([{"type": "text", "text": "What is it?"}, {"type": "image"}])
    said = [SYSTEM, picture, assistant("A dog."), user("And now?")]
    told = [each if each is picture else {**each, "content": parts(each["content"])} for each in said]
    expected = render_jinja_template([told], chat_template=source, add_generation_prompt=True)[0][0]
    assert template.render(said) == expected == template.render(told)
    assert template.render([*said, assistant("A c")], continue_final_message=True).endswith("A c")
    assert ChatTemplate("{{ messages[0].content }}").render([user("a")]) == "a"


def test_json_is_written_as_transformers_writes_it() -> None:
    data = {"b": "<\u00e9 & '\">", "a": [1, 2.5, None, True]}
    assert render("{{ x | tojson }}", x=data) == json.dumps(data, ensure_ascii=False)
    assert render("{{ x | tojson(indent=2) }}", x=data) == json.dumps(data, ensure_ascii=False, indent=2)
    compact = json.dumps(data, separators=(",", ":"), sort_keys=True)
    assert render("{{ x|tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}", x=data) == compact


def test_date_blocks_loop_controls_and_generation_tag() -> None:
    assert render("{{ strftime_now('%Y-%m-%d') }}", now=datetime(2024, 2, 29)) == "2024-02-29"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    skipping = "{% for m in messages %}{% if m.content == 'b' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    assert render(skipping, user("a"), user("b"), user("c")) == "ac"
    assert render("{% if true %}\n  a\n  {% endif %}\n  b\n") == "  a\n  b"  # trimmed and stripped blocks
    stop = "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(stop) == "012"
    assert render("a{% generation %}{{ 'b' }}{% endgeneration %}c") == "abc"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ loop is defined }}", "False"),
        ("{% for x in [1,2] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/2,2/2"),
        ("{% for x in [1,2,3] if x > 1 %}{{ loop.index0 }}{{ x }} {% else %}none{% endfor %}", "02 13 "),
        ("{% for x in [] %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{% for x in [1,[2,[3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for a in [1,1,2] %}{{ loop.changed(a) }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}",
         "True1 False12 True1 "),
        ("{{ 1 < 2 < 3 }} {{ 1 < 2 > 3 }} {{ 'a' in 'abc' }} {{ 'd' not in ['a'] }} {{ nothing is none }}",
         "True False True True False"),
        ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
        ("{{ [1,2,3,4][1:3] }}{{ 'hello'[::-1] }}{{ (1, 2) }}{{ {'a': 1} }}", "[2, 3]olleh(1, 2){'a': 1}"),
        ("{% set ns = namespace(a=1) %}{% for i in range(3) %}{% set ns.a = ns.a * 2 %}{% endfor %}{{ ns.a }}", "8"),
        ("{% macro m(x, y=2) %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}"
         "{% call m(3) %}!{% endcall %}", "<12><32!>"),
        ("{{ '%s-%03d' % ('a', 7) }} {{ '%s' | format('b') }} {{ '{}:{:>4}'.format('c', 5) }}", "a-007 b c:   5"),
        ("{{ {'a': 1}.items() | list }}{{ {'b': 2} | items | list }}{{ dict(a=1) }}", "[('a', 1)][('b', 2)]{'a': 1}"),
        ("{{ ['b','a'] | sort | join('-') }} {{ [1,2] | sum }} {{ 'x' | center(5) }}|", "a-b 3   x  |"),
        ("{{ [{'r': 'a'}, {'r': 'b'}] | selectattr('r', 'equalto', 'b') | map(attribute='r') | list }}", "['b']"),
        ("{{ 'a b'.split() | map('upper') | join(',') }} {{ ' x '.strip() }} {{ 'ab'.startswith('a') }}", "A,B x True"),
        ("{{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 7 % 3 }} {{ -3 }} {{ 'ab' * 2 }} {{ [1] + [2] }}",
         "1024 3 3.5 1 -3 abab [1, 2]"),
        ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set t %}x{{ a }}{% endset %}{{ t }}", "12x1"),
        ("{% filter upper %}ab{{ 'c' }}{% endfilter %}", "ABC"),
        ("{{ none }}{{ true }}{{ missing }}{{ 1.5 }}", "NoneTrue1.5"),
    ],
)  # fmt: skip
def test_the_metered_environment_computes_what_jinja_computes(source: str, expected: str) -> None:
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    assert plain.from_string(source).render() == expected  # the expectation itself, by Jinja
    assert render(source) == expected


def test_refusals_carry_the_templates_own_words() -> None:
    with pytest.raises(TemplateError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.hint


@pytest.mark.parametrize(
    "source",
    [
        "{{ ",
        "{% if %}",
        "{% for x in y %}",
        "{{ x | nofilter }}",
        "{% nosuchtag %}",
        "{{ 1 is nosuchtest }}",
        "{% endif %}",
    ],
)
def test_broken_templates_are_typed_errors(source: str) -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source", ["{{ missing.x.y }}", "{{ 1 + 'a' }}", "{{ messages[5].role }}", "{{ [] | first + 1 }}"]
)
def test_failing_expressions_are_typed_errors(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize(
    "messages", ["hi", [1], {"role": "user"}, [["role"]], [{"role": "user", "content": object()}], 5]
)
def test_messages_that_are_not_plain_data_are_usage_errors(messages: Any) -> None:
    with pytest.raises(UsageError):
        ChatTemplate("{{ messages }}").render(messages)


def test_messages_nested_too_deeply_are_usage_errors() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="deep"):
        render("x", user(deep))


def test_continuing_needs_a_last_message_with_text() -> None:
    for messages in ([], [user(None)], [user([{"type": "image"}])]):
        with pytest.raises(UsageError):
            ChatTemplate("{{ messages }}").render(messages, continue_final_message=True)
    with pytest.raises(TemplateError, match="drops the end"):
        ChatTemplate("hello").render([user("x")], continue_final_message=True)


# Worked by hand from the models' documentation.
BUILTIN_EXPECTED = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nU [/INST] A </s><s>[INST] V [/INST]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nV<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s>[INST] S\n\nU [/INST] A</s>[INST] V [/INST]",
    "zephyr": "<|system|>\nS</s>\n<|user|>\nU</s>\n<|assistant|>\nA</s>\n<|user|>\nV</s>\n<|assistant|>\n",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\nA<|end|>\n<|user|>\nV<|end|>\n<|assistant|>\n",
    "gemma": "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n",
    "alpaca": "<s>S\n\n### Instruction:\nU\n\n### Response:\nA</s>\n\n### Instruction:\nV\n\n### Response:\n",
    "vicuna": "<s>S\n\nUSER: U\nASSISTANT: A</s>\nUSER: V\nASSISTANT:",
    "plain": "<s>S\nU\nA\nV",
    "rwkv": "System: S\n\nUser: U\n\nAssistant: A\n\nUser: V\n\nAssistant:",
    "deepseek-v3.2": "<s>S<｜User｜>U<｜Assistant｜></think>A</s><｜User｜>V<｜Assistant｜></think>",
    "deepseek-v4": "<s>S<｜User｜>U<｜Assistant｜></think>A</s><｜User｜>V<｜Assistant｜></think>",
    "paligemma": "<s>U\n",
    "got-ocr": "<|im_start|>system\nS<|im_end|><|im_start|>user\nU<|im_end|><|im_start|>assistant\nA<|im_end|>"
    "<|im_start|>user\nV<|im_end|><|im_start|>assistant\n",
}


@pytest.mark.parametrize("name", sorted(BUILTIN_TEMPLATES))
def test_builtin_templates_write_their_formats(name: str) -> None:
    messages = [{"role": "system", "content": "S"}, user("U"), assistant("A"), user("V")]
    messages = messages[1:2] if name == "paligemma" else messages  # which has no conversations
    template = ChatTemplate(builtin_template(name), bos_token="<s>", eos_token="</s>")
    assert template.render(messages) == BUILTIN_EXPECTED[name]
    assert "U" in template.render([user("U")])


def test_a_deepseek_v4_reasons_where_it_is_asked_to() -> None:
    """What it has reasoned before is gone; messages that follow each other are one."""
    template = ChatTemplate(builtin_template("deepseek-v4"), bos_token="<s>", eos_token="</s>")
    messages = [user("T"), user("U"), {**assistant("A"), "reasoning_content": "R"}, user("V")]
    expected = "<s><｜User｜>T\n\nU<｜Assistant｜></think>A</s><｜User｜>V<｜Assistant｜><think>"
    assert template.render(messages, thinking=True) == expected
    with pytest.raises(TemplateError, match="has no such role"):
        template.render([{"role": "judge", "content": "1"}])


@pytest.mark.parametrize("thinks", [False, True])
def test_calls_and_results_of_a_deepseek_v4(thinks: bool) -> None:
    """Worked by hand from the encoding that its publisher describes: what was reasoned stays where there are calls."""
    template = ChatTemplate(builtin_template("deepseek-v4"), bos_token="<s>", eos_token="</s>")
    calls = [{"function": {"name": "add", "arguments": {"text": "x\"y", "numbers": [1, None]}}},
             {"function": {"name": "now", "arguments": "soon"}}]  # fmt: skip
    messages = [user("U"), {**assistant(None), "reasoning_content": "R", "tool_calls": calls},
                {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, user("V")]  # fmt: skip
    expected = (
        "<s><｜User｜>U<｜Assistant｜>" + ("<think>R" if thinks else "") + "</think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="text" string="true">x"y</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="numbers" string="false">[1, null]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="arguments" string="true">soon</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls></s><｜User｜><tool_result>1</tool_result>\n\n<tool_result>2</tool_result>\n\nV<｜Assistant｜>"
        + ("<think>" if thinks else "</think>")
    )
    assert template.render(messages, thinking=thinks) == expected
    assert tool_format(template.source).name == "deepseek_v4"


@pytest.mark.parametrize("thinks", [False, True])
def test_calls_and_results_of_a_deepseek_v32(thinks: bool) -> None:
    """Worked by hand from the encoding that its publisher describes: what was reasoned stays from the last question on."""
    template = ChatTemplate(builtin_template("deepseek-v3.2"), bos_token="<s>", eos_token="</s>")
    calls = [{"function": {"name": "add", "arguments": {"text": "x\"ö", "numbers": [1, None, "ö"]}}},
             {"function": {"name": "now", "arguments": {}}}]  # fmt: skip
    called = {**assistant(None), "reasoning_content": "R", "tool_calls": calls}
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    written = (
        "\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="text" string="true">x"ö</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="numbers" string="false">[1, null, "ö"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls></s>'
        "\n\n<function_results>\n<result>1</result>\n<result>2</result>\n</function_results>"
    )
    head, end = "<s><｜User｜>U<｜Assistant｜>", "<think>" if thinks else "</think>"
    reasoned = "<think>R</think>" if thinks else "</think>"
    assert template.render([user("U"), called, *results], thinking=thinks) == f"{head}{reasoned}{written}\n\n{end}"
    answered = [user("U"), called, *results, {**assistant("A"), "reasoning_content": "Q"}, user("V")]
    expected = f"{head}</think>{written}\n\n</think>A</s><｜User｜>V<｜Assistant｜>{end}"
    assert template.render(answered, thinking=thinks) == expected
    begun = template.render([user("U"), assistant("A")], thinking=thinks, continue_final_message=True)
    assert begun == f"{head}{'<think>' if thinks else ''}</think>A"
    assert template.render([user("U")], thinking=thinks, add_generation_prompt=False) == "<s><｜User｜>U"
    assert tool_format(template.source).name == "deepseek_v32"
    with pytest.raises(TemplateError, match="has no such role"):
        template.render([{"role": "judge", "content": "1"}])


def test_models_without_a_template_have_one_that_is_there() -> None:
    named = {family.name: family.template for family in HF_ARCHITECTURES.values() if family.template}
    assert named["deepseek32"] == "deepseek-v3.2"
    assert set(named.values()) <= BUILTIN_TEMPLATES.keys()
    assert "axk2" not in named  # which is one of those, and brings its own


def test_builtin_templates_are_found_by_name() -> None:
    with pytest.raises(TemplateError, match=r"known: .*chatml"):
        builtin_template("nonsense")
