"""Calls of Command R, Functionary, Muse, DeepSeek V3.2, MiniMax and Kimi K3: what is only theirs."""

from __future__ import annotations

from typing import Any

import pytest

from nanovllm_cli.text.tool_calls import tools_of
from test_tool_grammar import STRICT, allows, known
from tool_answers import ONE, answer, form

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
