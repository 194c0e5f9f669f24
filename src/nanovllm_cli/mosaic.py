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


class Laid(NamedTuple):
    """How squares lie, as a `SizeRule` has it; see `Mosaic`."""

    apart: bool
    margin: int
    ends: bool


class Plane(NamedTuple):
    """So many lines of so many patches, of which cells of 2 x 2 are a row each; where they are no whole ones, the last ones
    have fewer. ends: whether a row more is behind each line."""

    lines: int
    columns: int
    ends: bool

    @property
    def cells(self) -> tuple[int, int]:
        return -(-self.lines // 2), -(-self.columns // 2)

    @property
    def num_rows(self) -> int:
        """With one in front of all and one behind."""
        lines, columns = self.cells
        return 2 + lines * (columns + self.ends)

    @property
    def num_marks(self) -> int:
        """Of these, those that are always the same."""
        return 2 + self.cells[0] * self.ends

    def marks(self, first: int, begin: int) -> list[Mark]:
        """From the place `first` on; begin: the kind of that in front of all. Ends of lines are of the kind 1, of all 2."""
        lines, columns = self.cells
        ends = [Mark(first + (i + 1) * (columns + 1), 1) for i in range(lines)] if self.ends else []
        return [Mark(first, begin), *ends, Mark(first + self.num_rows - 1, 2)]


class Mosaic(NamedTuple):
    """One square shows all of it, and behind that one `rows` lines of `columns` squares do, in the middle of which it lies, as
    large as there is room for, in its own shape: height, width are its own. Without lines there is the first square alone.

    Where squares lie `apart` height and width are 0: all of each stands for the image, between rows that are always the same: one
    in front of all, one behind the first square, one behind each in a line and one behind each line, but for the last, and one
    behind all (Ovis2).

    Where they overlap, by twice `margin` patches, height and width are those of a square in patches, of whose rows 2 x 2 are one:
    those of the first square, behind each line of which is one that is always the same if it has `ends`, and then those of all
    others, without what two of them show at its edge, each of both between two more (Molmo 2)."""

    rows: int
    columns: int
    height: int
    width: int
    margin: int = 0
    ends: int = 0

    @property
    def num_squares(self) -> int:
        return 1 + self.rows * self.columns

    @property
    def apart(self) -> bool:
        return not self.height and not self.margin

    @property
    def planes(self) -> tuple[Plane, Plane]:
        """Of squares that overlap, the first, and all others."""
        side, both = self.height, 2 * self.margin
        inner = side - both
        return Plane(side, side, bool(self.ends)), Plane(self.rows * inner + both, self.columns * inner + both, True)

    @property
    def num_marks(self) -> int:
        if self.margin:
            return sum(plane.num_marks for plane in self.planes)
        return 2 + max(1, self.rows * self.columns) if self.apart else 0

    def marks(self, side: int) -> list[Mark]:
        """Of squares of side x side rows that lie apart, or overlap."""
        if self.margin:
            whole, others = self.planes
            return [*whole.marks(0, 0), *others.marks(whole.num_rows, 3)]
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
        if self.margin:
            return sum(plane.num_rows for plane in self.planes)
        if self.apart:
            return self.num_squares * side**2 + self.num_marks
        if not self.rows:
            return side**2 + 1
        seen = self.seen(side, most_squares)
        return side**2 + seen.shown_lines * (seen.shown_columns + 1)

    def fits(self, height: int, width: int, side: int, grids: Collection[tuple[int, int]], laid: Laid) -> bool:
        """Whether it may be of an image of this height and width, with squares of side x side rows, in one of these grids."""
        if (self.margin, self.ends) != (laid.margin, laid.ends):
            return False
        if self.margin:
            is_one = (self.rows, self.columns) in grids and self.height == self.width == side
            return is_one and height == width * self.num_squares and width % side == 0 < width
        known = (self.rows, self.columns) in ((0, 0), *grids)
        shaped = self.height == self.width == 0 if laid.apart else self.height > 0 < self.width
        return known and shaped and height == width * self.num_squares and width // side * side == width > 0


def most_rows(grid: tuple[int, int], side: int, most_squares: int, laid: Laid) -> int:
    """Of a mosaic with so many lines and columns of squares, whatever the image's shape."""
    rows, columns = grid
    if laid.margin:
        return Mosaic(rows, columns, side, side, laid.margin, int(laid.ends)).num_rows(side, 0)
    if laid.apart:
        return Mosaic(rows, columns, 0, 0).num_rows(side, most_squares)
    return math.ceil((1 + min(rows * columns, 1.1**2 * most_squares)) * side**2) + rows * side
