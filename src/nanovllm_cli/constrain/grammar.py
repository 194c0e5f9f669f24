"""From a `Constraint` to the grammar that llguidance compiles, and the limits on the way.

Whoever asks is not trusted: size and nesting are counted in one pass before any parser sees the text, llguidance's own limits
bound what compiling and a step may cost, and what it cannot enforce is refused by name. Every refusal is a UsageError.
White space between the parts of JSON is one space, or a line break with up to 40 blanks: a weak model would go on with blanks
for as long as it may.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llguidance

from nanovllm_cli.constrain.gbnf import grammars_of_gbnf
from nanovllm_cli.constrain.rewriting import rewritten, rewritten_grammar
from nanovllm_cli.constrain.vocabulary import Vocabulary, byte_vocabulary
from nanovllm_cli.constraint import Constraint
from nanovllm_cli.errors import UsageError

MAX_DEPTH = 100
"""Nesting of brackets; llguidance's own parsers go a little further."""
MAX_CHOICES = 10_000
MAX_PROPERTIES = 2_000
"""Of one object of a schema: compiling takes time that grows with their square."""
MAX_VALUES = 50_000
"""Of a schema's JSON text, nested ones included."""
CHECKED_STACK_BYTES = 8 << 20
"""Of the thread in which `check` shall be called; whoever compiles later needs more."""
_WHITE_SPACE = r" |\n[ \t]{0,40}"
_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# JSON is read in one way: what are many there are properties, and a vocabulary has hundreds of tokens in which an object begins.
_JSON_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_items_in_row=20_000, step_max_items=500_000, verbose_errors=False
)
_NAMES = {
    "json_object": "the JSON grammar",
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the list of choices",
    "lark": "the grammar",
    "gbnf": "the grammar",
}
# Brackets that open or close something: not behind a backslash, in a string, or (in an expression) in a set.
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_BRACKETS = re.compile(rf"\\.|{_STRING}|[\[\](){{}}]")
_REGEX_BRACKETS = re.compile(r"\\.|\[\^?\]?(?:[^\]\\\[]|\\.)*\]|[\[\](){}]")
_SPECIAL_TOKEN = re.compile(r"<[^<>\s\[\]\"]{1,100}>")
_SPECIAL_RANGE = re.compile(r"<\[[\d,-]+\]>")
_MAX_NAMES = 1000
_MAX_REASON = 200


