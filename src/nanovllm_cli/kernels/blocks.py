"""Whole blocks of the paged cache, copied or moved out and in, for all layers at once (blocks.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import Kernel, Launcher, check

THREADS = 256
CHUNK = THREADS * 4 * 16
"""Bytes a thread block moves, as in blocks.cu."""


class CacheRegions(NamedTuple):
    """Where the blocks of a cache lie; it does not keep the cache alive.

    table [R, 3] int64 on the device: of each tensor of each layer the address, the bytes of a block, and the bytes before it in
    a staged block, which has staged_bytes.
    """

    table: torch.Tensor
    num_blocks: int
    largest_block: int
    staged_bytes: int


def cache_regions(launcher: Launcher, layers: Sequence[tuple[torch.Tensor, ...]]) -> CacheRegions:
    """layers: the tensors of each, [N, …] contiguous; built once a cache. UnsupportedError for blocks of odd sizes, as the stamps
    of an odd number of heads' states are."""
    rows, staged_bytes, num_blocks = [], 0, layers[0][0].shape[0]
    for tensor in (tensor for layer in layers for tensor in layer):
        check(tensor, launcher, tensor.dtype, num_blocks, *tensor.shape[1:])
        block_bytes = tensor[0].nbytes
        if block_bytes % 16:
            raise UnsupportedError(f"layers that keep {block_bytes} bytes, no multiple of 16, on a GPU", "add --device cpu")
        assert tensor.data_ptr() % 16 == 0, tensor.data_ptr()
        rows.append((tensor.data_ptr(), block_bytes, staged_bytes))
        staged_bytes += block_bytes
    table = torch.tensor(rows, dtype=torch.int64).to(launcher.device)
    return CacheRegions(table, num_blocks, max(row[1] for row in rows), staged_bytes)


def copy_blocks(launcher: Launcher, regions: CacheRegions, pairs: list[tuple[int, int]]) -> None:
    """Copy blocks, (source, target), in all layers. No target is a source, or twice a target: the copies have no order."""
    sources, targets = {source for source, _ in pairs}, {target for _, target in pairs}
    assert len(targets) == len(pairs), pairs
    assert not sources & targets, pairs
    assert all(0 <= block < regions.num_blocks for block in sources | targets), pairs
    if pairs:
        device_pairs = torch.tensor(pairs, dtype=torch.int64).to(launcher.device)
        launcher.launch(
            variant("copy_blocks"), _grid(regions, len(pairs)), (THREADS, 1, 1), (regions.table, device_pairs)
        )


def gather_blocks(launcher: Launcher, regions: CacheRegions, blocks: list[int], staging: torch.Tensor) -> None:
    """staging [len(blocks), staged_bytes] uint8 = those blocks of all layers. It is on the device, or pinned on the host."""
    _swap(launcher, regions, blocks, staging, into_cache=False)


def scatter_blocks(launcher: Launcher, regions: CacheRegions, blocks: list[int], staging: torch.Tensor) -> None:
    """The way back of `gather_blocks`, to the same blocks or others, none of them twice."""
    assert len(set(blocks)) == len(blocks), blocks
    _swap(launcher, regions, blocks, staging, into_cache=True)


def _swap(launcher: Launcher, regions: CacheRegions, blocks: list[int], staging: torch.Tensor, into_cache: bool) -> None:
    assert staging.dtype == torch.uint8, staging.dtype
    assert staging.shape == (len(blocks), regions.staged_bytes), staging.shape
    assert staging.device == launcher.device or staging.is_pinned(), staging.device
    assert staging.is_contiguous()
    assert staging.data_ptr() % 16 == 0
    assert all(0 <= block < regions.num_blocks for block in blocks), blocks
    if blocks:
        device_blocks = torch.tensor(blocks, dtype=torch.int64).to(launcher.device)
        args = (regions.table, device_blocks, staging, np.int64(regions.staged_bytes), np.int32(into_cache))
        launcher.launch(variant("swap_blocks"), _grid(regions, len(blocks)), (THREADS, 1, 1), args)


def _grid(regions: CacheRegions, count: int) -> tuple[int, int, int]:
    return count, regions.table.shape[0], -(-regions.largest_block // CHUNK)


def variant(entry: str) -> Kernel:
    return Kernel("blocks", entry, ())


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [variant("copy_blocks"), variant("swap_blocks")]
