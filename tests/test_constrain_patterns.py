"""Patterns of a schema's strings and names: what an answer may be, against re."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from nanovllm_cli.constrain.grammar import compiled
from nanovllm_cli.constrain.matcher import Matcher
from nanovllm_cli.constrain.patterns import with_safe_patterns, with_safe_schemas
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
    assert with_safe_patterns(kept) == kept
    within = with_safe_patterns({"properties": {"const": {"items": {"pattern": "[^a]"}}}})
    assert within["properties"]["const"]["items"]["pattern"] != "[^a]"
    for grammar in ('start: "%json [^a]"', 'start: %json {"pattern": "[^a', "start: /[^a]/ %json true", "start: %json"):
        assert with_safe_schemas(grammar) == grammar
