"""Blocks of a KV cache on a GPU, as they are copied and swapped."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels import blocks
from nanovllm_cli.kernels.kernel import Launcher


class CudaBlocks:
    """A BlockMover."""

    def __init__(self, launcher: Launcher, layers: list[LayerCache]) -> None:
        self._launcher = launcher
        self._regions = blocks.cache_regions(launcher, layers)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        blocks.copy_blocks(self._launcher, self._regions, pairs)

    def take_out(self, which: list[int]) -> torch.Tensor:
        staging = torch.empty(len(which), self._regions.staged_bytes, dtype=torch.uint8, device=self._launcher.device)
        blocks.gather_blocks(self._launcher, self._regions, which, staging)
        return staging.cpu()

    def put_in(self, which: list[int], data: torch.Tensor) -> None:
        blocks.scatter_blocks(self._launcher, self._regions, which, data.to(self._launcher.device))
