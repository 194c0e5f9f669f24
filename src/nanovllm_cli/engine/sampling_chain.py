"""llama.cpp's way from logits to a token: steps one after another in the order that a request names, each on what the ones
before it left. For what the fixed order of `sampler` has no place for; `samplers` says which requests those are.

All of it is float64, one row at a time, in order of ids, so that a draw depends on its row, its random number and what its own
sequence drew before, and on nothing else. Of equal logits the lower id comes first.

What Mirostat and adaptive-p remember is one number: the largest surprise allowed, in bits, and the average probability so far.
It changes with the token that is kept (`accept`), not with one that is drawn and forgotten.

Legend: V tokens of the vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from nanovllm_cli.kernels.cpu_sampling import Edits, Words
from nanovllm_cli.kernels.cpu_sampling_edits import MINUS, SCALE, THEN_MINUS, TOKEN
from nanovllm_cli.kernels.cpu_sampling_rows import NOT_FINITE, NOTHING_LEFT
from nanovllm_cli.samplers import ADAPTIVE
from nanovllm_cli.sampling_params import GREEDY_BELOW, SamplingParams

Floats = NDArray[np.float64]
EditsOf = Callable[[str], Edits]

_BLOCK, _FIRST_SORTED = 32, 1024
_MIROSTAT_TOKENS = 100
"""So many of the likeliest tell Mirostat how fast probabilities fall."""
_ADAPTIVE_WIDTH, _ADAPTIVE_PEAK, _ADAPTIVE_SHARPNESS = 0.3, 5.0, 10.0
"""llama.cpp's: a probability that is off by a width is about e**5 times less likely than one that is not."""
_ADAPTIVE_DECAY = 0.99
"""The most that it takes: with 1 nothing would ever be learned."""


