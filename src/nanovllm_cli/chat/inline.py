"""Markdown within a line: emphasis, code, links, escapes; pieces come out as soon as they are decided.

What may still become markup (an opener without its closer) is held back to the end of its line or for `MAX_SPAN`
characters, and is plain text from then on. Rules are those of CommonMark 0.31 with GFM's strikethrough. Math (\\(…\\),
\\[…\\], $…$, $$…$$) and HTML other than <br> stay as they are.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm_cli.chat.flow import PLAIN, Piece, combined

MAX_SPAN = 400
_MAX_ADDRESS = 1000
_MAX_NESTED = 16  # openers within openers: more are not meant as markup

_SPECIAL = re.compile(r"[\\`*_~!\[<&$]")
_ESCAPABLE = frozenset(
    "!\"#$%&'*+,-./:;<=>?@^_`{|}~"
)  # CommonMark's, but for brackets: behind a backslash they are math
_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{0,31});")
_ENTITY_SO_FAR = re.compile(r"&#?[a-zA-Z0-9]{0,32}")
_BREAK = re.compile(r"<br\s?/?>", re.IGNORECASE)
_ADDRESS = re.compile(r"<((?:https?://|mailto:)[^\s<>]*|[\w.+-]{1,64}@[\w.-]{1,255})>")
_TARGET = re.compile(r"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)")


@dataclass(frozen=True, slots=True)
class Theme:
    """SGR parameters. Colours are of the terminal's own sixteen, which its owner can read on its background."""

    heading: str = "1;35"
    code: str = "36"
    link: str = "4"
    aside: str = "2"
    bold: str = "1"
    italic: str = "3"
    struck: str = "9"
    color: bool = True

    @classmethod
    def of(cls, *, color: bool) -> Theme:
        """Without colours attributes remain, and code keeps its backticks."""
        return cls() if color else cls(heading="1", code="", color=False)


class Inline:
    """One line after the other: `feed` and `finish` return what has been decided.

    Emphasis is CommonMark's delimiter stack, which works from left to right: as long as an opener waits for its closer, what
    stands behind it is held.
    """

    def __init__(self, theme: Theme) -> None:
        self._theme = theme
        self._start_line()

    def feed(self, text: str, style: str = PLAIN) -> list[Piece]:
        """More of a line, without its end."""
        self._pending += text
        self._read(final=False)
        return self._decided(style)

    def finish(self, text: str = "", style: str = PLAIN) -> list[Piece]:
        """The rest of the line."""
        self._pending += text
        self._read(final=True)
        self._openers.clear()
        pieces = self._decided(style)
        self._start_line()
        return pieces

    def _start_line(self) -> None:
        self._pending = ""
        self._position = 0  # of `_pending` in the line
        self._before = ""  # the character in front of it
        self._held: list[Piece | _Delimiters] = []
        self._openers: list[_Delimiters] = []

    def _read(self, *, final: bool) -> None:
        """Takes apart as much of what is pending as can be told."""
        text, end = self._pending, 0
        while end < len(text):
            special = _SPECIAL.search(text, end)
            begin = special.start() if special is not None else len(text)
            if begin > end:
                self._held.append(Piece(text[end:begin]))
                end = begin
            if special is None:
                break
            if special[0] in "*_~":
                stop = _run_end(text[: begin + MAX_SPAN], begin)
                if stop - begin == MAX_SPAN:
                    self._held.append(Piece(text[begin:stop]))
                elif stop == len(text) and not final:
                    break
                else:
                    before = text[begin - 1] if begin else self._before
                    self._delimit(_delimiters(text[begin:stop], before, text[stop : stop + 1], self._position + begin))
                end = stop
                continue
            limit = begin + MAX_SPAN + (_MAX_ADDRESS if special[0] in "![" else 0)
            match = _Construct(text[begin:limit], final or len(text) >= limit, self._theme).match()
            if match is None:
                break
            self._held += match.pieces
            end = begin + match.end
        if end:
            self._before, self._position, self._pending = text[end - 1], self._position + end, text[end:]

    def _delimit(self, run: _Delimiters) -> None:
        """Closes what the run can close, and keeps the rest of it as an opener."""
        self._forget_openers(run.begin)
        self._held.append(run)
        while run.can_close and run.count:
            at = next((i for i in reversed(range(len(self._openers))) if run.closes(self._openers[i])), None)
            if at is None:
                break
            opener = self._openers[at]
            width = min(opener.count, run.count, 2)
            opener.opened.append(width)
            run.closed.append(width)
            opener.count -= width
            run.count -= width
            del self._openers[at + 1 if opener.count else at :]
        if run.can_open and run.count:
            self._openers.append(run)

    def _forget_openers(self, position: int) -> None:
        """Openers that are too far back to be closed at `position`."""
        while self._openers and position - self._openers[0].begin > MAX_SPAN:
            del self._openers[0]

    def _decided(self, style: str) -> list[Piece]:
        """What stands in front of the first opener that still waits."""
        self._forget_openers(self._position)
        pieces: list[Piece] = []
        styles = [style]
        end = len(self._held)
        for i, item in enumerate(self._held):
            if isinstance(item, Piece):
                pieces.append(Piece(item.text, combined(styles[-1], item.style)))
                continue
            if self._openers and item is self._openers[0]:
                item.closed.clear()  # all that is open so far ends here
                end = i
                break
            del styles[len(styles) - len(item.closed) :]
            if item.count:
                pieces.append(Piece(item.character * item.count, styles[-1]))
            for width in reversed(item.opened):
                styles.append(combined(styles[-1], self._style_of(item.character, width)))
        del self._held[:end]
        return pieces

    def _style_of(self, character: str, width: int) -> str:
        if character == "~":
            return self._theme.struck
        return self._theme.bold if width == 2 else self._theme.italic


