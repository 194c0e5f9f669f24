"""Tables (GFM): held until their columns can be set, then printed with wrapped cells, a row after the other.

The first `HELD_ROWS` rows decide the widths; the rows behind them are printed as they come. A terminal too narrow for
the columns gets each row as a list of "header: cell".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from nanovllm_cli.chat.flow import Flow, Piece, char_width, text_width, total_width
from nanovllm_cli.chat.inline import Theme, inline_pieces

HELD_ROWS = 12
_MAX_COLUMNS = 64
_NARROWEST = 4
_DELIMITER = re.compile(r"\s*:?-+:?\s*")
_ATOMS = re.compile(r"\n| +|[^ \n]+")

Alignment = Literal["left", "center", "right"]
Line = list[Piece]


class Table:
    """header, delimiter: the first two lines. `add` and `finish` write to `flow`, behind whatever begins its lines."""

    def __init__(self, header: str, delimiter: str, flow: Flow, theme: Theme) -> None:
        self._flow = flow
        self._theme = theme
        self._alignments = [_alignment(cell) for cell in cells_of(delimiter)]
        self._header = self._cells(header, style=theme.bold)
        self._held: list[list[Line]] = []
        self._widths: list[int] | None = None

    def add(self, line: str) -> None:
        row = self._cells(line)
        if self._widths is None:
            self._held.append(row)
            if len(self._held) == HELD_ROWS:
                self._settle()
        else:
            self._write(row)

    def finish(self) -> None:
        if self._widths is None:
            self._settle()

    def _settle(self) -> None:
        """Sets the columns and writes what was held."""
        rows = [self._header, *self._held]
        natural = [max(max(total_width(row[i]), 1) for row in rows) for i in range(len(self._alignments))]
        self._widths = fit(natural, self._flow.room() - 3 * (len(natural) - 1))
        if self._widths:
            self._write(self._header)
            rule = "─┼─".join("─" * width for width in self._widths)
            self._flow.line([Piece(rule, self._theme.aside)])
        for row in self._held:
            self._write(row)
        self._held.clear()

    def _cells(self, line: str, style: str = "") -> list[Line]:
        count = len(self._alignments)
        cells = [inline_pieces(cell, self._theme, style) for cell in cells_of(line)]
        return (cells + [[] for _ in range(count)])[: max(count, len(cells))]

    def _write(self, row: list[Line]) -> None:
        widths = self._widths
        if not widths:
            self._write_as_list(row)
            return
        # Cells without a column go to the last one, so that nothing is lost.
        last = [piece for cell in row[len(widths) - 1 :] for piece in (Piece(" "), *cell)][1:]
        wrapped = [wrap(cell, width) for cell, width in zip([*row[: len(widths) - 1], last], widths, strict=True)]
        for i in range(max(len(lines) for lines in wrapped)):
            pieces: Line = []
            for lines, width, alignment in zip(wrapped, widths, self._alignments, strict=True):
                pieces += [Piece(" │ ", self._theme.aside)] if pieces else []
                pieces += _aligned(lines[i] if i < len(lines) else [], width, alignment)
            self._flow.line(_stripped(pieces))

    def _write_as_list(self, row: list[Line]) -> None:
        for i, cell in enumerate(row):
            header = self._header[i] if i < len(self._header) else []
            for piece in (*header, Piece(": ", self._theme.aside), *cell):
                self._flow.put(piece.text, piece.style)
            self._flow.end()
        self._flow.line([])


def cells_of(line: str) -> list[str]:
    """The cells of a row, without the bars at its ends."""
    line = line.strip().removeprefix("|")
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)]


def is_delimiter(line: str, header: str) -> bool:
    """Whether `line` makes a table of the line before it."""
    cells = cells_of(line)
    return len(cells) == len(cells_of(header)) <= _MAX_COLUMNS and all(map(_DELIMITER.fullmatch, cells))


def fit(natural: Sequence[int], room: int) -> list[int]:
    """Widths that fit into `room`: narrow columns keep theirs, the others share what is left. Empty where nothing fits."""
    if sum(natural) <= room:
        return list(natural)
    if sum(min(width, _NARROWEST) for width in natural) > room:
        return []
    widths = [min(width, _NARROWEST) for width in natural]
    while True:
        growing = [i for i, width in enumerate(widths) if width < natural[i]]
        share = (room - sum(widths)) // max(len(growing), 1)
        if share == 0:
            for i in growing[: room - sum(widths)]:
                widths[i] += 1
            return widths
        for i in growing:
            widths[i] = min(natural[i], widths[i] + share)


def wrap(pieces: Iterable[Piece], width: int) -> list[Line]:
    """Lines of at most `width` columns; words that are wider are cut. width: two at least, or wide characters stand out."""
    lines: list[Line] = [[]]
    column = 0
    for text, style in pieces:
        for atom in _ATOMS.findall(text):
            columns = text_width(atom)
            if atom == "\n":
                lines.append([])
                column = 0
                continue
            if column and column + columns > width:
                lines.append([])
                column = 0
            if atom[0] == " " and not column:
                continue
            if columns <= width:
                lines[-1].append(Piece(atom, style))
                column += columns
                continue
            for character in atom:
                columns = char_width(character)
                if column and column + columns > width:
                    lines.append([])
                    column = 0
                lines[-1].append(Piece(character, style))
                column += columns
    return lines


def _aligned(line: Line, width: int, alignment: Alignment) -> Line:
    spare = max(width - total_width(_stripped(line)), 0)
    left = {"left": 0, "center": spare // 2, "right": spare}[alignment]
    return [Piece(" " * left), *_stripped(line), Piece(" " * (spare - left))]


def _stripped(line: Line) -> Line:
    """Without the spaces at its end."""
    line = list(line)
    while line and not line[-1].text.strip(" "):
        line.pop()
    if line:
        line[-1] = line[-1]._replace(text=line[-1].text.rstrip(" "))
    return line


def _alignment(cell: str) -> Alignment:
    if cell.endswith(":"):
        return "center" if cell.startswith(":") else "right"
    return "left"