class Chain:
    """Of one sequence. steps: as `samplers.chain_of` has them. vocab_size: of the model."""

    def __init__(self, steps: tuple[str, ...], params: SamplingParams, vocab_size: int) -> None:
        self._steps, self._params, self._vocab_size = steps, params, vocab_size
        self.memory = params.adaptive_target if steps[-1:] == (ADAPTIVE,) else 2.0 * params.mirostat_tau
        self._next = self.memory

    def accept(self, memory: float | None = None) -> None:
        """The last draw's token is kept. memory: how it was behind this token, where that draw was not made here."""
        self.memory = self._next = self._next if memory is None else memory

    def draw(
        self,
        logits: NDArray[np.float32],
        bans: Iterable[Edits],
        allowed: Words | None,
        edits_of: EditsOf,
        uniform: float,
        chance: float,
    ) -> int:
        """The id drawn from logits [V], or NOT_FINITE, NOTHING_LEFT. bans: what changes them before all steps, in order. allowed:
        what may be drawn; None for all. edits_of: what "penalties" and "dry" change. uniform, chance: random numbers in [0, 1),
        of the token and of XTC."""
        if not (logits < np.inf).all():
            return NOT_FINITE
        row = logits.copy()
        for edits in bans:
            _edit(row, edits[:, TOKEN].astype(np.int64), edits)
        if allowed is not None:
            bits = np.unpackbits(allowed.view(np.uint8), bitorder="little", count=len(row))
            row[bits == 0] = -np.inf
        left = self.left(np.flatnonzero(row > -np.inf), row, edits_of, chance)
        return self._pick(left, uniform) if len(left.ids) else NOTHING_LEFT

    def left(self, ids: NDArray[np.int64], row: NDArray[np.float32], edits_of: EditsOf, chance: float) -> Candidates:
        """What the steps that have a name leave of these."""
        left = Candidates(ids, row)
        for step in self._steps:
            if not len(left.ids):
                break
            self._take(step, left, edits_of, chance)
        return left

    def _take(self, step: str, left: Candidates, edits_of: EditsOf, chance: float) -> None:
        params = self._params
        match step:
            case "penalties" | "dry":
                left.edit(edits_of(step))
            case "temperature":
                left.temper(_temperature(left, params))
            case "top_n_sigma" if params.top_n_sigma > 0.0:
                left.keep(left.logits >= left.logits.max() - params.top_n_sigma * left.logits.std())
            case "min_p" if params.min_p > 0.0:
                left.keep(left.logits >= left.logits.max() + math.log(params.min_p))
            case "top_k" if params.top_k > 0:
                left.keep_likeliest(params.top_k)
            case "typ_p" if params.typical_p < 1.0:
                likely = left.probabilities()
                surprises = np.minimum(-np.log(np.maximum(likely, np.finfo(np.float64).tiny)), 1e3)
                left.keep_until(params.typical_p, likely, -np.abs(surprises - (likely * surprises).sum()))
            case "top_p" if params.top_p < 1.0:
                left.keep_until(params.top_p, left.probabilities(), left.logits)
            case "xtc" if params.has_xtc and chance < params.xtc_probability:
                _exclude_top_choices(left, params.xtc_threshold)

    def _pick(self, left: Candidates, uniform: float) -> int:
        """One of the candidates, by the chain's last step."""
        params = self._params
        if self._steps[-1:] == (ADAPTIVE,):
            likely = left.probabilities()
            aim = min(1.0, max(0.0, 2.0 * params.adaptive_target - self.memory))
            distance = np.abs(likely - aim) / _ADAPTIVE_WIDTH
            left.logits = _ADAPTIVE_PEAK - _ADAPTIVE_SHARPNESS * distance * distance / (1.0 + distance)
            place = left.place_of(uniform)
            decay = min(params.adaptive_decay, _ADAPTIVE_DECAY)
            self._next = decay * self.memory + (1.0 - decay) * float(likely[place])
            return int(left.ids[place])
        if self._steps[-1:] != ("mirostat",):
            return int(left.ids[left.place_of(uniform)])
        if params.mirostat == 1:
            left.keep_likeliest(_mirostat_k(left, self.memory, self._vocab_size))
        else:
            highest = left.logits.max()
            log_total = math.log(np.exp(left.logits - highest).sum())
            left.keep(left.logits - highest >= min(0.0, log_total - self.memory * math.log(2.0)))
        place = left.place_of(uniform)
        surprise = -math.log2(left.probabilities()[place])
        self._next = self.memory - params.mirostat_eta * (surprise - params.mirostat_tau)
        return int(left.ids[place])


class Candidates:
    """What may still be drawn. ids [C], ascending; logits [C]: of these in a row [V]."""

    def __init__(self, ids: NDArray[np.int64], row: NDArray[np.float32]) -> None:
        self.ids, self.logits = ids, row[ids].astype(np.float64)

    def probabilities(self) -> Floats:
        weights = np.exp(self.logits - self.logits.max())
        likely: Floats = weights / weights.sum()
        return likely

    def keep(self, wanted: NDArray[np.bool_]) -> None:
        self.keep_places(np.flatnonzero(wanted))

    def keep_places(self, places: NDArray[np.int64]) -> None:
        """places: ascending."""
        self.ids, self.logits = self.ids[places], self.logits[places]

    def keep_likeliest(self, count: int) -> None:
        if count < len(self.ids):
            places = _largest(self.logits, count)
            order = np.argsort(-self.logits[places], kind="stable")
            self.keep_places(np.sort(places[order[:count]]))

    def keep_until(self, target: float, shares: Floats, values: Floats) -> None:
        """Those with the largest values [C], as many as it takes until their shares [C] reach target, and one at least."""
        count = _FIRST_SORTED
        while True:  # mostly few are enough, which are sorted far sooner than all
            places = _largest(values, count)
            order = places[np.argsort(-values[places], kind="stable")]
            held = np.cumsum(shares[order])
            if held[-1] >= target or len(places) == len(values):
                break
            count *= 8
        self.keep_places(np.sort(order[: int(np.searchsorted(held, target)) + 1]))

    def edit(self, edits: Edits) -> None:
        if not len(edits):
            return
        tokens = edits[:, TOKEN].astype(np.int64)
        places = np.minimum(np.searchsorted(self.ids, tokens), len(self.ids) - 1)
        there = self.ids[places] == tokens
        _edit(self.logits, places[there], edits[there])
        self.keep(self.logits > -np.inf)

    def temper(self, temperature: float) -> None:
        """The largest alone where that is as good as 0."""
        if temperature < GREEDY_BELOW:
            self.keep_likeliest(1)
        else:
            self.logits = self.logits / temperature

    def place_of(self, uniform: float) -> int:
        """Where a random number falls among them, in order of ids."""
        sums = np.cumsum(np.exp(self.logits - self.logits.max()))
        return min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(sums) - 1)


