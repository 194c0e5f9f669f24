"""Drawing one token from one row of logits, and log-probabilities, on the CPU.

One row at a time in numpy: a row of 150,000 logits lives in the cache, a pass over it takes 10 to 80 us, and a result
that never sees another row cannot depend on the batch. The usual chain (top_k, min_p) makes two passes; nothing sorts a
whole row unless the distribution is so flat that the filters keep most of it.

**Order.** Tokens are ranked by logit from the largest down, equal logits by id from the smallest up. Every filter cuts
in that order, so what it keeps is exact and has no ties to leave to chance.

**Weights.** A token's weight is floor(2**40 * exp((logit - largest) / temperature)), an integer. Sums of integers do
not depend on their order, so a shortlist, a full row and a GPU agree on where a nucleus ends and what a random number
hits. Tokens more than 2**40 times less likely than the first weigh nothing and are never drawn.

**Draw.** By inverse CDF: r = floor(u * total), and the token drawn is the first, in order of ids, whose running sum of
kept weights exceeds r. Ids, not ranks, so that no sort is needed where no filter needs one.

Legend: V tokens of the vocabulary, C candidates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_cli.sampling_params import SamplingParams

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Weights = NDArray[np.int64]
Mask = NDArray[np.bool_]

WEIGHT_BITS = 40
MAX_VOCABULARY = 2**22
"""So many weights of 2**40 still sum up in 63 bits."""

_LOWEST = float(np.finfo(np.float32).min)
_BLOCK = 1 << 15
_SAMPLED_ONE_IN = 64
_SHORTLISTED_ONE_IN = (128, 8)
_SORTED_AT_ONCE = 1024


class RowLogprobs(NamedTuple):
    """logprob and rank (from 1) of one token; ids [C] and logprobs [C] of the most likely, by rank."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def as_rows(logits: torch.Tensor) -> NDArray[np.float32]:
    """logits [B, V] as rows that numpy reads; without a copy where they are float32 on the CPU."""
    return logits.detach().to("cpu", torch.float32).contiguous().numpy()


def largest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Of each row [V] of logits [B, V]: the lowest id of the largest logit, and that logit (NaN if any is)."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        rows = logits.detach().numpy()  # eight times faster than torch's argmax
        ids = rows.argmax(axis=1)
        return ids.tolist(), rows[np.arange(len(rows)), ids].tolist()
    best = logits.argmax(dim=1, keepdim=True)
    return best.flatten().tolist(), logits.gather(1, best).flatten().tolist()


def draw_token(logits: Logits, params: SamplingParams, uniform: float, exclude_top: bool) -> int:
    """The id that `uniform` in [0, 1) draws from logits [V], whose largest must be finite.

    Filters: temperature, min_p, top_k, typical_p, top_p, and XTC where `exclude_top` (its chance came up).
    """
    temperature = params.temperature
    ids = _shortlist(logits, params)
    if ids is None and params.typical_p == 1.0 and params.top_p == 1.0 and not exclude_top:
        return _draw_from_row(logits, temperature, uniform)
    if ids is None and params.typical_p == 1.0 and params.top_p < 1.0:
        kept = _nucleus(logits, temperature, params.top_p)
    else:
        kept = _gather(logits, temperature, ids)
        if params.typical_p < 1.0:
            kept = kept.where(_typical(kept, params.typical_p))
        if params.top_p < 1.0:
            kept = kept.where(_first_until(kept.gaps, kept.weights, _share(params.top_p, kept.total)))
    if exclude_top:
        kept = kept.where(_without_top_choices(kept, params.xtc_threshold))
    sums = kept.weights.cumsum()
    return int(kept.ids[sums.searchsorted(_aim(uniform, int(sums[-1])), side="right")])


