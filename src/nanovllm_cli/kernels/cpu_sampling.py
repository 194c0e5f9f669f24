"""Drawing tokens from rows of logits, and log-probabilities, on the CPU: what they mean, and the front of what computes them.

Every function takes all rows of a step and hands them to the compiled `cpu_sampling_rows`, which deals them to the threads. A
result never sees another row, so it cannot depend on the batch.

**Order.** Tokens are ranked by logit from the largest down, equal logits by id from the smallest up. Every filter cuts
in that order, so what it keeps is exact and has no ties to leave to chance.

**Weights.** A token's weight is floor(2**40 * exp((logit - largest) / temperature)), an integer. Sums of integers do
not depend on their order, so a shortlist, a full row and a GPU agree on where a nucleus ends and what a random number
hits. Tokens more than 2**40 times less likely than the first weigh nothing and are never drawn.

**Typical tokens.** typical_p ranks by |surprise - expected|, in float64. In a surprise - expected = -log p - sum p * -log p the
normalizer of p cancels, so that (largest - logit) / temperature serves as one; the expected one is summed in order of ids.

**Deviations.** top_n_sigma counts by that of all that may be drawn, in float64 and in order of ids. A temperature divides logits
and their deviation alike, so it changes nothing of where that cuts.

**Draw.** By inverse CDF: r = floor(u * total), and the token drawn is the first, in order of ids, whose running sum of
kept weights exceeds r. Ids, not ranks, so that no sort is needed where no filter needs one.

Legend: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_cli.kernels import cpu, cpu_sampling_edits, cpu_sampling_rows
from nanovllm_cli.kernels.cpu_sampling_edits import EDIT, SCALE, TOKEN
from nanovllm_cli.kernels.cpu_sampling_rows import KEPT, LISTED, MIN_P_GAP, SETTINGS, TOP_P, UNIFORM
from nanovllm_cli.sampling_params import SamplingParams

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]
Edits = NDArray[np.float32]
Words = NDArray[np.uint32]

WEIGHT_BITS = 40
MAX_VOCABULARY = 2**22
"""So many weights of 2**40 still sum up in 63 bits, and so many ids are exact in the float32 of an edit."""

_LEAST_THRESHOLD = float(np.finfo(np.float32).tiny)

_DRAW_WORK = 32
_GREEDY_WORK = 1
"""A logit's share of a draw, in the multiply-adds by which `kernels.cpu` chooses how many threads to wake."""


