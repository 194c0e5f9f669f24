"""Models whose layers are gone through several times, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


class Run(NamedTuple):
    """Layers from `first` to in front of `end`, one behind the other. slow: whose rows it makes."""

    first: int
    end: int
    slow: bool


@dataclass(frozen=True, slots=True)
class PassesSpec:
    """Each run has keys and values of its own, so that a layer has as many caches as there are runs of it. The last run's rows
    are what the model gives. between: what becomes of those of the others.

    sums: there are two rows of a token that stacks of layers change by turns, a slow one and a fast one (HRM, Wang et al. 2025).
    The slow one is the embedding at first, the fast one a row of the checkpoint. A run reads the sum of both; what it leaves is
    normed, without gains, and replaces the row that it makes.
    norm: they go through the model's last norm, and the next run reads that (Nanbeige 4.2).
    nothing: the next run reads them as they are.
    """

    runs: tuple[Run, ...]
    between: Literal["sums", "norm", "nothing"] = "sums"

    @property
    def order(self) -> tuple[int, ...]:
        """Layers in the order in which they are computed."""
        return tuple(layer for run in self.runs for layer in range(run.first, run.end))

    @property
    def joints(self) -> dict[int, bool]:
        """Places in that order in front of which something is done to what a run has left, and whether that was a slow one."""
        found, place = {}, 0
        for run in self.runs[:-1] if self.between != "nothing" else ():
            place += run.end - run.first
            found[place] = run.slow
        return found


@dataclass(frozen=True, slots=True)
class LoopSpec:
    """Layers from `first` to in front of `end`, of `num_layers`, that are gone through `times` times, each time with keys and
    values of their own; those in front and behind once (Dory). What those in front leave is added again before each further time,
    and the sum normed."""

    first: int
    end: int
    times: int
    num_layers: int

    @property
    def order(self) -> tuple[int, ...]:
        """See `PassesSpec`."""
        return (*range(self.first), *(*range(self.first, self.end),) * self.times, *range(self.end, self.num_layers))

    @property
    def joints(self) -> frozenset[int]:
        """Places in that order where a time begins."""
        return frozenset(self.first + (self.end - self.first) * i for i in range(self.times))
