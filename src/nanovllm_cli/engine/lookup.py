"""Speculation by looking up (prompt lookup decoding): what followed the same few tokens before is guessed to follow now.

A guess costs little where a step waits for memory, and saves a whole step where it holds: code that is edited, texts that are
summed up or translated back, JSON with the same keys again. What is drawn does not depend on it: each token is drawn from its own
row of the logits, by its own random number, and a guess that is not what was drawn there is forgotten with all behind it. As a
row's bits do not depend on what is computed beside it (on a CPU, and a deterministic GPU), nor does any token.

A sequence begins with few guesses, gets twice as many where all held, and as many as held where not; where none does, it waits
longer and longer before it guesses again.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from nanovllm_cli.engine.sequence import Sequence

MATCHED = 3
"""Tokens that must have been there before."""
FIRST_GUESSES = 2
MOST_ROWS = 24
"""Of a step in all, guesses included. With so many a step is computing, not waiting for memory: one more costs its share."""
LONGEST_WAIT = 32


@dataclass(slots=True)
class Past:
    """What is remembered of a sequence. places: from MATCHED tokens to where they were followed last. waits: steps to come that
    guess nothing, after so many misses in a row."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_seen: int = MATCHED
    num_guesses: int = FIRST_GUESSES
    num_misses: int = 0
    waits: int = 0

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

    def learn(self, num_guessed: int, num_held: int) -> None:
        """How the last guesses went."""
        if num_held == num_guessed:
            self.num_guesses = min(MOST_ROWS, 2 * self.num_guesses)
        else:
            self.num_guesses = max(1, num_held)
        self.num_misses = 0 if num_held else self.num_misses + 1
        self.waits = min(LONGEST_WAIT, 2**self.num_misses - 1)


class Lookup:
    """See strategy.Strategy. max_guesses: most guesses of a sequence in one step."""

    def __init__(self, max_guesses: int) -> None:
        self._max_guesses = max_guesses
        self._room = max_guesses

    def begin(self, num_decodes: int) -> None:
        self._room = min(self._max_guesses, max(0, MOST_ROWS - num_decodes) // max(1, num_decodes))

    def feed(self, sequence: Sequence, limit: int) -> list[int]:
        start = sequence.num_computed
        known = sequence.token_ids[start : start + limit]
        room = min(self._room, limit - 1, sequence.request.max_len - len(sequence.token_ids) - 1)
        if room < 1 or len(sequence.token_ids) - start > 1 or sequence.pending:
            return known
        past: Past = sequence.past or Past()
        sequence.past = past
        if past.waits:
            past.waits -= 1
            return known
        count = 1 << min(room, past.num_guesses).bit_length() - 1  # of few sizes, so that steps are recorded
        return known + past.find(sequence.token_ids, count)

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
