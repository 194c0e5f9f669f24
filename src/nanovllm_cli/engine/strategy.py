"""How a sequence turns steps into tokens: the only thing that plain decoding and speculation do differently. What a step draws
does not depend on it: each token is drawn from its own row of the logits, by its own random number, and a guess that is not what
was drawn there is forgotten with all behind it. As a row's bits do not depend on what is computed beside it (on a CPU, and a
deterministic GPU), nor does any token.

The scheduler asks a strategy what to feed, and tells it what was drawn. It never learns which strategy it has.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.executor import Executor
from nanovllm_cli.engine.plan import DRAFTED
from nanovllm_cli.engine.sequence import Sequence

FIRST_GUESSES = 2
LONGEST_WAIT = 32
MATCHED = 3
"""Tokens that must have been there before, for what followed them to be guessed."""
MOST_ROWS = 24
"""Of a step in all, guesses included. With so many a step is computing, not waiting for memory: one more costs its share."""


def most_guesses(config: EngineConfig) -> int:
    """Of a sequence in a step, behind a token that is none."""
    return min(config.max_guesses, MOST_ROWS - 1)


class Strategy(Protocol):
    """`begin` is called before a step is planned, the others once for each of its sequences: `feed` before it, `num_valid`
    after it."""

    def begin(self, num_decodes: int) -> None:
        """So many sequences are going to decode."""
        ...

    def feed(self, sequence: Sequence, limit: int) -> list[int]:
        """Tokens for positions num_computed, num_computed + 1, …: known ones and, behind the last of these, guesses.

        At least one and at most `limit` (which is at least one), and none past the request's `max_len`. Guesses are
        only for a sequence whose known tokens all fit and that has nobody `pending`; there may be no room for them.
        """
        ...

    def num_valid(self, sequence: Sequence, fed: list[int], drawn: list[int]) -> int:
        """How many of the fed tokens turned out to belong to the sequence, given what its last rows drew."""
        ...


class Standard:
    """Known tokens only, one draw a step."""

    def begin(self, num_decodes: int) -> None: ...

    def feed(self, sequence: Sequence, limit: int) -> list[int]:
        start = sequence.num_computed
        return sequence.token_ids[start : start + limit]

    def num_valid(self, sequence: Sequence, fed: list[int], drawn: list[int]) -> int:
        return len(fed)


@dataclass(slots=True)
class Pace:
    """How many guesses a sequence gets: few at first, twice as many where all held, and as many as held where not. waits: steps
    to come that guess nothing, more and more where none does."""

    num_guesses: int = FIRST_GUESSES
    num_misses: int = 0
    waits: int = 0

    def learn(self, num_guessed: int, num_held: int) -> None:
        """How the last guesses went."""
        if num_held == num_guessed:
            self.num_guesses = min(MOST_ROWS, 2 * self.num_guesses)
        else:
            self.num_guesses = max(1, num_held)
        self.num_misses = 0 if num_held else self.num_misses + 1
        self.waits = min(LONGEST_WAIT, 2**self.num_misses - 1)


class Guessing(ABC):
    """Known tokens, and behind the last of them what `guesses` says. max_guesses: most of a sequence in one step. most_rows: see
    MOST_ROWS."""

    def __init__(self, max_guesses: int, most_rows: int = MOST_ROWS) -> None:
        self._max_guesses = max_guesses
        self._most_rows = most_rows
        self._room = max_guesses

    def begin(self, num_decodes: int) -> None:
        self._room = min(self._max_guesses, max(0, self._most_rows - num_decodes) // max(1, num_decodes))

    def feed(self, sequence: Sequence, limit: int) -> list[int]:
        start = sequence.num_computed
        known = sequence.token_ids[start : start + limit]
        room = min(self._room, limit - 1, sequence.request.max_len - len(sequence.token_ids) - 1)
        if room < 1 or len(sequence.token_ids) - start > 1 or sequence.pending:
            return known
        if sequence.past is None:
            sequence.past = self.begin_sequence()
        if sequence.past.waits:
            sequence.past.waits -= 1
            return known
        return known + self.guesses(sequence, min(room, sequence.past.num_guesses))

    def num_valid(self, sequence: Sequence, fed: list[int], drawn: list[int]) -> int:
        num_known = len(sequence.token_ids) - sequence.num_computed
        guesses = fed[num_known:]
        if not guesses:
            return len(fed)
        pairs = zip(guesses, drawn, strict=False)
        num_held = sum(itertools.takewhile(bool, (guess == token for guess, token in pairs)))
        sequence.past.learn(len(guesses), num_held)
        sequence.request.num_guessed_tokens += len(guesses)
        sequence.request.num_held_tokens += num_held
        return num_known + num_held

    def begin_sequence(self) -> Pace:
        """What is to be remembered of a sequence, as its `past`."""
        return Pace()

    @abstractmethod
    def guesses(self, sequence: Sequence, most: int) -> list[int]:
        """At most so many tokens that may follow the known ones."""


class Drafted(Guessing):
    """The worker's draft model guesses."""

    def guesses(self, sequence: Sequence, most: int) -> list[int]:
        return [DRAFTED] * most


class Lookup(Guessing):
    """Prompt lookup decoding: what followed the same few tokens before is guessed to follow now. A guess costs little where a
    step waits for memory, and saves a whole step where it holds: code that is edited, texts that are summed up or translated
    back, JSON with the same keys again."""

    def begin_sequence(self) -> Pace:
        return Past()

    def guesses(self, sequence: Sequence, most: int) -> list[int]:
        count = 1 << most.bit_length() - 1  # of few sizes, so that steps are recorded
        found: list[int] = sequence.past.find(sequence.token_ids, count)
        return found


@dataclass(slots=True)
class Past(Pace):
    """What is remembered of a sequence. places: from MATCHED tokens to where they were followed last."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_seen: int = MATCHED

    def find(self, tokens: list[int], count: int) -> list[int]:
        """What followed the last tokens when they came before, `count` of them; behind the end as if all came again."""
        for end in range(self.num_seen, len(tokens)):
            self.places[tuple(tokens[end - MATCHED : end])] = end
        self.num_seen = max(self.num_seen, len(tokens))
        place = self.places.get(tuple(tokens[-MATCHED:]))
        if place is None:
            return []
        found = tokens[place : place + count]
        while len(found) < count:
            found += found[: count - len(found)]
        return found


def strategy_of(config: EngineConfig, executor: Executor) -> Strategy:
    """The one that a config asks for."""
    if config.draft_model is not None or config.mtp:
        return Drafted(config.max_guesses, executor.most_drafted)
    return Lookup(config.max_guesses) if config.max_guesses else Standard()
