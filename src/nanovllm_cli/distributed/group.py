"""Processes of one machine that compute one model, and the memory they share.

All do the same steps in the same order, and meet in each. If one is lost the others would wait for it forever: whoever notices
calls `break_off`, from any thread, and nobody waits any more. What is computed from then on is of no use.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Protocol

import torch

from nanovllm_cli.distributed.division import Division
from nanovllm_cli.kernels import cpu_gather
from nanovllm_cli.kernels.cpu import address_of, launch, new_tensor
from nanovllm_cli.kernels.gathers import Gather, gather

AREA_BYTES = 8 << 20


def memory_bytes(size: int) -> int:
    """Of what `size` processes share."""
    return cpu_gather.HEAD_BYTES + 2 * size * AREA_BYTES


class Meeting:
    """Process number `rank` of `size`, and what it shares with the others: memory, whose first word is not 0 once somebody is
    lost. handle: a file of `memory_bytes(size)` zeros that all of them have open."""

    def __init__(self, rank: int, size: int, handle: int) -> None:
        self.rank = rank
        self.size = size
        self.memory = mmap.mmap(handle, memory_bytes(size))
        self._word = ctypes.c_int64.from_buffer(self.memory)

    @property
    def address(self) -> int:
        """Of the memory."""
        return ctypes.addressof(self._word)

    def break_off(self) -> None:
        """Nobody waits for anybody any more."""
        self._word.value = 1

    @property
    def is_broken(self) -> bool:
        return bool(self._word.value)


class Group(Protocol):
    """How tensors come together on a device. All processes call the same, in the same order."""

    rank: int
    size: int

    def gather(self, x: torch.Tensor, division: Division, *, only_first: bool = False) -> torch.Tensor:
        """[T, num_rows] of what each process has of its columns: x [T, own_rows]. only_first: the first process gets it, and the
        others anything."""

    def table_rows(
        self, division: Division, ids: torch.Tensor, table: torch.Tensor | None, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """[T, width] of a table whose rows are divided, in one section. ids, table: see `WeightStorage.rows`. own: gives those of
        this process's rows that it is asked for by number, with anything for -1."""


class CpuGroup:
    """See Group (kernels/cpu_gather.py)."""

    def __init__(self, meeting: Meeting) -> None:
        self.rank, self.size = meeting.rank, meeting.size
        self._meeting = meeting  # whose memory this is
        words = (0, self.rank, self.size, AREA_BYTES, meeting.address)
        self._control = torch.tensor(words, dtype=torch.int64)
        for each, num_arguments in cpu_gather.NUM_ARGUMENTS.items():  # compiled, or loaded, now and not in the midst of a step
            each.step("", (0,) * num_arguments)
        self._pieces: dict[tuple[Division, int], torch.Tensor] = {}
        self._bounds: dict[Division, torch.Tensor] = {}

    def gather(self, x: torch.Tensor, division: Division, *, only_first: bool = False) -> torch.Tensor:
        tokens, size = x.shape[0], x.itemsize
        out = new_tensor((tokens, division.num_rows), x.dtype)
        own = address_of(x, x.dtype, tokens, division.own_rows(self.rank))
        control, own_bytes, out_bytes = self._control.data_ptr(), x.shape[1] * size, division.num_rows * size
        table, chunk = self._table(division, size), _rows_at_once(division.most_rows * size)
        pieces, gives = (table.data_ptr(), 0 if only_first and self.rank else len(table)), bool(self.rank) or not only_first
        it = Gather(control, own, own_bytes, out.data_ptr(), out_bytes, tokens, *pieces, chunk, int(gives))
        gather(it, in_one=tokens <= 4)  # of few tokens always: they may be an expert's, whose steps have to be alike
        return out

    def table_rows(
        self, division: Division, ids: torch.Tensor, table: torch.Tensor | None, own: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        assert table is None, "a CPU's tokens are all known"
        count, begins = ids.shape[0], self._begins(division)
        mine = new_tensor((count,), torch.int64)
        first, end = begins[self.rank : self.rank + 2].tolist()
        launch(cpu_gather.own_rows, 0, "", (address_of(ids, torch.int64, count), mine.data_ptr(), count, first, end))
        x = own(mine)
        out = new_tensor((count, x.shape[1]), x.dtype)
        row_bytes = x.shape[1] * x.itemsize
        ints = (
            self._control.data_ptr(), address_of(x, x.dtype, *out.shape), out.data_ptr(), row_bytes, count,
            address_of(ids, torch.int64, count), begins.data_ptr(), _rows_at_once(row_bytes),
        )  # fmt: skip
        launch(cpu_gather.gather_rows, 0, "", ints)
        return out

    def _begins(self, division: Division) -> torch.Tensor:
        if division not in self._bounds:
            self._bounds[division] = torch.tensor(division.begins, dtype=torch.int64)
        return self._bounds[division]

    def _table(self, division: Division, itemsize: int) -> torch.Tensor:
        key = division, itemsize
        if key not in self._pieces:
            rows = [
                (division.own_rows(rank) * itemsize, own * itemsize, whole * itemsize, num * itemsize, rank)
                for rank, own, whole, num in division.pieces
            ]
            self._pieces[key] = torch.tensor(rows, dtype=torch.int64)
        return self._pieces[key]


def _rows_at_once(row_bytes: int) -> int:
    """For which an area has room."""
    rows = AREA_BYTES // row_bytes
    assert rows, "a row of megabytes"
    return rows
