"""Attention on the CPU to blocks of tokens that an indexer chooses (`BlockIndexerSpec`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.attention.backend import Angles
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.index_spec import BlockIndexerSpec
from nanovllm_cli.kernels import block_index, cpu
from nanovllm_cli.kernels.block_index import BlockIndexInputs, IndexKeys
from nanovllm_cli.kernels.indexer import ROWS
from nanovllm_cli.mixer_spec import AttentionSpec


class Where(NamedTuple):
    """Of a step: see `CpuStep`; tiles [T, 5] int64 are of one token each."""

    tiles: torch.Tensor
    query_starts: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    run: torch.Tensor

    @property
    def of_index(self) -> block_index.Where:
        return block_index.Where(*self[:3])


class ByBlocks:
    """Keeps memory for what tokens see from step to step, for each kind of layer."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[AttentionSpec, torch.dtype], block_index.Gathered] = {}

    def attend(
        self, spec: AttentionSpec, q: torch.Tensor, index: BlockIndexInputs, angles: Angles, cache: LayerCache, where: Where
    ) -> torch.Tensor | None:
        """q [T, H, D], rotated, over the tokens of chosen blocks, and those behind the last whole one: [T, H * V]. None where no
        sequence can be so long that a token does not see all; keys of blocks are kept either way. cache: keys and values, which
        have this step's, and what `cpu_block_index` has."""
        assert spec.blocks is not None
        k, v, kept, turned = cache
        chosen = _chosen(spec.blocks, index, angles, IndexKeys(kept, turned, spec.blocks.ratio), where)
        if chosen is None:
            return None
        if (kind := (spec, k.dtype)) not in self._gathered:
            sizes = spec.blocks.most, spec.blocks.ratio, spec.num_kv_heads, spec.head_dim, spec.found_dim
            self._gathered[kind] = block_index.Gathered(*sizes, q.dtype, (k.dtype, v.dtype))
        gathered, found = self._gathered[kind], cpu.new_tensor((len(q), spec.num_heads * spec.found_dim), q.dtype)
        for first in range(0, len(q), ROWS):
            some = slice(first, min(len(q), first + ROWS))
            tiles = gathered.gather(some, chosen, (k, v), where.of_index)
            cpu.paged_attention(
                q[some], gathered.keys, gathered.values, tiles, gathered.tables, spec.score_scale, 0, spec.softcap or 0.0, None,
                out=found[some], value_dim=spec.found_dim,
            )  # fmt: skip
        return found


def _chosen(
    spec: BlockIndexerSpec, index: BlockIndexInputs, angles: Angles, keys: IndexKeys, where: Where
) -> torch.Tensor | None:
    """Keeps keys of these tokens, and says which blocks they see [T, most]; None where all see all. By what block tables have
    room for, so that a recorded step serves as long as it is used."""
    width, dtype = spec.heads * spec.dim, index.projected.dtype
    block_index.keep_keys(index.projected[:, width:], *angles, index.k_norm, index.eps, index.offset, keys, where.of_index)
    if where.block_tables.shape[1] * cpu.BLOCK <= spec.most_seen:
        return None
    nowhere = torch.empty(cpu.cache_shapes(0, 1, spec.dim, dtype)[0], dtype=dtype)
    norms = index.q_norm, None, None, index.eps, index.offset
    q = cpu.rope_and_cache(
        index.projected[:, :width], spec.heads, 1, spec.dim, *norms, *angles, False, where.slots, where.run, nowhere, None,
        reads=True,
    )  # fmt: skip
    return block_index.choose(q, keys, spec.most, where.of_index)
