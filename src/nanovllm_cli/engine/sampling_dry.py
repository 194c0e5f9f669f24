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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nanovllm_cli.kernels.cpu_sampling import Edits, no_change
from nanovllm_cli.kernels.cpu_sampling_edits import MINUS
from nanovllm_cli.sampling_params import SamplingParams

Ids = NDArray[np.int64]
Numbers = NDArray[np.int32]
TokenSequence = tuple[int, ...]

_MAX_TAIL = 20
_LOG_FLOAT_MAX = 88.7228391


@dataclass(frozen=True, eq=False, slots=True)
class DryBreakers:
    """Which ids break by themselves, `single` [V], and which sequences of several ids do.

    longer: by a sequence's last id, and by how many ids follow its first (the fewest first): what follows the first id, with all
        ids that may be the first, ascending. Tens of thousands end in a letter, so they are looked up and never gone through.
    """

    single: NDArray[np.bool_]
    longer: dict[int, dict[int, dict[TokenSequence, Ids]]]

    def start(self, tokens: Numbers, end: int) -> int:
        """Where the breaker starts that ends with tokens[end]; of several the shortest. -1 without one."""
        token_id = int(tokens[end])
        if self.single[token_id]:
            return end
        for size, tails in self.longer.get(token_id, {}).items():
            begin = end - size
            if begin < 0:
                break
            firsts = tails.get(tuple(tokens[begin + 1 : end + 1].tolist()))
            if firsts is not None and _holds(firsts, int(tokens[begin])):
                return begin
        return -1

    def last(self, tokens: Numbers) -> tuple[int, int]:
        """Start and end of the breaker that starts last; of several that start there, of the longest. -1, -1 without one."""
        may_end = self.single.copy()
        may_end[list(self.longer)] = True
        found = (-1, -1)
        for end in reversed(np.flatnonzero(may_end[tokens]).tolist()):
            if end <= found[0]:
                break
            begin = self.start(tokens, end)
            if begin > found[0]:
                found = begin, end
        return found


@lru_cache(maxsize=4)
def no_breakers(vocab_size: int) -> DryBreakers:
    return DryBreakers(np.zeros(vocab_size, dtype=np.bool_), {})


class DryPrompt:
    """What DRY knows of a prompt [P]. All answers to it share one, and none changes it.

    tokens [P]. lengths [P + 1]: at 1 + place how many tokens up to there agree with the prompt's last ones, so that there is one
    of no agreement before the first place, too. agreeing: the places with any. last_break: where that starts and ends.
    """

    def __init__(self, prompt_ids: Sequence[int], breakers: DryBreakers) -> None:
        self.breakers = breakers
        self.tokens: Numbers = np.array(prompt_ids, dtype=np.int32)
        self.lengths = _suffix_matches(self.tokens)
        self.agreeing: Numbers = np.flatnonzero(self.lengths[1:]).astype(np.int32)
        self.last_break = breakers.last(self.tokens)
        self._order: Numbers = np.argsort(self.tokens, kind="stable").astype(np.int32)
        self._ordered: Numbers = self.tokens[self._order]
        for shared in (self.tokens, self.lengths, self.agreeing, self._order):
            shared.flags.writeable = False

    def places(self, token_id: int) -> Numbers:
        """Where a token stands, ascending."""
        start, end = self._ordered.searchsorted(np.array((token_id, token_id + 1), dtype=np.int32))
        return self._order[start:end]


class DryHistory:
    """A sequence's tokens, and for each place how long the text that ends there agrees with the text's end.

    That length grows by one where the next token agrees and falls to zero where it doesn't, so only places of that token are
    looked at: a token costs as much time as there are equal ones before it.
    """

    def __init__(self, prompt: DryPrompt, params: SamplingParams) -> None:
        self._params = params
        self._prompt = prompt
        self._tokens = _Growing(prompt.tokens)
        self._lengths = _Growing(prompt.lengths)
        self._agreeing = prompt.agreeing
        self._appended: dict[int, _Growing] = {}  # places by token, those behind the prompt
        self._break_start, self._break_end = prompt.last_break

    def append(self, token_id: int) -> None:
        appended = self._appended.setdefault(token_id, _Growing())
        places = self._prompt.places(token_id)
        if len(appended.values):
            places = np.concatenate((places, appended.values))
        lengths = self._lengths.values
        longer = lengths[places] + 1
        lengths[self._agreeing + 1] = 0
        lengths[places + 1] = longer
        self._agreeing = places
        place = len(self._tokens.values)
        appended.append(place)
        self._tokens.append(token_id)
        self._lengths.append(0)
        begin = self._prompt.breakers.start(self._tokens.values, place)
        if begin >= max(0, self._break_start):  # of several that start there the longest counts, which is the last
            self._break_start, self._break_end = begin, place

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
        places = self._agreeing if allowed else np.arange(size - 1, dtype=np.int32)
        places = places[places.searchsorted(np.int32(start)) :]
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
        counts = ~self._prompt.breakers.single[ids]
        edits = no_change(ids[counts].astype(np.int64))
        edits[:, MINUS] = penalties[counts]
        return edits


