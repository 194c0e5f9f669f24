"""A step of the scheduler's, from its plan until what it gave has been taken in."""

from __future__ import annotations

from typing import NamedTuple

from nanovllm_cli.engine.plan import Copy, Drawn, Look, Scheduled
from nanovllm_cli.engine.sequence import Sequence


class Step(NamedTuple):
    """A step that is under way: who is in it with what, who looks at what image, blocks being copied, states being copied to
    sequences, of which the sources are held for it, and who was reported as finished."""

    members: list[Sequence]
    scheduled: list[Scheduled]
    look: tuple[Sequence, Look] | None
    copies: list[Copy]
    states: list[tuple[int, int]]
    finished: list[int]


class Result(NamedTuple):
    """What a step did to one sequence. drawn: None after a prefill chunk that does not end the prompt."""

    sequence: Sequence
    drawn: Drawn | None


def sound(drawn: Drawn | None, sequence: Sequence) -> Drawn:
    """A draw that moves its sequence on, or says why not."""
    if drawn is not None and (drawn.error is not None or drawn.token_ids or drawn.ends):
        return drawn
    return Drawn(sequence.seq_id, [], None, "the sampler drew nothing")
