"""SAM's encoder as plain values: what makes of an image the rows that are read (GOT-OCR 2), that queries of a tower behind it
look at (DeepSeek-OCR 2), or that are read beside what such a tower makes of them (DeepSeek-OCR)."""

from __future__ import annotations

import math
from typing import NamedTuple


class SamSpec(NamedTuple):
    """SAM's encoder (Kirillov et al. 2023): a vision transformer in the windows of whose layers, squares of `window` patches, but
    for `full`, patches see each other, also those beyond the image; scores get what a query makes of how many lines and columns
    lie between. Behind it two convolutions to `neck` dimensions, each with a norm, and two that halve lines and columns, to
    `middle` and to those of the next tower. positions: a square of so many learned rows.

    queries: behind a small and a large image's rows, there are so many learned ones, each of which sees all of the image and the
    queries before it; what becomes of these is read. Behind a large image's is a row that is always the same. None: there is no
    tower behind it, and its own rows are read.
    beside: or there is one, which reads its rows, and what that makes of each lies in front of it in one row. Behind each line of
    these is one that is always the same. An image that is square shows all of a page, and behind it is another such row; one that
    is not is several squares of a page, in a line or below each other, which are computed apart, and whose lines are joined.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    eps: float
    window: int
    full: tuple[int, ...]
    positions: int
    neck: int
    middle: int
    queries: tuple[int, int] | None = (144, 256)
    beside: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def num_rows(self, lines: int, columns: int) -> int:
        """Of an image of so many cells."""
        if self.beside:
            return lines * (columns + 1) + (lines == columns)
        return lines * columns + (self.queries is not None and lines * columns == self.queries[1])

    def most_numbers(self, patches: int) -> int:
        """That there are at once, about: of a layer in which all patches see each other, or those of a window, with what there is
        beyond the image, and how far apart they lie."""
        side = math.isqrt(patches)
        filled = -(-side // self.window) * self.window
        most = (rows * (6 * self.hidden_size + 6 * self.num_heads * (self.head_dim + 2 * reach))
                for rows, reach in ((side**2, side), (filled**2, self.window)))  # fmt: skip
        return max(most)

    def work(self, patches: int) -> int:
        """Multiplications of all layers."""
        matrices = 4 * self.hidden_size + 2 * self.intermediate_size
        seen = len(self.full) * patches + (self.num_layers - len(self.full)) * min(patches, self.window**2)
        return patches * self.hidden_size * (self.num_layers * matrices + 2 * seen)
