"""Attention on the CPU, over the layout of kernels/cpu_attention.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.attention import by_digests
from nanovllm_cli.attention.backend import (
    Angles,
    DeltaWeights,
    HeadNorms,
    IndexInputs,
    LatentWeights,
    ScanWeights,
    WholeRows,
)
from nanovllm_cli.attention.by_blocks import ByBlocks, Where
from nanovllm_cli.attention.encoded import EncodedRows, among, behind, behind_each, keys_in, looked_at
from nanovllm_cli.attention.kv_cache import STATE_PARTS, BlockPart, LayerCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.cross_spec import CrossSpec
from nanovllm_cli.errors import DoesNotFitError
from nanovllm_cli.index_spec import IndexerSpec
from nanovllm_cli.kernels import conv, cpu, delta, digests, ngrams, scan, wkv
from nanovllm_cli.kernels.block_index import BlockIndexInputs
from nanovllm_cli.kernels.cpu_attention import MAX_TILE_ROWS
from nanovllm_cli.kernels.digests import SharedInputs, SharedWeights
from nanovllm_cli.kernels.indexer import ROWS, Chosen, Gathered, choose
from nanovllm_cli.kernels.latent import CpuHeadMatrices, latent_rows
from nanovllm_cli.kernels.ngrams import NGramHashes, NGramPast, NGramTable, NGramWeights
from nanovllm_cli.kernels.states import ByChannel, States
from nanovllm_cli.kernels.wkv import WkvInputs
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, ScanSpec, WkvSpec


class Elsewhere(NamedTuple):
    """Of the same tokens as of sequences that are other parts of theirs: see `Batch.in_chunks` and `encoded.among`."""

    block_tables: torch.Tensor
    tiles: dict[int, torch.Tensor]


class CpuStep(NamedTuple):
    """Of one batch: slots [T], block tables [B, P], how many tokens of its sequence follow each token in this step (itself
    included) [T], and the work's tiles by size of the query group; where each sequence's tokens begin [B + 1], how long it is
    with them, and without guesses, and its state [B]. whole: rows that see more, which no recorded step has. chunks: for layers
    that see no further than those. chosen: what the last layer whose tokens chose has found, if any did. encoded: for attention
    to an encoder's rows; block tables are of what is behind those then. near: the same for layers with a window, where these have
    slots and tables of their own."""

    slots: torch.Tensor
    block_tables: torch.Tensor
    run: torch.Tensor
    tiles: dict[int, torch.Tensor]
    query_starts: torch.Tensor
    kv_lens: torch.Tensor
    known_lens: torch.Tensor
    states: torch.Tensor
    chosen: list[Chosen]
    whole: WholeRows | None = None
    chunks: Elsewhere | None = None
    encoded: Elsewhere | None = None
    near: CpuStep | None = None

    @property
    def for_states(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What layers that keep states go by."""
        return self.query_starts, self.kv_lens, self.known_lens, self.states

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """All that kernels read, in a fixed order."""
        yield from (self.slots, self.block_tables, self.run, self.query_starts, self.kv_lens, self.known_lens, self.states)
        yield from self.tiles.values()
        for other in (self.chunks, self.encoded):
            if other is not None:
                yield from (other.block_tables, *other.tiles.values())
        if self.near is not None:
            yield from (self.near.slots, self.near.block_tables)
            if self.near.chunks is not None:
                yield from (self.near.chunks.block_tables, *self.near.chunks.tiles.values())


