"""Markdown as it streams, for a terminal: each line is written once and never changed.

Text of a paragraph comes out word by word. Held back is only what is undecided: the first characters of a line that may
become a heading, a fence or a list (`blocks.py`); an opener without its closer (`inline.py`); a table until its columns
are set (`tables.py`); a line of code, for its colours. What comes out depends on the text and the terminal's width alone,
not on how the text was cut.

Not CommonMark: the end of a line stays one; there are no reference links, no HTML blocks and no underlined headings,
because they are known only when their text has been written.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from nanovllm_cli.chat.blocks import Context, LineStart, read_start
from nanovllm_cli.chat.flow import PLAIN, Flow, Piece, combined
from nanovllm_cli.chat.highlight import Highlighter
from nanovllm_cli.chat.inline import Inline, Theme
from nanovllm_cli.chat.tables import Table, is_delimiter
from nanovllm_cli.text.control_filter import ControlFilter

_MAX_LINE = 4096  # of a line that is held; a longer one is written as it comes
_TAB = "    "
_FENCE = re.compile(r"(`{3,}(?!.*`)|~{3,})(.*)\Z")
_MATH = {"$$": "$$", "\\[": "\\]"}

Mode = Literal["start", "text", "held", "raw"]


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines that are shown as they are, code or math, up to one that matches `closer`. indent: is taken off its lines.
    style: of its first and last line."""

    closer: re.Pattern[str]
    quotes: int
    indent: int
    style: str
    highlighter: Highlighter


