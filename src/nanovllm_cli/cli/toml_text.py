"""A TOML file as its lines: on which of them a value stands, and changes that leave every other line, and comments, alone.

`tomllib` parses; here only quotes and brackets are followed, to see which lines are one statement. What a change comes to is read
again and compared with what was asked for, so that a file this cannot edit is refused, and never broken.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanovllm_cli.errors import UsageError

Path = tuple[str, ...]

MAX_PARTS = 100
_BLANKS = re.compile(r"[ \t]+")
_LONG_KEY = re.compile(rf"""(?:\.(?:"[^"\n]*"|'[^'\n]*'|[\w-]+)){{{MAX_PARTS}}}""")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# Strings of TOML's four kinds and comments, in which nothing else counts; and what does. Two quotes may end a long one's text.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}|"(?:\\.|[^"\\])*"|'[^']*'|\#[^\n]*|[\[{]|[\]}]|\n''', re.DOTALL
)


def parse(text: str) -> dict[str, Any]:
    """Its tables. ValueError where it is not TOML, or has a key of so many parts that tomllib would take minutes, as it goes
    through all of them for each."""
    if _LONG_KEY.search(_BLANKS.sub("", text)):
        raise ValueError(f"a key of more than {MAX_PARTS} parts")
    return tomllib.loads(text)


@dataclass(frozen=True, slots=True)
class Statement:
    """Lines `start` up to `end`, from 0. path: the table that they begin, or the value that they set."""

    start: int
    end: int
    path: Path
    is_table: bool


class TomlText:
    """text: whole and valid TOML; tomllib's error comes where it is not."""

    def __init__(self, text: str) -> None:
        self.tables = parse(text)
        # Not splitlines: that would cut at characters that TOML allows in strings.
        self._lines: list[str] = re.findall(r"[^\n]*\n|[^\n]+", text)
        self._statements = _statements(self._lines, text)

    def line_of(self, *path: str) -> int | None:
        """The line, from 1, on which a value or a table begins; where it is part of one, that of the whole."""
        for statement in self._statements:
            if statement.path[: len(path)] == path or (
                path[: len(statement.path)] == statement.path and not statement.is_table
            ):
                return statement.start + 1
        return None

    def with_value(self, table: Path, key: str, value: Any) -> str:
        """The text with `key` of `table` set. Raises UsageError where that takes more than a line of its own."""
        line = f"{_key(key)} = {literal(value)}"
        lines = list(self._lines)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        statement = self._find(*table, key)
        if statement is not None:
            lines[statement.start : statement.end] = [f"{line}{self._comment(statement)}\n"]
        else:
            place = self._end_of(table)
            if place is None:
                lines += ["\n"] * bool(lines) + [f"[{'.'.join(map(_key, table))}]\n", f"{line}\n"]
            else:
                lines.insert(place, f"{line}\n")
        wanted = copy.deepcopy(self.tables)
        inner = wanted
        for name in table:
            inner = inner.setdefault(name, {})
        inner[key] = value
        return _checked("".join(lines), wanted)

    def without(self, table: Path, key: str) -> str:
        """The text without `key` of `table`, which is there. Raises UsageError where it has no line of its own."""
        statement = self._find(*table, key)
        if statement is None:
            raise UsageError(f"{key} has no line of its own", "change it with: nanovllm config edit")
        wanted = copy.deepcopy(self.tables)
        inner = wanted
        for name in table:
            inner = inner[name]
        del inner[key]
        return _checked("".join(self._lines[: statement.start] + self._lines[statement.end :]), wanted)

    def _find(self, *path: str) -> Statement | None:
        return next((each for each in self._statements if each.path == path and not each.is_table), None)

    def _end_of(self, table: Path) -> int | None:
        """The line after the last statement of a table that has a header."""
        place = None
        inside = False
        for statement in self._statements:
            if statement.is_table:
                inside = statement.path == table
            if inside:
                place = statement.end
        return place

    def _comment(self, statement: Statement) -> str:
        """What stands behind the value on its only line."""
        if statement.end - statement.start > 1:
            return ""
        line = self._lines[statement.start].rstrip("\n")
        for match in re.finditer("#", line):
            value = line[: match.start()]
            if _parsed(value):
                return line[len(value.rstrip()) :]
        return ""


def _statements(lines: list[str], text: str) -> list[Statement]:
    """text: of the lines; valid TOML."""
    found: list[Statement] = []
    table: Path = ()
    start = 0
    for end in _ends(text):
        parsed = _parsed("".join(lines[start:end]))
        if parsed:
            path = _path(parsed)
            is_table = lines[start].lstrip().startswith("[")
            table = path if is_table else table
            found.append(Statement(start, end, path if is_table else (*table, *path), is_table))
        start = end
    return found


def _ends(text: str) -> Iterator[int]:
    """The lines before which a statement is over, which may be an empty one, in a time that is linear in the text."""
    depth = line = 0
    for match in _TOKEN.finditer(text if text.endswith("\n") else text + "\n"):
        token = match[0]
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        line += token.count("\n")
        if token == "\n" and depth == 0:
            yield line


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        return parse(text)
    except ValueError:
        return None


def _path(tables: Any) -> Path:
    """Down to the first value, or the first table that has not exactly one."""
    if isinstance(tables, dict) and len(tables) == 1:
        name, inner = next(iter(tables.items()))
        return (name, *_path(inner))
    return ()


def _checked(text: str, wanted: dict[str, Any]) -> str:
    if _parsed(text) != wanted:
        raise UsageError(
            "this file is written in a way that cannot be changed here", "change it with: nanovllm config edit"
        )
    return text


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else literal(name)


def literal(value: Any) -> str:
    """Strings, numbers, booleans and lists of them are written in TOML as in JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