def row_logprobs(logits: Logits, token_id: int, num_top: int) -> RowLogprobs:
    """Log-softmax of logits [V] at token_id, and at the num_top most likely tokens. The largest logit must be finite.

    Tokens of probability zero (logit -inf) are left out of the list.
    """
    peak = logits.max()
    log_total = math.log(sum(_block_totals(logits, 1.0)) / 2**WEIGHT_BITS)
    top_ids: list[int] = most_likely(logits, num_top).tolist() if num_top else []
    if token_id in top_ids:
        rank = top_ids.index(token_id) + 1
    else:
        value = logits[token_id]
        rank = 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token_id] == value))

    def logprob(index: int) -> float:
        return float(logits[index]) - float(peak) - log_total

    return RowLogprobs(logprob(token_id), rank, top_ids, [logprob(index) for index in top_ids])


def most_likely(logits: Logits, count: int) -> Ids:
    """Ids of the `count` most likely tokens by rank; fewer where the others' logits are -inf."""
    ids = np.flatnonzero(logits >= np.float32(max(_bound(logits, count), _LOWEST)))
    return ids[_ranked(logits[ids])[:count]]


def allowed_tokens(mask: torch.Tensor, vocab_size: int) -> NDArray[np.bool_]:
    """A mask as one bool a token. bool [<= V], or int32 [<= ceil(V / 32)] with token 32 * i + j in bit j of word i.

    Tokens past the mask's end (padding of the embedding) are not allowed.
    """
    array = mask.detach().cpu().contiguous().numpy()
    if array.dtype == np.int32:
        array = np.unpackbits(array.view(np.uint8), bitorder="little").view(np.bool_)
    assert array.dtype == np.bool_, f"a mask is bool or packed int32, not {array.dtype}"
    allowed = np.zeros(vocab_size, dtype=np.bool_)
    allowed[: len(array)] = array[:vocab_size]
    return allowed


class _Candidates(NamedTuple):
    """ids [C] ascending, gaps [C] to the row's largest logit over the temperature, weights [C]."""

    ids: Ids
    gaps: Logits
    weights: Weights

    @property
    def total(self) -> int:
        return int(self.weights.sum())

    def where(self, keep: Mask) -> _Candidates:
        return _Candidates(self.ids[keep], self.gaps[keep], self.weights[keep])


def _shortlist(logits: Logits, params: SamplingParams) -> Ids | None:
    """Ids, ascending, of what min_p and top_k keep. None: everything."""
    limits_count = 0 < params.top_k < len(logits)
    if params.min_p == 0.0 and not limits_count:
        return None
    floor = _LOWEST
    if params.min_p > 0.0:
        floor = max(floor, float(logits.max()) + params.temperature * math.log(params.min_p))
    if limits_count:
        floor = max(floor, _bound(logits, params.top_k))
    ids = np.flatnonzero(logits >= np.float32(floor))
    if limits_count and len(ids) > params.top_k:
        ids = np.sort(ids[_ranked(logits[ids])[: params.top_k]])
    return ids


def _gather(logits: Logits, temperature: float, ids: Ids | None) -> _Candidates:
    gaps = (logits if ids is None else logits[ids]) - logits.max()
    gaps /= np.float32(temperature)
    return _Candidates(np.arange(len(logits)) if ids is None else ids, gaps, _weights(gaps))


