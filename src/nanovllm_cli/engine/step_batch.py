"""The tensors of a step, from its plan: put together in numpy on the host, once, and shared by all layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from nanovllm_cli.batch import Batch, WholeImages
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.sight import rotary_positions

# Block tables are as wide as a power of two, so that a growing sequence needs a new graph a few times only.
MIN_TABLE = 8


def build_batch(scheduled: list[Scheduled], block_size: int) -> tuple[Batch, list[tuple[Scheduled, int]]]:
    """The step's tensors, and for each share that wants rows behind the last norm its first one among them."""
    lens = np.array([len(share.token_ids) for share in scheduled], np.int32)
    starts = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(lens, out=starts[1:])
    widest = max(len(share.block_table) for share in scheduled)
    tables = np.zeros((len(scheduled), max(MIN_TABLE, 1 << (widest - 1).bit_length())), np.int32)
    for row, share in zip(tables, scheduled, strict=True):
        row[: len(share.block_table)] = share.block_table
    seq_of = np.repeat(np.arange(len(scheduled)), lens)
    first = np.array([share.start for share in scheduled], np.int64)
    places = np.arange(starts[-1], dtype=np.int64) + (first - starts[:-1])[seq_of]
    prompt_lens = np.array([share.prompt_len for share in scheduled], np.int64)
    logit_rows: list[int] = []
    owners: list[tuple[Scheduled, int]] = []
    for i, share in enumerate(scheduled):
        if wanted := share.wanted_rows:
            owners.append((share, len(logit_rows)))
            logit_rows += [int(starts[i]) + row for row in wanted]
    token_ids = np.fromiter(
        itertools.chain.from_iterable(s.token_ids for s in scheduled), np.int64, int(starts[-1])
    )
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(rotary_positions(scheduled, places)),
        rope_lens=torch.from_numpy(np.maximum(places + 1, prompt_lens[seq_of])),
        query_starts=torch.from_numpy(starts),
        kv_lens=torch.from_numpy((first + lens).astype(np.int32)),
        known_lens=torch.tensor([share.known_len for share in scheduled], dtype=torch.int32),
        slots=torch.from_numpy(
            tables[seq_of, places // block_size].astype(np.int64) * block_size
            + places % block_size
        ),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        states=torch.tensor([share.state for share in scheduled], dtype=torch.int32),
        segments=_segments(scheduled),
        whole=_whole(scheduled),
        lora=None if (lora := lora_rows(scheduled)) is None else torch.from_numpy(lora),
    ), owners


def _segments(scheduled: list[Scheduled]) -> torch.Tensor | None:
    if not any(share.second for share in scheduled):
        return None
    return torch.cat([torch.arange(share.start, share.start + len(share.token_ids)) >= (share.second or math.inf)
                      for share in scheduled]).long()  # fmt: skip


def _whole(scheduled: list[Scheduled]) -> WholeImages | None:
    rows: list[int] = []
    numbers: list[int] = []
    first, in_windows = 0, False
    for share in scheduled:
        for placed in share.images:
            if placed.whole:
                its = range(first + max(0, placed.start - share.start), first + placed.end - share.start)
                numbers += [numbers[-1] + 1 if numbers else 0] * len(its)
                rows += its
                in_windows = placed.in_windows
        first += len(share.token_ids)
    return WholeImages(torch.tensor(rows), torch.tensor(numbers), in_windows) if rows else None


def lora_rows(scheduled: Sequence[Scheduled]) -> np.ndarray | None:
    """[T, A] fp32: what each token takes of each adapter that requests choose from. None where nobody takes any."""
    width = max(len(share.lora) for share in scheduled)
    if width == 0:
        return None
    scales = np.array([share.lora or (0.0,) * width for share in scheduled], np.float32)
    return np.repeat(scales, [len(share.token_ids) for share in scheduled], axis=0)
