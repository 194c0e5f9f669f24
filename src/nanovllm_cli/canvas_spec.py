"""Where a picture's pieces lie on a canvas, whose lines and columns are rotary positions (MiniCPM-V 4.7), as plain values.

What shows all of a picture is stretched over the canvas, and its pieces lie beside each other on it. Each has a token in front of
it, and one behind it or more, which have positions there as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Canvas(NamedTuple):
    """Of a piece. tall, wide: of all of it, in tokens. top, left: the piece's beginning; is_whole: it is what shows all of the
    picture. num_behind: tokens behind its own that belong to it, what ends it and what follows that. is_last: of its picture."""

    tall: int
    wide: int
    top: int = 0
    left: int = 0
    is_whole: bool = False
    num_behind: int = 1
    is_last: bool = False

    @property
    def extent(self) -> int:
        """Rotary positions that all of a picture takes, counted behind the last of its pieces."""
        return max(self.tall, self.wide) + 1 if self.is_last else 0


class Markers(NamedTuple):
    """Ids of tokens in front of what shows all of a picture, and behind it; of its pieces; and that ends a line of these. Any of
    them belongs to the picture that it follows."""

    image_start: int
    image_end: int
    slice_start: int
    slice_end: int
    newline: int


class Lying(NamedTuple):
    """A piece in a prompt: its tokens from the one in front of it to that behind all its own, and its lines and columns."""

    start: int
    end: int
    rows: int
    columns: int
    canvas: Canvas | None


def are_canvases(pieces: Iterable[Lying]) -> bool:
    """Whether they are whole pictures, one after another: what shows all of each, then its pieces, line by line."""
    above: Lying | None = None  # what shows all of the picture
    end, following = 0, (0, 0)
    for piece in pieces:
        canvas, rows, columns = piece.canvas, piece.rows, piece.columns
        if canvas is None or canvas.num_behind < 1 or canvas.is_whole != (above is None):
            return False
        if above is None:
            size = (rows, columns) if canvas.is_last else (canvas.tall, canvas.wide)
            if size != canvas[:2] or (canvas.top, canvas.left) != (0, 0):
                return False
            above, following = piece, (0, 0)
        else:
            assert above.canvas is not None
            if canvas[:2] != above.canvas[:2] or (canvas.top, canvas.left) != following or piece.start != end:
                return False
            line_ends = canvas.left + columns == canvas.wide
            following = (canvas.top + rows, 0) if line_ends else (canvas.top, canvas.left + columns)
            if canvas.left + columns > canvas.wide or canvas.is_last != (line_ends and following[0] == canvas.tall):
                return False
            if following[0] > canvas.tall or (following[0] == canvas.tall and not canvas.is_last):
                return False
        if canvas.is_last:
            above = None
        end = piece.end
    return above is None
