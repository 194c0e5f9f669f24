"""When the tokens of a text are said, by what they attend to of an encoder's rows, which follow each other in time: dynamic time
warping (Sakoe and Chiba 1978) of the weights of heads that go along with what is said.

As OpenAI's code has it (`timing.py` of openai/whisper): the weights of each head are measured by their mean and deviation over
all tokens, smoothed along time by a median of seven, and averaged over heads; the path is that of the greatest sum.

Legend: T tokens, R rows, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

MEDIAN_WIDTH = 7
_SORTED = ((0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6), (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4))
"""Pairs of seven that are put in order, one after another, until the fourth is the median (Devillard 1998)."""
_DIAGONAL, _DOWN, _ALONG = 0, 1, 2


def weights_of(heads: Iterable[tuple[Floats, Floats]], scale: float, rows: int) -> Floats:
    """heads: of each the queries [T, D] and the keys [R, D], float32 -> [T, rows] float32: how much a token's attention to each
    of the first rows stands out. One head at a time, as all together may take gigabytes."""
    total: Floats = np.zeros((), np.float32)
    count = 0
    for q, k in heads:
        total = total + _standing_out(q @ k[:rows].T * np.float32(scale))
        count += 1
    return total / np.float32(count)


def _standing_out(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    deviation = weights.std(axis=0)
    weights -= weights.mean(axis=0)
    np.divide(weights, deviation, out=weights, where=deviation > 0)  # where it is 0, all are
    return _smoothed(weights)


def _smoothed(weights: Floats) -> Floats:
    """The median of the seven weights around each, along rows, reflected at the ends; of so few rows as they are."""
    reach = MEDIAN_WIDTH // 2
    if weights.shape[1] <= reach:
        return weights
    padded = np.pad(weights, ((0, 0), (reach, reach)), mode="reflect")
    seven = [padded[:, i : i + weights.shape[1]] for i in range(MEDIAN_WIDTH)]
    for i, j in _SORTED:
        seven[i], seven[j] = np.minimum(seven[i], seven[j]), np.maximum(seven[i], seven[j])
    return seven[reach]


def first_rows(weights: Floats) -> NDArray[np.int64]:
    """weights [T, R] -> [T]: the row where the path of the greatest sum, from the first token and row to the last, comes to each
    token. Of ways that are equal it is the one along the rows."""
    steps = _steps(-weights.astype(np.float64))
    token, row = weights.shape[0] - 1, weights.shape[1] - 1
    first = np.zeros(len(weights), np.int64)
    while token >= 0:
        step = _ALONG if token == 0 else _DOWN if row == 0 else steps[token, row]
        if step != _ALONG or row == 0:
            first[token] = row
            token -= 1
        if step != _DOWN:
            row -= 1
    return first


def _steps(costs: NDArray[np.float64]) -> NDArray[np.int8]:
    """[T, R] -> [T, R]: by which step the cheapest way comes to each place. All places of a diagonal follow from the two before
    it, so that they are found together."""
    num_tokens, num_rows = costs.shape
    steps = np.empty((num_tokens, num_rows), np.int8)
    before = np.full(num_tokens + 1, np.inf)  # of each diagonal by token, from 1 on; 0 is the border
    last = before.copy()
    before[0] = 0.0  # the corner
    mirrored, mirrored_steps = costs[:, ::-1], steps[:, ::-1]
    for diagonal in range(num_tokens + num_rows - 1):
        first, end = max(0, diagonal - num_rows + 1), min(num_tokens, diagonal + 1)
        from_both, down, along = before[first:end], last[first:end], last[first + 1 : end + 1]
        is_diagonal, is_down = (from_both < down) & (from_both < along), (down < from_both) & (down < along)
        places = np.arange(first, end), np.arange(num_rows - 1 - diagonal + first, num_rows - 1 - diagonal + end)
        mirrored_steps[places] = np.where(is_diagonal, _DIAGONAL, np.where(is_down, _DOWN, _ALONG))
        best = np.where(is_diagonal, from_both, np.where(is_down, down, along))
        found = np.full(num_tokens + 1, np.inf)
        found[first + 1 : end + 1] = mirrored[places] + best
        before, last = last, found
    return steps
