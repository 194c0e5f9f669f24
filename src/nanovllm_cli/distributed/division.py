"""Which rows of a matrix each of several processes has.

Every product is divided by its rows, which are its outputs. No sum is: each number is computed by one process as it would be by
one alone, so that all bits are the same however many there are. The price is that outputs are gathered behind every product; if
every other one were divided by its columns, partial sums would be added up half as often.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Gathers = Literal["all", "first", "none"]
"""Who gets a product whole."""
STEP = 128
"""Rows: shares of large sections are multiples of it, as are the blocks of rows that have a scale in some formats."""
LEAST_ROWS = 16
"""Of a process. What has fewer is computed by all of them, which is quicker than to wait for each other."""


class Piece(NamedTuple):
    """Columns of what a process computed, and where they are in the whole: `num` from `own` on, at `whole`."""

    rank: int
    own: int
    whole: int
    num: int


def bounds(count: int, size: int, step: int = 1) -> list[int]:
    """`size` shares of a count, as even as multiples of step allow: where each begins, and the end."""
    return [*((count * rank // size + step // 2) // step * step for rank in range(size)), count]


@dataclass(frozen=True)
class Division:
    """Rows in sections behind each other, each divided among `size` processes at the same parts of it. units: what each section
    is cut into, of which a process has some; None: rows, or STEP of them."""

    sections: tuple[int, ...]
    size: int
    units: int | None = None

    def ranges(self, rank: int) -> list[range]:
        """The rows that a process has of each section."""
        starts = itertools.accumulate(self.sections, initial=0)
        return [
            range(start + cuts[rank], start + cuts[rank + 1])
            for start, cuts in zip(starts, map(self._cuts, self.sections), strict=False)
        ]

    def _cuts(self, count: int) -> list[int]:
        if self.units is not None:
            return [each * (count // self.units) for each in bounds(self.units, self.size)]
        return bounds(count, self.size, STEP if count >= 2 * STEP * self.size else 1)

    def own_rows(self, rank: int) -> int:
        """How many it has in all."""
        return sum(map(len, self.ranges(rank)))

    @cached_property
    def num_rows(self) -> int:
        return sum(self.sections)

    @cached_property
    def begins(self) -> list[int]:
        """Where the rows of each process begin, and the end: of one section."""
        assert len(self.sections) == 1, "of several each process has several parts"
        return [*(self.ranges(rank)[0].start for rank in range(self.size)), self.num_rows]

    @cached_property
    def most_rows(self) -> int:
        """Of any process."""
        return max(self.own_rows(rank) for rank in range(self.size))

    @cached_property
    def pieces(self) -> list[Piece]:
        """How the whole is put together of what all have, by process."""
        found = []
        for rank in range(self.size):
            own = 0
            for rows in self.ranges(rank):
                found.append(Piece(rank, own, rows.start, len(rows)))
                own += len(rows)
        return found

    def is_worth_it(self) -> bool:
        """Whether every process has enough of every section."""
        return all(len(rows) >= LEAST_ROWS for rank in range(self.size) for rows in self.ranges(rank))


def own_parts(parts: dict[str, int], sections: Sequence[int], shares: Sequence[int]) -> dict[str, int]:
    """parts: rows by name, each of one section or several, of which a process has `shares`: its rows by name."""
    found, pairs = {}, iter(zip(sections, shares, strict=True))
    for name, rows in parts.items():
        found[name] = 0
        while rows > 0:
            section, share = next(pairs)
            found[name] += share
            rows -= section
        assert rows == 0, "sections end where parts do"
    return found
