"""Answers taken apart: reasoning, content and calls, whole and in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanovllm_cli.errors import UsageError
from nanovllm_cli.text.answer_format import AnswerFormat, AnswerParser, answer_format
from nanovllm_cli.text.tool_calls import tools_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "place": {"type": "object"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = tools_of(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
    ]
)

Answer = tuple[str, str, list[tuple[str, str]]]


def read(parser: AnswerParser, *pieces: str) -> Answer:
    """Reasoning, content, and (name, arguments) of each call, as a client puts the deltas together."""
    reasoning, content, names, arguments, ids = "", "", [], [], []
    deltas = [*map(parser.push, pieces), parser.finish()]
    for delta in deltas:
        reasoning, content = reasoning + delta.reasoning, content + delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(names)
                assert call.id
                names.append(call.name)
                ids.append(call.id)
                arguments.append("")
            assert (call.name is None) == (call.id is None)
            arguments[call.index] += call.arguments
    assert len(set(ids)) == len(ids)
    assert parser.saw_calls == bool(names)
    return reasoning, content, list(zip(names, arguments, strict=True))


def answers(known: AnswerFormat, text: str, prompt: str = "", **options: Any) -> Answer:
    """What an answer is, whichever way it comes in."""
    options = {"tools": TOOLS, **options}

    def parser() -> AnswerParser:
        return known.parser(prompt, **options)

    whole = read(parser(), text)
    assert read(parser(), *text) == whole
    for size in (2, 3, 7):
        assert read(parser(), *(text[i : i + size] for i in range(0, len(text), size))) == whole
    for cut in range(1, len(text)):
        assert read(parser(), text[:cut], text[cut:]) == whole
    return whole


def known(name: str, reasoning: str = "none") -> AnswerFormat:
    return answer_format("", tools=name, reasoning=reasoning)


def calls(*expected: tuple[str, Any]) -> list[tuple[str, Any]]:
    return list(expected)


def decoded(answer: Answer) -> tuple[str, str, list[tuple[str, Any]]]:
    reasoning, content, found = answer
    return reasoning, content, [(name, json.loads(arguments)) for name, arguments in found]


def test_hermes() -> None:
    text = (
        "<think>hm <tool_call>{}</tool_call></think>\n\nOne moment.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln }"}}\n</tool_call>\n'
        '<tool_call>{"arguments":{"a":[1,{"b":null}]},"name":"now"}</tool_call>'
    )
    assert decoded(answers(known("hermes", "think"), text)) == (
        "hm <tool_call>{}</tool_call>",
        "One moment.",
        [("get_weather", {"city": "Köln }"}), ("now", {"a": [1, {"b": None}]})],
    )


def test_without_tools_nothing_is_a_call() -> None:
    text = 'a <tool_call>{"name": "now", "arguments": {}}</tool_call> b \n'
    assert answers(known("hermes"), text, tools=()) == ("", text, [])


def test_unknown_names_are_told() -> None:
    with pytest.raises(UsageError, match="no such format") as refused:
        answer_format("", tools="no such format")
    assert "hermes" in str(refused.value.hint)
    with pytest.raises(UsageError) as refused:
        answer_format("", reasoning="no such format")
    assert "think" in str(refused.value.hint)
