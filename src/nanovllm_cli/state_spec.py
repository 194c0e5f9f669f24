"""What carries numbers from token to token in a layer by a state of its sequence, or by the tokens just before, as plain values.

Frozen values without tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A gated short convolution in place of attention (LFM2): in(x) is b, c and h, of `channels` each; then out(c * conv(b * h)),
    where conv sums a channel's value and those of the `width` - 1 tokens before, each times a weight. bias: of in, conv and out.
    """

    channels: int
    width: int
    bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width."""
        biases = (4 * self.channels + hidden_size) * self.bias
        return 4 * hidden_size * self.channels + self.channels * self.width + biases


@dataclass(frozen=True, slots=True)
class NGramSpec:
    """Embeddings of n-grams in front of a layer with the delta rule (Qwen4-Exp): of each token, and each n-gram of 2 to
    `longest` tokens that ends with it, a few rows of a table are one behind the other, `width` numbers together; which rows they
    are is told by ids times multipliers, modulo sizes, one for each row, behind the sizes before it; see
    `ngram_rules.ngram_rows`. `end`: the token behind which they begin anew. shards: rows of the table's parts, as a checkpoint
    has it. streams: residual streams that keys and a value of all that are made for, see `ngram_rules.gated`; hidden: numbers of
    each. taps: of a convolution, `longest` tokens apart.
    """

    longest: int
    width: int
    end: int
    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    shards: tuple[int, ...]
    streams: int
    hidden: int
    taps: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first row of each."""
        return tuple(accumulate(self.sizes[:-1], initial=0))

    @property
    def row_width(self) -> int:
        """Numbers of a row of the table."""
        return self.width // len(self.sizes)

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.streams * self.hidden

    @property
    def num_before(self) -> int:
        """Tokens whose inputs of the convolution a token needs, beside its own."""
        return (self.taps - 1) * self.longest

    @property
    def num_stored(self) -> int:
        """Numbers of the table, which stays in its files."""
        return sum(self.shards) * self.row_width

    @property
    def num_multiplied(self) -> int:
        """Numbers of all else; norms left out."""
        return self.width * (self.channels + self.hidden) + self.taps * self.channels


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The gated delta rule in place of attention (Qwen3-Next): see `kernels.state_rules.gated_delta`. Value heads of value_dim
    have a state of key_dim rows each; num_keys divides num_values. tiled: which of them share a key head. log_decay: the
    checkpoint has the logarithm of the decay, without its sign; with a floor, decays lack that too. mamba: the rule of Mamba-2
    instead, see `kernels.state_rules.state_space`. conv_bias: of its convolution. normed: behind mamba's rule is a norm of all
    values, those of each key head by themselves. apart: projections and taps of q, k and v are tensors of their own. most: the
    largest beta. eps: of its norm, None: as of the model's others. channel_rank: a decay of each channel of a key (Kimi Linear,
    see `state_rules.channel_delta`), which is made by way of so many numbers, and so are gates of its outputs; 0: one of each
    head. least_step: what time steps of mamba's are at least (Zamba 2). at_once: both are made of the hidden state at once
    instead (Ling 3.0). floor: see `kernels.states.ByChannel`. by_sigmoid: what it finds is times sigmoids of z, not times its
    silu. ngrams: what joins the residual streams in front of it, and keeps something beside its states.
    """

    num_keys: int
    key_dim: int
    num_values: int
    value_dim: int
    width: int
    tiled: bool = False
    log_decay: bool = True
    mamba: bool = False
    conv_bias: bool = False
    normed: bool = True
    apart: bool = False
    most: float = 1.0
    eps: float | None = None
    channel_rank: int = 0
    least_step: float = 0.0
    at_once: bool = False
    floor: float = 0.0
    by_sigmoid: bool = False
    ngrams: NGramSpec | None = None

    @property
    def keys(self) -> int:
        """Numbers of a token's keys, of all heads."""
        return self.num_keys * self.key_dim

    @property
    def num_gates(self) -> int:
        """Numbers of a token that say how much of its states is kept and changed."""
        return self.num_values * (1 if self.mamba else 1 + self.key_dim if self.channel_rank else 2)

    @property
    def values(self) -> int:
        """Numbers of a token that its heads find."""
        return self.num_values * self.value_dim

    @property
    def num_guessed(self) -> int:
        """Numbers of a token that are kept of it, beside gates, where it is a guess."""
        return self.channels

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        if rank := self.channel_rank:
            decays = self.num_values * self.key_dim
            beside = decays + self.values if self.at_once else 2 * rank
            matrices = hidden_size * (self.channels + self.values + self.num_values + beside)
            matrices += 0 if self.at_once else rank * (decays + self.values)
            return matrices + self.channels * self.width + self.num_values + decays
        gates = 1 if self.mamba else 2
        ngrams = 0 if self.ngrams is None else self.ngrams.num_stored + self.ngrams.num_multiplied
        matrices = ngrams + hidden_size * (self.channels + 2 * self.values + gates * self.num_values)
        tables = self.num_values * (3 if self.mamba else 2) + self.channels * self.conv_bias
        return matrices + self.channels * self.width + tables


