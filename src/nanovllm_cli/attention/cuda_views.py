"""A step on a GPU as its layers see it. Tables and lengths that follow from a batch's are computed on the device, as a recorded
step's lengths are known there.

Legend: T tokens, B sequences, P blocks in a table, S block size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from nanovllm_cli.attention.backend import WholeRows
from nanovllm_cli.attention.cuda_latent import Groups
from nanovllm_cli.batch import Batch
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.prefill_attention import PrefillWork


class Shape(NamedTuple):
    """Layers that agree in these share what is prepared. window, chunk: 0 for none. of_encoded: keys are an encoder's rows."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    both_ways: bool = False
    chunk: int = 0
    of_encoded: bool = False


class TokenRows(NamedTuple):
    """Of each token: how many tokens its sequence has up to it, 0 for padding, and which sequence that is. [T] int32."""

    lens: torch.Tensor
    sequences: torch.Tensor


class Tables(NamedTuple):
    """Of a step of decodes as of sequences that are other parts of theirs: block tables [B, P] and kv_lens [B]."""

    block_tables: torch.Tensor
    kv_lens: torch.Tensor


class Encoded(NamedTuple):
    """What each token of a step sees of an encoder's rows. divided: by shape, as the host has divided it, whose sequences are
    those of the tables; None of a step of decodes, whose kernel goes by the lengths."""

    tables: Tables
    divided: dict[Shape, PrefillWork] | None = None


class CudaStep(NamedTuple):
    """Of one batch: slots [T], block tables [B, P], kv_lens and known_lens [B], query starts [B + 1], states [B]; for a step that
    is not decodes only the work by shape, its tokens as rows if some attention is latent, and those in groups where the host has
    divided them; where all sequences are whole prompts, the first row of each and the end. whole: rows that see more.
    chunks: for decodes in layers that see no further than those. near: the same for layers with a window, where these have slots
    and tables of their own. encoded: for attention to what an encoder has made."""

    slots: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    known_lens: torch.Tensor
    query_starts: torch.Tensor
    states: torch.Tensor
    work: dict[Shape, PrefillWork] | None = None
    rows: TokenRows | None = None
    groups: Groups | None = None
    prompts: list[int] | None = None
    whole: WholeRows | None = None
    chunks: Tables | None = None
    near: CudaStep | None = None
    encoded: Encoded | None = None

    @property
    def for_states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What layers that keep states go by."""
        return self.query_starts, self.kv_lens, self.known_lens, self.states


def token_rows(launcher: Launcher, batch: Batch) -> TokenRows:
    starts, lens = batch.query_starts, batch.kv_lens
    lengths, numbers = (torch.empty(batch.num_tokens, dtype=torch.int32, device=starts.device) for _ in range(2))

    def fill() -> None:
        tokens = torch.arange(len(numbers), dtype=torch.int32, device=starts.device)
        sequences = torch.searchsorted(starts[1:], tokens, right=True)
        numbers.copy_(sequences)
        lengths.copy_(lens[sequences] - starts[sequences + 1] + tokens + 1)

    launcher.torch_op(fill)
    return TokenRows(lengths, numbers)


def in_chunks(launcher: Launcher, batch: Batch, chunk: int, block_size: int) -> Tables:
    """Of sequences that begin with their chunks."""
    given, lens = batch.block_tables, batch.kv_lens
    tables, lengths = given.new_empty(len(given), min(given.shape[1], chunk // block_size)), torch.empty_like(lens)

    def fill() -> None:
        before = ((lens - 1) // chunk * chunk).clamp_min(0)  # a row of padding has no tokens
        lengths.copy_(lens - before)
        _shifted(given, before, block_size, tables)

    launcher.torch_op(fill)
    return Tables(tables, lengths)


def behind_leads(launcher: Launcher, batch: Batch, block_size: int) -> tuple[Batch, Tables]:
    """A batch whose sequences see something that leads them (`Batch.leads`): as of those that begin behind that; and what they
    see, each of its sequence's first token."""
    given, lens, looks, leads, starts = batch.block_tables, batch.kv_lens, batch.looks, batch.leads, batch.query_starts
    assert looks is not None
    assert leads is not None
    tables, seen_tables = (torch.empty_like(given, memory_format=torch.contiguous_format) for _ in range(2))
    lengths, known, seen_lens = (torch.empty_like(lens) for _ in range(3))

    def fill() -> None:
        torch.sub(lens, leads, out=lengths)
        torch.sub(batch.known_lens, leads, out=known)
        _shifted(given, leads, block_size, tables)
        first, count = looks[starts[:-1].clamp_max(len(looks) - 1).long()].unbind(1)
        seen_lens.copy_(torch.where(lens > 0, count, 0))
        _shifted(given, first, block_size, seen_tables)

    launcher.torch_op(fill)
    text = replace(batch, block_tables=tables, kv_lens=lengths, known_lens=known, looks=None, leads=None)
    return text, Tables(seen_tables, seen_lens)


def _shifted(given: torch.Tensor, tokens: torch.Tensor, block_size: int, out: torch.Tensor) -> None:
    """Tables without the whole blocks of so many tokens [B] of each; what is past their ends is anything. Of a step with guesses
    lengths have room for a sequence a token, tables for no more than there may be."""
    columns = (tokens[: len(given)] // block_size)[:, None] + torch.arange(out.shape[1], device=given.device)
    out.copy_(given.gather(1, columns.clamp_max(given.shape[1] - 1).long()))
