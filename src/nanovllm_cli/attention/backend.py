"""AttentionBackend: what a layer asks of the code that knows the cache's layout. One file a backend."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from nanovllm_cli.attention.encoded import EncodedRows
from nanovllm_cli.attention.kv_cache import CacheLayout, LayerCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.kernels.block_index import BlockIndexInputs
from nanovllm_cli.kernels.digests import SharedInputs, SharedWeights
from nanovllm_cli.kernels.ngrams import NGramHashes, NGramTable, NGramWeights
from nanovllm_cli.kernels.ops import HeadMatrices
from nanovllm_cli.kernels.states import ByChannel
from nanovllm_cli.kernels.wkv import WkvInputs
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, ScanSpec, WkvSpec

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos, sin [T, rotary / 2]."""


class HeadNorms(NamedTuple):
    """Weights [D] of the norms over each head of q, k and v, where there are any; offset: see `NormSpec`."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0


class DeltaWeights(NamedTuple):
    """Of the gated delta rule, beside its projections: taps [width, channels], decay and decay_bias [V], norm [D], with a decay
    of each channel decay_bias [V * E]; see `state_rules.gated_delta`. With skip [V] it is Mamba-2's rule, which has no norm
    (an empty tensor); taps_bias [channels] or None: see `state_rules.state_space`."""

    taps: torch.Tensor
    decay: torch.Tensor
    decay_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    skip: torch.Tensor | None = None
    taps_bias: torch.Tensor | None = None


class ScanWeights(NamedTuple):
    """Of Mamba's first rule, beside its projections: taps [width, channels], taps_bias [channels] or None; decay [V, N, D],
    rate_bias and skip [channels] fp32: see `state_rules.selective_scan`, and `kernels.states` for V heads of D channels."""

    taps: torch.Tensor
    taps_bias: torch.Tensor | None
    decay: torch.Tensor
    rate_bias: torch.Tensor
    skip: torch.Tensor


class LatentWeights(NamedTuple):
    """Of latent attention, beside its projections: norm [rank], eps and offset of what is kept; keys, rank x key_dim of a head,
    turn a query into what its key is made of; values, value_dim x rank, make what a head finds of what was kept."""

    norm: torch.Tensor
    eps: float
    offset: float
    keys: HeadMatrices
    values: HeadMatrices


class IndexInputs(NamedTuple):
    """What a layer's own indexer makes of a step's tokens: q [T, heads * dim] and key [T, dim], which are yet to be rotated, and
    weights [T, heads] fp32. See `IndexerSpec`."""

    q: torch.Tensor
    key: torch.Tensor
    weights: torch.Tensor


class WholeRows(NamedTuple):
    """Rows of a step whose tokens see those behind them, too, [n] int64, and what the backend made of a batch of these alone.
    in_windows: only in layers with a window."""

    rows: torch.Tensor
    step: Any
    in_windows: bool = False

    @property
    def of_near(self) -> WholeRows:
        """As layers with a window are told of them, where that is another thing."""
        return self._replace(step=self.step.near)

    def counts_in(self, spec: AttentionSpec) -> bool:
        """Whether they do in this layer."""
        return spec.window is not None or not self.in_windows


class Looking(NamedTuple):
    """Tokens of a step that look at something. rows [n] int64 of those; None: all of them."""

    rows: torch.Tensor | None


class StepInputs(NamedTuple):
    """A batch, cos and sin of its positions for each rope, and what the attention backend made of it. distances: see
    `layers/distances.py`. asked: the same of the rows whose logits are wanted, for layers that no other token needs.
    entered: what the first layer read [T, hidden], where others do, too. encoded: what a step is to keep of an encoder's rows, of
    whose tokens the batch has none; step is None where there are no others. looking: whoever looks at something, in layers that
    all others pass by; None where nobody does. asks: takes what each layer's attention to an encoder's rows asks with [T, H * D],
    one after another, where somebody wants to know."""

    batch: Batch
    angles: dict[RopeSpec | None, Angles]
    step: Any
    distances: torch.Tensor | None = None
    asked: StepInputs | None = None
    entered: torch.Tensor | None = None
    encoded: EncodedRows | None = None
    looking: Looking | None = None
    asks: list[torch.Tensor] | None = None

    def of_layer(self, is_near: bool) -> StepInputs:
        """is_near: see KVCache."""
        return self._replace(step=self.step.near) if is_near else self

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64, of its tokens in their sequences; of those of images, where they begin."""
        positions = self.batch.positions
        return positions if positions.dim() == 1 else positions[0]


