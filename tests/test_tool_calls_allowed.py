"""What the grammars allow is what the parsers read: values that may be of several types, and publishers' own variants."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nanovllm_cli.errors import UnsupportedError
from test_tool_grammar import allows, known, tool
from tool_answers import ONE, answer

UNIONS: dict[str, Any] = {
    "type": "object",
    "$defs": {"Mode": {"type": "string", "enum": ["fast", "slow"]}},
    "properties": {
        "mode": {"$ref": "#/$defs/Mode"},
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "level": {"oneOf": [{"enum": ["low", "high"]}, {"type": "integer"}]},
        "only": {"allOf": [{"type": "string", "maxLength": 3}]},
        "mixed": {"enum": [1, "one", None]},
        "both": {"allOf": [{"$ref": "#/$defs/Mode"}, {"description": "how"}]},
        "parts": {"allOf": [{"type": "string"}, {"minLength": 2}]},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("mode", "slow", "slow"),
        ("mode", '"slow"', None),
        ("mode", "medium", None),
        ("name", "Köln <3", "Köln <3"),
        ("name", "null", ...),
        ("level", "high", "high"),
        ("level", "12", 12),
        ("level", "tall", None),
        ("level", '"high"', None),
        ("only", "abc", "abc"),
        ("only", "abcd", None),
        ("mixed", "1", 1),
        ("mixed", "one", "one"),
        ("mixed", "2", None),
        ("both", "fast", "fast"),
        ("both", "quick", None),
        ("parts", "ab", "ab"),
        ("parts", "a", None),
    ],
)
def test_what_is_allowed_between_tags_is_read_as_the_schema_has_it(key: str, text: str, value: Any) -> None:
    """value: of the argument; None where the text is not allowed, ... where it is null."""
    for strict in (False, True):
        tools = (tool("f", UNIONS, strict=strict),)
        minimax = f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="{key}">{text}</parameter>\n</invoke>\n'
        glm = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
        for name, call in (("minimax", minimax + "</minimax:tool_call>"), ("glm", glm)):
            assert allows(known(name), call, tools=tools) == (value is not None)
            if value is not None:
                assert answer(known(name), call, tools=tools)[2] == [("f", {key: None if value is ... else value})]


def test_a_strict_tool_may_not_limit_what_text_can_be_taken_for() -> None:
    either = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"a": {"type": "integer"}}}]}
    parameters = {"type": "object", "properties": {"x": either}}
    with pytest.raises(UnsupportedError, match="'properties'"):
        known("glm").constraint((tool("f", parameters, strict=True),), "required")
    call = "<tool_call>f<arg_key>x</arg_key><arg_value>word</arg_value></tool_call>"
    assert allows(known("glm"), call, tools=(tool("f", parameters),))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value></tool_call><tool_call>now</tool_call>"),
        ("hermes", ONE["hermes"] + ONE["hermes"]),
        ("qwen3_coder", ONE["qwen3_coder"] + ONE["qwen3_coder"]),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Köln"}[TOOL_CALLS]now[CALL_ID]012345678[ARGS]{}'),
    ],
)
def test_other_ways_of_publishers_to_write_calls(name: str, call: str) -> None:
    """GLM 4.7's without line breaks, Step's and Reka's without one between calls, Mistral's with ids."""
    assert allows(known(name), call)
    assert len(answer(known(name), call)[2]) == 2
    assert not allows(known(name), call, parallel=False)


def test_references_that_branch_into_references_are_followed_in_time() -> None:
    """Each was followed as often as there are ways to it."""
    branching = {f"L{depth}": {"anyOf": [{"$ref": f"#/$defs/L{depth + 1}"}] * 64} for depth in range(6)}
    definitions = {**branching, "L6": {"type": "integer"}, "Own": {"anyOf": [{"$ref": "#/$defs/Own"}] * 64}}
    properties = {f"p{place}": {"$ref": "#/$defs/L0"} for place in range(3)} | {"own": {"$ref": "#/$defs/Own"}}
    made = tool("f", {"type": "object", "$defs": definitions, "properties": properties})
    begun = time.process_time()
    assert (made.types("p2"), made.types("own")) == ({"integer"}, set())
    known("glm").constraint((made,), "required")
    assert time.process_time() - begun < 1
