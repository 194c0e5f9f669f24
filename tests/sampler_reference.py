"""The filters as their definitions read, in float64 over the whole vocabulary: what the sampler is held against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanovllm_cli.sampling_params import SamplingParams

Floats = NDArray[np.float64]


class NearTie(Exception):
    """A filter's limit falls so close to a sum that rounding decides: no fair question."""


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return e / e.sum()


def distribution(logits: NDArray[np.float32], params: SamplingParams, exclude_top: bool) -> Floats:
    """Probability of each token after temperature, min_p, top_k, typical_p, top_p and XTC, in this order."""
    x = logits.astype(np.float64)
    by_rank = sorted(range(len(x)), key=lambda i: (-x[i], i))
    p = softmax(x / params.temperature)

    if params.min_p > 0:
        limit = params.min_p * p.max()
        _fair(p, limit)
        p = _only(p, [i for i in by_rank if p[i] >= limit])
    if params.top_k > 0:
        p = _only(p, [i for i in by_rank if p[i] > 0][: params.top_k])
    if params.typical_p < 1:
        alive = [i for i in by_rank if p[i] > 0]
        surprise = {i: -np.log(p[i]) for i in alive}
        entropy = sum(p[i] * surprise[i] for i in alive)
        distance = {i: abs(surprise[i] - entropy) for i in alive}
        order = sorted(alive, key=lambda i: (distance[i], i))
        _fair_order([distance[i] for i in order], [x[i] for i in order])
        p = _until(p, order, params.typical_p)
    if params.top_p < 1:
        p = _until(p, [i for i in by_rank if p[i] > 0], params.top_p)
    if exclude_top:
        _fair(p, params.xtc_threshold)
        top = [i for i in by_rank if p[i] >= params.xtc_threshold]
        if len(top) >= 2:
            p = _only(p, [i for i in by_rank if p[i] > 0 and i not in top[:-1]])
    return p


def _only(p: Floats, keep: list[int]) -> Floats:
    kept = np.zeros_like(p)
    kept[keep] = p[keep]
    return kept / kept.sum()


def _until(p: Floats, order: list[int], share: float) -> Floats:
    kept, held = [], 0.0
    for i in order:
        kept.append(i)
        held += p[i]
        if abs(held - share) < 1e-6:
            raise NearTie
        if held >= share:
            break
    return _only(p, kept)


def _fair(values: Floats, limit: float) -> None:
    if np.any(np.abs(values - limit) < 1e-6 * max(limit, 1e-3)):
        raise NearTie


def _fair_order(distances: list[float], logits: list[float]) -> None:
    """Equal logits tie by id; anything else closer than float32 tells apart is no fair question."""
    for i in range(len(distances) - 1):
        if distances[i + 1] - distances[i] < 1e-5 and logits[i] != logits[i + 1]:
            raise NearTie
