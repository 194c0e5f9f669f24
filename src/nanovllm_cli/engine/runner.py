"""From a Plan to tensors and back: builds the Batch, runs the model, hands logits to the sampler. One per worker.

Numbers are put together in numpy, once a step, and shared by all layers. Not covered: what to run (scheduler), where memory
comes from (worker).
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.engine.graphs import GraphCache
from nanovllm_cli.engine.plan import Plan, Scheduled, StepOutput, TokenLogprobs
from nanovllm_cli.engine.sampler import Sampler
from nanovllm_cli.kernels.ops import Hidden, take_rows
from nanovllm_cli.models.decoder import Decoder

# Prompt logprobs want logits for every row; this many rows at a time keep 150,000-word vocabularies in tens of megabytes.
LOGIT_ROWS = 64
# Block tables are as wide as a power of two, so that a growing sequence needs a new graph a few times only.
MIN_TABLE = 8


class Runner:
    """Runs plans on one model. What it remembers between steps is in the sampler: what each sequence drew."""

    def __init__(self, model: Decoder, cache: KVCache, sampler: Sampler, block_size: int, recordable: bool) -> None:
        self.model = model
        self.cache = cache
        self.sampler = sampler
        self.block_size = block_size
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
        batch, owners = self._batch(plan.scheduled)
        inputs = self.model.prepare(batch)
        draws = [seq_id for share, _ in owners for seq_id in share.draws]
        rows = [first + _num_rows(share) - 1 for share, first in owners for _ in share.draws]
        if all(share.prompt_logprobs is None for share, _ in owners) and self.graphs.fits(batch):
            return StepOutput(self.sampler.sample(draws, self.graphs.logits(inputs), rows), {})
        hidden = self.model.run(inputs, self.cache)
        prompt_logprobs = {
            share.seq_id: self._prompt_logprobs(take_rows(hidden, slice(first, first + len(share.targets))), share)
            for share, first in owners
            if share.prompt_logprobs is not None
        }
        if not draws:
            return StepOutput([], prompt_logprobs)
        return StepOutput(self.sampler.sample(draws, self.model.logits(take_rows(hidden, rows))), prompt_logprobs)

    def _prompt_logprobs(self, hidden: Hidden, share: Scheduled) -> list[TokenLogprobs]:
        assert share.prompt_logprobs is not None
        found: list[TokenLogprobs] = []
        for i in range(0, len(share.targets), LOGIT_ROWS):
            logits = self.model.logits(take_rows(hidden, slice(i, i + LOGIT_ROWS)))
            found += self.sampler.prompt_logprobs(
                logits, list(share.targets[i : i + LOGIT_ROWS]), share.prompt_logprobs
            )
        return found

    def _batch(self, scheduled: list[Scheduled]) -> tuple[Batch, list[tuple[Scheduled, int]]]:
        """The step's tensors, and for each share that wants logits its first row among them."""
        lens = np.array([len(share.token_ids) for share in scheduled], np.int32)
        starts = np.zeros(len(scheduled) + 1, np.int32)
        np.cumsum(lens, out=starts[1:])
        widest = max(len(share.block_table) for share in scheduled)
        tables = np.zeros((len(scheduled), max(MIN_TABLE, 1 << (widest - 1).bit_length())), np.int32)
        for row, share in zip(tables, scheduled, strict=True):
            row[: len(share.block_table)] = share.block_table
        seq_of = np.repeat(np.arange(len(scheduled)), lens)
        first = np.array([share.start for share in scheduled], np.int64)
        positions = np.arange(starts[-1], dtype=np.int64) + (first - starts[:-1])[seq_of]
        prompt_lens = np.array([share.prompt_len for share in scheduled], np.int64)
        logit_rows: list[int] = []
        owners: list[tuple[Scheduled, int]] = []
        for i, share in enumerate(scheduled):
            count = _num_rows(share)
            if count:
                owners.append((share, len(logit_rows)))
                begin = starts[i] if share.prompt_logprobs is not None else starts[i + 1] - 1
                logit_rows += range(begin, begin + count)
        token_ids = np.fromiter(
            itertools.chain.from_iterable(s.token_ids for s in scheduled), np.int64, int(starts[-1])
        )
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            rope_lens=torch.from_numpy(np.maximum(positions + 1, prompt_lens[seq_of])),
            query_starts=torch.from_numpy(starts),
            kv_lens=torch.from_numpy((first + lens).astype(np.int32)),
            slots=torch.from_numpy(
                tables[seq_of, positions // self.block_size].astype(np.int64) * self.block_size
                + positions % self.block_size
            ),
            block_tables=torch.from_numpy(tables),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        ), owners


def _num_rows(share: Scheduled) -> int:
    """Rows whose logits this share wants: all of them for prompt logprobs, else the last one if somebody draws from it."""
    if share.prompt_logprobs is not None:
        return len(share.token_ids)
    return 1 if share.draws else 0
