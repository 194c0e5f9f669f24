"""DRY ("don't repeat yourself"): a penalty that grows with the length of the repetition a token would continue.

After p-e-w's proposal (text-generation-webui #5677) and llama.cpp's reading of it. For every earlier place where the
last m tokens stood before, the token that followed there loses multiplier * base ** (m - allowed_length), m >=
allowed_length; the longest place counts. A sequence breaker (a newline, a quotation mark) ends what counts as the last
tokens, and is not penalized itself.

A breaker is text, and a token may hold more than it, or a part of it; `BreakerVocabulary` finds every token sequence
that covers it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_cli.kernels.cpu_sampling import Edits, no_change
from nanovllm_cli.kernels.cpu_sampling_edits import MINUS
from nanovllm_cli.sampling_params import SamplingParams

Ids = NDArray[np.int64]
TokenSequence = tuple[int, ...]

_MAX_TAIL = 20
_LOG_FLOAT_MAX = 88.7228391


class DryBreakers(NamedTuple):
    """single [V]: which ids break by themselves. longer: sequences of several ids that break, by their last id."""

    single: NDArray[np.bool_]
    longer: dict[int, list[TokenSequence]]


def no_breakers(vocab_size: int) -> DryBreakers:
    return DryBreakers(np.zeros(vocab_size, dtype=np.bool_), {})


class DryHistory:
    """A sequence's tokens, and for each place how long the text that ends there agrees with the text's end.

    That length grows by one where the next token agrees and falls to zero where it doesn't, so only places of that token are
    looked at: a token costs as much time as there are equal ones before it.
    """

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams, breakers: DryBreakers) -> None:
        self._params = params
        self._breakers = breakers
        self._tokens = _Numbers(prompt_ids)
        # lengths[1 + place], so that there is one of no agreement before the first place, too; _agreeing: places with any.
        self._lengths = _Numbers([0, *_suffix_matches(list(prompt_ids))])
        self._agreeing: Ids = np.flatnonzero(self._lengths.values[1:])
        self._places: dict[int, _Numbers] = {}
        self._break_start = -1
        self._break_end = -1
        for place, token_id in enumerate(prompt_ids):
            self._places.setdefault(token_id, _Numbers()).append(place)
            self._look_for_breaker(place)

    def append(self, token_id: int) -> None:
        places = self._places.setdefault(token_id, _Numbers())
        lengths = self._lengths.values
        longer = lengths[places.values] + 1
        lengths[self._agreeing + 1] = 0
        lengths[places.values + 1] = longer
        self._agreeing = places.values
        place = len(self._tokens.values)
        places.append(place)
        self._tokens.append(token_id)
        self._lengths.append(0)
        self._look_for_breaker(place)

    def edits(self) -> Edits:
        """DRY's penalties for the next token, one a token."""
        params = self._params
        tokens, allowed = self._tokens.values, params.dry_allowed_length
        size = len(tokens)
        window = size if params.dry_penalty_last_n < 0 else min(size, params.dry_penalty_last_n)
        start = size - window
        longest = size - 1 - self._break_end if self._break_start >= start else window
        if window <= allowed or longest < allowed:
            return no_change(())
        places = self._agreeing if allowed else np.arange(size - 1)
        places = places[places.searchsorted(start) :]
        lengths = np.minimum(np.minimum(self._lengths.values[places + 1], places - start + 1), longest)
        places, lengths = places[lengths >= allowed], lengths[lengths >= allowed]
        if not len(places):
            return no_change(())
        order = np.argsort(-lengths, kind="stable")
        ids, first = np.unique(tokens[places[order] + 1], return_index=True)
        exponents = lengths[order[first]] - allowed
        if params.dry_base > 1.000001:
            exponents = np.minimum(exponents, int(_LOG_FLOAT_MAX / math.log(params.dry_base)))
        penalties = params.dry_multiplier * np.power(params.dry_base, exponents.astype(np.float64))
        counts = ~self._breakers.single[ids]
        edits = no_change(ids[counts])
        edits[:, MINUS] = penalties[counts]
        return edits

    def _look_for_breaker(self, end: int) -> None:
        """Remember the breaker that starts last; of several that start there the longest."""
        tokens = self._tokens.values
        token_id = int(tokens[end])
        start = end if self._breakers.single[token_id] else -1
        for sequence in self._breakers.longer.get(token_id, ()):
            begin = end + 1 - len(sequence)
            if begin > start and tokens[begin : end + 1].tolist() == list(sequence):
                start = begin
        if start >= 0 and start >= self._break_start:
            self._break_start, self._break_end = start, end


