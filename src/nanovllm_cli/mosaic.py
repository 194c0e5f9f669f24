"""How an image lies over several squares that a tower reads at once, and which of their rows stand for it (LLaVA-NeXT's "anyres",
Liu et al. 2024). Plain numbers."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple


class Seen(NamedTuple):
    """Of the rows of all squares but the first, put together: `lines` from `top` on, `columns` from `left` on, made into
    `shown_lines` by `shown_columns` where those are fewer."""

    top: int
    lines: int
    left: int
    columns: int
    shown_lines: int
    shown_columns: int


class Mark(NamedTuple):
    """A row that is always the same, at this place among those of a mosaic, and which of such rows it is."""

    place: int
    kind: int


class Mosaic(NamedTuple):
    """One square shows all of it, and behind that one `rows` lines of `columns` squares do, in the middle of which it lies, as
    large as there is room for, in its own shape: height, width are its own. Without lines there is the first square alone.

    Where squares lie `apart` height and width are 0: all of each stands for the image, between rows that are always the same: one
    in front of all, one behind the first square, one behind each in a line and one behind each line, but for the last, and one
    behind all (Ovis2)."""

    rows: int
    columns: int
    height: int
    width: int

    @property
    def num_squares(self) -> int:
        return 1 + self.rows * self.columns

    @property
    def apart(self) -> bool:
        return not self.height

    @property
    def num_marks(self) -> int:
        return 2 + max(1, self.rows * self.columns) if self.apart else 0

    def marks(self, side: int) -> list[Mark]:
        """Of squares of side x side rows that lie apart."""
        marks, place = [Mark(0, 0)], 1 + side**2
        marks.append(Mark(place, 1))
        for number in range(1, self.num_squares):
            place += 1 + side**2
            marks.append(Mark(place, 4 if number == self.num_squares - 1 else 2 if number % self.columns else 3))
        return marks if self.rows else [*marks, Mark(place + 1, 4)]

    def seen(self, side: int, most_squares: int) -> Seen:
        """Of squares of side x side rows. most_squares: about as many as rows may be shown of."""
        lines, columns = self.rows * side, self.columns * side
        top = left = 0
        if self.width / self.height > columns / lines:
            top = (lines - int(round(self.height * (columns / self.width), 7))) // 2
        else:
            left = (columns - int(round(self.width * (lines / self.height), 7))) // 2
        lines, columns = lines - 2 * top, columns - 2 * left
        shrink = math.sqrt(lines * columns / (most_squares * side**2))
        if shrink <= 1.1:
            return Seen(top, lines, left, columns, lines, columns)
        return Seen(top, lines, left, columns, int(lines // shrink), int(columns // shrink))

    def num_rows(self, side: int, most_squares: int) -> int:
        """With one behind each line, or behind the first square where that is alone."""
        if self.apart:
            return self.num_squares * side**2 + self.num_marks
        if not self.rows:
            return side**2 + 1
        seen = self.seen(side, most_squares)
        return side**2 + seen.shown_lines * (seen.shown_columns + 1)

    def fits(self, height: int, width: int, side: int, grids: Collection[tuple[int, int]], *, apart: bool = False) -> bool:
        """Whether it may be of an image of this height and width, with squares of side x side rows, in one of these grids."""
        known = (self.rows, self.columns) in ((0, 0), *grids)
        shaped = self.height == self.width == 0 if apart else self.height > 0 < self.width
        return known and shaped and height == width * self.num_squares and width // side * side == width > 0


def most_rows(grid: tuple[int, int], side: int, most_squares: int, *, apart: bool = False) -> int:
    """Of a mosaic with so many lines and columns of squares, whatever the image's shape."""
    rows, columns = grid
    if apart:
        return Mosaic(rows, columns, 0, 0).num_rows(side, most_squares)
    return math.ceil((1 + min(rows * columns, 1.1**2 * most_squares)) * side**2) + rows * side