def _nucleus(logits: Logits, temperature: float, share: float) -> _Candidates:
    """What top_p keeps of a full row. Looked for among the likely first; a sample of the row says which those are."""
    target = _share(share, sum(_block_totals(logits, temperature)))
    sample = np.sort(logits[::_SAMPLED_ONE_IN])
    for one_in in _SHORTLISTED_ONE_IN:
        floor = sample[-1 - len(sample) // one_in]
        candidates = _gather(logits, temperature, np.flatnonzero(logits >= floor))
        if candidates.total >= target:
            break
    else:
        candidates = _gather(logits, temperature, None)
    return candidates.where(_first_until(candidates.gaps, candidates.weights, target))


def _draw_from_row(logits: Logits, temperature: float, uniform: float) -> int:
    """The draw over all tokens, with sums of blocks first."""
    totals = _block_totals(logits, temperature)
    aim = _aim(uniform, sum(totals))
    block = 0
    while aim >= totals[block]:
        aim -= totals[block]
        block += 1
    start = block * _BLOCK
    weights = _weights((logits[start : start + _BLOCK] - logits.max()) / np.float32(temperature))
    return start + int(weights.cumsum().searchsorted(aim, side="right"))


def _block_totals(logits: Logits, temperature: float) -> list[int]:
    """Weight of each block of the row. In blocks, because arrays that fit the cache cost a third of the others."""
    peak = logits.max()
    totals = []
    for start in range(0, len(logits), _BLOCK):
        gaps = logits[start : start + _BLOCK] - peak
        gaps /= np.float32(temperature)
        totals.append(int(_weights(gaps).sum()))
    return totals


def _typical(candidates: _Candidates, share: float) -> Mask:
    """The tokens whose surprise is nearest to the entropy, until they hold `share` of the weight.

    surprise - entropy = -log p - sum p * -log p, in which log p's normalizer cancels: the gaps serve.
    """
    surprises = np.minimum(-candidates.gaps.astype(np.float64), 1e3)
    total = candidates.total
    expected = float((candidates.weights * surprises).sum()) / total
    return _first_until(-np.abs(surprises - expected), candidates.weights, _share(share, total))


def _without_top_choices(candidates: _Candidates, threshold: float) -> Mask:
    """All but the tokens that hold `threshold` of the weight; the least likely of those stays."""
    keep = candidates.weights < threshold * candidates.total
    top = np.flatnonzero(~keep)
    if len(top):
        keep[top[_ranked(candidates.gaps[top])[-1]]] = True
    return keep


def _first_until(keys: NDArray[np.floating], weights: Weights, target: int) -> Mask:
    """The fewest entries with the largest keys whose weights reach `target`; at least one.

    Quickselect by weight: halves that are needed whole are kept unsorted, and only the last few are ranked.
    """
    keep = np.zeros(len(keys), dtype=np.bool_)
    positions = np.arange(len(keys))
    while len(positions) > _SORTED_AT_ONCE:
        middle = np.median(keys[:: len(keys) // _SORTED_AT_ONCE])
        upper = keys >= middle
        if upper.all():
            upper = keys > middle
            if not upper.any():
                break
        held = int(weights[upper].sum())
        if held < target:
            keep[positions[upper]] = True
            target -= held
            upper = ~upper
        positions, keys, weights = positions[upper], keys[upper], weights[upper]
    ranked = _ranked(keys)
    count = int(weights[ranked].cumsum().searchsorted(target)) + 1
    keep[positions[ranked[:count]]] = True
    return keep


def _share(share: float, total: int) -> int:
    return math.ceil(share * total)


def _aim(uniform: float, total: int) -> int:
    """Below total, also after rounding: 1 - 2**-53 times any float is a smaller float."""
    return int(uniform * total)


def _weights(gaps: Logits) -> Weights:
    scaled = np.exp(gaps)
    scaled *= np.float32(2**WEIGHT_BITS)
    return scaled.astype(np.int64)


def _ranked(keys: NDArray[np.floating]) -> Ids:
    """Positions by rank: largest key first, equal ones in order."""
    return np.argsort(-keys, kind="stable")


def _bound(keys: NDArray[np.floating], count: int) -> float:
    """A value that at least `count` keys reach, and few more do. -inf where there are no more than `count` keys.

    The keys are dealt into columns, many more than count; each column's largest is one of the keys, so the count-th
    largest of those is a bound, and a good one because large keys rarely share a column.
    """
    if count >= len(keys):
        return -math.inf
    num_columns = max(1024, 1 << (8 * count - 1).bit_length())
    num_rows = len(keys) // num_columns
    if num_rows > 1:
        keys = keys[: num_rows * num_columns].reshape(num_rows, num_columns).max(axis=0)
    return float(np.partition(keys, len(keys) - count)[len(keys) - count])
