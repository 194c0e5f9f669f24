"""What all that guess in a worker (`draft.py`, `mtp.py`, `assistant.py`) do alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.plan import Drawn, Scheduled
from nanovllm_cli.sampling_params import SamplingParams

DrawMore = Callable[[Mapping[int, Scheduled], Mapping[int, int], int], Sequence[Drawn]]
"""Draws once more for sequences that go on guessing, by id: their shares, the guesses of each that are newest, and how many each
has by now."""


class Guesses:
    """A guess is the likeliest token. min_p: one that is less likely is none, and ends them."""

    def __init__(self, config: EngineConfig) -> None:
        self._least_logprob = math.log(config.draft_min_p) if config.draft_min_p else None
        self._block_size = config.block_size
        self.params = SamplingParams(temperature=0.0, logprobs=0 if config.draft_min_p else None)

    def of(self, scheduled: Sequence[Scheduled], drawn: Sequence[Drawn], draw_more: DrawMore) -> dict[int, list[int]]:
        """As many as each share has room for, or fewer, by sequence id. drawn: the first of each, and maybe of others."""
        going = {share.seq_id: share for share in scheduled if share.num_guesses}
        guesses: dict[int, list[int]] = {seq_id: [] for seq_id in going}
        for count in range(1, 1 + max((share.num_guesses for share in going.values()), default=0)):
            sure = {each.seq_id: each.token_ids[0] for each in drawn if each.seq_id in going and self._is_sure(each)}
            for seq_id, token in sure.items():
                guesses[seq_id].append(token)
            going = {seq_id: going[seq_id] for seq_id in sure if going[seq_id].num_guesses > count}
            if not going:
                break
            drawn = draw_more(going, sure, count)
        return guesses

    def filled(self, share: Scheduled, guesses: list[int]) -> Scheduled:
        """`share` with these in place of DRAFTED."""
        table = self.blocks(share, share.start + len(share.known) + len(guesses))
        return share._replace(token_ids=[*share.known, *guesses], num_guesses=len(guesses), block_table=table)

    def blocks(self, share: Scheduled, num_tokens: int) -> list[int]:
        """Those of the first tokens of the share's sequence."""
        return share.block_table[: -(-num_tokens // self._block_size)]

    def _is_sure(self, drawn: Drawn) -> bool:
        return drawn.error is None and (
            self._least_logprob is None or (drawn.logprobs or [])[0].logprob >= self._least_logprob
        )
