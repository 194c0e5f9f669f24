"""What the sampling kernels know of sequences and batches, on the device: tables by sequence, buffers by row.

A sequence has a slot in the table from its first draw to its last. The host writes a slot once; the kernels then advance its
position and its token counts by themselves, so that a replayed graph goes on without the host. What a step says anew is `rows`:
the slot of each row of logits. Addresses never change.

Not here: top_n_sigma, typical_p, XTC, DRY, bad_words, n-grams, penalties over a window, more than 20 logprobs, and random draws
under a constraint that no filter narrows, which the CPU's sampler does (`on_device` tells).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nanovllm_cli.kernels.cpu_sampling import MAX_VOCABULARY, draw_settings, is_filtered
from nanovllm_cli.kernels.kernel import Launcher, widest
from nanovllm_cli.samplers import chain_of
from nanovllm_cli.sampling_fields import MAX_LOGIT_BIASES
from nanovllm_cli.sampling_params import SamplingParams

MAX_STOP_IDS = 64
MAX_LOGPROBS = 20

FINE, NOT_FINITE, NOTHING_LEFT = 0, 1, 2
"""A row's status: it drew; its logits hold NaN or infinity; every token is banned. Without a draw its token is 0."""

# struct Params of sampling.cuh.
_PARAMS = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        ("min_p_margin", np.float64),
        ("temperature", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("top_k", np.int32),
        ("uses_mask", np.int32),
        ("uses_counts", np.int32),
        ("num_biases", np.int32),
        ("num_stops", np.int32),
        ("min_tokens", np.int32),
        ("num_logprobs", np.int32),
        ("unused", np.int32),
    ]
)
_SCRATCH_BYTES = 36384
_THREADS, _MAX_SLICES, _MAX_COLUMNS = 512, 128, 2048
_SLICE = 2048  # one load of 16 bytes for each of a block's threads
_SLICE_STEP = 128  # slices begin at whole words of a mask and whole cache lines


def on_device(params: SamplingParams, stop_ids: Sequence[int]) -> bool:
    """Whether the kernels know everything that this request asks for."""
    has_window = params.has_penalties and params.penalty_last_n >= 0
    # The CPU's sampler makes these before it asks their constraint, with a second random number where that says no.
    asks_later = params.constraint is not None and not params.is_greedy and not is_filtered(draw_settings(params))
    filters = params.top_n_sigma > 0.0 or params.typical_p < 1.0 or params.has_xtc
    bans = params.bad_words or params.no_repeat_ngram_size > 0
    others = filters or params.has_dry or bans or has_window or asks_later or chain_of(params) is not None
    too_many = (params.logprobs or 0) > MAX_LOGPROBS or (params.min_tokens > 0 and len(stop_ids) > MAX_STOP_IDS)
    return not others and not too_many and params.transcript is None


