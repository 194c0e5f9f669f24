"""llama.cpp's grammars (GBNF) as llguidance reads them.

A grammar in which no rule refers to itself becomes one regular expression. In any other, every character becomes a lexeme of its
own: llguidance would take longer lexemes as long as they can be, as lexers do; GBNF reads a text in every way that its rules
allow, and a rule such as `ws ::= [ \\t\\n]*` in front of "\\n" needs that.
Repetitions become left recursions, which an Earley parser reads in linear time.

Format: llama.cpp's grammars/README.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from llguidance import LLMatcher

from nanovllm_cli.errors import UsageError

MAX_REPEATS = 2_000
MAX_NESTING = 100
MAX_PARTS = 60_000
"""Symbols of the Lark grammar, which llguidance counts in 16 bits."""

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNTS = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ANYTHING = "(?s:.)"
_NOTHING = '""'
_MAX_EXPRESSION = 20_000
_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}


def grammars_of_gbnf(text: str) -> list[str]:
    """The grammar, which starts with `root`, for llguidance; of several texts that say the same, the quickest first. Raises
    UsageError, with the line, for what is no GBNF."""
    rules = _Reader(text).rules_from_root()
    expression = _Expressions(rules).of_root()
    return ([] if expression is None else [LLMatcher.grammar_from_regex(expression)]) + [_Lark(rules).text()]


def lark_of_gbnf(text: str) -> str:
    """The grammar as Lark, to be a part of a greater one. Raises UsageError as above."""
    return _Lark(_Reader(text).rules_from_root()).text()


class _Char(NamedTuple):
    """One character. expression: which, as a regular expression."""

    expression: str


class _Name(NamedTuple):
    rule: str


class _Sequence(NamedTuple):
    parts: tuple[_Node, ...]


class _Choice(NamedTuple):
    ways: tuple[_Node, ...]


class _Repeat(NamedTuple):
    part: _Node
    low: int
    high: int | None


_Node = _Char | _Name | _Sequence | _Choice | _Repeat
_Rules = dict[str, _Node]


@dataclass
class _Expressions:
    """Rules that do not refer to themselves, written into each other as one regular expression. It reads a text in every way, as
    GBNF does, and its masks cost a fraction of those of a lexeme for each character."""

    rules: _Rules
    known: dict[str, str] = field(default_factory=dict)

    def of_root(self) -> str | None:
        """None if a rule refers to itself, or the expression grows too large."""
        try:
            return self._rule("root", 0)
        except _NoExpression:
            return None

    def _rule(self, name: str, depth: int) -> str:
        if name not in self.known:
            self.known[name] = self._node(self.rules[name], depth + 1)
        return self.known[name]

    def _node(self, node: _Node, depth: int) -> str:
        if depth > MAX_NESTING:  # which is where recursion ends, too
            raise _NoExpression
        match node:
            case _Char(expression):
                text = expression
            case _Name(rule):
                text = self._rule(rule, depth)
            case _Sequence(parts):
                text = self._bounded(parts, depth, "")
            case _Choice(ways):
                text = f"(?:{self._bounded(ways, depth, '|')})"
            case _Repeat(part, low, high):
                text = f"(?:{self._node(part, depth + 1)}){{{low},{'' if high is None else high}}}"
        if len(text) > _MAX_EXPRESSION:
            raise _NoExpression
        return text

    def _bounded(self, nodes: tuple[_Node, ...], depth: int, between: str) -> str:
        texts, size = [], 0
        for node in nodes:
            texts.append(self._node(node, depth + 1))
            size += len(texts[-1])
            if size > _MAX_EXPRESSION:
                raise _NoExpression
        return between.join(texts)


class _NoExpression(Exception):
    pass


@dataclass
class _Lark:
    """A rule is r0, r1, … in order of first sight; what repeats gets rules of its own, x1, x2, …"""

    rules: _Rules
    lines: list[str] = field(default_factory=list)
    num_own: int = 0

    def text(self) -> str:
        self.names = {name: f"r{number}" for number, name in enumerate(self.rules)}
        for name, node in self.rules.items():
            self.lines.append(f"{self.names[name]}: {self._node(node)}")
        return "\n".join(["%llguidance {}", f"start: {self.names['root']}", *self.lines]) + "\n"

    def _node(self, node: _Node) -> str:
        match node:
            case _Char(expression):
                return f"/{expression}/"
            case _Name(rule):
                return self.names[rule]
            case _Sequence(parts):
                return f"({' '.join(map(self._node, parts))})" if parts else _NOTHING
            case _Choice(ways):
                return f"({' | '.join(map(self._node, ways))})"
            case _Repeat(part, 0, 1):
                return f"({self._node(part)} | {_NOTHING})"
            case _Repeat(part, low, high):
                return self._repeated(self._own(self._node(part)), low, high)

    def _repeated(self, item: str, low: int, high: int | None) -> str:
        if high is None:  # at least low
            name = f"x{self.num_own + 1}"
            return self._own(f"{' '.join([item] * low) or _NOTHING} | {name} {item}")
        # at most high - low more: each rule is one item longer than the last
        more = ""
        for _ in range(high - low):
            more = self._own(f"{_NOTHING} | {item} {more}")
        return "(" + (" ".join([item] * low + [more] * (high > low)) or _NOTHING) + ")"

    def _own(self, body: str) -> str:
        self.num_own += 1
        self.lines.append(f"x{self.num_own}: {body}")
        return f"x{self.num_own}"


@dataclass
class _Reader:
    """Reads rule by rule."""

    text: str
    at: int = 0
    depth: int = 0
    num_parts: int = 0
    rules: _Rules = field(default_factory=dict)
    referred: dict[str, None] = field(default_factory=dict)

    def rules_from_root(self) -> _Rules:
        self._skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            self._rule()
            self._skip(_SPACE_AND_LINES)
        for name in self.referred:
            if name not in self.rules:
                raise UsageError(f"the grammar has no rule {name!r}")
        if "root" not in self.rules:
            raise UsageError('the grammar has no rule "root"', "an answer is what root describes")
        return self.rules

    def _rule(self) -> None:
        name = self._match(_NAME)
        self._skip(_SPACE)
        if not name or not self.text.startswith("::=", self.at):
            raise self._refused("a rule is: name ::= …")
        self.at += 3
        self._skip(_SPACE_AND_LINES)
        body = self._alternatives(nested=False)
        if self.at < len(self.text) and self.text[self.at] not in "\r\n":
            raise self._refused("this belongs to no rule")
        if name in self.rules:
            raise self._refused(f"a second rule {name!r}")
        self.rules[name] = body

    def _alternatives(self, nested: bool) -> _Node:
        found = [self._sequence(nested)]
        while self._peek() == "|":
            self.at += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(nested))
        return _Choice(tuple(found)) if len(found) > 1 else found[0]

    def _sequence(self, nested: bool) -> _Node:
        space = _SPACE_AND_LINES if nested else _SPACE
        parts: list[_Node] = []
        while (char := self._peek()) and char not in "|)\r\n":
            parts.append(self._repeated(self._part(char)))
            self._skip(space)
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _part(self, char: str) -> _Node:
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == ".":
            self.at += 1
            return self._character(_ANYTHING)
        if char == "(":
            return self._group()
        name = self._match(_NAME)
        if not name:
            raise self._refused(f"{char!r} has no meaning here")
        self.referred[name] = None
        self._count(1)
        return _Name(name)

    def _group(self) -> _Node:
        self.at, self.depth = self.at + 1, self.depth + 1
        if self.depth > MAX_NESTING:
            raise self._refused(f"groups are nested more than {MAX_NESTING} deep")
        self._skip(_SPACE_AND_LINES)
        body = self._alternatives(nested=True)
        if self._peek() != ")":
            raise self._refused("a group is not closed")
        self.at, self.depth = self.at + 1, self.depth - 1
        return body

    def _repeated(self, part: _Node) -> _Node:
        char = self._peek()
        if char in ("*", "+", "?"):
            self.at += 1
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif char == "{":
            low, high = self._counts()
        else:
            return part
        if (low, high) != (0, 1):
            self._count(low + (high or 0))
        return _Repeat(part, low, high)

    def _counts(self) -> tuple[int, int | None]:
        match = _COUNTS.match(self.text, self.at)
        if match is None or not match[1]:
            raise self._refused("repetitions are {n}, {n,} or {n,m}")
        low = int(match[1])
        high = low if not match[2] else int(match[3]) if match[3] else None
        if max(low, high or 0) > MAX_REPEATS:
            raise self._refused(f"more than {MAX_REPEATS} repetitions")
        if high is not None and high < low:
            raise self._refused("repetitions are {n,m} with n up to m")
        self.at = match.end()
        return low, high

    def _literal(self) -> _Node:
        start, self.at = self.at, self.at + 1
        chars: list[_Node] = []
        while self._peek() != '"':
            if not self._peek():
                self.at = start
                raise self._refused("a string is not closed")
            chars.append(self._character(_escaped(self._char())))
        self.at += 1
        return chars[0] if len(chars) == 1 else _Sequence(tuple(chars))

    def _class(self) -> _Node:
        start, self.at = self.at, self.at + 1
        negated = self._peek() == "^"
        self.at += negated
        ranges: list[str] = []
        while self._peek() != "]":
            if not self._peek():
                self.at = start
                raise self._refused("a set of characters is not closed")
            first = last = self._char()
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self._char()
                if last < first:
                    raise self._refused("a range of characters runs backwards")
            ranges.append(_escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}")
        self.at += 1
        if not ranges:
            return self._character(_ANYTHING if negated else "[^\\x{0}-\\x{10FFFF}]")
        return self._character(f"[{'^' if negated else ''}{''.join(ranges)}]")

    def _char(self) -> str:
        """One character of a string or a set, escapes undone."""
        if self._peek() != "\\":
            self.at += 1
            return self.text[self.at - 1]
        match = _ESCAPE.match(self.text, self.at)
        if match is None or (match[4] and match[4] not in _SIMPLE_ESCAPES):
            raise self._refused("an unknown escape")
        self.at = match.end()
        if match[4]:
            return _SIMPLE_ESCAPES[match[4]]
        code = int(match[1] or match[2] or match[3], 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._refused("an escape that is no character")
        return chr(code)

    def _character(self, expression: str) -> _Char:
        self._count(1)
        return _Char(expression)

    def _count(self, num: int) -> None:
        self.num_parts += num
        if self.num_parts > MAX_PARTS:
            raise self._refused(f"the grammar has more than {MAX_PARTS} parts")

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at
        return match.group() if match else ""

    def _skip(self, pattern: re.Pattern[str]) -> None:
        self._match(pattern)

    def _refused(self, reason: str) -> UsageError:
        return UsageError(f"line {self.text.count(chr(10), 0, self.at) + 1} of the grammar: {reason}")


def _escaped(char: str) -> str:
    """A character in one of Lark's regular expressions, wherever it stands in it."""
    return f"\\x{{{ord(char):X}}}" if not char.isalnum() or not char.isascii() else char
