"""Grammars of tool calls, followed by llguidance itself over a real vocabulary and over bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm_cli.constrain.grammar import check
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.text.answer_format import AnswerFormat, answer_format
from nanovllm_cli.text.tool_calls import Tool, joined_calls, tools_of
from nanovllm_cli.text.tool_grammar import Marked
from tool_answers import MESSAGES, ONE

llguidance = pytest.importorskip("llguidance", reason="llguidance is not installed")

VOCABULARY = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers" / "qwen2.tokenizer.json"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None, *, strict: bool = False) -> Tool:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return tools_of([{"type": "function", "function": function}])[0]


TOOLS = (tool("weather", PLACE), tool("now"))
STRICT = (tool("weather", PLACE, strict=True), tool("now"))


class Bytes:
    """A vocabulary of bytes and some special tokens behind them."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, special: tuple[str, ...] = ()) -> None:
        names = [b"<end>", *(name.encode() for name in special)]
        self.tokens = [bytes([i]) for i in range(256)] + names
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.ids = {name: 257 + i for i, name in enumerate(special)}

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        """Special tokens as such."""
        ids: list[int] = []
        while text:
            name = next((name for name in self.ids if text.startswith(name)), None)
            ids += [self.ids[name]] if name else list(text[0].encode())
            text = text[len(name) if name else 1 :]
        return ids


