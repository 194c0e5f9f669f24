"""From a Plan to tensors and back: builds the Batch, runs the model, hands logits to the sampler. One per worker.

Not covered: what to run (scheduler), where memory comes from (worker).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.engine.aligning import Aligner
from nanovllm_cli.engine.graphs import GraphCache
from nanovllm_cli.engine.interrupts import let_in
from nanovllm_cli.engine.plan import Drawn, Numbers, Plan, Scheduled, StepOutput, TokenLogprobs
from nanovllm_cli.engine.platform import KeptRows, See, sees_nothing
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.kernels.ops import Hidden, take_rows
from nanovllm_cli.models.decoder import Decoder

# Prompt logprobs want logits for every row; this many rows at a time keep 150,000-word vocabularies in tens of megabytes.
LOGIT_ROWS = 64


class Runner:
    """Runs plans on one model. What it remembers between steps is in the sampler: what each sequence drew.

    recordable: whether steps can be recorded. has_free_processor: whether the model leaves one to what masks take.
    can_be_broken_off: whether Ctrl-C may end a step in its midst. see, hidden: see PlanRunner.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        sampler: Sampler,
        block_size: int,
        recordable: bool,
        *,
        has_free_processor: bool,
        can_be_broken_off: bool = True,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.block_size = block_size
        self.has_free_processor = has_free_processor
        self._let_in = let_in if can_be_broken_off else nullcontext
        self.graphs = GraphCache(model, cache, recordable)
        self.see: See = sees_nothing
        self.hidden: list[KeptRows] = []
        self._aligner = Aligner(model, cache, block_size)

    def arranged(self, plan: Plan) -> Plan:
        return plan

    def run(self, plan: Plan, hidden: torch.Tensor | None = None) -> StepOutput:
        """See PlanRunner."""
        self.hidden = []
        for seq_id in plan.finished:
            self.sampler.remove(seq_id)
            self._aligner.forget(seq_id)
        for new in plan.new:
            self.sampler.add(new)
        self.sampler.keep(plan.scheduled)
        self.cache.copy_blocks(plan.copies)
        self.cache.copy_states(plan.state_copies)
        if not plan.scheduled:
            return StepOutput([], {})
        with self._let_in():
            images = self.see(plan.scheduled)
        batch, owners = build_batch(plan.scheduled, self.block_size, hidden, images)
        inputs = self._aligner.watched(plan.scheduled, self.model.prepare(batch))
        looks_partly = inputs.looking is not None and inputs.looking.rows is not None
        is_plain = inputs.batch.images is None and not looks_partly  # rows of some tokens are no part of what is recorded
        is_plain = is_plain and all(share.prompt_logprobs is None for share in plan.scheduled)
        draws = draws_of(owners)
        keeps = any(share.keeps_rows for share, _ in owners)
        if self.has_free_processor:
            self.sampler.start_masks([draw.seq_id for draw in draws])
        if is_plain and all(share.draws_from_all for share, _ in owners) and self.graphs.fits(batch):
            with self._let_in():
                logits, rows = self.graphs.logits(inputs, keeps)
            self.hidden = kept_rows(rows, owners)
            return StepOutput(self._draw(draws, logits), {})
        with self._let_in():
            found = self.model.run(inputs, self.cache)
        if keeps:
            self.hidden = kept_rows(self.model.kept(found), owners)
        output = beside_draws(self.model, self.sampler, found, owners)
        output = output._replace(pooled={**output.pooled, **self._aligner.times(plan.scheduled, inputs)})
        if not draws:
            return output
        drawn_from, draws = rows_of(draws)
        return output._replace(drawn=self._draw(draws, self.model.logits(take_rows(found, drawn_from))))

    def _draw(self, draws: list[Draw], logits: torch.Tensor) -> list[Drawn]:
        def sample(going: list[Draw], depth: int) -> list[Drawn]:
            return self.sampler.sample([draw.seq_id for draw in going], logits, [draw.row + depth for draw in going])

        return draw_behind_guesses(draws, sample)


def kept_rows(rows: torch.Tensor | None, owners: list[tuple[Scheduled, int]]) -> list[KeptRows]:
    """Of the shares that want them, out of `rows` behind the last norm, which are theirs as owners says."""
    if rows is None:
        return []
    return [(share, rows[first : first + len(share.wanted_rows)]) for share, first in owners if share.keeps_rows]


