"""From a Plan to tensors and back: builds the Batch, runs the model, hands logits to the sampler. One per worker.

Not covered: what to run (scheduler), where memory comes from (worker).
"""

from __future__ import annotations

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.engine.graphs import GraphCache
from nanovllm_cli.engine.interrupts import let_in
from nanovllm_cli.engine.plan import Plan, Scheduled, StepOutput, TokenLogprobs
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.kernels.ops import Hidden, take_rows
from nanovllm_cli.models.decoder import Decoder

# Prompt logprobs want logits for every row; this many rows at a time keep 150,000-word vocabularies in tens of megabytes.
LOGIT_ROWS = 64


class Runner:
    """Runs plans on one model. What it remembers between steps is in the sampler: what each sequence drew.

    recordable: whether steps can be recorded. has_free_processor: whether the model leaves one to what masks take.
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
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.block_size = block_size
        self.has_free_processor = has_free_processor
        self.graphs = GraphCache(model, cache, recordable)

    def run(self, plan: Plan) -> StepOutput:
        """Raises before anything is drawn if the step can't be computed; one bad row is reported in its Drawn instead."""
        for seq_id in plan.finished:
            self.sampler.remove(seq_id)
        for new in plan.new:
            self.sampler.add(new)
        self.cache.copy_blocks(plan.copies)
        if not plan.scheduled:
            return StepOutput([], {})
        batch, owners = build_batch(plan.scheduled, self.block_size)
        inputs = self.model.prepare(batch)
        draws = [seq_id for share, _ in owners for seq_id in share.draws]
        if self.has_free_processor:
            self.sampler.start_masks(draws)
        rows = [first + len(share.wanted_rows) - 1 for share, first in owners for _ in share.draws]
        if all(share.prompt_logprobs is None and share.pooling is None for share, _ in owners) and self.graphs.fits(batch):
            with let_in():
                logits = self.graphs.logits(inputs)
            return StepOutput(self.sampler.sample(draws, logits, rows), {})
        with let_in():
            hidden = self.model.run(inputs, self.cache)
        prompt_logprobs = {
            share.seq_id: prompt_logprobs_of(self.model, self.sampler, hidden, first, share)
            for share, first in owners
            if share.prompt_logprobs is not None
        }
        pooled = pooled_of(self.model, hidden, owners)
        if not draws:
            return StepOutput([], prompt_logprobs, pooled)
        drawn = self.sampler.sample(draws, self.model.logits(take_rows(hidden, rows)))
        return StepOutput(drawn, prompt_logprobs, pooled)


def pooled_of(model: Decoder, hidden: Hidden, owners: list[tuple[Scheduled, int]]) -> dict[int, list[float]]:
    """What the shares that are embedded make of their hidden rows; sums in float64, so that chunks hardly matter."""
    pooled: dict[int, list[float]] = {}
    for share, first in owners:
        if share.pooling is not None:
            rows = model.normed(take_rows(hidden, slice(first, first + len(share.wanted_rows))))
            pooled[share.seq_id] = rows.double().sum(0).tolist()
    return pooled


def prompt_logprobs_of(
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