def follows(grammar: str, tokenizer: Any, ids: list[int]) -> bool:
    """Whether a whole answer of these ids is allowed."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def allows(known: AnswerFormat, answer: str, choice: str = "required", tools: Any = TOOLS, **options: Any) -> bool:
    """Over bytes, once with the tags as special tokens and once as text; both agree."""
    given = []
    tags = tags_of(known)
    for special in ((), tags):
        vocabulary = Bytes(special)
        form = AnswerFormat(known.reasoning, known.tools, vocabulary.ids)
        constraint = form.constraint(tools, choice, **options)
        assert constraint is not None
        assert constraint.kind == "lark"
        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
        given.append(follows(constraint.text, tokenizer, vocabulary.encode(answer)))
    assert given[0] == given[1]
    return given[0]


BEFORE = {
    "harmony": "<|channel|>final<|message|>", "muse": " to=user<|message|>", "solar": "<|content|>", "functionary_v32": "all\n"
}  # fmt: skip
"""What begins content."""
MESSAGE_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>", "<|eom|>")


def tags_of(known: AnswerFormat) -> tuple[str, ...]:
    """What may be special tokens."""
    tags = (tag for tag in known.tools.tags if tag.endswith((">", "]", "｜", "[>[")) and not isinstance(tag, Marked))
    return (MESSAGE_TAGS if known.name in MESSAGES else ()) + tuple(tags)


def known(name: str, reasoning: str = "none") -> AnswerFormat:
    return answer_format("", tools=name, reasoning=reasoning)


@pytest.mark.parametrize("name", ONE)
def test_a_demanded_call_is_allowed_and_others_are_not(name: str) -> None:
    call = ONE[name]
    assert allows(known(name), call)
    assert allows(known(name), call, "weather")
    assert not allows(known(name), call, "now")
    assert not allows(known(name), call.replace("weather", "whether"))
    assert not allows(known(name), call.replace("3", "few"))
    assert not allows(known(name), call.replace("days", "weeks"))
    assert not allows(known(name), "It is raining.")
    assert not allows(known(name), "")


@pytest.mark.parametrize("name", ONE)
def test_free_choice_holds_only_strict_tools(name: str) -> None:
    call = ONE[name]
    assert known(name).constraint(TOOLS, "auto") is None
    assert known(name).constraint(TOOLS, "none") is None
    free = BEFORE.get(name, "") + "It is raining {a} [b]."
    assert allows(known(name), free, "auto", STRICT)
    assert allows(known(name), call, "auto", STRICT)
    assert not allows(known(name), call.replace("weather", "whether"), "auto", STRICT)
    assert not allows(known(name), call.replace("3", "few"), "auto", STRICT)


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["free", "strict"])
def test_an_answer_that_is_no_call_has_the_form_that_was_asked_for(name: str, tools: tuple[Tool, ...]) -> None:
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    form = Constraint("json_schema", json.dumps(schema))
    before = BEFORE.get(name, "")
    if name in ("llama", "json", "pythonic"):  # nothing marks a call
        with pytest.raises(UnsupportedError):
            known(name).constraint(tools, "auto", form=form)
        return
    assert allows(known(name), ONE[name], "auto", tools, form=form)
    assert allows(known(name), before + '{"rain": true}', "auto", tools, form=form)
    assert not allows(known(name), before + '{"rain": 1}', "auto", tools, form=form)
    assert not allows(known(name), before + "It is raining.", "auto", tools, form=form)
    assert known(name).constraint(tools, "none", form=form) == known(name).constraint((), "auto", form=form) == form
    assert known(name).constraint(tools, "required", form=form) == known(name).constraint(tools, "required")


MARKED = [name for name in ONE if name not in ("llama", "json", "pythonic")]


@pytest.mark.parametrize("name", MARKED)
def test_beside_calls_an_expression_is_held_to(name: str) -> None:
    before = BEFORE.get(name, "")
    for form, good, bad in [
        (Constraint("regex", "[0-9]+/[0-9]+(\\n|\n)?"), ("1/2", "31/12\n"), ("", "1", "1/2x", "1/2\n\n")),
        (Constraint("choice", '["yes", "no \\"/\\\\", "\\n"]'), ("yes", 'no "/\\', "\n"), ("", "y", "no", "yesyes")),
    ]:
        assert allows(known(name), ONE[name], "auto", form=form)
        assert [text for text in (*good, *bad) if allows(known(name), before + text, "auto", form=form)] == list(good)


def followed(name: str, special: tuple[str, ...], form: Constraint, answer: str) -> bool:
    """Beside strict tools that may be called, where these tags are special tokens."""
    vocabulary = Bytes(special)
    constraint = AnswerFormat(None, known(name).tools, vocabulary.ids).constraint(STRICT, "auto", form=form)
    assert constraint is not None
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary))
    return follows(constraint.text, tokenizer, vocabulary.encode(answer))


@pytest.mark.parametrize("name", MARKED)
def test_beside_calls_a_grammar_is_held_to_where_a_token_begins_them(name: str) -> None:
    """The grammar takes any line, and has names and white space of its own."""
    lark = Constraint("lark", '%llguidance {}\nstart: r0 ";" T0\nr0: "a" "b"\nT0: /[^\\n]*/\n%ignore / +/')
    before = BEFORE.get(name, "")
    tags = tags_of(known(name))
    if name not in BEFORE:
        with pytest.raises(UnsupportedError, match="ordinary text"):
            followed(name, (), lark, "ab;")
    if name in ("phi", "minicpm", "command_r", "functionary_v31"):  # no token of its vocabulary begins a call
        return
    for good in ("ab;x", "a b ; }", "ab;" + "<" * 9, "ab;"):
        assert followed(name, tags, lark, before + good), good
    for bad in ("", "abx", "ab", "ab;\n", "It is raining."):
        assert not followed(name, tags, lark, before + bad), bad
    assert followed(name, tags, lark, ONE[name])
    assert not followed(name, tags, lark, ONE[name].replace("3", "few"))


def test_an_expression_lets_no_call_by_that_is_none_of_the_tools() -> None:
    form = Constraint("regex", "(?s:.*)")
    assert allows(known("hermes"), ONE["hermes"], "auto", STRICT, form=form)
    assert allows(known("hermes"), "any text", "auto", STRICT, form=form)
    assert not allows(known("hermes"), ONE["hermes"].replace("weather", "whether"), "auto", STRICT, form=form)


TWO = {
    "hermes": ONE["hermes"] + "\n" + ONE["hermes"],
    "llama": ONE["llama"] + "; " + ONE["llama"],
    "json": ONE["json"] + "\n" + ONE["json"],
    "pythonic": ONE["pythonic"][:-1] + ", now()]",
    "mistral": ONE["mistral"] * 2,
    "mistral_list": ONE["mistral_list"][:-1] + ', {"name": "now", "arguments": {}}]',
    "deepseek": ONE["deepseek"].replace(
        "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "gemma4": ONE["gemma4"] + "<|tool_call>call:now{}<tool_call|>",
    "glm": ONE["glm"] + "\n<tool_call>now\n</tool_call>",
    "hy3": ONE["hy3"].replace(
        "</tool_calls", "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls"
    ),
    "qwen3_coder": ONE["qwen3_coder"] + "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed": ONE["seed"] + "\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "minimax": ONE["minimax"].replace("</minimax", '<invoke name="now">\n</invoke>\n</minimax'),
    "deepseek_v32": ONE["deepseek_v32"].replace("</｜DSML｜f", '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜f'),
    "kimi_k3": ONE["kimi_k3"].replace(
        "<|close|>tools", '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools'
    ),
    "minimax_m1": ONE["minimax_m1"].replace("</", '{"name": "now", "arguments": {}}\n</'),
    "minimax_m3": ONE["minimax_m3"].replace(
        "]<]minimax[>[</tool", ']<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool'
    ),
    "minicpm": ONE["minicpm"] + '\n<function name="now"></function>',
    "tool_calls": ONE["tool_calls"].replace("]<", ', {"name": "now", "arguments": {}}]<'),
    "cohere": ONE["cohere"].replace("\n]", ',\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]'),
    "command_r": ONE["command_r"].replace(
        "\n]", ',\n    {\n        "tool_name": "now",\n        "parameters": {}\n    }\n]'
    ),
    "solar": ONE["solar"] + "<|tool_call:begin|>0123456789<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>",
    "functionary_v31": ONE["functionary_v31"] + "\n<function=now>{}</function>",
    "functionary_v32": ONE["functionary_v32"] + ">>>now\n{}",
    "muse": ONE["muse"] + '<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n'
            '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
    "olmo": ONE["olmo"].replace("</", "\nnow()</"),
    "internlm": ONE["internlm"] + '<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
}  # fmt: skip


@pytest.mark.parametrize("name", TWO)
def test_several_calls_only_where_they_are_parallel(name: str) -> None:
    assert allows(known(name), TWO[name])
    assert not allows(known(name), TWO[name], parallel=False)
    assert not allows(known(name), TWO[name], "weather")
    assert allows(known(name), ONE[name], parallel=False)


@pytest.mark.parametrize("name", ["hermes", "mistral", "glm", "gemma4", "qwen3_coder", "deepseek"])
def test_text_goes_on_around_free_calls(name: str) -> None:
    text = f"One moment.\n\n{ONE[name]}\nAnd again: {ONE[name]} Done <i>."
    assert allows(known(name), text, "auto", STRICT)
    assert not allows(known(name), text.replace("3", "few"), "auto", STRICT)
    assert not allows(known(name), text + ONE[name].replace("weather", "whether"), "auto", STRICT)


def test_free_text_does_not_begin_calls_another_way() -> None:
    call = ONE["qwen3_coder"].removeprefix("<tool_call>\n")
    assert not allows(known("qwen3_coder"), call, "auto", STRICT)
    assert not allows(known("llama"), 'Yes <function=weather>{"city": 3}</function>', "auto", STRICT)
    assert not allows(known("llama"), '[{"name": "weather", "parameters": {}}]', "auto", STRICT)
    assert allows(known("llama"), "", "auto", STRICT)
    assert allows(known("llama"), " \n3 [a] {b}", "auto", STRICT)


def test_tools_that_are_not_strict_may_be_called_with_anything_where_the_model_is_free() -> None:
    for arguments in ('{"a": [1]}', "{}"):
        call = f'<tool_call>\n{{"name": "now", "arguments": {arguments}}}\n</tool_call>'
        assert allows(known("hermes"), call, "auto", STRICT)
    assert not allows(known("hermes"), call.replace("{}", '{"a": 1}'), "now")
    call = "<tool_call>\n<function=now>\n<parameter=a-1>\nx <b>\n</parameter>\n</function>\n</tool_call>"
    assert allows(known("qwen3_coder"), call, "auto", STRICT)
    assert not allows(known("qwen3_coder"), call, "required")


def test_line_breaks_may_follow_reasoning() -> None:
    assert allows(known("hermes", "think"), "\n\n" + ONE["hermes"])
    assert not allows(known("hermes"), "\n\n" + ONE["hermes"])


def test_white_space_in_arguments_has_a_bound() -> None:
    call = ONE["hermes"]
    assert allows(known("hermes"), call.replace(", ", ",").replace('"name": "weather","arg', '"name": "weather", "arg'))
    assert allows(known("hermes"), call.replace(' "days": 3', '\n    "days": 3\n  '))
    assert not allows(known("hermes"), call.replace('"days": 3', "\n" * 3 + '"days": 3'))


def test_gpt_oss_may_reason_and_speak_before_a_call() -> None:
    call = ONE["harmony"]
    begin = "<|start|>assistant"
    assert allows(known("harmony"), begin + call)
    assert allows(known("harmony"), call.replace(" <|constrain|>json", ""))
    said = f"<|channel|>analysis<|message|>Hm.<|end|>{begin}<|channel|>commentary<|message|>I look.<|end|>{begin}"
    assert allows(known("harmony"), said + call, "auto", STRICT)
    assert not allows(known("harmony"), said + call)
    assert not allows(known("harmony"), said + call.replace("3", "few"), "auto", STRICT)


PARAMETERS = {
    "type": "object",
    "$defs": {"Unit": {"enum": ["C", "F"]}},
    "properties": {
        "maybe": {"type": "string", "maxLength": 3},
        "unit": {"$ref": "#/$defs/Unit"},
        "kind": {"type": "string", "enum": ["a/b", "c\n"]},
        "one": {"const": "x"},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
        "least": {"type": "string", "minLength": 2},
    },
    "required": ["unit"],
}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"unit": "C"}, True),
        ({"unit": '"C"'}, False),
        ({"unit": "K"}, False),
        ({"maybe": "abc"}, False),
        ({"unit": "C", "maybe": "abc"}, True),
        ({"unit": "C", "maybe": "abcd"}, False),
        ({"unit": "C", "maybe": "</p"}, True),
        ({"unit": "C", "least": "ab"}, True),
        ({"unit": "C", "least": "\n\n"}, True),
        ({"unit": "C", "least": "\n"}, False),
        ({"unit": "C", "kind": "a/b"}, True),
        ({"unit": "C", "kind": "c\n"}, True),
        ({"unit": "C", "kind": "c"}, False),
        ({"unit": "C", "one": "x", "count": "null", "note": "any <text>\n"}, True),
        ({"unit": "C", "one": "y"}, False),
        ({"unit": "C", "count": "few"}, False),
        ({"unit": "C", "other": "x"}, False),
    ],
)
def test_arguments_between_tags_follow_their_schema(arguments: dict[str, str], fits: bool) -> None:
    tools = (tool("f", PARAMETERS, strict=True),)
    qwen = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    assert (
        allows(known("qwen3_coder"), f"<tool_call>\n<function=f>\n{qwen}</function>\n</tool_call>", tools=tools) == fits
    )
    glm = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments.items())
    assert allows(known("glm"), f"<tool_call>f\n{glm}</tool_call>", tools=tools) == fits


@pytest.mark.parametrize("name", ["qwen3_coder", "seed", "minimax", "minicpm", "muse", "glm", "hy3", "deepseek_v32", "kimi_k3"])
def test_a_value_ends_for_a_grammar_where_it_does_for_its_reader(name: str) -> None:
    call = ONE[name]
    end = next(tag for tag in ("</parameter>", "</param>", "</atem:parameter>", "</arg_value>", "</arg_value:opensource>",
                               "</｜DSML｜parameter>", "<|close|>argument<|sep|>") if tag in call)  # fmt: skip
    assert allows(known(name), call)
    assert not allows(known(name), call.replace("Köln", f"Köln{end}x"))
    unbroken = call.replace(f"Köln\n{end}", f"Köln{end}")
    assert allows(known(name), unbroken)
    assert not allows(known(name), unbroken.replace("3", "few"))


@pytest.mark.parametrize("length", [-1, 2.5, "2", True])
def test_a_length_that_is_none_is_its_senders_mistake(length: Any) -> None:
    for keyword in ("minLength", "maxLength"):
        tools = (tool("f", {"properties": {"a": {"type": "string", keyword: length}}}),)
        with pytest.raises(UsageError):
            known("qwen3_coder").constraint(tools, "required")


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ("", True),
        ("a=1", True),
        ("b=2", True),
        ("a=1, c=3", True),
        ("b=2, c=3", True),
        ("b=2, a=1", False),
        ("a=1,", False),
    ],
)
def test_arguments_of_python_calls_may_be_left_out(arguments: str, fits: bool) -> None:
    numbers = {name: {"type": "integer"} for name in "abc"}
    tools = (tool("f", {"type": "object", "properties": numbers}),)
    assert allows(known("pythonic"), f"[f({arguments})]", tools=tools) == fits


@pytest.mark.parametrize("schema", [{"type": "string", "format": "date"}, {"type": "string", "pattern": "a+"}])
def test_what_a_format_cannot_hold_a_strict_tool_to_is_refused(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    for name in ("qwen3_coder", "glm", "gemma4"):
        with pytest.raises(UnsupportedError, match="the strict tool 'f'"):
            known(name).constraint((tool("f", parameters, strict=True),), "required")
        assert known(name).constraint((tool("f", parameters),), "required") is not None
        with pytest.raises(UnsupportedError, match="'anyOf'"):
            known(name).constraint((tool("f", {"anyOf": [parameters]}, strict=True),), "auto")
    assert known("hermes").constraint((tool("f", parameters, strict=True),), "required") is not None


@pytest.mark.parametrize("name", ["glm", "gemma4", "qwen3_coder", "pythonic", "hermes"])
@pytest.mark.parametrize(
    "broken", [{"required": None}, {"required": 5}, {"required": "a"}, {"properties": {"a": {"enum": 5}}}]
)
def test_a_schema_that_is_none_is_its_senders_mistake(name: str, broken: dict[str, Any]) -> None:
    parameters = {"properties": {"a": {"type": "string"}}} | broken
    with pytest.raises(UsageError):  # ours, or what llguidance's becomes
        check(known(name).constraint((tool("f", parameters),), "required") or Constraint("json_object"))


def test_choices_that_no_tool_can_answer_are_refused() -> None:
    with pytest.raises(UsageError, match="no tools"):
        known("hermes").constraint((), "required")
    with pytest.raises(UsageError, match="'later'"):
        known("hermes").constraint(TOOLS, "later")
    with pytest.raises(UsageError, match="properties"):
        known("glm").constraint((tool("f", {"properties": []}),), "required")
    assert known("hermes").constraint((), "none") is None


def test_names_and_keys_are_text_and_no_grammar() -> None:
    """A name may hold whatever Lark means something by."""
    odd = tool(
        'a"b\\ {<[1]>} /é', {"type": "object", "properties": {'k"/\\': {"type": "integer"}}, "required": ['k"/\\']}
    )
    call = f'<tool_call>\n{{"name": {json.dumps(odd.name, ensure_ascii=False)}, "arguments": {{"k\\"/\\\\": 1}}}}\n</tool_call>'
    assert allows(known("hermes"), call, tools=(odd,))
    assert allows(known("deepseek"), ONE["deepseek"].partition("weather")[0] + odd.name + "<｜tool▁sep｜>"
                  '{"k\\"/\\\\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', tools=(odd,))  # fmt: skip


@pytest.mark.skipif(not VOCABULARY.exists(), reason="the real vocabulary is not here")
def test_over_a_real_vocabulary() -> None:
    tokenizer = llguidance.LLTokenizer(VOCABULARY.read_text(), eos_token=151645)
    for name in ("hermes", "qwen3_coder", "llama"):
        for choice, tools in (("required", TOOLS), ("auto", STRICT)):
            constraint = known(name).constraint(tools, choice)
            assert constraint is not None
            assert follows(constraint.text, tokenizer, tokenizer.tokenize_str(ONE[name]))
            assert not follows(constraint.text, tokenizer, tokenizer.tokenize_str(ONE[name].replace("3", "few")))


def test_a_model_that_must_call_calls() -> None:
    """The bundled model knows nothing of tools; held to the grammar, its answers are calls all the same."""
    from nanovllm_cli import LLM, SamplingParams

    schema = {
        "type": "object",
        "properties": {"days": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["days", "ok"],
    }
    tools = (tool("weather", {**schema, "additionalProperties": False}), tool("now"))
    with LLM("tiny", tool_format="hermes", shows_calls=True) as llm:
        form = llm.answer_format
        assert form is not None
        params = SamplingParams(
            temperature=1.0, seed=3, n=4, max_tokens=80, constraint=form.constraint(tools, "required")
        )
        [output] = llm.chat([{"role": "user", "content": "How will it be?"}], params)
        finished = [each for each in output.outputs if each.finish_reason == "stop"]
        assert finished
        for each in finished:
            parser = form.parser("", tools)
            delta, last = parser.push(each.text), parser.finish()
            assert (delta.content, last.content) == ("", "")
            calls = joined_calls([*delta.calls, *last.calls])
            assert calls
            for call in calls:
                arguments = json.loads(call.arguments)
                if call.name == "now":
                    assert arguments == {}
                else:
                    assert call.name == "weather"
                    assert isinstance(arguments["days"], int)
                    assert isinstance(arguments["ok"], bool)