def compiled(constraint: Constraint, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    """At its beginning, and never to be moved on: who follows it takes a `deep_copy`.

    Raises UsageError for what is malformed, too large, cannot be enforced, or can never be met.
    """
    name = _NAMES[constraint.kind]
    limits = _JSON_LIMITS if constraint.kind.startswith("json") else _LIMITS
    for text in grammars_of(constraint):
        text = _behind_a_space(text) if vocabulary.begins_with_space else text
        matcher = llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        if not matcher.is_error():
            break
    if matcher.is_error():
        hint = "a keyword that can't be enforced is refused rather than ignored: leave it out"
        reason = _reason(matcher.get_error())
        raise UsageError(f"{name} can't be used: {reason}", hint if constraint.kind == "json_schema" else None)
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    if first.is_error() or not any(mask):
        raise UsageError(f"nothing can match {name}")
    again = matcher.deep_copy()  # that it came to the end of what it may take is told by the mask behind it
    again.compute_bitmask()
    if again.is_error():
        raise UsageError(f"{name} is too large or too involved", "make it smaller")
    return matcher


def _behind_a_space(text: str) -> str:
    """Of one of llguidance's texts, what matches the same behind a space."""
    inner = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    return json.dumps({"grammars": [{"lark_grammar": 'start: " " @whole'}, {**inner[0], "name": "whole"}, *inner[1:]]})


def check(constraint: Constraint) -> None:
    """Raises UsageError for what `compiled` would refuse in every vocabulary. Special tokens that it names are taken to exist."""
    if constraint.kind == "lark":
        names = sorted(set(_SPECIAL_TOKEN.findall(constraint.text)))[:_MAX_NAMES]
        anyway = Constraint("lark", _SPECIAL_RANGE.sub("<[0]>", constraint.text))
        compiled(anyway, byte_vocabulary(names))
    else:
        compiled(constraint, _byte_vocabulary())


@contextmanager
def stack_of(num_bytes: int) -> Iterator[None]:
    """Threads that begin within have stacks of this size, whatever the limits of this process are."""
    before = threading.stack_size(num_bytes)
    try:
        yield
    finally:
        threading.stack_size(before)


_byte_vocabulary = functools.cache(byte_vocabulary)


def grammars_of(constraint: Constraint) -> list[str]:
    """llguidance's texts for it, of which the first that compiles is to be taken. Raises UsageError for what is malformed or too
    large."""
    text, name = constraint.text, _NAMES[constraint.kind]
    _check_unicode(text, name)
    _check_depth(text, name, _REGEX_BRACKETS if constraint.kind == "regex" else _BRACKETS)
    match constraint.kind:
        case "json_object":
            return [_json_grammar({"type": "object"})]
        case "json_schema":
            return [_json_grammar(_schema(text))]
        case "choice":
            return [llguidance.LLMatcher.grammar_from_regex("|".join(map(re.escape, choices_of(text))))]
        case "regex":
            if re.search(r"(?<!\\)(?:\\\\)*+\\\Z", text):  # llguidance leaves it out
                raise UsageError(f"{name} ends in the middle of an escape", "a backslash by itself is written \\\\")
            return [llguidance.LLMatcher.grammar_from_regex(text)]
        case "gbnf":
            return grammars_of_gbnf(text)
        case "lark":
            return [llguidance.LLMatcher.grammar_from_lark(rewritten_grammar(text))]


def choices_of(text: str) -> list[str]:
    """The strings of a constraint of kind "choice"."""
    found = _json(text, "the list of choices")
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise UsageError("choices are a list of strings, at least one")
    if len(found) > MAX_CHOICES:
        raise UsageError(f"{len(found)} choices; {MAX_CHOICES} are the most")
    return found


def _json_grammar(schema: Any) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(rewritten(schema)), overrides={"whitespace_pattern": _WHITE_SPACE, "lenient": False}
    )


def _schema(text: str) -> Any:
    schema = _json(text, "the JSON schema")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise UsageError("a JSON schema is an object")
    waiting, seen = [schema], 0
    while waiting:
        value = waiting.pop()
        inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        seen += len(inside)
        if isinstance(value, dict) and len(inside) > MAX_PROPERTIES:
            raise UsageError(f"an object of the JSON schema has {len(inside)} members; {MAX_PROPERTIES} are the most")
        if seen > MAX_VALUES:
            raise UsageError(f"the JSON schema has more than {MAX_VALUES} values")
        waiting += inside
    return schema


def _json(text: str, name: str) -> Any:
    try:
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON: {str(error)[:_MAX_REASON]}") from None
    _check_unicode(json.dumps(found, ensure_ascii=False), name)  # by an escape
    return found


def _check_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} holds a lone surrogate", "send valid Unicode") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is out of range")
    return value


def _check_depth(text: str, name: str, brackets: re.Pattern[str]) -> None:
    depth = deepest = 0
    for match in brackets.finditer(text):
        if match.group() in ("[", "(", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif match.group() in ("]", ")", "}"):
            depth = max(0, depth - 1)
    if deepest > MAX_DEPTH:
        raise UsageError(f"{name} is nested {deepest} deep; {MAX_DEPTH} is the limit")


def _reason(message: str) -> str:
    """One short line of llguidance's several, without what it knows of this process."""
    if message.startswith("panic"):
        return "it is too large or too involved"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
    reason = (named or lines or ["it does not compile"])[0]
    reason = re.sub(r"^at (\d+)\((\d+)\):", r"line \1, column \2:", reason).partition("; following special")[0]
    return reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + " …"
