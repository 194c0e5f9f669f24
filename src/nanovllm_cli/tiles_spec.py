"""A tower that reads all tiles of an image at once, as plain values (Llama 3.2)."""

from __future__ import annotations

from typing import NamedTuple

PADDED_TO = 8
"""Rows of a tile are filled up to a multiple of so many, by rows that begin as zeros."""


class TilesSpec(NamedTuple):
    """An image is laid on a grid of up to `most` tiles; in the place of those that it lacks are zeros, as of patches of a mean
    colour. A tile's patches are behind a lead, and have learned positions and others, by the grid and where in it
    their tile is. Layers see the rows of all tiles; but rows that fill up a tile, and those of a tile that an image lacks, don't
    see each other. num_global: of a tower's layers, the last ones, in front of which another table is added, and what they add is
    gated. reads: what is projected is a row behind the last layer, and a number in turn of what it was behind each of these."""

    most: int
    num_global: int
    reads: tuple[int, ...]

    @property
    def grids(self) -> list[tuple[int, int]]:
        """In lines and columns, in the order of their tables behind the first, which is of no image."""
        sides = range(1, self.most + 1)
        return [(lines, columns) for lines in sides for columns in sides if lines * columns <= self.most]

    def filled(self, rows: int) -> int:
        """Rows of a tile that has so many, with what fills them up."""
        return -(-rows // PADDED_TO) * PADDED_TO
