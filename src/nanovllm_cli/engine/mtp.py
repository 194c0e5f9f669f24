"""Speculation by a layer of the model's own (`models/mtp.py`): it says what comes next, and the model computes all of that in one
step and draws from each row.

The layer reads tokens and, of each, what the model made of the token before it. Its K and V lie in blocks beside the model's, at
the same places. Before a step it is fed what the last one was fed, with the rows that this gave, then the token that was drawn,
and guesses: so whatever fails or is broken off, nothing has been drawn yet. What it was fed of guesses is written over when the
model's rows of them are there. A row that nobody has any more, as of a prefix that was found, is zeros: a guess may then be
worse, but a guess changes no token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.loaded_mtp import LoadedMTP
from nanovllm_cli.engine.plan import Drawn, NewSequence, Plan, Scheduled, StepOutput
from nanovllm_cli.engine.platform import KeptRows
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.sampling_params import SamplingParams

MOST_UNFED = 16
"""Tokens of a sequence that nobody guesses behind: several at once take little longer than one."""


class _Unfed(NamedTuple):
    """Tokens of a sequence that the layer has still to be fed, from position `start` on, and the model's rows of the tokens
    before each of them and of the last: [1 + len(tokens), hidden]."""

    start: int
    tokens: list[int]
    rows: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class _Fed(NamedTuple):
    """A share of a step for the layer, and the rows that it reads beside the share's tokens."""

    share: Scheduled
    rows: torch.Tensor