class MarkdownStream:
    """Hands what `feed` and `finish` have decided to `write`: text with SGR sequences of ours, and no other control
    character than newlines.

    width: the columns of the terminal, asked for at the beginning of each line. color: False leaves bold, italic, dim,
    underlined and struck-through text. Time is linear in the text, and memory bounded.
    """

    def __init__(self, write: Callable[[str], None], width: Callable[[], int], *, color: bool = True) -> None:
        self._flow = Flow(write, width)
        self._theme = Theme.of(color=color)
        self._filter = ControlFilter()
        self._inline = Inline(self._theme)
        self._mode: Mode = "start"
        self._line = ""  # what is held of this line
        self._start = LineStart()
        self._style = PLAIN
        self._context = Context()
        self._block: _Block | None = None
        self._header: tuple[LineStart, str] | None = None  # a row that may become a table's first
        self._table: Table | None = None
        self._blank: list[Piece] | None = None  # an empty line that is to come before the next one
        self._has_text = False

    def feed(self, text: str) -> None:
        """More of the text."""
        for number, part in enumerate(self._filter.feed(text).split("\n")):
            if number:
                self._end_line()
            if part:
                self._extend_line(part if self._block is not None else part.replace("\t", _TAB))
        self._flow.flush()

    def finish(self) -> None:
        """The end of the text: everything is shown, the last line is ended, and the terminal has its own style again."""
        if self._line or self._mode != "start":
            self._end_line()
        self._close_table()
        self._flow.flush()

    # ---- a line ----

    def _extend_line(self, part: str) -> None:
        if self._mode == "text":
            self._put(self._inline.feed(part, self._style))
        elif self._mode == "raw":
            self._flow.raw([Piece(part)])
        else:
            self._line += part
            if self._mode == "start" and self._block is None:
                self._decide(ended=False)
            if len(self._line) > _MAX_LINE:
                self._let_go()

    def _end_line(self) -> None:
        if self._block is not None and self._mode == "start":
            self._end_block_line(self._block)
        elif self._mode == "start":
            self._end_undecided()
        elif self._mode == "held":
            self._end_held()
        if self._mode == "text":
            self._put(self._inline.finish(style=self._style))
        self._flow.end()
        self._mode, self._line = "start", ""

    def _end_undecided(self) -> None:
        if self._line.strip(" >"):
            self._decide(ended=True)
            if self._mode == "held":
                self._end_held()
            return
        self._close_table()
        self._blank = [Piece("│ " * self._line.count(">"), self._theme.aside)]
        self._context = dataclasses.replace(self._context, follows_text=False)

    def _decide(self, *, ended: bool) -> None:
        """Goes on with the line once its start says what it is."""
        start = read_start(self._line, self._context, self._theme, ended=ended)
        if start is None:
            return
        if start.kind != "row" or start.rest != self._start.rest:
            self._close_table()
        if self._blank is not None and self._has_text:
            self._flow.blank(self._blank)
        self._blank, self._has_text = None, True
        self._start = start
        self._context = Context(start.quotes, start.items, follows_text=start.kind == "text")
        if start.kind in ("text", "heading"):
            self._begin_text(start, start.text)
        else:
            self._mode, self._line = "held", start.text

    def _let_go(self) -> None:
        """Shows a line that is too long to be held."""
        if self._block is not None or self._start.kind == "code":
            if self._block is None:
                self._flow.begin(self._start.first, self._start.rest)
            self._flow.raw([Piece(self._line)])
            self._mode, self._line = "raw", ""
        else:
            self._close_table()
            self._begin_text(self._start, self._line)

    def _begin_text(self, start: LineStart, text: str) -> None:
        self._mode, self._line = "text", ""
        self._style = PLAIN
        if start.kind == "heading":
            self._style = combined(self._theme.heading, self._theme.link if start.level == 1 else PLAIN)
        self._flow.begin(start.first, start.rest)
        self._flow.raw([])
        self._put(self._inline.feed(text, self._style))

    def _put(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._flow.put(piece.text, piece.style)

    # ---- lines that were held ----

    def _end_held(self) -> None:
        start, line = self._start, self._line
        if start.kind == "row":
            self._end_row(start, line)
            return
        fence = _FENCE.match(line)
        if (start.kind == "fence" and fence is None) or (start.kind == "math" and _MATH[line[:2]] in line[2:]):
            self._begin_text(start, line)
            return
        self._flow.begin(start.first, start.rest)
        if start.kind == "rule":
            self._flow.line([Piece("─" * self._flow.room(), self._theme.aside)])
        elif start.kind == "code":
            self._flow.line([Piece(line)])
        elif fence is not None:
            closer = re.compile(rf" *{fence[1][0]}{{{len(fence[1])},}} *\Z")
            self._open_block(line, closer, self._theme.aside, fence[2])
        else:
            closer = re.compile(rf".*{re.escape(_MATH[line[:2]])}| *\Z")  # an empty line ends it too
            self._open_block(line, closer, PLAIN, "")

    def _open_block(self, line: str, closer: re.Pattern[str], style: str, language: str) -> None:
        self._flow.line([Piece(line, style)])
        highlighter = Highlighter(language if self._theme.color else "")
        self._block = _Block(closer, self._start.quotes, self._start.column, style, highlighter)

    def _end_block_line(self, block: _Block) -> None:
        line = self._line
        if block.quotes:
            quotes = re.match(rf"(?: {{0,3}}> ?){{{block.quotes}}}", line)
            if quotes is None:  # the quote has ended, and its code with it
                self._block = None
                self._line = line.replace("\t", _TAB)
                self._end_undecided()
                return
            line = line[quotes.end() :]
        indent = len(line) - len(line.lstrip(" "))
        line = line[min(indent, block.indent) :]
        if block.closer.match(line):
            self._flow.line([Piece(line.rstrip(), block.style)])
            self._block = None
        else:
            self._flow.line(block.highlighter.line(line))

    def _end_row(self, start: LineStart, line: str) -> None:
        if self._table is not None:
            self._table.add(line)
        elif self._header is not None and is_delimiter(line, self._header[1]):
            first, header = self._header
            self._flow.begin(first.first, first.rest)
            self._table, self._header = Table(header, line, self._flow, self._theme), None
        else:
            self._close_table()
            self._header = start, line

    def _close_table(self) -> None:
        """Shows the table that has ended, or the row that was none."""
        if self._table is not None:
            self._table.finish()
        elif self._header is not None:
            start, line = self._header
            self._flow.begin(start.first, start.rest)
            self._put(self._inline.finish(line))
            self._flow.end()
        self._table = self._header = None