class RowLogprobs(NamedTuple):
    """logprob and rank (from 1) of one token; ids [C] and logprobs [C] of the most likely, by rank."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Draws(NamedTuple):
    """Of B rows. ids [B]: what was drawn; NOT_FINITE or NOTHING_LEFT in its place. largest_allowed [B]: whether its mask allows
    the largest logit. kept [B, KEPT]: what filters left, as far as that is told."""

    ids: Ids
    largest_allowed: NDArray[np.bool_]
    kept: Ids


def as_rows(logits: torch.Tensor) -> Logits:
    """logits [B, V] as rows that numpy reads; without a copy where they are float32 on the CPU."""
    return logits.detach().to("cpu", torch.float32).contiguous().numpy()


def row_addresses(matrix: Logits, rows: Sequence[int]) -> Ids:
    """Addresses of some rows of a matrix [R, V], which has to be kept alive while they are in use."""
    assert matrix.dtype == np.float32
    assert matrix.flags.c_contiguous
    assert 0 <= min(rows) <= max(rows) < len(matrix)
    return np.array(rows, dtype=np.int64) * matrix.strides[0] + matrix.ctypes.data


# ---- what changes a row before the draw ----


def no_change(token_ids: Sequence[int] | Ids) -> Edits:
    """An edit [EDIT] for each token, all of them without effect until a column is written."""
    edits = np.zeros((len(token_ids), EDIT), dtype=np.float32)
    edits[:, TOKEN] = token_ids
    edits[:, SCALE] = 1.0
    return edits


def mask_words(mask: torch.Tensor) -> Words:
    """A mask, bool [<= V] or int32 [<= ceil(V / 32)], as bits: token 32 * i + j is bit j of word i. Tokens past its end (padding
    of the embedding) are not allowed."""
    array = mask.detach().cpu().contiguous().numpy()
    assert array.ndim == 1, "a mask is one row"
    if array.dtype == np.int32:
        return array.view(np.uint32)
    assert array.dtype == np.bool_, f"a mask is bool or packed int32, not {array.dtype}"
    return packed_bits(array)


def packed_bits(allowed: NDArray[np.bool_]) -> Words:
    """bool [V] as words [ceil(V / 32)]."""
    words = np.zeros(-(-len(allowed) // 32), dtype=np.uint32)
    bits = np.packbits(allowed, bitorder="little")
    words.view(np.uint8)[: len(bits)] = bits
    return words


def has_bit(words: Words, token_id: int) -> bool:
    """Whether a mask allows a token."""
    index, bit = divmod(token_id, 32)
    return index < len(words) and bool(words[index] >> np.uint32(bit) & np.uint32(1))


def edit_rows(rows: Ids, edits: Sequence[Sequence[Edits]], copies: Logits) -> None:
    """The logits [V] at addresses [B] to copies [B, V], with a row's edits in order.

    A row that holds NaN or +inf is given NaN and nothing else, so that its draw says so.
    """
    count, vocab_size = copies.shape
    assert len(rows) == len(edits) == count
    assert copies.dtype == np.float32
    assert copies.flags.c_contiguous
    listed = np.concatenate([np.empty((0, EDIT), np.float32), *(part for parts in edits for part in parts)])
    assert listed.dtype == np.float32
    assert listed.shape[1] == EDIT
    assert 0 <= listed[:, TOKEN].min(initial=0) <= listed[:, TOKEN].max(initial=0) < vocab_size
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([sum(map(len, parts)) for parts in edits], out=starts[1:])
    ints = (rows.ctypes.data, count, vocab_size, listed.ctypes.data, starts.ctypes.data, copies.ctypes.data)
    cpu.launch(cpu_sampling_edits.edit_rows, copies.size, "", ints)


# ---- the draw ----


def draw_settings(params: SamplingParams) -> list[float]:
    """What a draw needs of a request, with XTC; the last of them is the place of the random number. A threshold of 0 becomes one
    that every weight reaches, as 0 itself says that there is no XTC."""
    if params.is_greedy:
        return [0.0, -math.inf, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    min_p_gap = params.temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    xtc_threshold = max(params.xtc_threshold, _LEAST_THRESHOLD) if params.has_xtc else 0.0
    return [
        params.temperature, min_p_gap, params.top_n_sigma, max(0, params.top_k), params.typical_p, params.top_p, xtc_threshold,
        0.0,
    ]  # fmt: skip


def is_filtered(settings: Sequence[float]) -> bool:
    """Whether these `draw_settings` leave anything out."""
    unfiltered = draw_settings(SamplingParams())
    return list(settings[MIN_P_GAP:UNIFORM]) != unfiltered[MIN_P_GAP:UNIFORM]


def draw_tokens(
    rows: Ids, vocab_size: int, settings: NDArray[np.float64], masks: Sequence[Words | None], scratch: Ids
) -> Draws:
    """An id for each row of logits [V] at addresses [B], by its settings [B, SETTINGS].

    Of XTC's threshold, 0 says that its chance did not come up. masks: what may be drawn, None for everything. scratch: addresses
    [B] of float32 [V] that a row with a mask writes to; its own address is as good.
    """
    assert settings.shape == (len(rows), SETTINGS)
    assert settings.dtype == np.float64
    assert settings.flags.c_contiguous
    assert len(rows) == len(masks) == len(scratch)
    assert all(mask is None or (mask.dtype == np.uint32 and mask.flags.c_contiguous) for mask in masks)
    words = np.array([0 if mask is None else mask.ctypes.data for mask in masks], dtype=np.int64)
    sizes = np.array([-1 if mask is None else len(mask) for mask in masks], dtype=np.int64)
    drawn, tops = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.uint8)
    kept = np.empty((len(rows), KEPT), dtype=np.int64)
    work = _DRAW_WORK if settings[:, cpu_sampling_rows.TEMPERATURE].any() else _GREEDY_WORK
    work = len(rows) * vocab_size * work if len(rows) > 1 else 0
    ints = (
        rows.ctypes.data, len(rows), vocab_size, settings.ctypes.data, words.ctypes.data, sizes.ctypes.data, scratch.ctypes.data,
        drawn.ctypes.data, tops.ctypes.data, kept.ctypes.data,
    )  # fmt: skip
    cpu.launch(cpu_sampling_rows.draw_rows, work, "", ints)
    return Draws(drawn, tops.view(np.bool_), kept)


def draw_allowed(kept: Ids, setting: NDArray[np.float64], allows: Callable[[int], bool | None]) -> int | None:
    """What would be drawn from a row by its settings [SETTINGS] if some of its tokens were banned, known by what filters kept
    of it without bans [KEPT] and by asking for as few tokens as possible. None where that, or an answer of None, decides nothing.

    A ban lets no token in but at top_k's end, and the total only falls: to no less than what is known to be allowed. Where
    the smallest and the largest total cut at the same place, they say what is kept.
    """
    count, total, weakest, *rest = kept.tolist()
    top_p, allowed, held = float(setting[TOP_P]), list[tuple[int, int]](), 0
    for token_id, weight in zip(rest[:count], rest[LISTED:], strict=False):
        is_allowed = allows(token_id)
        if is_allowed:
            allowed.append((token_id, weight))
            held += weight
        elif is_allowed is None or not allowed:  # weights are relative to the largest logit's
            return None
        else:
            total += weakest - weight
        if held >= _share(top_p, total):
            break
    else:
        return None
    if held - allowed[-1][1] >= _share(top_p, held):
        return None
    aim = int(float(setting[UNIFORM]) * float(held))
    for token_id, weight in sorted(allowed):
        aim -= weight
        if aim < 0:
            return token_id
    raise AssertionError("a random number of 1 or more")


def _share(top_p: float, total: int) -> int:
    """The weight that a nucleus has to reach."""
    return max(1, math.ceil(top_p * float(total))) if top_p < 1.0 else total


def largest(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Of each row [V] of logits [B, V]: the lowest id of the largest logit, and that logit (NaN if any is)."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        rows = logits.detach().numpy()  # eight times faster than torch's argmax
        ids = rows.argmax(axis=1)
        return ids.tolist(), rows[np.arange(len(rows)), ids].tolist()
    best = logits.argmax(dim=1, keepdim=True)
    return best.flatten().tolist(), logits.gather(1, best).flatten().tolist()


# ---- log-probabilities ----


def logprobs(rows: Ids, vocab_size: int, token_ids: Sequence[int], num_top: Sequence[int]) -> list[RowLogprobs | None]:
    """Log-softmax of each row of logits [V] at addresses [B]: at its token_id, and at its num_top most likely tokens, of which
    those of probability zero (logit -inf) are left out. None where the largest is not finite."""
    width = max(num_top, default=0)
    tokens, limits = np.array(token_ids, dtype=np.int64), np.array(num_top, dtype=np.int64)
    assert len(tokens) == len(limits) == len(rows)
    assert 0 <= tokens.min() <= tokens.max() < vocab_size
    counts = np.empty((len(rows), 3 + width), dtype=np.int64)
    found = np.empty((len(rows), 2 + width), dtype=np.float32)
    work = len(rows) * vocab_size * _DRAW_WORK if len(rows) > 1 else 0
    ints = (
        rows.ctypes.data, len(rows), vocab_size, tokens.ctypes.data, limits.ctypes.data, width, counts.ctypes.data,
        found.ctypes.data,
    )  # fmt: skip
    cpu.launch(cpu_sampling_rows.logprob_rows, work, "", ints)
    return [_from_found(ints, floats) for ints, floats in zip(counts.tolist(), found.tolist(), strict=True)]


def _from_found(ints: list[int], floats: list[float]) -> RowLogprobs | None:
    total, rank, count, *ids = ints
    if total < 0:
        return None
    log_total = math.log(total / 2**WEIGHT_BITS)
    peak, value, *values = floats
    tops = [logit - peak - log_total for logit in values[:count]]
    return RowLogprobs(value - peak - log_total, rank, ids[:count], tops)
