"""Which format a model has, and what a reader of its answers sees."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import pytest

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.answer_format import answer_format, model_format, special_tokens
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from nanovllm_cli.text.reasoning import split
from tool_answers import ONE, TOOLS, answer, form, read

FORMATS: Mapping[str, tuple[str, str | None]] = {
    "{{ '<tool_call>' }}": ("hermes", None),
    "<think><tool_call><function=x><parameter=y>": ("qwen3_coder", "think"),
    "<tool_call><arg_key>": ("glm", None),
    "HYTK = ':opensource' '<think{}>' '<tool_calls{}>' '<tool_sep{}>' '<arg_key{}>'.format(HYTK)": ("hy3", "hy3"),
    "[TOOL_CALLS][": ("mistral_list", None),
    "[TOOL_CALLS]x[ARGS][THINK]": ("mistral", "mistral"),
    "<｜tool▁calls▁begin｜>": ("deepseek", None),
    "<｜tool▁calls▁begin｜>```json": ("deepseek_r1", None),
    "<|tool_calls_section_begin|>": ("kimi", None),
    "inner_token = '<|inner_prefix|>' … '<|tools_prefix|>' + '['": ("apertus", "apertus"),
    "<|tool_call|>": ("granite", None),
    "'<|tool_call>call:' + name": ("gemma4", None),
    '<|tool_call>{{ name }}<|"|><|channel>thought': ("gemma4", "gemma"),
    "<|tool_call>": ("json", None),
    "<start_function_call>call:": ("functiongemma", None),
    "List of tools: <|tool_list_start|>[]<|tool_list_end|>": ("lfm2", None),
    "<|tool_call_start|>": ("lfm2", None),
    "<|tool_call|><|/tool_call|>": ("phi4", None),
    "functools[": ("phi", None),
    "<|start_header_id|>": ("llama", None),
    "start with <function= and end with </function>\\n <|start_header_id|>": ("functionary_v31", None),
    "\\n>>>${recipient}\\n${content} <|start_header_id|> '>>>all\\n' + content": ("functionary_v32", None),
    "<|start_header_id|>[func_name1(params)]": ("pythonic", None),
    "<|channel|>analysis to=functions.": ("harmony", "harmony"),
    "<|im_start|>": ("json", None),
    "'<|start|>assistant to=self<|message|>' + message": ("json", "muse"),
    "'<|start|>assistant to=self<|message|>' '<|eom|>' '<atem:function_calls>\\n'": ("muse", "muse"),
    "'<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' <seed:think>": ("seed", "seed"),
    "dsml_token = '｜DSML｜' '<' + dsml_token + 'function_calls>' <think> message['tool_calls']": ("deepseek_v32", "think"),
    "dsml_token = '｜DSML｜' '<' + dsml_token + 'tool_calls>' <think>": ("deepseek_v4", "think"),
    "'<|open|>' + tag + '<|sep|>' … '<|close|>' … '<|end_of_msg|>'": ("kimi_k3", "kimi_k3"),
    "ns_token = ']<]minimax[>[' ns_token ~ '<tool_call>' '<mm:think>'": ("minimax_m3", "minimax_m3"),
    "<minimax:tool_call>\\n<invoke name= <parameter name= </think>": ("minimax", "think"),
    """'<function name="' ~ name ~ '">' '<param name="'""": ("minicpm", None),
    "<tool_calls>[ <think> '<answer>' in content": ("tool_calls", "hunyuan"),
    "'\\n[BEGIN FINAL RESPONSE]\\n' '<tool_calls>['": ("tool_calls", "apriel"),
    "<beginning_of_sentence>ai <tool_calls>\\n": ("minimax_m1", None),
    "<TOOLCALL>[": ("nemotron", None),
    "<|START_THINKING|> <|START_ACTION|>[ <|START_RESPONSE|>": ("cohere", "cohere"),
    "<|START_THINKING|> <|START_ACTION|>[ <|START_TEXT|>": ("cohere", "cohere_text"),
    """'\\nAction:\\n```json\\n[\\n' + '"tool_name": "' + name""": ("command_r", None),
    "<|think|> <|content|> <|tool_calls|><|tool_call:begin|>": ("solar", "solar"),
    "<|role_sep|> <|message_sep|> '<|function_call|>' + call": ("gigachat", None),
    "'role': 'function call' role_sep=\"<|role_sep|>\\n\" message_sep=\"<|message_sep|>\"": ("gigachat_role", None),
    "<function_calls>": ("olmo", None),
    "List of tools: [ keep_past_thinking </think>": ("lfm2", "think"),
    "write your thoughts between <think></think>, your response between <response></response>": ("json", "granite"),
    r"'</think>\n\n<response>\n' + content": ("json", "granite"),
    r"<think> '<response>' + result + '</response>'": ("json", "think"),
}


@pytest.mark.parametrize("source", FORMATS)
def test_the_format_follows_from_the_template(source: str) -> None:
    known = answer_format(source)
    assert (known.name, known.reasoning.name if known.reasoning else None) == FORMATS[source]


def test_where_a_template_says_nothing_the_vocabulary_does() -> None:
    tags = {"<|tool_call_start|>": "lfm2", "<|action_start|>": "internlm", "<tool_call>": "json", "<|python_tag|>": "json"}
    assert {tag: answer_format("<|im_start|>", special_tokens={tag: 7}).name for tag in tags} == tags
    assert answer_format("<tool_call>", special_tokens={"<|action_start|>": 7}).name == "hermes"


def test_formats_by_name_count_instead() -> None:
    known = answer_format("<think><tool_call>", tools="mistral", reasoning="none")
    assert (known.name, known.reasoning) == ("mistral", None)
    with pytest.raises(UsageError, match="no such format") as refused:
        answer_format("", tools="no such format")
    assert "hermes" in str(refused.value.hint)
    with pytest.raises(UsageError, match="no such format") as refused:
        answer_format("", reasoning="no such format")
    assert "think" in str(refused.value.hint)


def test_the_names_that_vllm_has_for_them() -> None:
    tools = {"llama3_json": "llama", "kimi_k2": "kimi", "minimax_m2": "minimax", "hermes": "hermes", "openai": "harmony"}
    tools |= {"muse_glimmer": "muse", "kimi_k3": "kimi_k3", "deepseek_v32": "deepseek_v32", "deepseek_v4": "deepseek_v4"}
    assert {name: answer_format("", tools=name).name for name in tools} == tools
    reasoning = {"deepseek_r1": "think", "qwen3": "think", "openai_gptoss": "harmony", "mistral": "mistral", "ernie45": "granite"}
    found = {name: answer_format("", reasoning=name).reasoning for name in reasoning}
    assert {name: known and known.name for name, known in found.items()} == reasoning


def test_a_model_without_a_template_has_no_format() -> None:
    assert model_format(byte_tokenizer(), None) is None


def test_visible_are_the_tags_that_are_tokens() -> None:
    known = answer_format("<think><|tool_call|>", special_tokens={"<think>": 7, "<|tool_call|>": 8, "<|end|>": 9})
    assert {"<think>", "</think>", "<|tool_call|>"} <= set(known.visible)
    assert known.visible_ids(calls=True) == [7, 8]
    assert known.visible_ids(calls=False) == [7]
    assert set(special_tokens(byte_tokenizer()).values()) == byte_tokenizer().control_ids


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_tokens_that_belong_to_no_call_are_not_content(tools: tuple[()]) -> None:
    """As with skip_special_tokens; where the tag is ordinary text, it is text."""
    text = "Run <|python_tag|>print(1) and <|python_tag|>."
    tokens = form("llama", special=("<|python_tag|>",))
    assert answer(tokens, text, tools=tools) == ("", "Run print(1) and .", [])
    assert answer(form("llama"), text, tools=tools) == ("", text, [])


WRAPPED = {
    "hunyuan": [
        ("<think>\nhm\n</think>\n<answer>\nyes\n\nno\n</answer>", ("hm", "yes\n\nno")),
        ("<think>hm</think>yes <answer>no</answer>", ("hm", "yes <answer>no</answer>")),
        ("<think>hm</think>\n<answer>\nyes</answ", ("hm", "yes</answ")),
        ("<answer>yes</answer>", ("", "yes")),
        ("<think>hm</think><answer>", ("hm", "")),
        ("<think>hm</think><answ", ("hm", "<answ")),
    ],
    "granite": [("<think>hm</think><response>a < b\n</response>\n", ("hm", "a < b"))],
    "apriel": [
        ("Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nyes\n[END FINAL RESPONSE]\n", ("hm", "yes")),
        ("Here are my reasoning steps:\nhm\n[BEGIN FINAL RESPONSE]\nyes", ("hm", "yes")),
    ],
    "cohere": [("<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>", ("hm", "yes"))],
    "cohere_text": [("<|START_THINKING|><|END_THINKING|><|START_TEXT|>yes<|END_TEXT|>", ("", "yes"))],
    "solar": [
        ("<|think|>hm<|end|><|begin|>assistant<|content|>yes<|end|>", ("hm", "yes")),
        ("<|content|>yes", ("", "yes")),
        ("<|think|>hm<|end|><|begin|>assist", ("hm", "<|begin|>assist")),
    ],
}


@pytest.mark.parametrize(("name", "text", "parts"), [(name, *case) for name in WRAPPED for case in WRAPPED[name]])
def test_tags_around_the_content_are_no_content(name: str, text: str, parts: tuple[str, str]) -> None:
    assert answer(form("json", name), text)[:2] == parts
    known = form("json", name).reasoning
    assert known is not None
    assert tuple(split(text, known)) == parts


@pytest.mark.parametrize("part", [" ", "\n<", "</answer", "</answer> <answer>", "<answer>"])
def test_such_tags_are_found_in_linear_time(part: str) -> None:
    def seconds(size: int) -> float:
        known = form("json", "hunyuan").reasoning
        assert known is not None
        parser = known.parser("<think></think>")
        begun = time.process_time()
        for _ in range(size):
            parser.push(part)
        parser.finish()
        return time.process_time() - begun

    assert min(seconds(160_000) for _ in range(2)) < 12 * min(seconds(40_000) for _ in range(2)) + 0.1


def test_calls_stand_behind_such_content_or_in_its_place() -> None:
    hunyuan = answer_format("", tools="tool_calls", reasoning="hunyuan")
    call = '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'
    assert answer(hunyuan, f"<think>hm</think>\n<answer>Wait.</answer>\n{call}") == ("hm", "Wait.", [("now", {})])
    assert answer(hunyuan, f"<think>hm</think>\n{call}") == ("hm", "", [("now", {})])
    tags = ("<|think|>", "<|end|>", "<|begin|>", "<|content|>", "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>",
            "<|tool_call:args|>", "<|tool_call:end|>", "<|calls|>")  # fmt: skip
    solar = form("solar", "solar", special=tags)
    call = "<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>"
    for before in ("<|think|>hm<|end|><|begin|>assistant", ""):
        assert answer(solar, before + call) == ("hm" if before else "", "", [("now", {})])


@pytest.mark.parametrize("reasoning", ["none", "think", "gemma", "hunyuan"])
def test_how_much_is_held_is_known_at_once(reasoning: str) -> None:
    """It is asked at each token, and a model may write nothing but blanks."""
    for before in ("", "x", "<think>x</think>"):
        parser = form("hermes", reasoning).parser("", TOOLS)
        parser.push(before)
        begun = time.thread_time()
        for _ in range(40_000):
            parser.push(" ")
            assert parser.num_held >= 0
        assert time.thread_time() - begun < 2


def test_plain_answers_stay_as_they_are() -> None:
    for text in ("", " ", "\n\n", " a \n b \n", "a { b [ c <", "<tool_cal", "x" * 300):
        for name in ("hermes", "json", "llama", "glm"):
            assert read(form(name).parser(""), text) == ("", text, [])
            assert answer(form(name), text)[1:] == (text, [])


def test_reasoning_may_stay_in_the_content() -> None:
    text = '<think>\nNot <tool_call>{"name": "now"}</tool_call>.</think>\nYes.\n<tool_call>{"name": "now"}</tool_call>'
    kept = ("", '<think>\nNot <tool_call>{"name": "now"}</tool_call>.</think>\nYes.', [("now", {})])
    assert answer(form("hermes", "think"), text, splits_reasoning=False) == kept
    inside = text.removeprefix("<think>\n")
    assert answer(form("hermes", "think"), inside, "<think>\n", splits_reasoning=False) == (
        "",
        kept[1].removeprefix("<think>\n"),
        kept[2],
    )
    assert answer(form("hermes", "think"), text, splits_reasoning=False, tools=()) == ("", text, [])


def test_a_tag_of_reasoning_in_an_argument_is_part_of_it() -> None:
    """Also where no reasoning was before."""
    arguments = {"city": "a </think> b", "note": "</think>"}
    for name in ("hermes", "tool_calls", "mistral"):
        call = ONE[name].replace(json.dumps({"city": "Köln", "days": 3}, ensure_ascii=False), json.dumps(arguments))
        for before in ("", "Let me look.\n", "<think>hm</think>"):
            said = "Let me look." if before.startswith("L") else ""
            reasoning = "hm" if before.startswith("<") else ""
            assert answer(form(name, "think"), before + call) == (reasoning, said, [("weather", arguments)])


def test_orphan_tags_of_reasoning() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    assert answer(form("hermes", "think"), f"Yes.</think>\n{call}") == ("", "Yes.", [("now", {})])
    assert answer(form("hermes", "think"), f"<think>{call}") == (call, "", [])
    assert answer(form("hermes", "think"), f"{call}<think>") == ("", "<think>", [("now", {})])
