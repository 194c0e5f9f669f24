"""The tensors of a step, from its plan: put together in numpy on the host, once, and shared by all layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from nanovllm_cli.batch import Batch, ImageRows, WholeImages
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.sight import rotary_positions

# Block tables are as wide as a power of two, so that a growing sequence needs a new graph a few times only.
MIN_TABLE = 8


def build_batch(
    scheduled: list[Scheduled], block_size: int, hidden: torch.Tensor | None = None, images: ImageRows | None = None
) -> tuple[Batch, list[tuple[Scheduled, int]]]:
    """The step's tensors, and for each share that wants rows behind the last norm its first one among them. hidden, images: see
    Batch."""
    logit_rows: list[int] = []
    owners: list[tuple[Scheduled, int]] = []
    begin, starts = 0, [0]
    for share in scheduled:
        if wanted := share.wanted_rows:
            owners.append((share, len(logit_rows)))
            logit_rows += range(begin + wanted.start, begin + wanted.stop)
        begin += len(share.token_ids)
        starts.append(begin)
    known_lens = [share.known_len for share in scheduled]
    tables = _tables([share.block_table for share in scheduled])
    are_decodes = begin == len(scheduled)
    places, slots, rope_lens = (_of_decodes if are_decodes else _of_chunks)(scheduled, block_size, starts, tables)
    near_slots, near_tables = None, None
    if scheduled[0].near_table:
        near_tables = _tables([share.near_table for share in scheduled])
        near_slots = torch.from_numpy(_slots(near_tables, starts, places, block_size))
    return Batch(
        token_ids=_int64(list(itertools.chain.from_iterable(share.token_ids for share in scheduled))),
        positions=torch.from_numpy(rotary_positions(scheduled, places)),
        rope_lens=torch.from_numpy(rope_lens),
        query_starts=_int32(starts),
        kv_lens=_int32([share.start + len(share.token_ids) for share in scheduled]),
        known_lens=_int32(known_lens),
        slots=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        logit_rows=_int64(logit_rows),
        states=_int32([share.state for share in scheduled]),
        segments=_segments(scheduled),
        **_looks(scheduled, places),
        whole=_whole(scheduled),
        lora=None if (lora := lora_rows(scheduled)) is None else torch.from_numpy(lora),
        images=images,
        hidden=hidden,
        near_slots=near_slots,
        near_tables=None if near_tables is None else torch.from_numpy(near_tables),
    ), owners


def _tables(rows: list[Sequence[int]]) -> np.ndarray:
    tables = np.zeros((len(rows), max(MIN_TABLE, 1 << (max(map(len, rows)) - 1).bit_length())), np.int32)
    for mine, row in zip(tables, rows, strict=True):
        mine[: len(row)] = row
    return tables


def _slots(tables: np.ndarray, starts: list[int], places: np.ndarray, block_size: int) -> np.ndarray:
    """Of each token, int64, by its place in its sequence. starts: of the sequences' tokens, and the end."""
    seq_of = np.repeat(np.arange(len(tables)), np.diff(starts))
    slots: np.ndarray = tables[seq_of, places // block_size] * np.int64(block_size) + places % block_size
    return slots


def _int64(numbers: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, np.int64))


def _int32(numbers: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, np.int32))


def _of_decodes(
    scheduled: list[Scheduled], block_size: int, starts: list[int], tables: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `_of_chunks` finds, where each sequence has one token. Of few numbers Python makes arrays sooner than numpy's
    operators, whose code is no longer in a cache when a step ends."""
    places, slots, rope_lens = [], [], []
    for share in scheduled:
        block, within = divmod(share.start, block_size)
        places.append(share.start)
        slots.append(share.block_table[block] * block_size + within)
        rope_lens.append(max(share.start + 1, share.prompt_len))
    return np.array(places, np.int64), np.array(slots, np.int64), np.array(rope_lens, np.int64)


def _of_chunks(
    scheduled: list[Scheduled], block_size: int, starts: list[int], tables: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token, int64: its place in its sequence, its slot, and its sequence's length (see `Batch.rope_lens`)."""
    begins = np.array(starts, np.int64)
    seq_of = np.repeat(np.arange(len(scheduled)), np.diff(begins))
    first = np.array([share.start for share in scheduled], np.int64)
    prompt_lens = np.array([share.prompt_len for share in scheduled], np.int64)
    places = np.arange(begins[-1]) + (first - begins[:-1])[seq_of]
    return places, _slots(tables, starts, places, block_size), np.maximum(places + 1, prompt_lens[seq_of])


def _looks(scheduled: list[Scheduled], places: np.ndarray) -> dict[str, torch.Tensor]:
    """`Batch.looks` and `Batch.leads`, where anybody has something in front of a text. places [T]: see `_of_chunks`."""
    if all(share.lead is None for share in scheduled):
        return {}
    looks, begin = np.zeros((len(places), 2), np.int32), 0
    for share in scheduled:
        end = begin + len(share.token_ids)
        for glance in () if share.lead is None else share.lead.glances:
            looks[begin:end][places[begin:end] >= glance.start] = glance.first, glance.num_rows
        begin = end
    leads = [0 if share.lead is None else share.lead.num_tokens for share in scheduled]
    return {"looks": torch.from_numpy(looks), "leads": _int32(leads)}


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
