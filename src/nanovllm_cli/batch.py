"""The tensors of ONE forward. Sequences lie behind each other in one flat row of tokens; a `query_len` per sequence says
how many are its own: 1 is decode, n a prefill chunk, k + 1 a verification. Nothing anywhere asks which of these it is.

Legend: T tokens of this step, B sequences, P most blocks of any sequence, R rows that want logits, A adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch


class WholeImages(NamedTuple):
    """Tokens `rows` [n] int64 of a step, and by number which image each stands for [n]; in_windows: they see more only in layers
    with a window."""

    rows: torch.Tensor
    numbers: torch.Tensor
    in_windows: bool = False

    def within(self, rows: torch.Tensor) -> WholeImages | None:
        """Those among some rows of the step, as places among these."""
        places = torch.isin(rows, self.rows).nonzero()[:, 0]
        return self._replace(rows=places, numbers=self.numbers[torch.isin(self.rows, rows)]) if len(places) else None


class ImageRows(NamedTuple):
    """Of the tokens `rows` [n] int64 of a step: what a tower has made of their images, [n, hidden]; and what is added to them
    behind each of the layers `behind`, [n, hidden] each. added: values are added to embeddings, and take the place of none."""

    rows: torch.Tensor
    values: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()
    behind: tuple[int, ...] = ()
    added: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of a forward. All tensors are contiguous and on one device.

    token_ids    [T] int64
    positions    [T] int64, each token's position in its sequence as rotary angles and learned positions go by it; where there
                 are images [3, T]: by time, by row and by column; or [4, T]: its own, by column, by row and by image;
                 below 0: it stands for a row of an encoder's, or for nothing, and no layer computes it
    rope_lens    [T] int64, length of the token's sequence as far as length-dependent rope scaling goes: the prompt's length,
                 or position + 1 for tokens after it
    query_starts [B + 1] int32, where each sequence's tokens begin in T; the last entry is T
    kv_lens      [B] int32, cached tokens of each sequence once this step's are written
    known_lens   [B] int32, the same without those that are guesses, and may be taken back
    slots        [T] int64, where each token's K and V go: block * block_size + offset
    block_tables [B, P] int32, blocks of each sequence in order; entries past its end are 0
    logit_rows   [R] int64, rows of T whose logits are wanted
    states       [B] int32, the state of each sequence, of a model that keeps some
    token_table  [n] int64 or None; where it is there, token_ids are indices into it: tokens that only the device knows
    segments     [T] int64 or None; which of two texts that are read together each token is of, 0 or 1; None: all are of the first
    images       what takes the place of some tokens' embeddings, on the device already, or None
    whole        tokens of images that see all of theirs, which this step has to its end, or None
    looks        [T, 2] int32 or None; of each token, the first of those in front of its text that stand for what it sees, and how
                 many rows that are (`leading.py`), 0: none; None: nobody sees anything
    leads        [B] int32, where looks are; tokens in front of each sequence's text
    lora         [T, A] fp32 or None; what each token takes of each adapter that requests choose from; None: nobody takes any
    hidden       [T, hidden] or None; on the device already: what `models/mtp.py` reads beside the tokens
    near_slots   [T] int64, and near_tables [B, P] int32, what slots and block_tables are for layers with a window, where their
                 cache is not of blocks but of parts of its own (`engine/near.py`); or None
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rope_lens: torch.Tensor
    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    known_lens: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    states: torch.Tensor
    token_table: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    looks: torch.Tensor | None = None
    leads: torch.Tensor | None = None
    lora: torch.Tensor | None = None
    near_slots: torch.Tensor | None = None
    near_tables: torch.Tensor | None = None
    whole: WholeImages | None = None
    images: ImageRows | None = None
    hidden: torch.Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """The same on another device; this one itself where it is there already."""
        if self.token_ids.device == device:
            return self
        assert self.token_table is None
        mine: dict[str, torch.Tensor | None] = {each.name: getattr(self, each.name) for each in fields(self)[:-3]}
        there: dict[str, Any] = {
            name: None if tensor is None else tensor.to(device, non_blocking=True) for name, tensor in mine.items()
        }
        whole = None if self.whole is None else self.whole._replace(rows=self.whole.rows.to(device, non_blocking=True))
        return Batch(**there, whole=whole, images=self.images, hidden=self.hidden)

    @property
    def of_near(self) -> Batch | None:
        """As layers with a window are told of it, where that is another thing."""
        if self.near_slots is None or self.near_tables is None:
            return None
        return replace(self, slots=self.near_slots, block_tables=self.near_tables, near_slots=None, near_tables=None)

    def asked(self) -> Batch:
        """The rows whose logits are wanted, alone."""
        return self.taken(self.logit_rows)

    def taken(self, rows: torch.Tensor, numbers: torch.Tensor | None = None) -> Batch:
        """Some rows alone: as runs of tokens that follow each other, each like a sequence that ends with them. numbers: what else
        is the same within a run."""
        starts = self.query_starts.long()
        owner = torch.searchsorted(starts, rows, right=True) - 1
        begins = torch.ones(len(rows), dtype=torch.bool)
        begins[1:] = (rows.diff() != 1) | (owner.diff() != 0)
        if numbers is not None:
            begins[1:] |= numbers.diff() != 0
        first = begins.nonzero()[:, 0]
        ends = torch.cat([first[1:], torch.tensor([len(rows)])])
        owners = owner[first]
        last = rows[ends - 1]
        kv_lens = self.kv_lens[owners] - (starts[owners + 1] - 1 - last).int()
        return Batch(
            token_ids=self.token_ids[rows],
            positions=self.positions[..., rows],
            rope_lens=self.rope_lens[rows],
            query_starts=torch.cat([first, ends[-1:]]).int(),
            kv_lens=kv_lens,
            known_lens=torch.minimum(kv_lens, self.known_lens[owners]),
            slots=self.slots[rows],
            block_tables=self.block_tables[owners],
            logit_rows=torch.arange(len(rows)),
            states=self.states[owners],
            looks=None if self.looks is None else self.looks[rows],
            leads=None if self.leads is None else self.leads[owners],
            lora=None if self.lora is None else self.lora[rows],
            near_slots=None if self.near_slots is None else self.near_slots[rows],
            near_tables=None if self.near_tables is None else self.near_tables[owners],
            whole=None if self.whole is None else self.whole.within(rows),
        )

    def in_chunks(self, size: int, block_size: int) -> Batch:
        """The same, a sequence's tokens of each chunk of so many like a sequence that begins with it; size: of whole blocks."""
        starts, rows = self.query_starts.long(), torch.arange(self.num_tokens)
        lens = starts.diff()
        places = rows + torch.repeat_interleave(self.kv_lens.long() - starts[1:], lens)
        taken = self.taken(rows, places // size)
        before = (taken.kv_lens.long() - 1) // size * size
        width = self.block_tables.shape[1]
        columns = (before // block_size)[:, None] + torch.arange(min(width, size // block_size))
        kv_lens = taken.kv_lens - before.int()
        return replace(
            taken,
            kv_lens=kv_lens,
            known_lens=torch.minimum(kv_lens, (taken.known_lens - before.int()).clamp_min(0)),
            block_tables=taken.block_tables.gather(1, columns.clamp_max(width - 1)),
            logit_rows=self.logit_rows,
        )

    @property
    def lookers(self) -> torch.Tensor | None:
        """Rows of tokens that see something in front of their texts [n] int64; None where none does."""
        rows = None if self.looks is None else (self.looks[:, 1] > 0).nonzero()[:, 0]
        return rows if rows is not None and len(rows) else None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.kv_lens.shape[0]