def inline_pieces(text: str, theme: Theme, style: str = PLAIN) -> list[Piece]:
    """A whole text on one line."""
    return Inline(theme).finish(text, style)


@dataclass(slots=True)
class _Delimiters:
    """A run of delimiters, of which `count` are not used. opened, closed: how many were used for each span that begins, or
    ends, here; the innermost comes first."""

    character: str
    begin: int
    width: int
    can_open: bool
    can_close: bool
    count: int
    opened: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)

    def closes(self, opener: _Delimiters) -> bool:
        """Rules 9 and 10 of section 6.2: the "multiple of 3"."""
        thirds = (self.width + opener.width) % 3 == 0 and self.width % 3 != 0
        return self.character == opener.character and not (thirds and (self.can_open or opener.can_close))


def _delimiters(run: str, before: str, after: str, begin: int) -> _Delimiters:
    """A run between two characters: left- and right-flanking (section 6.2)."""
    left = not _is_space(after) and (not _is_punctuation(after) or _is_space(before) or _is_punctuation(before))
    right = not _is_space(before) and (not _is_punctuation(before) or _is_space(after) or _is_punctuation(after))
    can_open, can_close = left, right
    if run[0] == "_":
        can_open = left and (not right or _is_punctuation(before))
        can_close = right and (not left or _is_punctuation(after))
    means = len(run) == 2 or run[0] != "~"
    return _Delimiters(run[0], begin, len(run), can_open and means, can_close and means, len(run))


class _Match(NamedTuple):
    """Pieces for the first `end` characters."""

    pieces: list[Piece]
    end: int


