"""Which format a model has, and what a reader of its answers sees."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.answer_format import answer_format, model_format, special_tokens
from nanovllm_cli.text.byte_tokenizer import byte_tokenizer
from tool_answers import TOOLS, answer, form, read

FORMATS: Mapping[str, tuple[str, str | None]] = {
    "{{ '<tool_call>' }}": ("hermes", None),
    "<think><tool_call><function=x><parameter=y>": ("qwen3_coder", "think"),
    "<tool_call><arg_key>": ("glm", None),
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
    "List of tools: <|tool_list_start|>[]<|tool_list_end|>": ("lfm2", None),
    "<|tool_call_start|>": ("lfm2", None),
    "<|tool_call|><|/tool_call|>": ("phi4", None),
    "functools[": ("phi", None),
    "<|start_header_id|>": ("llama", None),
    "<|start_header_id|>[func_name1(params)]": ("pythonic", None),
    "<|channel|>analysis to=functions.": ("harmony", "harmony"),
    "<|im_start|>": ("json", None),
}


@pytest.mark.parametrize("source", FORMATS)
def test_the_format_follows_from_the_template(source: str) -> None:
    known = answer_format(source)
    assert (known.name, known.reasoning.name if known.reasoning else None) == FORMATS[source]


def test_formats_by_name_count_instead() -> None:
    known = answer_format("<think><tool_call>", tools="mistral", reasoning="none")
    assert (known.name, known.reasoning) == ("mistral", None)
    with pytest.raises(UsageError, match="no such format") as refused:
        answer_format("", tools="no such format")
    assert "hermes" in str(refused.value.hint)
    with pytest.raises(UsageError, match="no such format") as refused:
        answer_format("", reasoning="no such format")
    assert "think" in str(refused.value.hint)


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


def test_orphan_tags_of_reasoning() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    assert answer(form("hermes", "think"), f"Yes.</think>\n{call}") == ("", "Yes.", [("now", {})])
    assert answer(form("hermes", "think"), f"<think>{call}") == (call, "", [])
    assert answer(form("hermes", "think"), f"{call}<think>") == ("", "<think>", [("now", {})])
