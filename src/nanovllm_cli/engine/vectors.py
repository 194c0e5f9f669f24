"""What becomes of vectors of texts: their length, their first numbers, how near they are."""

from __future__ import annotations

import math
from collections.abc import Sequence


def unit(vector: Sequence[float]) -> list[float]:
    """The same direction, of length 1."""
    length = math.sqrt(math.fsum(number * number for number in vector))
    return [number / length for number in vector] if length else list(vector)


def nearness(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of the angle between two vectors of length 1."""
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def by_score(scores: Sequence[float]) -> list[tuple[int, float]]:
    """Best first, the earlier of those that are alike: (their place, their score)."""
    return sorted(enumerate(scores), key=lambda scored: -scored[1])