@dataclass(frozen=True, slots=True)
class _Construct:
    """What may begin at the first character of `text`, and its longest possible extent. complete: `text` is all that
    will ever be looked at. What is decided depends on nothing behind it, so that it is the same for any cut."""

    text: str
    complete: bool
    theme: Theme

    def match(self) -> _Match | None:
        """The construct, or its first characters as plain text; None: undecided."""
        if len(self.text) == 1:
            return self._plain(1) if self.complete else None
        character = self.text[0]
        if character == "`":
            return self._code()
        if character == "\\":
            return self._escape()
        if character in "![":
            return self._link()
        if character == "<":
            return self._angle()
        if character == "&":
            return self._entity()
        return self._math()

    def _plain(self, end: int) -> _Match:
        return _Match([Piece(self.text[:end])], end)

    def _through(self, closer: str, start: int) -> _Match | None:
        """Everything up to and with `closer` as it is; without one, up to `start`."""
        found = self.text.find(closer, start)
        if found >= 0:
            return self._plain(found + len(closer))
        return self._plain(start) if self.complete else None

    def _escape(self) -> _Match | None:
        following = self.text[1]
        if following in "([":
            return self._through("\\)" if following == "(" else "\\]", 2)
        if following in _ESCAPABLE:
            return _Match([Piece(following)], 2)
        return self._plain(2 if following in ")]\\" else 1)

    def _math(self) -> _Match | None:
        """Dollars as Pandoc reads them: no space within, no digit behind."""
        text, dollars = self.text, _run_end(self.text, 0)
        if dollars == len(text):
            return self._plain(dollars) if self.complete else None
        if dollars == 2:
            return self._through("$$", 2)
        if dollars > 2 or text[1] == " " or text[1].isdigit():
            return self._plain(dollars)
        close = text.find("$", 1)
        if not self.complete and close in (-1, len(text) - 1):
            return None
        is_math = close > 0 and text[close - 1] != " " and not text[close + 1 : close + 2].isdigit()
        return self._plain(close + 1 if is_math else 1)

    def _code(self) -> _Match | None:
        width = _run_end(self.text, 0)
        end = _code_end(self.text, 0)
        if not self.complete and (end is None or end == len(self.text)):
            return None
        if end is None:
            return self._plain(width)
        code = self.text[width : end - width]
        if not self.theme.color:
            return self._plain(end)
        if code[0] == code[-1] == " " and code.strip():
            code = code[1:-1]
        return _Match([Piece(code, self.theme.code)], end)

    def _angle(self) -> _Match | None:
        if not self.text[1].isalpha():
            return self._plain(1)
        ends = re.search(r"[>\s<]", self.text[1:]) is not None
        if not self.complete and (not ends or "<br /".startswith(self.text.lower())):
            return None
        address = _ADDRESS.match(self.text)
        if address is not None:
            return _Match([Piece(address[1], self.theme.link)], address.end())
        line_break = _BREAK.match(self.text)
        if line_break is not None:
            return _Match([Piece("\n")], line_break.end())
        return self._plain(1)

    def _entity(self) -> _Match | None:
        entity = _ENTITY.match(self.text)
        if entity is None:
            so_far = _ENTITY_SO_FAR.match(self.text)
            undecided = so_far is not None and so_far.end() == len(self.text) and not self.complete
            return None if undecided else self._plain(1)
        meant = html.unescape(entity[0]).replace("\xa0", " ")
        if not meant or not meant.isprintable() or ";" in meant:
            return self._plain(entity.end())
        return _Match([Piece(meant)], entity.end())

    def _link(self) -> _Match | None:
        """[text](address) and ![text](address): the text, and the address in parentheses."""
        text = self.text
        bracket = int(text[0] == "!")
        if text[bracket] != "[":
            return self._plain(1)
        close = _bracket_end(text[:MAX_SPAN], bracket)
        if close is None:
            undecided = len(text) < MAX_SPAN and not self.complete
            return None if undecided else self._plain(bracket + 1)
        target = _TARGET.match(text, close)
        if target is None:
            undecided = close > 0 and text[close : close + 1] in ("(", "") and not self.complete
            return None if undecided else self._plain(bracket + 1)
        label = text[bracket + 1 : close - 1]
        address = target[0][1:-1].strip().strip("<>")
        pieces = inline_pieces(label, self.theme, self.theme.link)
        if address and address != label:
            pieces.append(Piece(f" ({address})" if label else address, self.theme.aside))
        return _Match(pieces, target.end())


def _run_end(text: str, begin: int) -> int:
    """Where the run of one character at `begin` ends."""
    end = begin
    while end < len(text) and text[end] == text[begin]:
        end += 1
    return end


def _code_end(text: str, begin: int) -> int | None:
    """Where the code span of the backticks at `begin` ends; None where it does not. At the end of `text` the last run may
    still grow."""
    end = _run_end(text, begin)
    width = end - begin
    for run in re.finditer("`+", text[end:]):
        if run.end() - run.start() == width:
            return end + run.end()
    return None


def _bracket_end(text: str, begin: int) -> int | None:
    """Behind the bracket that closes the one at `begin`; -1 where brackets are nested too deep; None: not found."""
    depth = 0
    for stop in re.finditer(r"\\.|[\[\]]", text[begin:]):
        depth += {"[": 1, "]": -1}.get(stop[0], 0)
        if depth == 0 and stop[0] == "]":
            return begin + stop.end()
        if depth > _MAX_NESTED:
            return -1
    return None


def _is_space(character: str) -> bool:
    """The ends of a line count as spaces."""
    return not character or character.isspace()


def _is_punctuation(character: str) -> bool:
    return bool(character) and not character.isalnum() and not character.isspace()
