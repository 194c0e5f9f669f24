"""How a sequence turns steps into tokens: the only thing that plain decoding and speculation do differently.

The scheduler asks a strategy what to feed, and tells it what was drawn. It never learns which strategy it has.
"""

from __future__ import annotations

from typing import Protocol

from nanovllm_cli.engine.sequence import Sequence


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