class SamplingTable:
    """One slot for each sequence, S in all. V tokens of the vocabulary, W = ceil(V / 32) words of a mask.

    params [S, 72] uint8 (struct Params), positions [S] int64 (index of the token that is drawn next), masks [S, W] int32 (token
    32 * i + j in bit j of word i), stop_ids [S, 64] int32, bias_ids [S, 1024] int32, biases [S, 1024] float32, counts [S, V]
    int16 (unsigned; how often the output has each token, up to 65535), prompt_bits [S, W] int32.
    """

    def __init__(self, device: torch.device, slots: int, vocab_size: int) -> None:
        assert vocab_size <= MAX_VOCABULARY, vocab_size
        words = -(-vocab_size // 32)

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.vocab_size = vocab_size
        self.params = zeros(slots, _PARAMS.itemsize, dtype=torch.uint8)
        self.positions = zeros(slots, dtype=torch.int64)
        self.masks = zeros(slots, words, dtype=torch.int32)
        self.stop_ids = zeros(slots, MAX_STOP_IDS, dtype=torch.int32)
        self.bias_ids = zeros(slots, MAX_LOGIT_BIASES, dtype=torch.int32)
        self.biases = zeros(slots, MAX_LOGIT_BIASES, dtype=torch.float32)
        self.counts = zeros(slots, vocab_size, dtype=torch.int16)
        self.prompt_bits = zeros(slots, words, dtype=torch.int32)
        self._allowed: dict[int, NDArray[np.uint32]] = {}

    def write(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        num_slots: int = 1,
    ) -> None:
        """Give the slot to a sequence. Where it is guided, `put_masks` comes before every draw. Its ids lie in the vocabulary,
        but for stop ids. Only what the request uses is copied. num_slots: that slot and those behind it are to draw at once, one
        for each of the next tokens, of which none has a mask or a penalty by those before."""
        assert on_device(params, stop_ids)
        assert num_slots == 1 or (not params.has_penalties and not params.is_guided)
        here = slice(slot, slot + num_slots)
        stops = [token_id for token_id in stop_ids if token_id < self.vocab_size] if params.min_tokens else []
        row = np.zeros(1, _PARAMS)
        row["seed"] = seed & 2**64 - 1
        row["top_p"] = params.top_p
        row["min_p_margin"] = params.temperature * math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        row["temperature"] = 0.0 if params.is_greedy else params.temperature
        row["repetition"] = params.repetition_penalty
        row["presence"] = params.presence_penalty
        row["frequency"] = params.frequency_penalty
        row["top_k"] = params.top_k if params.top_k < self.vocab_size else 0
        row["uses_mask"] = params.is_guided or params.allowed_token_ids is not None
        row["uses_counts"] = params.has_penalties
        row["num_biases"] = len(params.logit_bias or ())
        row["num_stops"] = len(stops)
        row["min_tokens"] = params.min_tokens
        row["num_logprobs"] = -1 if params.logprobs is None else params.logprobs
        _fill(self.params[here], row.view(np.uint8))
        _fill(self.positions[None, here], len(output_ids) + np.arange(num_slots))
        _fill(self.stop_ids[here], np.array(stops, np.int32))
        if params.logit_bias:
            _fill(self.bias_ids[here], np.array(list(params.logit_bias), np.int32))
            _fill(self.biases[here], np.array(list(params.logit_bias.values()), np.float32))
        if params.has_penalties:
            counts = np.bincount(np.array(output_ids, np.int64), minlength=self.vocab_size)
            _fill(self.counts[here], np.minimum(counts, 65535).astype(np.uint16).view(np.int16))
            _fill(self.prompt_bits[here], _packed(prompt_ids, self.vocab_size))
        self._allowed.pop(slot, None)
        if params.allowed_token_ids is not None:
            allowed = _packed(params.allowed_token_ids, self.vocab_size)
            _fill(self.masks[here], allowed)
            self._allowed[slot] = allowed.view(np.uint32)

    def allowed(self, slot: int) -> NDArray[np.uint32] | None:
        """The sequence's allowed_token_ids, as words [W] of a mask; None for all. A constraint's masks are to keep to them."""
        return self._allowed.get(slot)

    def put_masks(self, slots: torch.Tensor, masks: torch.Tensor) -> None:
        """What constraints allow in the next draw: int32 [B, W] for slots [B] int32, both on the device."""
        self.masks.index_copy_(0, slots.long(), masks)


class SamplingBuffers:
    """What one batch of up to B rows reads and writes.

    Inputs: rows [B] int32, the slot of each row of logits, or -1 for padding, which draws token 0. A slot may stand in one row
    only. Outputs: token_ids [B] int64, status [B] int32; and where a row wants logprobs, values [B] float32 and ranks [B] int32
    (from 1) of the drawn token, top_ids [B, 20] int32 and top_values [B, 20] float32 by rank, ids of -1 past the last.
    """

    def __init__(self, device: torch.device, max_rows: int, vocab_size: int) -> None:
        self.rows = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        self.adjusted = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=device)
        self.scratch = torch.zeros(max_rows, _SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.status = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.values = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.ranks = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.top_ids = torch.zeros(max_rows, MAX_LOGPROBS, dtype=torch.int32, device=device)
        self.top_values = torch.zeros(max_rows, MAX_LOGPROBS, dtype=torch.float32, device=device)

    def part(self, first: int, rows: torch.Tensor) -> SamplingBuffers:
        """Those from row `first` on, for as many rows of logits as there are `rows`, which take the place of this part's."""
        part = copy(self)
        for name, buffer in vars(self).items():
            setattr(part, name, buffer[first : first + len(rows)])
        part.rows = rows
        return part


class Slices(NamedTuple):
    """How many blocks share a row, how many logits each has, and how many threads' logits make a column."""

    blocks: int
    length: int
    column_lanes: int


def divide(vocab_size: int, batch: int, num_multiprocessors: int) -> Slices:
    """Enough blocks for a full GPU, but no more than have work for all their threads. Results do not depend on it."""
    count = min(_MAX_SLICES, -(-vocab_size // _SLICE), -(-4 * num_multiprocessors // batch))
    length = -(-vocab_size // (count * _SLICE_STEP)) * _SLICE_STEP
    count = -(-vocab_size // length)
    lanes = 1
    while count * _THREADS // lanes > _MAX_COLUMNS:
        lanes *= 2
    return Slices(count, length, lanes)


def check_call(launcher: Launcher, logits: torch.Tensor, table: SamplingTable, buffers: SamplingBuffers) -> None:
    """logits [B, V] float32, contiguous; the table's vocabulary, and room in the buffers."""
    batch, vocab_size = logits.shape
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.is_contiguous()
    assert logits.data_ptr() % (4 * widest(vocab_size, torch.float32)) == 0
    assert {logits.device, table.params.device, buffers.rows.device} == {launcher.device}, launcher.device
    assert table.vocab_size == buffers.adjusted.shape[1] == vocab_size, (table.vocab_size, vocab_size)
    assert batch <= len(buffers.rows), (batch, len(buffers.rows))


def constants(vocab_size: int) -> tuple[tuple[str, str | int], ...]:
    vector = widest(vocab_size, torch.float32)
    return (
        ("VECTOR", vector if vector == 4 else 1),
        ("PARAMS_BYTES", _PARAMS.itemsize),
        ("SCRATCH_BYTES", _SCRATCH_BYTES),
    )


def _fill(target: torch.Tensor, values: NDArray[np.generic]) -> None:
    """The first of each row of target [B, N]."""
    target[:, : len(values)].copy_(torch.from_numpy(values))


def _packed(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """Bits of a mask, as int32 words."""
    chosen = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    chosen[np.array(token_ids, np.int64)] = True
    return np.packbits(chosen, bitorder="little").view(np.int32)
