"""llama.cpp's grammars (GBNF) in llguidance's Lark.

Every character of GBNF becomes a lexeme of its own. llguidance would take longer lexemes as long as they can be, as lexers do;
GBNF reads a text in every way that its rules allow, and a rule such as `ws ::= [ \\t\\n]*` in front of "\\n" needs that.
Repetitions become left recursions, which an Earley parser reads in linear time.

Format: llama.cpp's grammars/README.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}


def lark_of_gbnf(text: str) -> str:
    """The grammar for llguidance; its start is `root`. Raises UsageError, with the line, for what is no GBNF."""
    return _Reader(text).lark()


@dataclass
class _Reader:
    """Reads rule by rule, and writes Lark. A rule is r0, r1, … in order of first sight; what repeats gets a rule, too."""

    text: str
    at: int = 0
    depth: int = 0
    num_parts: int = 0
    names: dict[str, str] = field(default_factory=dict)
    rules: dict[str, str] = field(default_factory=dict)
    num_own: int = 0

    def lark(self) -> str:
        self._skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            self._rule()
            self._skip(_SPACE_AND_LINES)
        for name, rule in self.names.items():
            if rule not in self.rules:
                raise UsageError(f"the grammar has no rule {name!r}")
        if "root" not in self.names:
            raise UsageError('the grammar has no rule "root"', "an answer is what root describes")
        lines = [f"{rule}: {body}" for rule, body in self.rules.items()]
        return "\n".join(["%llguidance {}", f"start: {self.names['root']}", *lines]) + "\n"

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
        rule = self._named(name)
        if rule in self.rules:
            raise self._refused(f"a second rule {name!r}")
        self.rules[rule] = body

    def _alternatives(self, nested: bool) -> str:
        found = [self._sequence(nested)]
        while self._peek() == "|":
            self.at += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(nested))
        return " | ".join(found)

    def _sequence(self, nested: bool) -> str:
        space = _SPACE_AND_LINES if nested else _SPACE
        parts: list[str] = []
        while (char := self._peek()) and char not in "|)\r\n":
            parts.append(self._repeated(self._part(char)))
            self._skip(space)
        return " ".join(parts) or '""'

    def _part(self, char: str) -> str:
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == ".":
            self.at += 1
            return self._counted(r"/(?s:.)/")
        if char == "(":
            return self._group()
        name = self._match(_NAME)
        if not name:
            raise self._refused(f"{char!r} has no meaning here")
        return self._counted(self._named(name))

    def _group(self) -> str:
        self.at, self.depth = self.at + 1, self.depth + 1
        if self.depth > MAX_NESTING:
            raise self._refused(f"groups are nested more than {MAX_NESTING} deep")
        self._skip(_SPACE_AND_LINES)
        body = self._alternatives(nested=True)
        if self._peek() != ")":
            raise self._refused("a group is not closed")
        self.at, self.depth = self.at + 1, self.depth - 1
        return f"({body})"

    def _repeated(self, part: str) -> str:
        char = self._peek()
        if char in ("*", "+", "?"):
            self.at += 1
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        elif char == "{":
            low, high = self._counts()
        else:
            return part
        if (low, high) == (0, 1):
            return f"({part} | \"\")"
        item, loop = self._own(), self._own()
        self.rules[item] = part
        self._counted(low + (high or 0))
        if high is None:  # at least low
            self.rules[loop] = f'{" ".join([item] * low) or chr(34) * 2} | {loop} {item}'
            return loop
        # at most high - low more: each rule is one item longer than the last
        more = [item] * low
        for _ in range(high - low):
            longer = self._own()
            self.rules[longer] = f'"" | {item} {loop}' if loop in self.rules else f'"" | {item}'
            loop = longer
        return "(" + " ".join([*more, *([loop] if high > low else [])] or ['""']) + ")"

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

    def _literal(self) -> str:
        start, self.at = self.at, self.at + 1
        chars: list[str] = []
        while self._peek() != '"':
            if not self._peek():
                self.at = start
                raise self._refused("a string is not closed")
            chars.append(f"/{_escaped(self._char())}/")
        self.at += 1
        self._counted(len(chars))
        return f"({' '.join(chars)})" if len(chars) > 1 else "".join(chars) or '""'

    def _class(self) -> str:
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
            return self._counted(r"/(?s:.)/") if negated else self._counted("/[^\\x{0}-\\x{10FFFF}]/")
        return self._counted(f"/[{'^' if negated else ''}{''.join(ranges)}]/")

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

    def _named(self, name: str) -> str:
        return self.names.setdefault(name, f"r{len(self.names)}")

    def _own(self) -> str:
        self.num_own += 1
        return f"x{self.num_own}"

    def _counted(self, part: str | int) -> str:
        self.num_parts += part if isinstance(part, int) else 1
        if self.num_parts > MAX_PARTS:
            raise self._refused(f"the grammar has more than {MAX_PARTS} parts")
        return str(part)

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
