"""Attention on the CPU with one key for all heads, which sees digests beyond its window (`SharedSpec`): what each token sees is
gathered, and attended to as a sequence of its own, so that it has the same bits in any step."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.attention.backend import Angles
from nanovllm_cli.attention.kv_cache import BlockPart, LayerCache
from nanovllm_cli.kernels import cpu, digests
from nanovllm_cli.kernels.digests import SharedInputs, SharedWeights
from nanovllm_cli.kernels.indexer import ROWS
from nanovllm_cli.mixer_spec import AttentionSpec


class Where(NamedTuple):
    """Of a step: see `digests.Where`; slots [T] int64: where what windows need of its tokens is kept."""

    kernels: digests.Where
    slots: torch.Tensor


def parts_of(spec: AttentionSpec, dtype: torch.dtype) -> list[BlockPart]:
    """What is kept in a block: keys and, with digests, raw rows, both of tokens; digests, and those that choose."""
    assert spec.shared is not None
    keys, own = ((cpu.BLOCK, spec.head_dim), dtype), spec.shared.digests
    if own is None:
        return [keys]
    sizes = [spec.head_dim] if own.indexer is None else [spec.head_dim, own.indexer.dim]
    room = digests.digest_room(own.rate)
    return [keys, ((cpu.BLOCK, own.width(spec.head_dim)), dtype), *(((room, size), dtype) for size in sizes)]


class ByDigests:
    """Keeps tables of blocks that lie behind each other, by how many there are."""

    def __init__(self) -> None:
        self._tables: dict[int, torch.Tensor] = {}

    def attend(
        self, spec: AttentionSpec, inputs: SharedInputs, weights: SharedWeights, angles: Angles, of_digests: Angles | None,
        sinks: torch.Tensor, cache: LayerCache, where: Where,
    ) -> torch.Tensor:  # fmt: skip
        """[T, H * D], turned back. cache: keys [N, BLOCK, D]; with digests raw rows, digests, and those that choose."""
        assert spec.shared is not None
        assert spec.window is not None
        own, heads, dim = spec.shared.digests, spec.num_heads, spec.head_dim
        q = digests.turn_last(inputs.q, heads, angles, eps=weights.eps)
        digests.turn_last(inputs.key, 1, angles, gains=weights.gains, eps=weights.eps, offset=weights.offset)
        digests.keep_rows(inputs.key, where.slots, cache[0])
        made, chosen, room, rate = None, None, 0, 0
        if own is not None:
            assert of_digests is not None
            made, rate = cache[2], own.rate
            chosen = self._digested(spec, inputs, weights, angles, of_digests, cache, where)
            room = where.kernels.block_tables.shape[1] * cpu.BLOCK // rate
            room = room if chosen is None else min(room, chosen.shape[1])
        found = cpu.new_tensor((len(q), heads * dim), q.dtype)
        by_head = q.view(len(q), heads, dim)
        for first in range(0, len(q), ROWS):
            some = slice(first, min(len(q), first + ROWS))
            seen, tiles = digests.gather_seen(some, cache[0], made, chosen, rate, spec.window, where.kernels, room)
            tables = self._table_of(len(seen) // (some.stop - first))
            cpu.paged_attention(by_head[some], seen, None, tiles, tables, spec.score_scale, 0, 0.0, sinks, out=found[some])
        return digests.turn_last(found, heads, angles, back=True)

    def _digested(
        self, spec: AttentionSpec, inputs: SharedInputs, weights: SharedWeights, angles: Angles, of_digests: Angles,
        cache: LayerCache, where: Where,
    ) -> torch.Tensor | None:  # fmt: skip
        """Keeps what these tokens have for digests, and those that end with them; says which they see [T, most], None for all."""
        assert spec.shared is not None
        own = spec.shared.digests
        assert own is not None
        assert inputs.raw is not None
        assert weights.digests is not None
        digests.keep_rows(inputs.raw, where.slots, cache[1])
        digests.make_digests(cache[1], cache[2], weights.digests, of_digests, own.rate, where.kernels)
        if own.indexer is None:
            return None
        assert weights.chosen_by is not None
        assert inputs.index_q is not None
        assert inputs.index_weights is not None
        digests.make_digests(cache[1], cache[3], weights.chosen_by, of_digests, own.rate, where.kernels)
        q = digests.turn_last(inputs.index_q, own.indexer.heads, angles)
        return digests.choose(q, inputs.index_weights, cache[3], own.rate, own.indexer.most, where.kernels)

    def _table_of(self, blocks: int) -> torch.Tensor:
        if blocks not in self._tables:
            self._tables[blocks] = torch.arange(ROWS * blocks, dtype=torch.int32).view(ROWS, blocks)
        return self._tables[blocks]
