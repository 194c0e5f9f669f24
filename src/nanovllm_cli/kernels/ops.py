"""Ops: what layers call themselves. Matmuls go through a weight's storage, attention through its backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch

from nanovllm_cli.kernels.mixture import Expert, Mixture, Scoring

Squash = Literal["tanh", "sigmoid"]


class Normed(NamedTuple):
    """Rows [T, width] that a matmul is to RMS-normalise on its way in: rows / rms(rows) * (offset + weight), rounded."""

    rows: torch.Tensor
    weight: torch.Tensor
    eps: float
    offset: float


Hidden = torch.Tensor | Normed
"""What goes into a matmul. Only a device whose matmuls take `Normed` makes one of it."""
AnglesOf = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def take_rows(hidden: Hidden, index: slice | list[int]) -> Hidden:
    """Some of the rows. All of them in their order are `hidden` itself: an index would be copied to the device, which waits."""
    rows = hidden.rows if isinstance(hidden, Normed) else hidden
    if isinstance(index, list) and index == list(range(rows.shape[0])):
        return hidden
    if isinstance(hidden, Normed):
        return hidden._replace(rows=hidden.rows[index])
    return hidden[index]


class Addend(NamedTuple):
    """What has still to join the residual stream, which becomes (residual + rows) * factor; rows may have to be normalised."""

    rows: Hidden
    factor: float = 1.0

    def taken(self, index: torch.Tensor) -> Addend:
        """Some of the rows."""
        rows = self.rows._replace(rows=self.rows.rows[index]) if isinstance(self.rows, Normed) else self.rows[index]
        return Addend(rows, self.factor)


class HeadMatrices(Protocol):
    """A matrix [num_rows, width] for each head, in the compute type. Loaded once, a head's rows at a time."""

    @property
    def num_bytes(self) -> int: ...

    def load(self, head: int, rows: torch.Tensor) -> None:
        """rows [num_rows, width], of any float type."""

    def products(self, x: torch.Tensor, x_at: int, x_step: int) -> torch.Tensor:
        """[T, heads * num_rows]: of each head its matrix times columns x_at + head * x_step … of x [T, …]."""


