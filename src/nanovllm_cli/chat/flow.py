"""Words set in lines as wide as the terminal, one behind the other: what is written is never written again.

Styles are the parameters of SGR sequences ("1;36"), the only sequences that are ever written. Text must come without
control characters. The terminal's width is asked for at the beginning of each line, so a resize takes effect there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import wcwidth

PLAIN = ""
_RUNS = re.compile(r" +|[^ ]+")
_MAX_GAP = 1000  # spaces in a row; a line would have to be longer to show more
_JOINER = "\u200d"  # what holds an emoji of several people together


class Piece(NamedTuple):
    """Text of one style."""

    text: str
    style: str = PLAIN


def combined(outer: str, inner: str) -> str:
    return f"{outer};{inner}" if outer and inner else outer or inner


class Flow:
    """Writes pieces as they come, a word at a time; `write` gets whatever one call has decided in one go.

    A word wider than a line begins on a line of its own and is left to the terminal to wrap, so that a URL can be copied
    whole. Between wide characters (CJK, emoji) a line may end anywhere.
    """

    def __init__(self, write: Callable[[str], None], width: Callable[[], int]) -> None:
        self._write = write
        self._ask_width = width
        self._ready: list[str] = []
        self._style = PLAIN
        self._first: list[Piece] = []
        self._rest: list[Piece] = []
        self._gap: list[Piece] = []
        self._begun = False  # the line
        self._width = self._column = self._start = 0
        self._word: list[Piece] = []
        self._columns = 0
        self._is_wide = self._is_long = False
        self._last = ""

    def begin(self, first: Iterable[Piece] = (), rest: Iterable[Piece] = ()) -> None:
        """What stands before the next line, and before those that it is wrapped into."""
        self._first, self._rest = list(first), list(rest)

    def put(self, text: str, style: str = PLAIN) -> None:
        """More text of the line; "\\n" breaks it."""
        for number, part in enumerate(text.split("\n")):
            if number:
                self._end_word()
                self._break()
            for run in _RUNS.finditer(part):
                if run[0][0] == " ":
                    self._end_word()
                    self._widen_gap(run[0], style)
                elif run[0].isascii():
                    self._extend(run[0], style, len(run[0]))
                else:
                    for character in run[0]:
                        columns = char_width(character)
                        self._extend(character, style, columns, is_wide=columns == 2)

    def end(self) -> None:
        """The end of the line, if anything stands on it."""
        self._end_word()
        if self._begun:
            self._break()

    def line(self, pieces: Iterable[Piece]) -> None:
        """A line as it is, not wrapped."""
        self.end()
        self.raw(pieces)
        self._begin_line()
        self._break()

    def raw(self, pieces: Iterable[Piece]) -> None:
        """Part of a line, as it is; `end` ends the line."""
        self._end_word()
        self._begin_line()
        for piece in pieces:
            self._emit(piece.text, piece.style)

    def blank(self, lead: Iterable[Piece] = ()) -> None:
        """An empty line."""
        self.end()
        self.begin(lead)
        self._break()

    def room(self) -> int:
        """Columns behind what stands before a line."""
        return max(self._ask_width(), 1) - total_width(self._lead(self._rest, max(self._ask_width(), 1)))

    def flush(self) -> None:
        text = "".join(self._ready)
        self._ready.clear()
        if text:
            self._write(text)

    def reset(self) -> None:
        """Back to the terminal's own style."""
        if self._style:
            self._ready.append("\x1b[0m")
            self._style = PLAIN

    def _widen_gap(self, spaces: str, style: str) -> None:
        spaces = spaces[: _MAX_GAP - sum(len(piece.text) for piece in self._gap)]
        if spaces:
            self._gap.append(Piece(spaces, style))

    def _extend(self, text: str, style: str, columns: int, *, is_wide: bool = False) -> None:
        """Makes the word longer, or begins a new one next to a wide character."""
        joined = columns == 0 or (is_wide and self._last == _JOINER)
        if self._word and not joined and (is_wide or self._is_wide):
            self._end_word()
        self._is_wide = self._is_wide or is_wide
        self._last = text[-1]
        self._columns += columns
        self._word.append(Piece(text, style))
        if self._is_long:
            self._emit_word(columns)
        elif not self._is_wide and self._columns > self._line_width() - total_width(self._lead(self._rest)):
            self._is_long = True
            if self._column > self._start:
                self._break()
            self._begin_line()
            self._gap.clear()
            self._emit_word(self._columns)

    def _end_word(self) -> None:
        if self._word:
            columns = text_width("".join(piece.text for piece in self._word))
            gap = sum(len(piece.text) for piece in self._gap)
            self._begin_line()
            if self._column > self._start and self._column + gap + columns > self._width:
                self._break()
                self._begin_line()
            elif self._column > self._start:
                for piece in self._gap:
                    self._emit(piece.text, piece.style)
                self._column += gap
            self._gap.clear()
            self._emit_word(columns)
        self._start_word()

    def _emit_word(self, columns: int) -> None:
        for piece in self._word:
            self._emit(piece.text, piece.style)
        self._word.clear()
        self._column += columns
        if self._column > self._width:  # the terminal has wrapped it
            self._column = (self._column - 1) % self._width + 1

    def _start_word(self) -> None:
        self._word.clear()
        self._columns = 0
        self._is_wide = self._is_long = False
        self._last = ""

    def _line_width(self) -> int:
        return self._width if self._begun else max(self._ask_width(), 1)

    def _begin_line(self) -> None:
        if self._begun:
            return
        self._begun = True
        self._width = max(self._ask_width(), 1)
        lead = self._lead(self._first)
        for piece in lead:
            self._emit(piece.text, piece.style)
        self._column = self._start = total_width(lead)
        self._first = self._rest

    def _break(self) -> None:
        self._begin_line()
        self.reset()
        self._ready.append("\n")
        self._gap.clear()
        self._begun = False
        self._column = self._start = 0

    def _lead(self, pieces: list[Piece], width: int = 0) -> list[Piece]:
        """What stands before a line, cut where it would take more than half of it."""
        left = (width or self._line_width()) // 2
        cut = []
        for piece in pieces:
            cut.append(piece._replace(text=piece.text[:left]))
            left -= len(cut[-1].text)
        return cut

    def _emit(self, text: str, style: str) -> None:
        if not text:
            return
        if style != self._style:
            self._ready.append(f"\x1b[0;{style}m" if style else "\x1b[0m")
            self._style = style
        self._ready.append(text)


@functools.lru_cache(maxsize=4096)
def char_width(character: str) -> int:
    """Columns of one character: 0, 1 or 2."""
    return max(wcwidth.wcwidth(character), 0)


def text_width(text: str) -> int:
    """Columns of a text without control characters."""
    return len(text) if text.isascii() else max(wcwidth.wcswidth(text), 0)


def cut(text: str, columns: int) -> str:
    """As much of a text as fits."""
    while text_width(text) > columns:
        text = text[:-1]
    return text


def total_width(pieces: Iterable[Piece]) -> int:
    return sum(text_width(piece.text) for piece in pieces)