class Draw(NamedTuple):
    """A sequence that draws from a row of the logits, and from those behind it as long as its guesses hold."""

    seq_id: int
    row: int
    guesses: list[int]

    def held(self, drawn: Drawn, depth: int) -> bool:
        """Whether the first `depth` guesses are what was drawn, and one more token may be."""
        return depth <= len(self.guesses) and not drawn.ends and drawn.token_ids[depth - 1 :] == self.guesses[depth - 1 : depth]


def draws_of(owners: list[tuple[Scheduled, int]]) -> list[Draw]:
    """owners: the step's shares, and the first row of each among those behind the last norm."""
    return [
        Draw(seq_id, first + len(share.wanted_rows) - 1 - share.num_guesses, share.guesses)
        for share, first in owners
        for seq_id in share.draws
    ]


def rows_of(draws: list[Draw]) -> tuple[list[int], list[Draw]]:
    """The rows that draws may need, and the draws as they are among these alone."""
    rows = [row for draw in draws for row in range(draw.row, draw.row + 1 + len(draw.guesses))]
    place = {row: i for i, row in enumerate(rows)}
    return rows, [draw._replace(row=place[draw.row]) for draw in draws]


def draw_behind_guesses(draws: list[Draw], sample: Callable[[list[Draw], int], list[Drawn]]) -> list[Drawn]:
    """A token for each, and one more behind every guess that was drawn. sample: from as many rows behind each one's own."""
    drawn = {draw.seq_id: found for draw, found in zip(draws, sample(draws, 0), strict=True)}
    going = draws
    for depth in range(1, 1 + max(len(draw.guesses) for draw in draws)):
        going = [draw for draw in going if draw.held(drawn[draw.seq_id], depth)]
        if not going:
            break
        for draw, found in zip(going, sample(going, depth), strict=True):
            drawn[draw.seq_id] = _joined(drawn[draw.seq_id], found)
    return [drawn[draw.seq_id] for draw in draws]


def _joined(drawn: Drawn, more: Drawn) -> Drawn:
    logprobs = None if drawn.logprobs is None else drawn.logprobs + (more.logprobs or [])
    return more._replace(token_ids=drawn.token_ids + more.token_ids, logprobs=logprobs)


def beside_draws(model: Decoder, sampler: Sampler, hidden: Hidden, owners: list[tuple[Scheduled, int]]) -> StepOutput:
    """What a step is asked for beside draws: log-probabilities of prompts, and sums of hidden rows."""
    prompt_logprobs = {
        share.seq_id: _prompt_logprobs(model, sampler, hidden, first, share)
        for share, first in owners
        if share.prompt_logprobs is not None
    }
    return StepOutput([], prompt_logprobs, pooled_of(model, hidden, owners))


def pooled_of(model: Decoder, hidden: Hidden, owners: list[tuple[Scheduled, int]]) -> dict[int, Numbers]:
    """What the shares that are embedded make of their hidden rows."""
    return {seq_id: _numbers(total) for seq_id, total in pooled_sums(model, hidden, owners)}


def _numbers(found: torch.Tensor) -> Numbers:
    """Those of all tokens may be millions, which a list would make eight times as large."""
    return found.tolist() if found.dim() == 1 else array("f", found.float().cpu().numpy().tobytes())


def pooled_sums(
    model: Decoder, hidden: Hidden, owners: list[tuple[Scheduled, int]]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each such share's sequence, and the sum of its rows, in float64, so that chunks hardly matter; or its rows."""
    for share, first in owners:
        if share.pooling is not None:
            rows = model.normed(take_rows(hidden, slice(first, first + len(share.wanted_rows))))
            yield share.seq_id, rows if share.pooling == "each" else rows.double().sum(0)


def _prompt_logprobs(
    model: Decoder, sampler: Sampler, hidden: Hidden, first: int, share: Scheduled
) -> list[TokenLogprobs]:
    """Of the share's targets, whose rows of hidden begin at `first`."""
    assert share.prompt_logprobs is not None
    found: list[TokenLogprobs] = []
    for i in range(0, len(share.targets), LOGIT_ROWS):
        targets = list(share.targets[i : i + LOGIT_ROWS])
        logits = model.logits(take_rows(hidden, slice(first + i, first + i + len(targets))))
        found += sampler.prompt_logprobs(logits, targets, share.prompt_logprobs)
    return found