class Ops(Protocol):
    """One device's ops. `device` is where their tensors are."""

    @property
    def device(self) -> torch.device: ...

    def add_rms_norm(
        self,
        x: Addend | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float,
        centered: bool = False,
        shift: torch.Tensor | None = None,
    ) -> Hidden:
        """x joins residual in place where there is one; then the norm of residual (see `reference.add_rms_norm`). centered: of
        what it is without its mean, and with a shift [n] plus that; x is then no `Normed`."""

    def join(self, x: Addend, residual: torch.Tensor) -> None:
        """The same without a norm behind it."""

    def angles(self, frequencies: torch.Tensor, attention_factor: float) -> AnglesOf:
        """What finds cos, sin [T, half] of positions [T] int64, as `rope_tables` has them by these frequencies alone."""

    def rope_tables(
        self,
        positions: torch.Tensor,
        frequencies: torch.Tensor,
        attention_factor: float,
        lengths: torch.Tensor | None,
        long_frequencies: torch.Tensor | None,
        original_len: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [T, half] fp32, times attention_factor, of positions [T] int64 and frequencies [half]. Where there are lengths
        [T] int64, tokens with one past original_len take long_frequencies."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """The norm of x, as a tensor; rows may take turns at the gains of several."""

    def norm_columns(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """x [T, n] itself, which may be columns of a wider tensor, normed in place."""

    def norm_sum(
        self, x: torch.Tensor | None, stream: torch.Tensor, weight: torch.Tensor, shift: torch.Tensor | None, eps: float
    ) -> None:
        """stream [T, n] itself becomes the layer norm of stream + x, see `reference.norm_sum`."""

    def scale(self, x: torch.Tensor, factor: float, cap: float = 0.0) -> torch.Tensor:
        """x itself, changed in place as `reference.scale` has it."""

    def widened(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """x [T, n] with so many columns of -inf behind it. On a CPU no part of what is recorded."""

    def best_gate(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """x [T, n] -> [T, n], of logits [T, E] fp32, as `reference.best_gate` has it."""

    def clip(self, x: torch.Tensor, least: float, most: float) -> torch.Tensor:
        """x [T, n] itself, which may be columns of a wider tensor, held between least and most in place; NaN stays."""

    def room(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """[num_rows, width] for ops of this step to fill."""

    def put_columns(self, x: torch.Tensor, wide: torch.Tensor, first: int) -> None:
        """x [T, n] to where it belongs in wide [T, more], from column `first` on."""

    def temper(self, x: torch.Tensor, positions: torch.Tensor, length: int, scale: float, offset: int) -> torch.Tensor:
        """x [T, n] itself, which may be columns of a wider tensor, changed in place as `reference.temper` has it."""

    def xielu(self, x: torch.Tensor, positive: float, negative: float, slope: float, edge: float) -> torch.Tensor:
        """x itself, changed in place as `reference.xielu` has it."""

    def sigmoid_gate(self, x: torch.Tensor, gate: torch.Tensor, *, softplus: bool = False) -> torch.Tensor:
        """x [T, n] itself, times the sigmoids of gate, or its softplus: [T, c], c dividing n, which may be columns of a wider
        tensor, or [T, 1] fp32."""

    def add(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """x itself, changed in place to (x + y) * factor, rounded once."""

    def add_row(self, x: torch.Tensor, row: torch.Tensor) -> None:
        """row [n] fp32 is added to each row of x [T, n], in place, and rounded once."""

    def gated(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        """act(gate) * up of [T, n] each, either of which may be columns of a wider tensor; see `reference.gated_activation`."""

    def altup_predict(
        self, streams: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor, factor: float
    ) -> torch.Tensor:
        """streams [S, T, n] become `reference.altup_predict` of them; the first [T, n] is given as a tensor of its own."""

    def altup_correct(
        self, streams: torch.Tensor, found: torch.Tensor, logits: torch.Tensor, coefficients: torch.Tensor, gains: torch.Tensor,
        factor: float,
    ) -> torch.Tensor:
        """streams [S, T, n] become `reference.altup_correct` of them; the first [T, n] times gains [n] is given."""

    def altup_enter(self, x: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """[1 + N, T, n] of x [T, n] and each part of others [T, N * n], made as large by `reference.altup_match`."""

    def altup_match(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """rows [T, n] themselves, changed in place as `reference.altup_match` has it."""

    def spread(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """x [T, n] so many times, [count, T, n]."""

    def read_streams(
        self, streams: torch.Tensor, matrix: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float, least: float,
        most: float, rounds: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """streams [S, T, n] -> [T, n] and fp32 [T, S or 0], with rounds [T, S + S * S]: see `reference.read_streams`."""

    def write_streams(self, streams: torch.Tensor, found: torch.Tensor, weights: torch.Tensor) -> None:
        """streams [S, T, n] += found [T, n] times weights [T, S] fp32, in place; with weights [T, S + S * S] see
        `reference.write_streams`."""

    def norm_streams(self, streams: torch.Tensor, gains: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """streams [S, T, n] -> [T, S * n], gains [S * n]: see `reference.norm_streams`."""

    def mix_streams(self, normed: torch.Tensor, gates: torch.Tensor, count: int, weights: torch.Tensor | None) -> torch.Tensor:
        """normed, gates [T, S * n] -> [T, n]; weights [T, S] fp32 are changed in place: see `reference.mix_streams`."""

    def sparse_gate(self, x: torch.Tensor, cutoff: float) -> torch.Tensor:
        """x [T, n] itself, which may be columns of a wider tensor, changed in place as `reference.sparse_gate` has it."""

    def scan_parts(
        self, x: torch.Tensor, rank: int, gains: torch.Tensor | None, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, rank + 2 * N] fp32 -> [T, rank] of dtype, and [T, 2 * N] fp32: see `state_rules.scan_parts`."""

    def squash(self, x: torch.Tensor, kind: Squash, dtype: torch.dtype) -> torch.Tensor:
        """x [T, n] fp32 -> [T, n] of dtype: tanh or sigmoid of each."""

    def rescale(self, x: torch.Tensor, shift: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        """x [T, n] itself, which may be columns, changed in place to `compressed_rules.rescaled`; shift and gains [n] fp32."""

    def with_open_gates(self, x: torch.Tensor, channels: int) -> torch.Tensor:
        """See `compressed_rules.with_open_gates`."""

    def of_the_best(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """See `compressed_rules.of_the_best`."""

    def met_heads(
        self, projected: torch.Tensor, convolved: torch.Tensor, bias: torch.Tensor, before: torch.Tensor, gains: torch.Tensor,
        head_dim: int, num_keys: int, least: float,
    ) -> torch.Tensor:
        """See `compressed_rules.met_heads`."""

    def head_matrices(self, num_heads: int, num_rows: int, width: int, dtype: torch.dtype) -> HeadMatrices:
        """All zeros; for this device's AttentionBackend."""

    def mixture(
        self, experts: Sequence[Expert], num_chosen: int, norm_topk: bool, scoring: Scoring | None = None
    ) -> Mixture:
        """Of each token the sum of what those say that it takes; see `reference.route`."""


def plain(hidden: Hidden, ops: Ops) -> torch.Tensor:
    """The rows themselves, normalised where a matmul was to do it."""
    if isinstance(hidden, Normed):
        return ops.rms_norm(hidden.rows, hidden.weight, hidden.eps, hidden.offset)
    return hidden


def side_by_side(left: torch.Tensor, right: torch.Tensor, ops: Ops) -> torch.Tensor:
    """[T, m + n] of [T, m] and [T, n]."""
    joined = ops.room(left.shape[0], left.shape[1] + right.shape[1], left.dtype)
    ops.put_columns(left, joined, 0)
    ops.put_columns(right, joined, left.shape[1])
    return joined


def taken_out(x: torch.Tensor, first: int, ops: Ops) -> torch.Tensor:
    """Columns of x [T, n] from this one on, as a tensor of their own."""
    taken = ops.room(x.shape[0], x.shape[1] - first, x.dtype)
    ops.put_columns(x[:, first:], taken, 0)
    return taken
