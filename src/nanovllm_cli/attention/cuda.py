"""Attention on a GPU. K and V of a layer are [N, K, S, D] each, in the compute type, as fp8 (e4m3) with a scale a head, or as
int8 with a scale a token and head; those are [N, K, S] fp32, two tensors more.

A step of decodes takes decode_attention: norm, rotation, cache and attention in one launch, which reads all lengths on the
device. Every other step takes rope_and_cache and prefill_attention, whose work is divided on the host. A deterministic GPU takes
the second for both: a token's K and V must have the same bits whether it was decoded or, after a preemption, computed again in a
chunk. Its steps of decodes are recorded all the same, with room for their work (`engine/decode_work.py`). Latent attention has
kernels of its own, and one tensor a layer (cuda_latent.py). Values that are narrower than keys have zeros behind them here
(narrow_values.py).

An encoder's texts are computed whole, and their tokens see those behind them, too: prefill_attention's, but for texts of a single
token, which see themselves alone, as a decoded token would.

On Hopper, whose tensor cores mma.sync does not fill, whole prompts go to torch's flash attention instead: nothing of theirs was
cached before, so attention over what this step wrote is all there is. It is asked for by name: left to itself, torch takes
cuDNN's there, which is compiled anew for every length of a prompt.

Legend: T tokens, B sequences, H query heads, K kv heads, D head dim, N blocks, S block size, P blocks in a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanovllm_cli.attention.backend import (
    Angles,
    DeltaWeights,
    HeadNorms,
    IndexInputs,
    LatentWeights,
    ScanWeights,
    WholeRows,
)
from nanovllm_cli.attention.cuda_blocks import CudaBlocks
from nanovllm_cli.attention.cuda_latent import CudaLatent
from nanovllm_cli.attention.cuda_views import CudaStep, Encoded, Shape, Tables, behind_leads, in_chunks, token_rows
from nanovllm_cli.attention.encoded import EncodedRows, behind_each, leading, looked_at
from nanovllm_cli.attention.kv_cache import BlockPart, LayerCache
from nanovllm_cli.attention.narrow_values import values_narrowed, values_widened
from nanovllm_cli.batch import Batch
from nanovllm_cli.cross_spec import CrossSpec
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError
from nanovllm_cli.kernels.block_index import BlockIndexInputs
from nanovllm_cli.kernels.causal_conv import causal_conv
from nanovllm_cli.kernels.connections import NO_DIGESTS, NO_GATED_STREAMS
from nanovllm_cli.kernels.decode_attention import DecodeScratch, decode_attention
from nanovllm_cli.kernels.gated_conv import gated_conv
from nanovllm_cli.kernels.gated_delta import gated_delta
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.prefill_attention import PrefillWork, new_counters, prefill_attention, prefill_tiles, tiling
from nanovllm_cli.kernels.rope_cache import Projected, rope_and_cache
from nanovllm_cli.kernels.selective_scan import selective_scan
from nanovllm_cli.kernels.states import ByChannel, States
from nanovllm_cli.kernels.token_shift import token_shift
from nanovllm_cli.kernels.wkv import WkvInputs
from nanovllm_cli.kernels.wkv7 import wkv7
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, ScanSpec, WkvSpec

HOPPER = 90
MAX_FLASH_DIM = 256
LATENT_ROWS = 128
"""Tokens that a launch has at the least where each is a row of its own, if they are cut into splits: enough to fill a GPU."""
GIB = 1 << 30


class Sides(NamedTuple):
    """A layer's keys and values, and their scales where they have some."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


