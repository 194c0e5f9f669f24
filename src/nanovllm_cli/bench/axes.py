"""Axes of a chart: where values go, round numbers to stand beside them, and how those are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanovllm_cli.bench.charts import Axis

NUM_TICKS = 6


def number(value: float) -> str:
    """Three digits that count, thousands apart: 12,345  123  12.3  0.0123."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    if digits <= 0:
        return f"{value:,.0f}"
    shown = f"{value:.{digits}f}"
    return shown.rstrip("0").rstrip(".")


def printable(text: str) -> str:
    """A name without control characters: names of models and settings are others' words."""
    return "".join(c if c.isprintable() else " " for c in text)


class Scale(NamedTuple):
    """Values of an axis to places on the paper, the values that get a line and a number, and the axis's middle."""

    place: Callable[[float], float]
    ticks: list[float]
    middle: float


def scale(values: Sequence[float], axis: Axis, begin: float, end: float, *, to_a_tick: bool = True) -> Scale:
    """Of `values`, from `begin` to `end` on the paper. A linear one begins at 0, and ends at a tick or with the values."""
    if axis.log:
        positive = [value for value in values if value > 0] or [1.0]
        low = math.floor(math.log(min(positive), axis.log) + 1e-9)
        high = max(math.ceil(math.log(max(positive), axis.log) - 1e-9), low + 1)
        step = max(1, math.ceil((high - low) / NUM_TICKS))
        ticks = [float(axis.log) ** power for power in range(low, high + 1, step)]
        floor = float(axis.log) ** low

        def place(value: float) -> float:
            return begin + (end - begin) * (math.log(max(value, floor), axis.log) - low) / (high - low)

        return Scale(place, ticks, (begin + end) / 2)
    most = max([*values, 0.0])
    unit = round_step(most / NUM_TICKS)
    count = max(1, math.ceil(most / unit - 1e-9)) if to_a_tick else max(1, math.floor(most / unit + 1e-9))
    high_end = count * unit if to_a_tick else max(most * 1.02, unit)
    ticks = [i * unit for i in range(count + 1)]
    return Scale(lambda value: begin + (end - begin) * value / high_end, ticks, (begin + end) / 2)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `least`; 1 for 0."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least * (1 - 1e-9))
