"""Adapters beside a weight on a CPU: their narrow matrices, packed, and what rows add of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nanovllm_cli.kernels import cpu, cpu_adapters
from nanovllm_cli.kernels.cpu_adapters import SIDE_FIELDS
from nanovllm_cli.kernels.simd import TILE_COLUMNS
from nanovllm_cli.kernels.simd_ir import LANES

_COLUMNS = 256
"""Of a task: a row's numbers lie behind each other, and memory is read ahead along them."""


class Side:
    """One adapter: down [rank, K] and up [N, rank], of a type that is computed in; rank a multiple of 16. module: its column in
    the table of what rows take."""

    def __init__(self, down: torch.Tensor, up: torch.Tensor, module: int) -> None:
        self.rank, self.module = down.shape[0], module
        assert up.shape[1] == self.rank, (up.shape, self.rank)
        assert self.rank % LANES == 0, self.rank
        self.down = _narrow(down)
        self.up, self.spans = _reaching(up)

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


class Sides:
    """Those of a weight, in the order in which they are added. dtype: what is computed in."""

    def __init__(self, sides: Sequence[Side], width: int, dtype: torch.dtype) -> None:
        self._sides = sides
        self._width = width
        self._dtype = dtype
        starts = np.cumsum([0, *(side.rank for side in sides)])
        self._ranks = int(starts[-1])
        rows = [
            (side.down.data_ptr(), side.up.data_ptr(), side.rank, int(start), side.module, side.spans.data_ptr())
            for side, start in zip(sides, starts, strict=False)
        ]
        self._table = torch.tensor(rows, dtype=torch.int64)
        assert self._table.shape == (len(sides), SIDE_FIELDS)

    @property
    def num_bytes(self) -> int:
        return sum(side.num_bytes for side in self._sides)

    @property
    def recordable(self) -> bool:
        return cpu.recordable(self._width, self._dtype)

    def ranks(self, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """What is between the two products: of each row of x [T, K] that takes of a side, its columns. scales [T, modules] fp32;
        without one every row takes all of every side."""
        x = cpu.paired(x)
        tokens, width = x.shape
        found = cpu.new_tensor((tokens, self._ranks), self._dtype)
        groups = max(side.rank for side in self._sides) // LANES
        ints = (
            cpu.address_of(x, self._dtype, tokens, width), tokens, width * x.element_size(), width * x.element_size() // 4,
            self._table.data_ptr(), len(self._sides), groups, *_chosen(scales, tokens), found.data_ptr(), self._ranks,
        )  # fmt: skip
        cpu.launch(cpu_adapters.down, tokens * width * self._ranks, cpu.tags_of(self._dtype), ints)
        return found

    def onto(self, y: torch.Tensor, ranks: torch.Tensor, scales: torch.Tensor | None) -> None:
        """y [T, N] += what its rows take."""
        tokens, n = y.shape
        ints = (
            self._table.data_ptr(), len(self._sides), *_chosen(scales, tokens),
            cpu.address_of(ranks, self._dtype, tokens, self._ranks), self._ranks,
            cpu.address_of(y, y.dtype, tokens, n), tokens, n, _COLUMNS,
        )  # fmt: skip
        cpu.launch(cpu_adapters.up, tokens * n * self._ranks, cpu.tags_of(self._dtype, y.dtype), ints)


def _chosen(scales: torch.Tensor | None, tokens: int) -> tuple[int, int]:
    """Address and width of the table, or none."""
    return (0, 0) if scales is None else (cpu.address_of(scales, torch.float32, tokens, scales.shape[1]), scales.shape[1])


def _narrow(down: torch.Tensor) -> torch.Tensor:
    """Sixteen ranks side by side, a word of each behind the last one's."""
    down = cpu.paired(down)
    a_step = 4 // down.element_size()
    return down.view(-1, LANES, down.shape[1] // a_step, a_step).transpose(1, 2).contiguous()


def _reaching(up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What of up [N, rank] is not zeros, for 64 outputs after another; and its spans."""
    a_step = 4 // up.element_size()
    parts, spans, place = [], [], 0
    for rows in torch.split(up, TILE_COLUMNS):
        used = rows.count_nonzero(0).nonzero()[:, 0].tolist()
        begin, end = (used[0] // a_step, used[-1] // a_step + 1) if used else (0, 0)
        reached = torch.zeros(TILE_COLUMNS, (end - begin) * a_step, dtype=up.dtype)
        reached[: len(rows)] = rows[:, begin * a_step : end * a_step]
        parts.append(reached.view(TILE_COLUMNS, -1, a_step).transpose(0, 1).flatten())
        spans.append((place, begin, end - begin))
        place += end - begin
    return torch.cat(parts), torch.tensor(spans, dtype=torch.int64)
