"""What a Whisper's next token may be: see `TranscriptRules`. Its rules go by what was drawn and by the model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm_cli.constraint import TranscriptRules
from nanovllm_cli.kernels.cpu_sampling import Words, packed_bits


class TranscriptMask:
    """Of one answer, in a vocabulary of so many tokens. left: the logarithm of what its latest mask leaves of all probability,
    which OpenAI's log-probabilities are measured by."""

    left = 0.0

    def __init__(self, rules: TranscriptRules, vocab_size: int) -> None:
        self._rules = rules
        self._known = np.ones(vocab_size, np.bool_)
        self._known[[each for each in rules.bans if each < vocab_size]] = False
        self._left = self._known
        self._first_bans = [each for each in rules.first_bans if each < vocab_size]

    def allowed(self, logits: NDArray[np.float32], drawn: Sequence[int]) -> Words:
        """The tokens that may follow those that were drawn, as bits; logits [V] are those of the next."""
        known = self._known.copy()
        if not drawn:
            known[self._first_bans] = False
        if (first := self._rules.first_time) is not None:
            self._put_times(known, drawn, first)
            with np.errstate(all="ignore"):  # a row of NaN is its draw's matter
                if _together(logits[first:][known[first:]]) > np.max(logits[:first][known[:first]], initial=-np.inf):
                    known[:first] = False
        with np.errstate(all="ignore"):
            self.left = _together(logits[known], np.float32) - _together(logits, np.float32)
        self._left = known
        return packed_bits(known)

    def likeliest(self, logits: NDArray[np.float32], count: int) -> tuple[tuple[int, float], ...]:
        """So many of the tokens that its latest mask leaves of these logits [V], which it was made of, from the likeliest down,
        with their log-probabilities among them all."""
        if not count:
            return ()
        ids = np.flatnonzero(self._left)
        whole = _together(logits[ids], np.float32)
        if count < len(ids):
            ids = ids[np.argpartition(-logits[ids], count)[:count]]
        ids = ids[np.lexsort((ids, -logits[ids]))]
        return tuple((int(token_id), float(logits[token_id]) - whole) for token_id in ids)

    def _put_times(self, known: NDArray[np.bool_], drawn: Sequence[int], first: int) -> None:
        known[first - 1] = False  # which says that there are none
        if not drawn:
            known[:first] = False
            if self._rules.latest is not None:
                known[first + self._rules.latest + 1 :] = False
            return
        is_time = drawn[-1] >= first
        closes = is_time and len(drawn) > 1 and drawn[-2] < first
        if closes:
            known[: self._rules.end] = False
        elif is_time:
            known[first:] = False
        if times := [each for each in drawn if each >= first]:
            known[first : times[-1] + (not closes)] = False


def _together(logits: NDArray[np.float32], dtype: type[np.floating[Any]] = np.float64) -> float:
    """Of all these tokens, as if they were one; exponentials are of this type: the narrower takes a tenth of the time."""
    top = float(np.max(logits, initial=-np.inf))
    if not np.isfinite(top):
        return top
    return top + float(np.log(np.exp(logits.astype(dtype, copy=False) - dtype(top)).sum(dtype=np.float64)))
