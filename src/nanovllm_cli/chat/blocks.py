"""What a line of Markdown is, told from as little of its start as possible: quotes, lists, headings, fences, tables.

Lists are read as models write them: a marker two columns right of another is nested in it, and a line that is not
indented is in no list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from nanovllm_cli.chat.flow import Piece
from nanovllm_cli.chat.inline import Theme

MAX_START = 200  # characters that may be undecided; a longer start is text
_MAX_MARKERS = 16  # of one line
_NESTED = 2
_CODE_INDENT = 4
_BULLETS = "•◦▪"

_SPACES = re.compile(r" *")
_QUOTES = re.compile(r"(?: {0,3}> ?)*")
_INNER_QUOTES = re.compile(r"(?:> ?)*")
_RULE = re.compile(r"([-*_])(?: *\1){2,} *\Z")
_UNDERLINE = re.compile(r"=+ *\Z")
_MARKER = re.compile(r"([-*+]|\d{1,9}[.)])(?: +|\Z)")
_MARKER_SO_FAR = re.compile(r"(?:\d{1,9}[.)]?|\+|([-*_])(?: *\1)* *)\Z")  # or a rule so far
_TASK = re.compile(r"\[([ xX])\] +")
_TASK_SO_FAR = re.compile(r"\[(?:[ xX](?:\] *)?)?\Z")
_HEADING = re.compile(r"(#{1,6})(?: +|\Z)")
_BLOCK_SO_FAR = re.compile(r"(?:#{1,6}|`{1,2}|~{1,2}|\$|\\)\Z")

Kind = Literal["text", "heading", "rule", "fence", "math", "row", "code"]


@dataclass(frozen=True, slots=True)
class Item:
    """An open list item. column: of its marker in the source. lead: columns in front of its text on the screen."""

    column: int
    lead: int


@dataclass(frozen=True, slots=True)
class Context:
    """What is open where a line begins. follows_text: right behind a line of text."""

    quotes: int = 0
    items: tuple[Item, ...] = ()
    follows_text: bool = False


@dataclass(slots=True)
class LineStart:
    """A line whose kind is known. text: what follows its markers, as far as it is there. first, rest: what stands before
    it on the screen, and before the lines that it is wrapped into. column: of `text` in the source, behind the quotes.
    level: of a heading."""

    kind: Kind = "text"
    text: str = ""
    column: int = 0
    level: int = 0
    quotes: int = 0
    items: tuple[Item, ...] = ()
    first: list[Piece] = field(default_factory=list)
    rest: list[Piece] = field(default_factory=list)


class _Undecided(Exception):
    """More of the line must be seen."""


def read_start(line: str, context: Context, theme: Theme, *, ended: bool) -> LineStart | None:
    """What a line is of which `line` is there, or all if it has ended. None: more of it must be seen."""
    decided = ended or len(line) >= MAX_START
    try:
        start = _read_markers(line, context, theme, decided)
        _read_block(start, context, decided, ended)
    except _Undecided:
        return None
    return start


def _read_markers(line: str, context: Context, theme: Theme, decided: bool) -> LineStart:
    """The markers of quotes, lists and tasks, and what stands for them on the screen."""
    is_inside = bool(context.items) and not context.quotes and line.startswith(" " * _NESTED)
    quoted = 0 if is_inside else _length(_QUOTES, line)
    quotes = line.count(">", 0, quoted)
    line = line[quoted:]
    bars = [Piece("│ " * quotes, theme.aside)] if quotes else []
    items = context.items if quotes == context.quotes else ()
    column = _length(_SPACES, line)
    shown: str | None = None  # list markers, as the screen has them
    for _ in range(_MAX_MARKERS):
        text = line[column:]
        if not decided and (not text or _MARKER_SO_FAR.match(text)):
            raise _Undecided
        marker = _MARKER.match(text)
        if marker is None or _RULE.match(text):
            break
        items = _enclosing(items, column)
        name = marker[1] if marker[1][0].isdigit() else _BULLETS[min(len(items), len(_BULLETS) - 1)]
        shown = (shown or "").ljust(items[-1].lead if items else 0) + name + " "
        at = column
        column += marker.end()
        if not decided and _TASK_SO_FAR.match(line[column:]):
            raise _Undecided
        task = _TASK.match(line, column)
        if task is not None:
            shown += "☐ " if task[1] == " " else "☑ "
            column = task.end()
        items = (*items, Item(at, len(shown)))
    if shown is None:
        items = _enclosing(items, column)
        shown = " " * (items[-1].lead if items else 0)
    inner = _length(_INNER_QUOTES, line[column:])
    if inner:
        column += inner
        if not decided and column == len(line):
            raise _Undecided
    inner_bars = [Piece("│ " * line.count(">", column - inner, column), theme.aside)] if inner else []
    return LineStart(
        text=line[column:], column=column, quotes=quotes, items=items,
        first=[*bars, Piece(shown), *inner_bars], rest=[*bars, Piece(" " * len(shown)), *inner_bars],
    )  # fmt: skip


def _read_block(start: LineStart, context: Context, decided: bool, ended: bool) -> None:
    """What kind of block the text is, behind its markers."""
    text = start.text
    heading = _HEADING.match(text)
    if not decided and (_BLOCK_SO_FAR.match(text) or (context.follows_text and _UNDERLINE.match(text))):
        raise _Undecided
    if _RULE.match(text) or (context.follows_text and _UNDERLINE.match(text)):
        start.kind = "rule" if ended else "text"
    elif heading is not None:
        start.kind, start.level, start.text = "heading", len(heading[1]), text[heading.end() :]
    elif text.startswith(("```", "~~~")):
        start.kind = "fence"
    elif text.startswith(("$$", "\\[")):
        start.kind = "math"
    elif text.startswith("|"):
        start.kind = "row"
    elif start.column >= _CODE_INDENT and not start.items and not context.follows_text and text:
        start.kind, start.text = "code", " " * start.column + text


def _enclosing(items: tuple[Item, ...], column: int) -> tuple[Item, ...]:
    """The items that text at `column` is in."""
    return tuple(item for item in items if column >= item.column + _NESTED)


def _length(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return 0 if match is None else match.end()