class _Numbers:
    """An array that grows at its end. `values` is a view of it."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self._memory: Ids = np.array(values, dtype=np.int64)
        self.values = self._memory

    def append(self, number: int) -> None:
        size = len(self.values)
        if size == len(self._memory):
            self._memory = np.concatenate((self._memory, np.zeros(max(4, size), dtype=np.int64)))
        self._memory[size] = number
        self.values = self._memory[: size + 1]


class BreakerVocabulary:
    """Finds the tokens of a vocabulary that hold or cover a breaker.

    encode: text to ids, without special tokens. token_bytes: the bytes of every token, by id; asked for once, when
        needed.
    """

    def __init__(
        self, vocab_size: int, encode: Callable[[str], list[int]], token_bytes: Callable[[], Sequence[bytes]]
    ) -> None:
        self._vocab_size = vocab_size
        self._encode = encode
        self._token_bytes = token_bytes
        self._joined = b""
        self._ends: Ids = np.zeros(0, dtype=np.int64)
        self._sequences = lru_cache(maxsize=256)(self._find)

    def breakers(self, texts: Sequence[str]) -> DryBreakers:
        single = np.zeros(self._vocab_size, dtype=np.bool_)
        longer: dict[int, list[TokenSequence]] = defaultdict(list)
        for text in texts:
            for sequence in self._sequences(text):
                if len(sequence) == 1:
                    single[sequence[0]] = True
                else:
                    longer[sequence[-1]].append(sequence)
        return DryBreakers(single, dict(longer))

    def _find(self, text: str) -> frozenset[TokenSequence]:
        if not self._joined:
            tokens = self._token_bytes()[: self._vocab_size]
            self._joined = b"".join(tokens)
            self._ends = np.cumsum([len(token) for token in tokens])
        found: set[TokenSequence] = {(token_id,) for token_id in self._holders(text.encode(), at_end=False)}
        singles = {token_id for (token_id,) in found}
        found.add(tuple(self._encode(text)[: _MAX_TAIL + 1]))
        for split in range(1, len(text)):
            tail = tuple(self._encode(text[split:])[:_MAX_TAIL])
            beginners = self._holders(text[:split].encode(), at_end=True)
            found.update((token_id, *tail) for token_id in beginners if token_id not in singles)
        return frozenset(sequence for sequence in found if sequence and max(sequence) < self._vocab_size)

    def _holders(self, part: bytes, at_end: bool) -> list[int]:
        """Ids of the tokens that hold `part`, or that end in it. Searched for in all tokens joined to one string."""
        places = []
        place = self._joined.find(part)
        while place >= 0:
            places.append(place)
            place = self._joined.find(part, place + 1)
        begins = np.array(places, dtype=np.int64)
        token_ids = self._ends.searchsorted(begins, side="right")
        past = begins + len(part) - self._ends[token_ids]
        holders: list[int] = np.unique(token_ids[past == 0 if at_end else past <= 0]).tolist()
        return holders


def _suffix_matches(tokens: list[int]) -> list[int]:
    """For each position, how many tokens up to it agree with the last ones: the Z-function, read backwards."""
    backwards = tokens[::-1]
    size = len(backwards)
    matches = [0] * size
    left = right = 0
    for start in range(1, size):
        length = min(matches[start - left], right - start) if start < right else 0
        while start + length < size and backwards[length] == backwards[start + length]:
            length += 1
        matches[start] = length
        if start + length > right:
            left, right = start, start + length
    return matches[::-1]