class AttentionBackend(CacheLayout, Protocol):
    """Everything between a layer's projection of its input and that of its output. chooses: whether tokens choose what they see,
    where a layer's attention is sparse; else each sees all, as no sequence is longer than what one may see."""

    chooses: bool

    def prepare(self, host: Batch, batch: Batch, *, whole: WholeRows | None = None, is_whole: bool = False) -> Any:
        """What depends on the batch alone, once a step; handed to every layer's `attend`. The batch as it is on the host and
        on the device, which may be one. whole: those of its rows that see more; is_whole: this is what is made for them."""

    def attend(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        norm: HeadNorms,
        angles: Angles,
        sinks: torch.Tensor | None,
        cache: LayerCache,
        step: Any,
        distances: torch.Tensor | None = None,
        index: BlockIndexInputs | None = None,
    ) -> torch.Tensor:
        """qkv [T, (H + K) * D + K * V] -> [T, H * V], V being spec.found_dim: norm and rotate q and k, write k and v to the
        cache, attend over each token's sequence. With spec.reads qkv is [T, H * D]: the cache, another layer's, has this step's
        k and v already.
        distances: of its heads, see `layers/distances.py`. index: of a layer with spec.blocks."""

    def attend_latent(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kept: torch.Tensor,
        weights: LatentWeights,
        angles: Angles,
        cache: LayerCache,
        step: Any,
        index: IndexInputs | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H * (key_dim + rotary_dim)], kept [T, rank + rotary_dim] -> [T, H * value_dim], of spec.latent: norm and rotate
        what is kept and write it to the cache, attend over each token's sequence. See `reference.latent_attention`. index: of a
        layer that chooses, where this backend does; those that do not and have an indexer go by the last one that did, in this
        step."""

    def attend_shared(
        self,
        spec: AttentionSpec,
        inputs: SharedInputs,
        weights: SharedWeights,
        angles: Angles,
        of_digests: Angles | None,
        sinks: torch.Tensor,
        cache: LayerCache,
        step: Any,
    ) -> torch.Tensor:
        """-> [T, H * D], of spec.shared: keep each token's key, and what it has for digests, and attend over its window and
        digests of tokens up to its own. of_digests: angles of the first token of what each token's digest stands for."""

    def convolve(
        self,
        spec: ConvSpec,
        projected: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cache: LayerCache,
        step: Any,
    ) -> torch.Tensor:
        """projected [T, 3 * channels] -> [T, channels]: see `reference.gated_conv`, of each token's sequence. weight
        [width, channels]: the token's own row is the last."""

    def recur(
        self,
        spec: DeltaSpec,
        projected: torch.Tensor,
        gates: torch.Tensor,
        weights: DeltaWeights,
        cache: LayerCache,
        step: Any,
        by_channel: ByChannel | None = None,
    ) -> torch.Tensor:
        """projected [T, channels + V * D], gates [T, 2 * V] fp32 -> [T, V * D]: see `state_rules.gated_delta`, of each
        token's sequence. With spec.mamba gates are [T, V]: see `state_rules.state_space`; with by_channel, too, and projected
        is [T, channels]: see `state_rules.channel_delta`."""

    def mix_inputs(
        self, spec: ScanSpec, projected: torch.Tensor, weights: ScanWeights, cache: LayerCache, step: Any
    ) -> torch.Tensor:
        """projected [T, 2 * channels], the first half of which counts -> [T, channels]: see `state_rules.causal_conv`, of each
        token's sequence. `scan` has to follow."""

    def scan(
        self,
        spec: ScanSpec,
        projected: torch.Tensor,
        x: torch.Tensor,
        rates: torch.Tensor,
        both: torch.Tensor,
        weights: ScanWeights,
        cache: LayerCache,
        step: Any,
    ) -> torch.Tensor:
        """projected [T, 2 * channels], whose second half is z, x [T, channels] of `mix_inputs`, rates [T, channels] and both
        [T, 2 * N] fp32 -> [T, channels]: see `state_rules.selective_scan`, of each token's sequence."""

    def shift(
        self, spec: WkvSpec, x: torch.Tensor, shares: torch.Tensor, part: int, cache: LayerCache, step: Any
    ) -> torch.Tensor:
        """x [T, C], shares [P, C] fp32 -> [P, T, C]: see `wkv_rules.token_shift`, of each token's sequence. part: wkv.TIME, in
        front of `advance`, or wkv.CHANNEL, behind it."""

    def advance(
        self, spec: WkvSpec, inputs: WkvInputs, tables: torch.Tensor, cache: LayerCache, step: Any
    ) -> torch.Tensor:
        """-> [T, C]: see `wkv_rules.wkv7`, of each token's sequence."""

    def ngram_rows(
        self, ids: torch.Tensor, table: NGramTable, hashes: NGramHashes, dtype: torch.dtype, cache: LayerCache, step: Any
    ) -> torch.Tensor:
        """ids [T] int64 -> [T, width]: rows of each token's n-grams, see `ngram_rules.ngram_rows`. `recur` has to follow in the
        layer, as it says what the cache has."""

    def join_ngrams(
        self, keys: torch.Tensor, value: torch.Tensor, streams: torch.Tensor, weights: NGramWeights, cache: LayerCache, step: Any
    ) -> None:
        """streams [S, T, n] get what keys [T, S * n] and value [T, n] of a token's n-grams add, in place: see `ngram_rules`.
        Between `ngram_rows` and `recur`."""
