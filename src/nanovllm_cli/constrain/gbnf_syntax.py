"""GBNF, llama.cpp's grammars, as rules. Format: llama.cpp's grammars/README.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm_cli.errors import UsageError

MAX_REPEATS = 2_000
MAX_NESTING = 100
MAX_PARTS = 60_000
"""Symbols of the Lark grammar, which llguidance counts in 16 bits."""
NOT_ASCII = 1 << 128
EVERY_LETTER = NOT_ASCII * 2 - 1

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNTS = re.compile(r"\{\s*(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_ANYTHING = "(?s:.)"
_NOTHING = "[^\\x{0}-\\x{10FFFF}]"
_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}


def read_gbnf(text: str) -> Rules:
    """The rules, by name; `root` is among them. Raises UsageError, with the line, for what is no GBNF."""
    return _Reader(text).rules_from_root()


class Terminal(NamedTuple):
    """One character. expression: which, as a regular expression. letters: which, a bit for each of ASCII, and NOT_ASCII for all
    others together."""

    expression: str
    letters: int


class Name(NamedTuple):
    rule: str


class Sequence(NamedTuple):
    parts: tuple[Node, ...]


class Choice(NamedTuple):
    ways: tuple[Node, ...]


class Repeat(NamedTuple):
    part: Node
    low: int
    high: int | None


Node = Terminal | Name | Sequence | Choice | Repeat
Rules = dict[str, Node]


@dataclass
class _Reader:
    """Reads rule by rule."""

    text: str
    at: int = 0
    depth: int = 0
    num_parts: int = 0
    rules: Rules = field(default_factory=dict)
    referred: dict[str, None] = field(default_factory=dict)

    def rules_from_root(self) -> Rules:
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

    def _alternatives(self, nested: bool) -> Node:
        found = [self._sequence(nested)]
        while self._peek() == "|":
            self.at += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(nested))
        return Choice(tuple(found)) if len(found) > 1 else found[0]

    def _sequence(self, nested: bool) -> Node:
        space = _SPACE_AND_LINES if nested else _SPACE
        parts: list[Node] = []
        while (char := self._peek()) and char not in "|)\r\n":
            parts.append(self._repeated(self._part(char)))
            self._skip(space)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self, char: str) -> Node:
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == ".":
            self.at += 1
            return self._character(_ANYTHING, EVERY_LETTER)
        if char == "(":
            return self._group()
        name = self._match(_NAME)
        if not name:
            raise self._refused(f"{char!r} has no meaning here")
        self.referred[name] = None
        self._count(1)
        return Name(name)

    def _group(self) -> Node:
        self.at, self.depth = self.at + 1, self.depth + 1
        if self.depth > MAX_NESTING:
            raise self._refused(f"groups are nested more than {MAX_NESTING} deep")
        self._skip(_SPACE_AND_LINES)
        body = self._alternatives(nested=True)
        if self._peek() != ")":
            raise self._refused("a group is not closed")
        self.at, self.depth = self.at + 1, self.depth - 1
        return body

    def _repeated(self, part: Node) -> Node:
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
        return Repeat(part, low, high)

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

    def _literal(self) -> Node:
        start, self.at = self.at, self.at + 1
        chars: list[Node] = []
        while self._peek() != '"':
            if not self._peek():
                self.at = start
                raise self._refused("a string is not closed")
            char = self._char()
            chars.append(self._character(_escaped(char), letters_from(char, char)))
        self.at += 1
        return chars[0] if len(chars) == 1 else Sequence(tuple(chars))

    def _class(self) -> Node:
        start, self.at = self.at, self.at + 1
        negated = self._peek() == "^"
        self.at += negated
        ranges, letters = list[str](), 0
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
            letters |= letters_from(first, last)
            ranges.append(_escaped(first) if first == last else f"{_escaped(first)}-{_escaped(last)}")
        self.at += 1
        if not ranges:
            return self._character(_ANYTHING, EVERY_LETTER) if negated else self._character(_NOTHING, 0)
        if negated:
            return self._character(f"[^{''.join(ranges)}]", EVERY_LETTER & ~letters | NOT_ASCII)
        return self._character(f"[{''.join(ranges)}]", letters)

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

    def _character(self, expression: str, letters: int) -> Terminal:
        self._count(1)
        return Terminal(expression, letters)

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


def letters_from(first: str, last: str) -> int:
    """Of a range of characters, as a Terminal has them."""
    ascii_letters = (2 << min(ord(last), 127)) - (1 << min(ord(first), 128))
    return max(0, ascii_letters) | (NOT_ASCII if ord(last) > 127 else 0)


def _escaped(char: str) -> str:
    """A character in one of Lark's regular expressions, wherever it stands in it."""
    return f"\\x{{{ord(char):X}}}" if not char.isalnum() or not char.isascii() else char
