"""Processes that compute one model on a GPU each."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.distributed.division import Division
from nanovllm_cli.distributed.group import AREA_BYTES, Meeting
from nanovllm_cli.kernels import cpu_gather, peers
from nanovllm_cli.kernels.device import Device

_SHOWN_BYTES = AREA_BYTES - peers.HEAD_BYTES // 2
"""Of each area: the flags before both take their part."""


class CudaGroup:
    """See Group (kernels/peers.cu). What the GPUs show each other lies in the machine's memory, which each of them reads and
    writes across its bus: so it goes on any machine."""

    def __init__(self, meeting: Meeting, device: Device) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._launcher = device.launcher
        self._seen = device.shared_pages(meeting.memory)
        base = self._seen.data_ptr()
        regions = [base + cpu_gather.HEAD_BYTES + 2 * rank * AREA_BYTES for rank in range(self.size)]
        self._here = peers.peers(self._launcher, base, self.rank, regions, _SHOWN_BYTES)
        self._columns: dict[tuple[Division, int], peers.Columns] = {}
        self._bounds: dict[Division, torch.Tensor] = {}

    def gather(
        self, x: torch.Tensor, division: Division, *, only_first: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """out: where it goes, if not into memory of its own."""
        key = division, x.itemsize
        if key not in self._columns:
            pieces = [(piece.rank, piece.own, piece.whole, piece.num) for piece in division.pieces]
            self._columns[key] = peers.columns(self._launcher, pieces, self.size, division.num_rows, x.itemsize)
        is_first = self.rank == 0
        gives, takes = not (only_first and is_first), is_first or not only_first
        return peers.gather(self._launcher, self._here, x, self._columns[key], gives=gives, takes=takes, out=out)

    def own_columns(self, x: torch.Tensor, division: Division) -> torch.Tensor:
        """A copy [T, own_rows] of this process's columns of x [T, num_rows], of one section."""
        first, end = division.begins[self.rank : self.rank + 2]
        own = torch.empty((x.shape[0], end - first), dtype=x.dtype, device=x.device)
        self._launcher.torch_op(lambda: own.copy_(x[:, first:end]))
        return own

    def table_rows(
        self, division: Division, ids: torch.Tensor, table: torch.Tensor | None, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if division not in self._bounds:
            self._bounds[division] = torch.tensor(division.begins, dtype=torch.int64).to(self._launcher.device)
        mine, whose = peers.find_rows(self._launcher, self._here, self._bounds[division], ids, table)
        return peers.gather_rows(self._launcher, self._here, own(mine), whose)
