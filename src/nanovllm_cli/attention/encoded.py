"""Attention to what an encoder has made (`CrossSpec`, `LookSpec`): what a step keeps of it, and what of a batch is then left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.cross_spec import CrossSpec
from nanovllm_cli.mixer_spec import AttentionSpec


class EncodedRows(NamedTuple):
    """What an encoder has made [n, hidden] that tokens of a step stand for, the slots [n] int64 of these, and how many of each
    one's sequence follow it here [n] int32, itself included. lora: see `Batch`, of these."""

    values: torch.Tensor
    slots: torch.Tensor
    run: torch.Tensor
    lora: torch.Tensor | None = None


@runtime_checkable
class AttendsToEncoded(Protocol):
    """What an AttentionBackend has beside the rest, where it attends to an encoder's rows."""

    def keep_encoded(self, spec: AttentionSpec, kv: torch.Tensor, rows: EncodedRows, cache: LayerCache) -> None:
        """kv [n, 2 * K * D], of an encoder's rows: their keys and values are written to the cache."""

    def attend_encoded(self, spec: AttentionSpec, q: torch.Tensor, cache: LayerCache, step: Any) -> torch.Tensor:
        """q [T, H * D] -> [T, H * D]: each token attends to all of an encoder's rows that its sequence begins with; or, of tokens
        that look at something (`Batch.lookers`) and no others, each to what it sees."""

    def encoded_keys(self, spec: AttentionSpec, cache: LayerCache, blocks: Sequence[int], head: int) -> torch.Tensor:
        """What `keep_encoded` has written to these blocks, of one KV head: keys [n, D] float32, on the host."""


def taken_apart(batch: Batch, device: torch.device) -> tuple[Batch | None, EncodedRows | None]:
    """A batch on the host some of whose tokens stand for an encoder's rows, or for nothing: what is left without those, if
    anything is, and the rows, if there are any."""
    is_text, encoded = batch.positions >= 0, None
    if (images := batch.images) is not None:
        kept = batch.taken(images.rows.cpu())
        ends = torch.repeat_interleave(kept.query_starts[1:], kept.query_starts.diff())
        run = ends - torch.arange(len(ends), dtype=torch.int32)
        lora = None if kept.lora is None else kept.lora.to(device)
        encoded = EncodedRows(images.values, kept.slots.to(device), run.to(device), lora)
    if not is_text.any():
        return None, encoded
    rows = is_text.nonzero()[:, 0]
    return replace(batch.taken(rows), logit_rows=torch.searchsorted(rows, batch.logit_rows)), encoded


def behind(batch: Batch, lead: int, block_size: int) -> Batch:
    """The same as of sequences that begin behind their first `lead` tokens, whole blocks of which none is here."""
    tables = batch.block_tables[:, lead // block_size :].contiguous()
    return replace(batch, kv_lens=batch.kv_lens - lead, known_lens=batch.known_lens - lead, block_tables=tables)


def among(batch: Batch, count: int, lead: int, block_size: int) -> Batch:
    """The same as of sequences that have `count` tokens, in the whole blocks of their first `lead`, and see all of these."""
    lens, tables = torch.full_like(batch.kv_lens, count), batch.block_tables[:, : lead // block_size].contiguous()
    return replace(batch, kv_lens=lens, known_lens=lens, block_tables=tables)


def leading(batch: Batch, cross: CrossSpec) -> Batch:
    """The same, of sequences that all begin with as many rows of an encoder's, told like what leads a text (`Batch.leads`)."""
    looks = torch.tensor([[0, cross.rows]], dtype=torch.int32).expand(batch.num_tokens, 2)
    return replace(batch, looks=looks, leads=torch.full_like(batch.kv_lens, cross.lead))


def behind_each(batch: Batch, block_size: int) -> Batch:
    """The same as of sequences that begin behind what leads each of them (`Batch.leads`)."""
    if batch.leads is None:
        return batch
    columns = batch.leads[:, None] // block_size + torch.arange(batch.block_tables.shape[1])
    tables = batch.block_tables.gather(1, columns.clamp_max(batch.block_tables.shape[1] - 1))
    lens = batch.kv_lens - batch.leads, batch.known_lens - batch.leads
    return replace(batch, kv_lens=lens[0], known_lens=lens[1], block_tables=tables, looks=None, leads=None)


def looked_at(batch: Batch, rows: torch.Tensor, block_size: int) -> Batch:
    """Tokens that look at something (`Batch.lookers`), those of a run which see the same like a sequence that has that alone, and
    sees all of it."""
    assert batch.looks is not None
    firsts, counts = batch.looks[rows].unbind(1)
    taken = batch.taken(rows, firsts.long() << 32 | counts)
    assert taken.looks is not None
    firsts, counts = taken.looks[taken.query_starts[:-1].long()].unbind(1)
    width = 1 << (-(-int(counts.max()) // block_size) - 1).bit_length()  # of a power of two, so that steps are recorded seldom
    columns = firsts[:, None] // block_size + torch.arange(width)
    tables = taken.block_tables.gather(1, columns.clamp_max(taken.block_tables.shape[1] - 1))
    return replace(taken, kv_lens=counts.contiguous(), known_lens=counts.contiguous(), block_tables=tables)


def keys_in(kept: torch.Tensor, shape: tuple[int, ...], *, is_coded: bool) -> torch.Tensor:
    """What blocks of a CPU's cache have of one head, as `kernels/cpu_attention.py` lays it out -> its keys [n, D] float32. shape:
    (D / e, S, e). is_coded: bytes, and behind those of a block a scale for each row."""
    if not is_coded:
        return kept.float().transpose(1, 2).flatten(0, 1).flatten(1)
    size = math.prod(shape)
    scales = kept.view(torch.uint8)[:, size:].contiguous().view(torch.float32).reshape(-1, 1)
    return kept[:, :size].reshape(len(kept), *shape).float().transpose(1, 2).flatten(0, 1).flatten(1) * scales
