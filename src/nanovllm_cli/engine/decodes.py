"""What a step of decodes is on a GPU, and what its sequences see in front of their texts (`leading.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nanovllm_cli.cross_spec import CrossSpec
from nanovllm_cli.engine.plan import Scheduled


def are_decodes(scheduled: list[Scheduled]) -> bool:
    """Whether a step is one of decodes. Either all see something in front of their texts, each always the same, or nobody has
    anything there."""
    if not all(map(_is_decode, scheduled)):
        return False
    leads = [share.lead for share in scheduled if share.lead is not None]
    return not leads or (len(leads) == len(scheduled) and all(map(_sees_one_thing, scheduled)))


def _sees_one_thing(share: Scheduled) -> bool:
    assert share.lead is not None
    seen = share.lead.seen_at(share.start)
    return seen[1] > 0 and seen == share.lead.seen_at(share.start + len(share.token_ids) - 1)


def _is_decode(share: Scheduled) -> bool:
    """One token and guesses behind it, or as good as that."""
    is_one = len(share.token_ids) == 1 + share.num_guesses or share.every_row
    return is_one and share.draws == (share.seq_id,) and share.prompt_logprobs is None and not share.images


def looks_of(scheduled: Sequence[Scheduled], cross: CrossSpec | None) -> np.ndarray:
    """[B, 3] int32, of a step of decodes: how many tokens are in front of each text, the first of those that stand for what it
    sees, and how many rows that is. cross: what all of them see, where it is always as much."""
    looks = np.zeros((len(scheduled), 3), np.int32)
    for row, share in enumerate(scheduled):
        if share.lead is not None:
            looks[row] = share.lead.num_tokens, *share.lead.seen_at(share.start)
        elif cross is not None:
            looks[row] = cross.lead, 0, cross.rows
    return looks
