"""Patterns and bounds of a schema: what an answer may be, against re and numbers as they are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from nanovllm_cli.constrain.grammar import compiled
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.rewriting import rewritten, rewritten_grammar
from nanovllm_cli.constrain.vocabulary import byte_vocabulary
from nanovllm_cli.constraint import Constraint, ConstraintKind

VOCABULARY = byte_vocabulary()
PATTERNS = [
    '^[^"]+$', r"^[^\\]+$", r'^[^"\\]*$', '^[^a"]$', '^[^"\n]+$', r'^[^\\/:*?"<>|]+$', '^(?:[^"]|b)+$', '^[^]"-]+$', '^[^-"]+$',
    r'^\[[^"]\]$', r"^[^\n]+$", r"^[^\x00-\x1f]+$", r'^[^\s"]+$', "^.$", r"^\S\W+$", '^[a"]+$',
]  # fmt: skip
TEXTS = ['"', "\\", 'a"b', "a\\b", "ab", "\n", "a\nb", "\t", "é", "-", "]", '[^"', '["]', "[a]", "/", "a/b", "!!"]


def accepts(kind: ConstraintKind, constraint: str, text: str) -> bool:
    followed = Matcher(compiled(Constraint(kind, constraint), VOCABULARY).deep_copy(), VOCABULARY)
    return all(followed.try_accept(byte) for byte in text.encode()) and followed.inner.is_accepting()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_lets_through_what_it_matches(pattern: str) -> None:
    """Quotes and backslashes too, which are written as escapes."""
    schema = {"type": "string", "pattern": pattern}
    for text in TEXTS:
        matches = re.search(pattern, text) is not None
        said = json.dumps(text, ensure_ascii=False)
        assert accepts("json_schema", json.dumps(schema), said) == matches, text
        assert accepts("lark", f'start: "<" %json {json.dumps(schema)} ">"', f"<{said}>") == matches, text


def test_no_character_class_lets_through_what_it_leaves_out() -> None:
    assert not accepts("json_schema", r'{"type": "string", "pattern": "^\\P{P}+$"}', r'"a\"b"')
    assert accepts("json_schema", r'{"type": "string", "pattern": "^\\P{P}+$"}', r'"ab"')


def test_patterns_of_names_hold_too() -> None:
    schema = json.dumps({"type": "object", "patternProperties": {'^[^"]+$': {}}, "additionalProperties": False})
    assert accepts("json_schema", schema, '{"a": 1}')
    assert not accepts("json_schema", schema, r'{"a\"": 1}')


def test_only_patterns_are_changed() -> None:
    kept: dict[str, Any] = {
        "const": {"pattern": "[^a]"}, "enum": [{"pattern": "[^a]"}], "default": {"pattern": "[^a]"},
        "properties": {"pattern": {"description": "[^a]"}, "const": {"type": "null"}},
    }  # fmt: skip
    assert rewritten(kept) == kept
    within = rewritten({"properties": {"const": {"items": {"pattern": "[^a]"}}}})
    assert within["properties"]["const"]["items"]["pattern"] != "[^a]"
    for grammar in ('start: "%json [^a]"', 'start: %json {"pattern": "[^a', "start: /[^a]/ %json true", "start: %json"):
        assert rewritten_grammar(grammar) == grammar


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.25", "0.0001"], ["0", "0.0", "-0", "0.6", "1"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.49"], ["0", "0.5", "0.50"]),
        ({"exclusiveMinimum": 2.0, "maximum": 2.5, "minimum": 1}, ["2.1", "2.5"], ["2", "2.0", "1", "1.5"]),
        ({"exclusiveMinimum": 100000, "maximum": 100000.5}, ["100000.25"], ["100000", "100000.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["-0", "0", "0.0", "-0.6"]),
        ({"minimum": -1.25, "exclusiveMaximum": -1}, ["-1.25", "-1.1"], ["-1", "-1.0", "-1.5"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1, "multipleOf": 0.5}, ["0.5"], ["0", "1", "0.25"]),
        ({"exclusiveMinimum": 0, "maximum": 0.9, "minimum": 0.5}, ["0.5", "0.9"], ["0", "0.4"]),
        ({"exclusiveMinimum": 0}, ["0.0001", "1", "7"], ["0", "-1"]),
    ],
)
def test_an_exclusive_bound_is_none_of_the_numbers(bounds: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    schema = json.dumps({"type": "number", **bounds})
    assert [text for text in [*allowed, *refused] if accepts("json_schema", schema, text)] == allowed