class MTPDraft:
    """cache: of as many blocks as the model's."""

    def __init__(self, loaded: LoadedMTP, cache: KVCache, config: EngineConfig) -> None:
        self.weight_bytes = loaded.weight_bytes
        sampler = Sampler(loaded.spec.vocab_size)
        self._runner = loaded.platform.make_runner(loaded.model, cache, sampler, loaded.recordable)
        self._nothing = loaded.model.no_rows(1)
        self._block_size = config.block_size
        self._least_logprob = math.log(config.draft_min_p) if config.draft_min_p else None
        self._params = SamplingParams(temperature=0.0, logprobs=0 if config.draft_min_p else None)
        self._unfed: dict[int, _Unfed] = {}
        self._last: tuple[Sequence[KeptRows], StepOutput] | None = None

    def fill(self, plan: Plan) -> tuple[Plan, dict[int, list[int]]]:
        """`plan` with guesses in place of DRAFTED, and these by sequence id: as many as there is room for, or fewer."""
        self.settle()
        for seq_id in plan.finished:
            self._unfed.pop(seq_id, None)
        self._runner.run(Plan([], [], plan.finished, plan.copies))
        going = {share.seq_id: share for share in plan.scheduled if share.num_guesses}
        guesses: dict[int, list[int]] = {seq_id: [] for seq_id in going}
        drawn, rows = self._feed_and_draw(list(going.values()))
        for count in range(1, 1 + max((share.num_guesses for share in going.values()), default=0)):
            sure = {each.seq_id: each.token_ids[0] for each in drawn if self._is_sure(each)}
            for seq_id, token in sure.items():
                guesses[seq_id].append(token)
            going = {seq_id: going[seq_id] for seq_id in sure if going[seq_id].num_guesses > count}
            if not going:
                break
            more = [_Fed(self._drawing(share, [sure[i]], share.start + count, count), rows[i]) for i, share in going.items()]
            drawn, rows = self._draw(more)
        return plan._replace(scheduled=[self._filled(share, guesses.get(share.seq_id, [])) for share in plan.scheduled]), guesses

    def follow(self, kept: Sequence[KeptRows], output: StepOutput) -> None:
        """What the model made of a step's tokens. kept: rows of its shares. output: what was drawn, which tells the guesses that
        held."""
        self._last = kept, output

    def settle(self) -> None:
        """Feeds the layer what is left of the last step. To be called before anyone else touches a block."""
        if self._last is None:
            return
        (kept, output), self._last = self._last, None
        num_drawn = {each.seq_id: len(each.token_ids) for each in output.drawn}
        feeding: list[_Fed] = []
        for share, rows in kept:
            num_known = len(share.known)
            num_valid = num_known + min(share.num_guesses, max(0, num_drawn.get(share.seq_id, 0) - 1))
            tokens, rows = share.token_ids[:num_valid], rows[:num_valid]
            before = self._unfed.pop(share.seq_id, None)
            if before is not None and before.end == share.start + num_known:  # fed what is known, to guess behind it
                unfed = _Unfed(before.end, tokens[num_known:], rows[num_known - 1 :].clone())
            elif before is not None and before.end == share.start:
                unfed = _Unfed(before.start, [*before.tokens, *tokens], torch.cat([before.rows, rows]))
            else:
                unfed = _Unfed(share.start, tokens, torch.cat([self._nothing, rows]))
            if unfed.tokens and (num_known > 1 or len(share.draws) != 1 or self._is_due(unfed)):
                feeding.append(self._all_of(share, unfed))
                unfed = _Unfed(unfed.end, [], unfed.rows[-1:].clone())
            self._unfed.update(dict.fromkeys(share.draws or (share.seq_id,), unfed))
        if feeding:
            self._run(feeding)

    def _feed_and_draw(self, scheduled: list[Scheduled]) -> tuple[list[Drawn], dict[int, torch.Tensor]]:
        """See `_draw`: behind what is known."""
        if not scheduled:
            return [], {}
        new = [NewSequence(seq_id, [], self._params, 0, ()) for share in scheduled for seq_id in share.draws]
        feeding = []
        for share in scheduled:
            before = self._unfed.get(share.seq_id)
            if before is None or before.end != share.start:
                before = _Unfed(share.start, [], self._nothing)
            feeding.append(_Fed(self._drawing(share, [*before.tokens, *share.known], before.start, 0), before.rows))
            self._unfed[share.seq_id] = _Unfed(share.start + len(share.known), [], self._nothing)  # until `follow`
        return self._draw(feeding, new)

    def _draw(self, feeding: list[_Fed], new: Sequence[NewSequence] = ()) -> tuple[list[Drawn], dict[int, torch.Tensor]]:
        """What the layer draws, and by sequence id its own last row, [1, hidden]."""
        drawn = self._run(feeding, new)
        return drawn, {share.seq_id: rows[-1:] for share, rows in self._runner.hidden}

    def _run(self, feeding: list[_Fed], new: Sequence[NewSequence] = ()) -> list[Drawn]:
        rows = torch.cat([each.rows[: len(each.share.token_ids)] for each in feeding])
        return self._runner.run(Plan([each.share for each in feeding], list(new), [], []), rows).drawn

    def _is_due(self, unfed: _Unfed) -> bool:
        """Where a block is full it may be found by others."""
        size = self._block_size
        return unfed.start // size != unfed.end // size or len(unfed.tokens) >= MOST_UNFED

    def _all_of(self, share: Scheduled, unfed: _Unfed) -> _Fed:
        return _Fed(self._known(share, unfed.tokens, unfed.start), unfed.rows)

    def _known(self, share: Scheduled, tokens: list[int], start: int) -> Scheduled:
        table = share.block_table[: self._blocks_for(start + len(tokens))]
        return Scheduled(share.seq_id, tokens, start, table, (), prompt_len=share.prompt_len)

    def _drawing(self, share: Scheduled, tokens: list[int], start: int, num_drawn: int) -> Scheduled:
        """num_drawn: since the sequence was new. Steps of a token or two are recorded."""
        return self._known(share, tokens, start)._replace(
            draws=(share.seq_id,), prompt_len=start + len(tokens) - num_drawn, every_row=len(tokens) <= 2, keeps_hidden=True
        )

    def _is_sure(self, drawn: Drawn) -> bool:
        return drawn.error is None and (
            self._least_logprob is None or (drawn.logprobs or [])[0].logprob >= self._least_logprob
        )

    def _filled(self, share: Scheduled, guesses: list[int]) -> Scheduled:
        share = share._replace(keeps_hidden=share.pooling is None)
        if not share.num_guesses:
            return share
        end = share.start + len(share.known) + len(guesses)
        table = share.block_table[: self._blocks_for(end)]
        return share._replace(token_ids=[*share.known, *guesses], num_guesses=len(guesses), block_table=table)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
