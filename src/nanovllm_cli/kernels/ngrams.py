"""Embeddings of n-grams (Qwen4-Exp) on the CPU: tensors in, checks, addresses to the compiled kernels (cpu_ngrams.py).

A layer takes them by three kernels, in front of its delta rule: rows of a table, gates, and the convolution that joins the
streams. The table stays where it is, in mapped files: of a token its n-grams' rows are read.

Legend: T tokens, B sequences, N states, S streams, G tokens of the longest n-gram, H rows for n-grams of each length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from nanovllm_cli.kernels import cpu, cpu_ngrams
from nanovllm_cli.kernels.scan import of_sequences
from nanovllm_cli.kernels.states import States

TABLE_DTYPES = (torch.bfloat16, torch.float32)
"""That rows are read of."""


class NGramPast(NamedTuple):
    """What N states have of this: inputs [N, 2, L, S * n] of the convolution, and ids [N, 2, G - 1] int32 of the last tokens."""

    inputs: torch.Tensor
    ids: torch.Tensor


class NGramTable:
    """Rows [some, width] in pieces, of one type, which are kept as they are: views of mapped files."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self._pieces = list(pieces)
        self.width, self.dtype = pieces[0].shape[1], pieces[0].dtype
        assert self.dtype in TABLE_DTYPES
        assert all((each.dtype, each.shape[1], each.is_contiguous()) == (self.dtype, self.width, True) for each in pieces)
        self.addresses = torch.tensor([each.data_ptr() for each in pieces])
        self.firsts = torch.tensor([0, *accumulate(len(each) for each in pieces)])


class NGramHashes(NamedTuple):
    """multipliers [G], sizes and offsets [(G - 1) * H] int64, and the token behind which n-grams begin anew: see
    `ngram_rules.ngram_rows`."""

    multipliers: torch.Tensor
    sizes: torch.Tensor
    offsets: torch.Tensor
    end: int


class NGramWeights(NamedTuple):
    """Of what joins streams by n-grams, beside projections: gains [3, S * n] of the norms of keys, streams, and what goes into
    the convolution; its taps [K, S * n], `apart` tokens from each other. See `ngram_rules`."""

    gains: torch.Tensor
    eps: float
    offset: float
    taps: torch.Tensor
    apart: int


Steps = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""query_starts [B + 1], kv_lens, known_lens [B] int32: see `Batch`; state_of [B] int32: which of the states is a sequence's."""


def gather(
    ids: torch.Tensor, table: NGramTable, hashes: NGramHashes, dtype: torch.dtype, past: NGramPast, states: States, step: Steps
) -> torch.Tensor:
    """ids [T] int64 -> [T, (G - 1) * H * width] of dtype: rows of each token's n-grams, see `ngram_rules.ngram_rows`."""
    (tokens,), longest, every = ids.shape, len(hashes.multipliers), len(hashes.sizes)
    i32, i64, num_states, num_values = torch.int32, torch.int64, *_sizes(states)
    out = cpu.new_tensor((tokens, every * table.width), dtype)
    ints = (
        cpu.address_of(ids, i64, tokens), tokens, longest, every // (longest - 1), hashes.end,
        cpu.address_of(hashes.multipliers, i64, longest), cpu.address_of(hashes.sizes, i64, every),
        cpu.address_of(hashes.offsets, i64, every), table.addresses.data_ptr(), table.firsts.data_ptr(), len(table.addresses),
        table.width * table.dtype.itemsize, table.width, cpu.address_of(past.ids, i32, num_states, 2, longest - 1),
        *_stamps(states), num_states, num_values, *of_sequences(*step), out.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_ngrams.gather_ngrams, 8 * out.numel(), cpu.tags_of(dtype, table.dtype), ints)
    return out


def join(
    keys: torch.Tensor, value: torch.Tensor, streams: torch.Tensor, gains: torch.Tensor, eps: float, offset: float,
    taps: torch.Tensor, apart: int, past: NGramPast, states: States, step: Steps,
) -> None:  # fmt: skip
    """streams [S, T, n] get what keys [T, S * n] and value [T, n] make of a token's n-grams: see `ngram_rules.gated` and
    `ngram_rules.convolved`. gains [3, S * n]: of norms of keys, streams, and what goes into the convolution. taps [K, S * n]."""
    (count, tokens, width), dtype, (num_taps, channels) = streams.shape, streams.dtype, taps.shape
    num_states, num_values = _sizes(states)
    gated, normed = (cpu.new_tensor((tokens, channels), dtype) for _ in range(2))
    at = cpu.address_of(streams, dtype, count, tokens, width)
    ints = (
        cpu.address_of(keys, dtype, tokens, channels), at, cpu.address_of(value, dtype, tokens, width), count, tokens, width,
        cpu.address_of(gains, dtype, 3, channels), gated.data_ptr(), normed.data_ptr(),
    )  # fmt: skip
    cpu.launch(cpu_ngrams.gate_ngrams, 16 * gated.numel(), cpu.tags_of(dtype), ints, (eps, offset))
    rest = (
        at, gated.data_ptr(), normed.data_ptr(), num_taps, apart, cpu.address_of(taps, dtype, num_taps, channels), count, tokens,
        width, cpu.address_of(past.inputs, dtype, num_states, 2, (num_taps - 1) * apart, channels), *_stamps(states), num_states,
        num_values, *of_sequences(*step),
    )  # fmt: skip
    cpu.launch(cpu_ngrams.convolve_ngrams, (num_taps + 8) * gated.numel(), cpu.tags_of(dtype), rest)


def _sizes(states: States) -> tuple[int, int]:
    num_states, _, num_values = states.stamps.shape
    return num_states, num_values


def _stamps(states: States) -> tuple[int, int]:
    shape = states.stamps.shape
    return cpu.address_of(states.stamps, torch.int32, *shape), cpu.address_of(states.reaches, torch.int32, *shape)
