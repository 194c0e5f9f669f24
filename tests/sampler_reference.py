"""The filters as their definitions read, in float64 over the whole vocabulary: what the sampler is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nanovllm_cli.engine.sampling_state import SequenceState
from nanovllm_cli.kernels import cpu_sampling, cpu_sampling_rows
from nanovllm_cli.sampling_params import SamplingParams

Floats = NDArray[np.float64]
Floats32 = NDArray[np.float32]
Ints = NDArray[np.int64]
LOWEST = float(np.finfo(np.float32).min)
_weight = njit(lambda gap: cpu_sampling_rows.weight(gap))


class NearTie(Exception):
    """A filter's limit falls so close to a sum that rounding decides: no fair question."""


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return e / e.sum()


def distribution(logits: NDArray[np.float32], params: SamplingParams, exclude_top: bool) -> Floats:
    """Probability of each token after temperature, top_n_sigma, min_p, top_k, typical_p, top_p and XTC, in this order."""
    x = logits.astype(np.float64)
    by_rank = sorted(range(len(x)), key=lambda i: (-x[i], i))
    p = softmax(x / params.temperature)

    if params.top_n_sigma > 0:
        limit = x.max() - params.top_n_sigma * x[x > -np.inf].std()
        if np.any(np.abs(x - limit) < 1e-5):
            raise NearTie
        p = _only(p, [i for i in by_rank if x[i] >= limit])
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


def drawn_from(params: SamplingParams, steps: Sequence[str], logits: Floats) -> Floats:
    """Probabilities behind llama.cpp's samplers in this order, by their formulas. Tokens 0 and 1 were seen before, 2 would repeat
    something; XTC always happens."""
    logits = logits.astype(np.float64)
    for step in steps:
        left = softmax(logits)
        likeliest = np.argsort(-left)
        keep = np.isfinite(logits)
        match step:
            case "penalties":
                seen = logits[:2]
                logits[:2] = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
                logits[:2] -= params.presence_penalty
            case "dry":
                logits[2] -= params.dry_multiplier
            case "temperature" if params.temperature == 0:
                keep &= left == left.max()
            case "temperature":
                logits = logits / params.temperature
            case "top_n_sigma" if params.top_n_sigma > 0:
                alive = logits[keep]
                keep &= logits >= alive.max() - params.top_n_sigma * alive.std() - 1e-9
            case "min_p":
                keep &= left >= params.min_p * left.max() * (1 - 1e-9)
            case "top_k" if params.top_k:
                keep[likeliest[params.top_k :]] = False
            case "top_p":
                keep[likeliest[1:]] &= np.cumsum(left[likeliest])[:-1] < params.top_p
            case "typ_p":
                surprise = -np.log(np.maximum(left, 1e-300))
                nearest = np.argsort(np.abs(surprise - (left * surprise).sum()))
                keep[nearest[1:]] &= np.cumsum(left[nearest])[:-1] < params.typical_p
            case "xtc" if params.has_xtc:
                top = [token for token in likeliest if left[token] >= params.xtc_threshold]
                keep[top[:-1]] = False
        logits = np.where(keep, logits, -np.inf)
    return softmax(logits)


# ---- the same in integers, as `kernels.cpu_sampling` defines it: sorted in full, one row, plain numpy ----


def exact_weights(gaps: Floats32) -> Ints:
    """floor(2**40 * e**gap) with the kernels' own exponential, which a test holds against float64's."""
    values, places = np.unique(gaps, return_inverse=True)
    return np.array([_weight(value) for value in values], dtype=np.int64)[places]


def exact_draw(logits: Floats32, params: SamplingParams, uniform: float, exclude_top: bool) -> int:
    """The id drawn; the largest logit must be finite and the temperature positive."""
    ranked = np.lexsort((np.arange(len(logits)), -logits))
    kept = ranked[logits[ranked] > -np.inf]
    if params.top_n_sigma > 0:
        alive = logits[logits > -np.inf].astype(np.float64)  # in order of ids, one after the other: what numpy's own sum is not
        mean = alive.cumsum()[-1] / len(alive)
        deviation = math.sqrt(((alive - mean) ** 2).cumsum()[-1] / len(alive))
        kept = kept[logits[kept] >= np.float32(float(logits.max()) - params.top_n_sigma * deviation)]
    if params.min_p > 0:
        floor = np.float32(max(LOWEST, float(logits.max()) + params.temperature * math.log(params.min_p)))
        kept = kept[logits[kept] >= floor]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    with np.errstate(over="ignore"):
        gaps = (logits - logits.max()) / np.float32(params.temperature)
    weights = exact_weights(gaps)
    if params.typical_p < 1:
        ids = np.sort(kept)
        surprises = np.minimum(-gaps[ids].astype(np.float64), 1e3)
        expected = (weights[ids] * surprises).cumsum()[-1] / weights[ids].sum()
        ids = ids[np.argsort(np.abs(surprises - expected), kind="stable")]
        ids = _exact_until(ids, weights, params.typical_p)
        kept = np.array([i for i in ranked if i in set(ids.tolist())])
    if params.top_p < 1:
        kept = _exact_until(kept, weights, params.top_p)
    if exclude_top:
        top = kept[weights[kept] >= params.xtc_threshold * weights[kept].sum()]
        kept = np.array([i for i in kept if i not in set(top[:-1].tolist())])
    kept = np.sort(kept)
    sums = weights[kept].cumsum()
    return int(kept[np.argmax(sums > int(uniform * int(sums[-1])))])


def _exact_until(ids: Ints, weights: Ints, share: float) -> Ints:
    sums = weights[ids].cumsum()
    return ids[: int(np.argmax(sums >= max(1, math.ceil(share * int(sums[-1]))))) + 1]


def exact_edits(logits: Floats32, edits: Sequence[NDArray[np.float32]]) -> Floats32:
    """logits after what `kernels.cpu_sampling.edit_rows` says of a row's edits."""
    logits = logits.copy()
    for token, scale, minus, then_minus in (edit for part in edits for edit in part):
        x = logits[int(token)]
        logits[int(token)] = (x / scale if x > 0 else x * scale) - minus - then_minus
    return logits


def adjusted_row(logits: Floats32, state: SequenceState) -> Floats32:
    """What the kernels make of a row by one sequence's parameters and history."""
    source, copy = logits[None].copy(), np.empty((1, len(logits)), dtype=np.float32)
    cpu_sampling.edit_rows(cpu_sampling.row_addresses(source, [0]), [state.edits()], copy)
    return copy[0] if state.allowed is None else masked(copy[0], state.allowed)


def masked(logits: Floats32, words: NDArray[np.uint32]) -> Floats32:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(logits)] > 0
    allowed = np.pad(bits, (0, len(logits) - len(bits)))
    return np.where(allowed, logits, np.float32(-np.inf))