def _largest(values: Floats, count: int) -> NDArray[np.int64]:
    """Places, ascending, of the largest values [C]: of so many, of others as large as the last, and perhaps of a few more."""
    if count >= len(values):
        return np.arange(len(values))
    whole = len(values) // _BLOCK * _BLOCK
    peaks = values[:whole].reshape(-1, _BLOCK).max(1)  # the count-th of them is no larger than that of all
    bounds = peaks if len(peaks) >= count else values
    return np.flatnonzero(values >= np.partition(bounds, -count)[-count])


def _edit(logits: NDArray[np.floating], places: NDArray[np.int64], edits: Edits) -> None:
    """See `kernels.cpu_sampling_edits`."""
    values, scale = logits[places], edits[:, SCALE]
    logits[places] = np.where(values > 0, values / scale, values * scale) - edits[:, MINUS] - edits[:, THEN_MINUS]


def _temperature(left: Candidates, params: SamplingParams) -> float:
    if params.dynatemp_range == 0.0 or params.is_greedy or len(left.ids) == 1:
        return params.temperature
    gaps = left.logits - left.logits.max()
    weights = np.exp(gaps)
    total = float(weights.sum())
    entropy = math.log(total) - float((weights * np.maximum(gaps, -1e3)).sum()) / total
    share = max(0.0, entropy / math.log(len(gaps)))
    least, most = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
    return least + (most - least) * math.pow(min(1.0, share), params.dynatemp_exponent)


def _exclude_top_choices(left: Candidates, threshold: float) -> None:
    """All that are at least so likely, but for the least likely of them, the last of equal ones."""
    top = np.flatnonzero(left.probabilities() >= threshold)
    if len(top) > 1:
        wanted = np.ones(len(left.ids), np.bool_)
        wanted[top] = False
        wanted[top[np.flatnonzero(left.logits[top] == left.logits[top].min())[-1]]] = True
        left.keep(wanted)


def _mirostat_k(left: Candidates, most_surprise: float, vocab_size: int) -> int:
    """How many tokens have at most this surprise, in bits, if probabilities fall as Zipf's law says; its exponent is what the
    likeliest ones have of it."""
    most = min(_MIROSTAT_TOKENS, len(left.ids))
    if most == 1:
        return 1
    logits = np.sort(left.logits[_largest(left.logits, most)])[: -most - 1 : -1]
    steps = np.log(np.arange(2, most + 1) / np.arange(1, most))
    exponent = float((steps * -np.diff(logits)).sum() / (steps * steps).sum())
    excess, log_size = exponent - 1.0, math.log(max(2, vocab_size))
    rate = 1.0 / log_size if excess == 0.0 else excess / -math.expm1(-excess * log_size)
    log_k = math.log(rate) + most_surprise * math.log(2.0)
    if exponent * math.log(vocab_size + 1) <= log_k:
        return len(left.ids)
    return max(1, int(math.exp(log_k / exponent))) if log_k > 0.0 else 1