MOST_CHANNELS = 64
"""That the kernels of a selective scan take as one head."""


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """Mamba's first state space in place of attention (Gu and Dao 2023): in(x) is x and z, of `channels` each; x goes through a
    causal convolution over `width` tokens. `rank` numbers that time steps are made of, and B and C of key_dim each, are made of
    what it gives; each channel has a state of key_dim numbers then, see `kernels.state_rules.selective_scan`. conv_bias: of its
    convolution. norms: what the three are divided by their root mean squares with: gains of the checkpoint (Jamba), nothing else
    (Falcon Mamba), or they are not. eps: of these, None: as of the model's others. log_decay: the checkpoint has the logarithm of
    the decay, without its sign. heads (PLaMo 2): so many have a time step, a decay and a skip each, which their channels share;
    the checkpoint has z and x of a head side by side, and B and C before what steps are made of. 0: each channel has its own."""

    channels: int
    key_dim: int
    rank: int
    width: int
    conv_bias: bool = True
    norms: Literal["none", "plain", "gains"] = "none"
    eps: float | None = None
    log_decay: bool = True
    heads: int = 0

    @property
    def values(self) -> int:
        """Numbers of a token that its channels find."""
        return self.channels

    @property
    def value_dim(self) -> int:
        """Channels that share a place, and a task: see `kernels.states`. Heads of such are an even number if they can be, as what
        a GPU copies has to be 16 bytes at least."""
        sizes = range(1, MOST_CHANNELS + 1)
        even = [size for size in sizes if self.channels % (2 * size) == 0]
        return max(even or [size for size in sizes if self.channels % size == 0])

    @property
    def num_values(self) -> int:
        return self.channels // self.value_dim

    @property
    def num_parts(self) -> int:
        """Numbers of a token that time steps are made of, and B and C."""
        return self.rank + 2 * self.key_dim

    @property
    def num_gates(self) -> int:
        """Numbers of a token that say how much of its states is kept and changed."""
        return self.channels + self.key_dim

    @property
    def num_guessed(self) -> int:
        """See `DeltaSpec`: what went into the convolution, and what came out."""
        return 2 * self.channels

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        own, decays = (self.heads, 1) if self.heads else (self.channels, self.key_dim)
        matrices = self.channels * (3 * hidden_size + self.num_parts) + own * self.rank
        return matrices + self.channels * (self.width + self.conv_bias) + own * (decays + 2)


@dataclass(frozen=True, slots=True)
class WkvSpec:
    """RWKV-7's time mixing in place of attention (Peng et al. 2025, "Goose"): `heads` of head_dim numbers with a state of as many
    rows each, see `kernels.wkv_rules.wkv7`. What its matrices read are mixtures of a token's numbers and those of the token
    before, as is what the MLP behind it reads (its channel mixing). Decays, rates, values and gates are made by way of so many
    numbers each. is_first: its values are those that later layers' have a part of, so that it has no value_rank. eps: of the norm
    of what heads find."""

    heads: int
    head_dim: int
    decay_rank: int
    rate_rank: int
    value_rank: int
    gate_rank: int
    is_first: bool
    eps: float

    @property
    def values(self) -> int:
        """Numbers of a token that its heads find."""
        return self.heads * self.head_dim

    @property
    def num_values(self) -> int:
        return self.heads

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def key_dim(self) -> int:
        """Rows of a head's state."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Tokens that mixtures are of."""
        return 2

    @property
    def channels(self) -> int:
        """Numbers of the token before: those that its time mixing read, and those that its MLP did."""
        return 2 * self.values

    @property
    def num_guessed(self) -> int:
        """See `DeltaSpec`."""
        return self.channels

    @property
    def num_gates(self) -> int:
        """Numbers of a token that go into the rule: what is kept, keys, values, what is taken off, and what is put there."""
        return 5 * self.values

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        ranks = self.decay_rank + self.rate_rank + self.gate_rank + (0 if self.is_first else self.value_rank)
        tables = 6 * hidden_size + (5 if self.is_first else 6) * self.values
        return 4 * hidden_size * self.values + ranks * (hidden_size + self.values) + tables


StateSpec = DeltaSpec | ScanSpec | WkvSpec
"""What keeps a state of a sequence."""
