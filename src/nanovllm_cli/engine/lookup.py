"""Speculation by looking up (prompt lookup decoding): what followed the same few tokens before is guessed to follow now.

A guess costs little where a step waits for memory, and saves a whole step where it holds: code that is edited, texts that are
summed up or translated back, JSON with the same keys again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nanovllm_cli.engine.sequence import Sequence
from nanovllm_cli.engine.strategy import Guessing, Pace

MATCHED = 3
"""Tokens that must have been there before."""


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


class Lookup(Guessing):
    """See strategy.Strategy."""

    def begin_sequence(self) -> Pace:
        return Past()

    def guesses(self, sequence: Sequence, most: int) -> list[int]:
        count = 1 << most.bit_length() - 1  # of few sizes, so that steps are recorded
        found: list[int] = sequence.past.find(sequence.token_ids, count)
        return found