class _Growing:
    """An array that grows at its end. `values` is a view of it."""

    def __init__(self, values: Sequence[int] | Numbers = ()) -> None:
        self._memory: Numbers = np.array(values, dtype=np.int32)
        self.values = self._memory

    def append(self, number: int) -> None:
        size = len(self.values)
        if size == len(self._memory):
            self._memory = np.concatenate((self._memory, np.zeros(max(4, size // 4), dtype=np.int32)))
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
        self._joined: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        self._ends: Ids = np.zeros(0, dtype=np.int64)
        self._sizes: Ids = np.zeros(0, dtype=np.int64)

    def breakers(self, texts: Sequence[str]) -> DryBreakers:
        """Takes milliseconds a text: worth a cache."""
        found: dict[TokenSequence, list[Ids]] = defaultdict(list)
        for text in texts:
            for firsts, tail in self._find(text):
                if max(tail, default=0) < self._vocab_size:
                    found[tail].append(firsts[firsts < self._vocab_size])
        single = np.zeros(self._vocab_size, dtype=np.bool_)
        longer: dict[int, dict[int, dict[TokenSequence, Ids]]] = {}
        for tail in sorted(found, key=len):
            firsts = np.unique(np.concatenate(found[tail]))
            if not tail:
                single[firsts] = True
            elif len(firsts):
                longer.setdefault(tail[-1], {}).setdefault(len(tail), {})[tail] = firsts
        return DryBreakers(single, longer)

    def _find(self, text: str) -> Iterator[tuple[Ids, TokenSequence]]:
        """Sequences that break: ids that may be the first, and what follows it."""
        if not len(self._joined):
            tokens = self._token_bytes()[: self._vocab_size]
            self._joined = np.frombuffer(b"".join(tokens), dtype=np.uint8)
            self._sizes = np.array([len(token) for token in tokens], dtype=np.int64)
            self._ends = self._sizes.cumsum()
        holders = self._holders(text.encode())
        yield holders, ()
        spelled = self._encode(text)[: _MAX_TAIL + 1]
        yield np.array(spelled[:1], dtype=np.int64), tuple(spelled[1:])
        for split in range(1, len(text)):
            firsts = np.setdiff1d(self._enders(text[:split].encode()), holders, assume_unique=True)
            if len(firsts):
                yield firsts, tuple(self._encode(text[split:])[:_MAX_TAIL])

    def _holders(self, part: bytes) -> Ids:
        """Ids of the tokens that hold `part`. Searched for in all tokens joined to one string."""
        begins: Ids = np.flatnonzero(self._joined[: max(0, len(self._joined) + 1 - len(part))] == part[0])
        for offset, byte in enumerate(part[1:], 1):
            begins = begins[self._joined[begins + offset] == byte]
        token_ids = self._ends.searchsorted(begins, side="right")
        return np.unique(token_ids[begins + len(part) <= self._ends[token_ids]])

    def _enders(self, part: bytes) -> Ids:
        """Ids of the tokens that end in `part`."""
        token_ids: Ids = np.flatnonzero(self._sizes >= len(part))
        for offset, byte in enumerate(reversed(part), 1):
            token_ids = token_ids[self._joined[self._ends[token_ids] - offset] == byte]
        return token_ids


def _holds(ascending: Ids, number: int) -> bool:
    place = int(ascending.searchsorted(number))
    return place < len(ascending) and bool(ascending[place] == number)


def _suffix_matches(tokens: Numbers) -> Numbers:
    """For tokens [P], [P + 1]: at 1 + place how many tokens up to there agree with the last ones, and 0 at the last place: the
    Z-function, read backwards."""
    backwards: list[int] = tokens[::-1].tolist()
    size = len(backwards)
    matches: Numbers = np.zeros(size + 1, dtype=np.int32)
    left = right = 0
    for start in np.flatnonzero(tokens[::-1] == tokens[-1:])[1:].tolist():  # elsewhere nothing agrees
        length = min(int(matches[start - left]), right - start) if start < right else 0
        while start + length < size and backwards[length] == backwards[start + length]:
            length += 1
        matches[start] = length
        if start + length > right:
            left, right = start, start + length
    return matches[::-1].copy()