class CpuBlocks:
    """A BlockMover."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self._sides = [side.flatten().view(torch.uint8).view(len(side), -1) for layer in layers for side in layer]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for side in self._sides:
            for source, target in pairs:
                side[target].copy_(side[source])

    def take_out(self, blocks: list[int]) -> torch.Tensor:
        index = torch.tensor(blocks)
        return torch.cat([side[index] for side in self._sides], dim=1)

    def put_in(self, blocks: list[int], data: torch.Tensor) -> None:
        index = torch.tensor(blocks)
        parts = torch.split(data, [side.shape[1] for side in self._sides], dim=1)
        for side, part in zip(self._sides, parts, strict=True):
            side[index] = part


@dataclass(eq=False)
class CpuAttention:
    """An AttentionBackend; one kernel serves decode, chunks and verification. groups: query heads a key-value head, of all
    layers. dtype: of queries. cache_dtypes: what K and V are kept as, each dtype, int8 or float8_e4m3fn. max_guesses: see
    CacheLayout. chunk: what some layers see no further than, see `AttentionSpec`. cross: what layers attend to beside their own
    sequence, if to anything of always as many rows."""

    chooses = True
    groups: set[int]
    dtype: torch.dtype
    cache_dtypes: tuple[torch.dtype, torch.dtype]
    max_guesses: int = 0
    chunk: int | None = None
    cross: CrossSpec | None = None
    _gathered: dict[tuple[int, int], Gathered] = field(default_factory=dict, init=False)
    _of_blocks: ByBlocks = field(default_factory=ByBlocks, init=False)
    _of_digests: by_digests.ByDigests = field(default_factory=by_digests.ByDigests, init=False)

    def block_parts(self, mixer: AttentionSpec | ConvSpec) -> list[BlockPart]:
        if isinstance(mixer, ConvSpec):
            return [((cpu.BLOCK, mixer.channels), self.dtype)]
        if mixer.shared is not None:
            return by_digests.parts_of(mixer, self.dtype)
        shapes = cpu.cache_shapes(1, mixer.num_kv_heads, mixer.head_dim, self.dtype, self.cache_dtypes, mixer.found_dim)
        parts = [(shape[1:], dtype) for shape, dtype in zip(shapes, self.cache_dtypes, strict=True)]
        if (blocks := mixer.blocks) is not None:
            assert mixer.rope is not None
            return [*parts, *(((cpu.BLOCK, width), self.dtype) for width in (blocks.dim, mixer.rope.dim))]
        if mixer.latent is None:
            return parts
        if (indexer := mixer.latent.own_indexer) is None:
            return parts[:1]
        return [parts[0], (cpu.cache_shapes(1, 1, indexer.dim, self.dtype)[0][1:], self.dtype)]

    def empty_cache(self, num_bytes: int) -> torch.Tensor:
        try:
            return cpu.zeros(num_bytes, torch.uint8)
        except OSError as error:  # less than is free, and more than this process may have (ulimit -v)
            raise DoesNotFitError(
                f"a KV cache of {num_bytes / 2**30:.1f} GiB can't be had: {error.strerror}",
                "take less by --kv-cache, or shorten the context with --ctx-size",
            ) from None

    def block_mover(self, layers: list[LayerCache]) -> CpuBlocks:
        return CpuBlocks(layers)

    def prepare(self, host: Batch, batch: Batch, *, whole: WholeRows | None = None, is_whole: bool = False) -> CpuStep:
        starts, count = batch.query_starts.numpy(), batch.num_tokens  # torch's way takes a hundredth of a step
        if count == len(starts) - 1:  # one token of each: decodes
            left = np.ones(count, np.int32)
        else:
            left = np.repeat(starts[1:], np.diff(starts)) - np.arange(count, dtype=np.int32)
        run = torch.from_numpy(left)
        lengths, chunks, encoded = (batch.kv_lens, batch.known_lens), self._chunks(batch), None
        of_near = batch.of_near
        if self.cross is not None:
            there = among(batch, self.cross.rows, self.cross.lead, cpu.BLOCK)
            encoded = Elsewhere(there.block_tables, self._tiles(there))
            batch = behind(batch, self.cross.lead, cpu.BLOCK)
        if (lookers := batch.lookers) is not None:
            there = looked_at(batch, lookers, cpu.BLOCK)
            encoded = Elsewhere(there.block_tables, self._tiles(there))
        batch = behind_each(batch, cpu.BLOCK)
        tables, tiles = batch.block_tables, self._tiles(batch)
        step = CpuStep(batch.slots, tables, run, tiles, batch.query_starts, *lengths, batch.states, [], whole, chunks, encoded)
        if of_near is None:
            return step
        seen = None if whole is None else whole.of_near
        tables, chunks = of_near.block_tables, self._chunks(of_near)
        return step._replace(near=step._replace(slots=of_near.slots, block_tables=tables, chunks=chunks, whole=seen))

    def _chunks(self, batch: Batch) -> Elsewhere | None:
        if self.chunk is None:
            return None
        parts = batch.in_chunks(self.chunk, cpu.BLOCK)
        return Elsewhere(parts.block_tables, self._tiles(parts))

    def _tiles(self, batch: Batch) -> dict[int, torch.Tensor]:
        return {group: cpu.attention_tiles(batch.query_starts, batch.kv_lens, group) for group in self.groups}

    def attend(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        norm: HeadNorms,
        angles: Angles,
        sinks: torch.Tensor | None,
        cache: LayerCache,
        step: CpuStep,
        distances: torch.Tensor | None = None,
        index: BlockIndexInputs | None = None,
    ) -> torch.Tensor:
        k, v = cache[:2]
        q = cpu.rope_and_cache(
            qkv, spec.num_heads, spec.num_kv_heads, spec.head_dim, *norm, *angles, spec.interleaved, step.slots, step.run, k, v,
            spec.reads is not None, spec.qk_norm_of == "turned head", spec.found_dim,
        )  # fmt: skip
        if index is not None:
            where = Where(step.tiles[MAX_TILE_ROWS], step.query_starts, step.block_tables, step.slots, step.run)
            if (of_blocks := self._of_blocks.attend(spec, q, index, angles, cache, where)) is not None:
                return of_blocks

        def found(q: torch.Tensor, step: CpuStep, *, both_ways: bool) -> torch.Tensor:
            where = step if spec.chunk is None else step.chunks
            assert where is not None
            tiles = where.tiles[spec.queries_a_key]
            return cpu.paged_attention(
                q, k, v, tiles, where.block_tables, spec.score_scale, spec.window or 0, spec.softcap or 0.0, sinks,
                both_ways=both_ways, distances=distances, value_dim=spec.found_dim,
            )  # fmt: skip

        out = found(q, step, both_ways=spec.both_ways)
        if step.whole is not None and step.whole.counts_in(spec):
            out[step.whole.rows] = found(q[step.whole.rows], step.whole.step, both_ways=True)
        return out

    def keep_encoded(self, spec: AttentionSpec, kv: torch.Tensor, rows: EncodedRows, cache: LayerCache) -> None:
        (k, v), none = cache, torch.empty(len(kv), 0)
        cpu.rope_and_cache(
            kv, 0, spec.num_kv_heads, spec.head_dim, *HeadNorms(), none, none, False, rows.slots, rows.run, k, v
        )

    def attend_encoded(self, spec: AttentionSpec, q: torch.Tensor, cache: LayerCache, step: CpuStep) -> torch.Tensor:
        assert step.encoded is not None
        (k, v), tables, tiles = cache, step.encoded.block_tables, step.encoded.tiles[spec.queries_a_key]
        q = q.view(len(q), spec.num_heads, spec.head_dim)
        return cpu.paged_attention(q, k, v, tiles, tables, spec.score_scale, 0, 0.0, None, both_ways=True)

    def encoded_keys(self, spec: AttentionSpec, cache: LayerCache, blocks: Sequence[int], head: int) -> torch.Tensor:
        kept = cache[0][torch.tensor(blocks, dtype=torch.int64), head]
        return keys_in(kept, cpu.cache_shapes(1, 1, spec.head_dim, self.dtype)[0][2:], is_coded=kept.dtype != self.dtype)

    def attend_latent(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kept: torch.Tensor,
        weights: LatentWeights,
        angles: Angles,
        cache: LayerCache,
        step: CpuStep,
        index: IndexInputs | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        latent, dim, heads = spec.latent, spec.head_dim, spec.num_heads
        assert latent is not None
        assert isinstance(weights.keys, CpuHeadMatrices)
        assert isinstance(weights.values, CpuHeadMatrices)
        rows = latent_rows(q, kept, weights.norm, weights.eps, weights.offset, heads, latent.key_dim)
        weights.keys.products_into(q, 0, latent.query_dim, rows, latent.rotary_dim, dim)
        k = cache[0]
        turned = cpu.rope_and_cache(
            rows, heads, 1, dim, *HeadNorms(), *angles, spec.interleaved, step.slots, step.run, k, None
        )
        if (indexer := latent.indexer) is not None:
            self._choose(indexer, index, angles, cache, step)
        if indexer is None or not _is_sparse(indexer, step):
            found = cpu.paged_attention(
                turned, k, None, step.tiles[heads], step.block_tables, spec.score_scale, 0, 0.0, sinks, latent.rotary_dim
            )
            return weights.values.products(found, latent.rotary_dim, dim)
        if (size := (indexer.most, dim)) not in self._gathered:
            self._gathered[size] = Gathered(*size, self.dtype, k.dtype)
        gathered, (chosen,), tiles = self._gathered[size], step.chosen, step.tiles[MAX_TILE_ROWS]
        found = cpu.new_tensor((len(q), heads * dim), q.dtype)
        for first in range(0, len(q), ROWS):
            some = slice(first, first + gathered.gather(first, chosen, k, tiles, step.block_tables))
            cpu.paged_attention(
                turned[some], gathered.keys, None, chosen.tiles[some], gathered.tables, spec.score_scale, 0, 0.0, sinks,
                latent.rotary_dim, out=found[some],
            )  # fmt: skip
        return weights.values.products(found, latent.rotary_dim, dim)

    def attend_shared(
        self,
        spec: AttentionSpec,
        inputs: SharedInputs,
        weights: SharedWeights,
        angles: Angles,
        of_digests: Angles | None,
        sinks: torch.Tensor,
        cache: LayerCache,
        step: CpuStep,
    ) -> torch.Tensor:
        near = step if step.near is None else step.near
        kernels = digests.Where(step.tiles[MAX_TILE_ROWS], step.block_tables, near.block_tables)
        where = by_digests.Where(kernels, near.slots)
        return self._of_digests.attend(spec, inputs, weights, angles, of_digests, sinks, cache, where)

    def _choose(
        self, indexer: IndexerSpec, index: IndexInputs | None, angles: Angles, cache: LayerCache, step: CpuStep
    ) -> None:
        """What a layer's own indexer says: its keys of these tokens, and which tokens they see."""
        if not indexer.chooses:
            return
        assert index is not None
        keys = cache[1]
        rotate = *HeadNorms(), *angles, indexer.interleaved, step.slots, step.run, keys, None
        cpu.rope_and_cache(index.key, 0, 1, indexer.dim, *rotate)
        if not _is_sparse(indexer, step):
            return
        q = cpu.rope_and_cache(index.q, indexer.heads, 1, indexer.dim, *rotate, reads=True)
        step.chosen[:] = [choose(q, index.weights, keys, step.tiles[MAX_TILE_ROWS], step.block_tables, indexer.most)]

    def convolve(
        self,
        spec: ConvSpec,
        projected: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cache: LayerCache,
        step: CpuStep,
    ) -> torch.Tensor:
        (inputs,) = cache
        return conv.gated_conv(projected, weight, bias, inputs, step.query_starts, step.kv_lens, step.block_tables)

    def recur(
        self,
        spec: DeltaSpec,
        projected: torch.Tensor,
        gates: torch.Tensor,
        weights: DeltaWeights,
        cache: LayerCache,
        step: CpuStep,
        by_channel: ByChannel | None = None,
    ) -> torch.Tensor:
        states, rest = States(*cache[:STATE_PARTS]), (spec.most, by_channel, spec.by_sigmoid)
        return delta.gated_delta(projected, gates, *weights, spec.tiled, states, *step.for_states, *rest)

    def mix_inputs(
        self, spec: ScanSpec, projected: torch.Tensor, weights: ScanWeights, cache: LayerCache, step: CpuStep
    ) -> torch.Tensor:
        return scan.causal_conv(projected, weights.taps, weights.taps_bias, States(*cache), *step.for_states)

    def scan(
        self,
        spec: ScanSpec,
        projected: torch.Tensor,
        x: torch.Tensor,
        rates: torch.Tensor,
        both: torch.Tensor,
        weights: ScanWeights,
        cache: LayerCache,
        step: CpuStep,
    ) -> torch.Tensor:
        return scan.selective_scan(projected, x, rates, both, *weights[2:], States(*cache), *step.for_states)

    def shift(
        self, spec: WkvSpec, x: torch.Tensor, shares: torch.Tensor, part: int, cache: LayerCache, step: CpuStep
    ) -> torch.Tensor:
        return wkv.token_shift(x, shares, part, States(*cache), *step.for_states)

    def advance(
        self, spec: WkvSpec, inputs: WkvInputs, tables: torch.Tensor, cache: LayerCache, step: CpuStep
    ) -> torch.Tensor:
        return wkv.wkv7(inputs, tables, spec.eps, States(*cache), *step.for_states)

    def ngram_rows(
        self, ids: torch.Tensor, table: NGramTable, hashes: NGramHashes, dtype: torch.dtype, cache: LayerCache, step: CpuStep
    ) -> torch.Tensor:
        return ngrams.gather(ids, table, hashes, dtype, *_with_past(cache), step.for_states)

    def join_ngrams(
        self, keys: torch.Tensor, value: torch.Tensor, streams: torch.Tensor, weights: NGramWeights, cache: LayerCache,
        step: CpuStep,
    ) -> None:  # fmt: skip
        ngrams.join(keys, value, streams, *weights, *_with_past(cache), step.for_states)


def _with_past(cache: LayerCache) -> tuple[NGramPast, States]:
    """Of a layer with n-grams."""
    return NGramPast(*cache[STATE_PARTS:]), States(*cache[:STATE_PARTS])


def _is_sparse(indexer: IndexerSpec, step: CpuStep) -> bool:
    """Whether a sequence may be so long that a token does not see all of it. By what block tables have room for, so that a
    recorded step serves as long as it is used; what a token that sees all finds has the same bits either way."""
    return step.block_tables.shape[1] * cpu.BLOCK > indexer.most
