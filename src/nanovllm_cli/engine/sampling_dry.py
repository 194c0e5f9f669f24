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
    """A sequence's tokens, and for each how long the text that ends there agrees with the text's end.

    That length grows by one where the next token agrees and falls to zero where it doesn't, so that a token costs one
    pass over the history.
    """

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams, breakers: DryBreakers) -> None:
        self._params = params
        self._breakers = breakers
        self._size = len(prompt_ids)
        self._tokens = np.array(prompt_ids, dtype=np.int64)
        self._matches = np.array(_suffix_matches(list(prompt_ids)), dtype=np.int64)
        self._break_start = -1
        self._break_end = -1
        for end in range(self._size):
            self._look_for_breaker(end)

    def append(self, token_id: int) -> None:
        size = self._size
        if size == len(self._tokens):
            more = np.zeros(max(16, size), dtype=np.int64)
            self._tokens = np.concatenate((self._tokens, more))
            self._matches = np.concatenate((self._matches, more))
        agrees = self._tokens[:size] == token_id
        self._matches[1:size] = self._matches[: size - 1] + 1 if size else 0
        self._matches[:1] = 1
        self._matches[:size] *= agrees
        self._tokens[size] = token_id
        self._size += 1
        self._look_for_breaker(size)

    def edits(self) -> Edits:
        """DRY's penalties for the next token, one a token."""
        params = self._params
        size, allowed = self._size, params.dry_allowed_length
        window = size if params.dry_penalty_last_n < 0 else min(size, params.dry_penalty_last_n)
        start = size - window
        longest = size - 1 - self._break_end if self._break_start >= start else window
        if window <= allowed or longest < allowed:
            return no_change(())
        lengths = np.minimum(self._matches[start : size - 1], np.arange(1, window))
        lengths = np.minimum(lengths, longest)
        places = np.flatnonzero(lengths >= allowed)
        if not len(places):
            return no_change(())
        places = places[np.argsort(-lengths[places], kind="stable")]
        ids, longest_places = np.unique(self._tokens[start + 1 + places], return_index=True)
        exponents = lengths[places[longest_places]] - allowed
        if params.dry_base > 1.000001:
            exponents = np.minimum(exponents, int(_LOG_FLOAT_MAX / math.log(params.dry_base)))
        penalties = params.dry_multiplier * np.power(params.dry_base, exponents.astype(np.float64))
        counts = ~self._breakers.single[ids]
        edits = no_change(ids[counts])
        edits[:, MINUS] = penalties[counts]
        return edits

    def _look_for_breaker(self, end: int) -> None:
        """Remember the breaker that starts last; of several that start there the longest."""
        token_id = int(self._tokens[end])
        start = end if self._breakers.single[token_id] else -1
        for sequence in self._breakers.longer.get(token_id, ()):
            begin = end + 1 - len(sequence)
            if begin > start and self._tokens[begin : end + 1].tolist() == list(sequence):
                start = begin
        if start >= 0 and start >= self._break_start:
            self._break_start, self._break_end = start, end


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
