"""Several residual streams instead of one, as plain values: what `model_spec.py` has of them.

Frozen values without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several residual streams (AltUp, Baykal et al. 2023; see `layers/altup.py`): a layer's attention and MLP read and write the
    first of `count`, and what the others become of it is told by small matrices. rank: of a pair of matrices beside attention, by
    which its input joins the stream as well (LAuReL, Menghani et al. 2024)."""

    count: int
    rank: int

    def num_weights(self, hidden_size: int) -> int:
        """Of a layer."""
        return hidden_size * (self.count + 2 * self.rank) + self.count**2 * (self.count + 1)

    def num_outer(self, hidden_size: int) -> int:
        """Of what makes all of one before the first layer, and one of all behind the last."""
        return 2 * (self.count - 1) * hidden_size**2


@dataclass(frozen=True, slots=True)
class ConnectionsSpec:
    """Hyper-connections (Zhu et al. 2024; see `layers/connections.py`): attention and MLP each read a weighted sum of all `count`
    streams, and what they make joins each stream times a weight of its own. A token's weights are made of its own streams. least:
    what is added to their sigmoids; most: what the sigmoids are multiplied with by which a stream is written. rounds: streams are
    mixed before they are written, by a matrix of the token whose rows and columns are made to have sums of 1 so many times
    (manifold-constrained, Xie et al. 2026; see `mixing_rules.mixing`), and least is added to what reads alone; 0: they are
    not."""

    count: int
    least: float
    most: float = 2.0
    rounds: int = 0

    @property
    def num_shares(self) -> int:
        """Weights of a token and half of a layer."""
        return 2 * self.count + (self.count**2 if self.rounds else 0)

    @property
    def num_scales(self) -> int:
        """Of these weights' kinds."""
        return 3 if self.rounds else 2

    def num_weights(self, hidden_size: int) -> int:
        """Of a layer, both halves."""
        return 2 * (self.num_shares * (self.count * hidden_size + 1) + self.num_scales)

    def num_outer(self, hidden_size: int) -> int:
        """Of what makes one of all behind the last layer."""
        return self.count * (self.count * hidden_size + 1) + 1


@dataclass(frozen=True, slots=True)
class GatedStreamsSpec:
    """Gated residual streams (Qwen4-Exp; see `layers/gated_streams.py`): attention and MLP each read the mean of all `count`
    streams, normed by themselves and each number times a sigmoid that is made of all of them by way of `rank` numbers. What they
    make joins each stream times a weight of its own, which a token's streams make, too."""

    count: int
    rank: int

    def num_weights(self, hidden_size: int) -> int:
        """Of a layer, both halves; norms left out."""
        return 2 * (self.num_outer(hidden_size) + self.count**2 * hidden_size)

    def num_outer(self, hidden_size: int) -> int:
        """Of what makes one of all behind the last layer."""
        return 2 * self.rank * self.count * hidden_size


AnyStreams = StreamsSpec | ConnectionsSpec | GatedStreamsSpec