class CudaAttention:
    """An AttentionBackend. max_batch sequences in a step of decodes, with tables of at most max_tokens (P * S) tokens.

    max_guesses: see CacheLayout. long_prompt: tokens from which on prompts are worth a launch each. shapes: those whose work the
    host divides. by_distance: scores go by `layers/distances.py`, too. chunk: what some layers see no further than, see
    `AttentionSpec`; None where no sequence is longer. encoded: attention to what an encoder has made, if there is any. cross:
    that, of always as many rows.
    """

    chooses = False
    long_prompt = 512

    def __init__(
        self,
        launcher: Launcher,
        specs: list[AttentionSpec],
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        block_size: int,
        max_batch: int,
        max_tokens: int,
        deterministic: bool,
        max_guesses: int = 0,
        by_distance: bool = False,
        chunk: int | None = None,
        encoded: AttentionSpec | None = None,
        cross: CrossSpec | None = None,
    ) -> None:
        if chunk is not None and chunk % block_size:
            raise UnsupportedError(f"attention in chunks of {chunk} tokens over a KV cache with blocks of {block_size} on a GPU")
        self.launcher = launcher
        self._chunk = chunk or 0
        self._cross = cross
        self.max_guesses = max_guesses
        self.dtype = dtype
        self.cache_dtype = cache_dtype
        self.cache_dtypes = cache_dtype, cache_dtype
        self.block_size = block_size
        self.deterministic = deterministic
        _check_directions(specs)
        latent, specs = [spec for spec in specs if spec.latent], [spec for spec in specs if not spec.latent]
        shapes = [*map(self._shape, specs), *([] if encoded is None else [_of_encoded(encoded)])]
        self.shapes = list(dict.fromkeys(shapes))
        for shape in self.shapes:
            tiling(launcher.capability, shape.head_dim, dtype, cache_dtype)  # refuses now what it would refuse in a step
        self._needs_rows = bool(latent)
        heads = () if deterministic else {shape[:3] for shape in self.shapes}
        self._scratch = {each: DecodeScratch(launcher, max_batch, *each, max_tokens) for each in heads}
        self._counters = new_counters(launcher)
        most_heads = max((spec.num_kv_heads for spec in (*specs, *latent)), default=0)
        self._scales = torch.ones(most_heads, device=launcher.device) if cache_dtype == torch.float8_e4m3fn else None
        most_rows = max(max_batch, LATENT_ROWS) if deterministic else max_batch
        one_scale = None if self._scales is None else self._scales[:1]
        self._latent = CudaLatent(launcher, latent, cache_dtype, most_rows, max_tokens, deterministic, one_scale)
        own_kernels = latent or by_distance or chunk or encoded
        plain = bool(specs) and not own_kernels and all(not (spec.window or spec.softcap or spec.sinks) for spec in specs)
        dims_fit = all(spec.head_dim % 8 == 0 and spec.head_dim <= MAX_FLASH_DIM for spec in specs)
        same_type = cache_dtype == dtype
        self._takes_flash_attention = launcher.capability == HOPPER and plain and dims_fit and same_type and not deterministic

    def block_parts(self, mixer: AttentionSpec | ConvSpec) -> list[BlockPart]:
        if isinstance(mixer, ConvSpec):
            return [((self.block_size, mixer.channels), self.dtype)]
        rows, parts = (mixer.num_kv_heads, self.block_size), 1 if mixer.latent else 2
        scales: list[BlockPart] = [(rows, torch.float32)] if self.cache_dtype == torch.int8 else []
        return [((*rows, mixer.head_dim), self.cache_dtype)] * parts + scales * parts

    def empty_cache(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.launcher.device)
        except torch.OutOfMemoryError:
            raise DoesNotFitError(
                f"a KV cache of {num_bytes / GIB:.1f} GiB does not fit the GPU beside the weights",
                "leave --kv-cache out to take what fits, or shorten the context with --ctx-size",
            ) from None

    def block_mover(self, layers: list[LayerCache]) -> CudaBlocks:
        return CudaBlocks(self.launcher, layers)

    def prepare(self, host: Batch, batch: Batch, *, whole: WholeRows | None = None, is_whole: bool = False) -> CudaStep:
        plain = not is_whole and whole is None
        are_decodes = plain and host.num_tokens == host.num_seqs and not self.deterministic  # of whole texts: a token each
        if self._cross is not None:
            host = leading(host, self._cross)
        if host.leads is not None:
            return self._behind_leads(host, batch, are_decodes)
        if are_decodes:
            return self.decode_step(batch)
        starts, lens = host.query_starts.numpy(), host.kv_lens.numpy()
        if plain and self._takes_flash_attention and (lens == np.diff(starts)).all() and lens.min() >= self.long_prompt:
            return self.decode_step(batch)._replace(prompts=starts.tolist())
        step = self.decode_step(batch, self._brought(self.divide(starts, lens, is_whole=is_whole)))
        if whole is not None:
            near = None if step.near is None else step.near._replace(whole=whole.of_near)
            step = step._replace(whole=whole, near=near)
        return step if self.deterministic else step._replace(groups=self._latent.groups(starts, lens))

    def _behind_leads(self, host: Batch, batch: Batch, are_decodes: bool) -> CudaStep:
        """Of sequences some or all of whose tokens see something in front of their texts."""
        there, size = self.launcher.device, self.block_size
        lookers = host.lookers
        if are_decodes and lookers is not None and len(lookers) == host.num_tokens:
            assert host.looks is not None
            assert host.leads is not None
            return self.decode_step(replace(batch, looks=host.looks.to(there), leads=host.leads.to(there)))
        text, encoded = behind_each(host, size), None
        tables, *lens = (each.to(there) for each in (text.block_tables, text.kv_lens, text.known_lens))
        own = replace(batch, block_tables=tables, kv_lens=lens[0], known_lens=lens[1], looks=None, leads=None)
        if lookers is not None:
            seen = looked_at(host, lookers, size)
            work = self.divide(seen.query_starts.numpy(), seen.kv_lens.numpy(), seen=seen.kv_lens.numpy())
            encoded = Encoded(Tables(seen.block_tables.to(there), seen.kv_lens.to(there)), self._brought(work))
        if are_decodes:
            return self.decode_step(own)._replace(encoded=encoded)
        work = self.divide(text.query_starts.numpy(), text.kv_lens.numpy())
        return self.decode_step(own, self._brought(work))._replace(encoded=encoded)

    def _brought(self, work: dict[Shape, PrefillWork]) -> dict[Shape, PrefillWork]:
        """To the device."""
        there = self.launcher.device
        return {shape: tiles._replace(items=tiles.items.to(there, non_blocking=True)) for shape, tiles in work.items()}

    def divide(
        self, query_starts: np.ndarray, kv_lens: np.ndarray, *, is_whole: bool = False, seen: np.ndarray | None = None
    ) -> dict[Shape, PrefillWork]:
        """See `prefill_tiles`; items are on the host. is_whole: all rows see those behind them. seen: how many rows of an
        encoder's each sequence's tokens see; where it is None, nobody asks for these shapes."""
        shapes = [shape for shape in self.shapes if seen is not None or not shape.of_encoded]
        return {
            shape: prefill_tiles(
                self.launcher, query_starts, seen if shape.of_encoded and seen is not None else kv_lens, *shape[:3], self.dtype,
                self.cache_dtype, window=shape.window, chunk=shape.chunk, both_ways=shape.both_ways or is_whole,
                deterministic=self.deterministic,
            )
            for shape in shapes
        }  # fmt: skip

    def decode_step(self, batch: Batch, work: dict[Shape, PrefillWork] | None = None) -> CudaStep:
        """Nothing is read on the host. One token a sequence, and a kv_len of 0 is a row of padding; or any number, with work that
        the host has divided. Tokens see nothing in front of their texts, or all do."""
        encoded = None
        if batch.looks is not None:
            batch, tables = behind_leads(self.launcher, batch, self.block_size)
            encoded = Encoded(tables, work)
        rows = None if work is None or not self._needs_rows else token_rows(self.launcher, batch)
        lengths = batch.kv_lens, batch.known_lens
        has_chunks = self._chunk and work is None
        chunks = in_chunks(self.launcher, batch, self._chunk, self.block_size) if has_chunks else None
        same = batch.slots, batch.block_tables, *lengths, batch.query_starts, batch.states
        near = None if (of_near := batch.of_near) is None else self.decode_step(of_near, work)
        return CudaStep(*same, work, rows, chunks=chunks, near=near, encoded=encoded)

    def attend(
        self,
        spec: AttentionSpec,
        qkv: torch.Tensor,
        norm: HeadNorms,
        angles: Angles,
        sinks: torch.Tensor | None,
        cache: LayerCache,
        step: CudaStep,
        distances: torch.Tensor | None = None,
        index: BlockIndexInputs | None = None,
    ) -> torch.Tensor:
        assert index is None, "the platform refuses such models"
        if spec.found_dim != spec.head_dim:
            wide = values_widened(self.launcher, qkv, spec), norm, angles, sinks, cache, step, distances
            return values_narrowed(self.launcher, self.attend(replace(spec, value_dim=None), *wide), spec)
        shape = self._shape(spec)
        heads, kv_heads, dim, window, both_ways, chunk, _ = shape
        k, v, k_scale, v_scale = self._sides(cache, kv_heads)
        order = spec.interleaved, spec.reads is not None, spec.qk_norm_of == "turned head"
        projected = Projected(qkv, heads, kv_heads, dim, *norm, *angles, *order)
        scale, softcap = spec.score_scale, spec.softcap or 0.0
        if step.work is None and step.prompts is None:
            tables, lens = step.chunks if chunk and step.chunks is not None else (step.block_tables, step.kv_lens)
            return decode_attention(
                self.launcher, projected, k, v, tables, lens, self._scratch[shape[:3]], scale,
                window, softcap, sinks, k_scale, v_scale, distances=distances,
            )  # fmt: skip
        q = rope_and_cache(self.launcher, projected, step.slots, k, v, k_scale, v_scale)
        if step.prompts is not None:
            return self._whole_prompts(q, cache, step.block_tables, step.prompts, scale, causal=not both_ways)

        def found(q: torch.Tensor, step: CudaStep) -> torch.Tensor:
            assert step.work is not None
            return prefill_attention(
                self.launcher, q, k, v, step.work[shape], step.block_tables, self._counters,
                scale=scale, softcap=softcap, sinks=sinks, k_scale=k_scale, v_scale=v_scale, distances=distances,
            )  # fmt: skip

        out = found(q, step)
        if step.whole is not None and step.whole.counts_in(spec):
            out[step.whole.rows] = found(q[step.whole.rows], step.whole.step)
        return out

    def keep_encoded(self, spec: AttentionSpec, kv: torch.Tensor, rows: EncodedRows, cache: LayerCache) -> None:
        projected = Projected(kv, 0, spec.num_kv_heads, spec.head_dim, *HeadNorms(), *_no_angles(kv), False)
        rope_and_cache(self.launcher, projected, rows.slots, *self._sides(cache, spec.num_kv_heads))

    def attend_encoded(self, spec: AttentionSpec, q: torch.Tensor, cache: LayerCache, step: CudaStep) -> torch.Tensor:
        assert step.encoded is not None
        (tables, lens), divided = step.encoded
        shape = _of_encoded(spec)
        heads, kv_heads, dim = shape[:3]
        k, v, k_scale, v_scale = self._sides(cache, kv_heads)
        if divided is not None:
            q = q.view(len(q), heads, dim)
            return prefill_attention(
                self.launcher, q, k, v, divided[shape], tables, self._counters, scale=spec.score_scale,
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
        asking = Projected(q, heads, kv_heads, dim, *HeadNorms(), *_no_angles(q), False, True)
        return decode_attention(
            self.launcher, asking, k, v, tables, lens, self._scratch[shape[:3]], spec.score_scale,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def encoded_keys(self, spec: AttentionSpec, cache: LayerCache, blocks: Sequence[int], head: int) -> torch.Tensor:
        kept, _, scales, _ = self._sides(cache, spec.num_kv_heads)
        keys = kept[list(blocks), head].float()
        if scales is not None:
            keys *= scales[list(blocks), head][:, :, None] if scales.dim() > 1 else scales[head]
        return keys.flatten(0, 1).cpu()

    def _sides(self, cache: LayerCache, kv_heads: int) -> Sides:
        k, v, *of_rows = cache
        of_heads = None if self._scales is None else self._scales[:kv_heads]
        return Sides(k, v, *(of_rows or (of_heads, of_heads)))

    def attend_latent(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kept: torch.Tensor,
        weights: LatentWeights,
        angles: Angles,
        cache: LayerCache,
        step: CudaStep,
        index: IndexInputs | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert index is None, "the platform sees to it that no sequence is so long that tokens would choose"
        lens, sequences = (step.kv_lens, None) if step.rows is None else step.rows
        return self._latent.attend(
            spec, q, kept, weights, angles, cache, step.slots, step.block_tables, lens, sequences, step.groups, sinks
        )

    def convolve(
        self,
        spec: ConvSpec,
        projected: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cache: LayerCache,
        step: CudaStep,
    ) -> torch.Tensor:
        (inputs,) = cache
        return gated_conv(self.launcher, projected, weight, bias, inputs, step.query_starts, step.kv_lens, step.block_tables)

    def recur(
        self,
        spec: DeltaSpec,
        projected: torch.Tensor,
        gates: torch.Tensor,
        weights: DeltaWeights,
        cache: LayerCache,
        step: CudaStep,
        by_channel: ByChannel | None = None,
    ) -> torch.Tensor:
        return gated_delta(
            self.launcher, projected, gates, *weights, spec.tiled, States(*cache), *step.for_states, spec.most, by_channel
        )

    def mix_inputs(
        self, spec: ScanSpec, projected: torch.Tensor, weights: ScanWeights, cache: LayerCache, step: CudaStep
    ) -> torch.Tensor:
        return causal_conv(self.launcher, projected, weights.taps, weights.taps_bias, States(*cache), *step.for_states)

    def scan(
        self,
        spec: ScanSpec,
        projected: torch.Tensor,
        x: torch.Tensor,
        rates: torch.Tensor,
        both: torch.Tensor,
        weights: ScanWeights,
        cache: LayerCache,
        step: CudaStep,
    ) -> torch.Tensor:
        return selective_scan(self.launcher, projected, x, rates, both, *weights[2:], States(*cache), *step.for_states)

    def shift(
        self, spec: WkvSpec, x: torch.Tensor, shares: torch.Tensor, part: int, cache: LayerCache, step: CudaStep
    ) -> torch.Tensor:
        return token_shift(self.launcher, x, shares, part, States(*cache), *step.for_states)

    def advance(
        self, spec: WkvSpec, inputs: WkvInputs, tables: torch.Tensor, cache: LayerCache, step: CudaStep
    ) -> torch.Tensor:
        return wkv7(self.launcher, inputs, tables, spec.eps, States(*cache), *step.for_states)

    def attend_shared(self, *_: Any) -> torch.Tensor:
        raise UnsupportedError(*NO_DIGESTS)

    def ngram_rows(self, *_: Any) -> torch.Tensor:
        raise UnsupportedError(*NO_GATED_STREAMS)

    def join_ngrams(self, *_: Any) -> None:
        raise UnsupportedError(*NO_GATED_STREAMS)

    def _shape(self, spec: AttentionSpec) -> Shape:
        chunk = 0 if spec.chunk is None else self._chunk
        return Shape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.window or 0, spec.both_ways, chunk)

    def _whole_prompts(
        self, q: torch.Tensor, cache: LayerCache, tables: torch.Tensor, starts: list[int], scale: float, causal: bool
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H * D], a sequence at a time."""
        out = torch.empty_like(q)
        for sequence, (start, end) in enumerate(itertools.pairwise(starts)):
            blocks_used = tables[sequence, : -(-(end - start) // self.block_size)].long()
            k, v = (side[blocks_used].transpose(0, 1).flatten(1, 2)[:, : end - start] for side in cache)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                found = scaled_dot_product_attention(
                    q[start:end].transpose(0, 1)[None], k[None], v[None], is_causal=causal, scale=scale, enable_gqa=True
                )
            out[start:end] = found[0].transpose(0, 1)
        return out.flatten(1)


def _check_directions(specs: list[AttentionSpec]) -> None:
    """Of these, some tokens are computed apart from the rest of their text, as decoded ones are."""
    for spec in specs:
        if spec.both_ways and (spec.latent or spec.reads is not None):
            kind = "latent attention" if spec.latent else "attention to another layer's keys"
            raise UnsupportedError(f"{kind} in both directions on a GPU", "add --device cpu")


def _of_encoded(spec: AttentionSpec) -> Shape:
    return Shape(spec.num_heads, spec.num_kv_heads, spec.head_dim, both_ways=True, of_encoded=True)


def _no_angles(rows: torch.Tensor) -> Angles:
    """Of rows without positions."""
    none = torch.empty(len(rows), 0, device=rows.device)
    return none, none
