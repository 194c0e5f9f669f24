"""Processes of one machine that compute one model, and the memory they share (kernels/cpu_gather.py).

All do the same steps in the same order, and meet in each. If one is lost the others would wait for it forever: whoever notices
calls `break_off`, from any thread, and nobody waits any more. What is computed from then on is of no use.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from nanovllm_cli.distributed.division import Division
from nanovllm_cli.kernels import cpu_gather
from nanovllm_cli.kernels.cpu import address_of, launch, new_tensor
from nanovllm_cli.kernels.gathers import Gather, gather

AREA_BYTES = 8 << 20


def memory_bytes(size: int) -> int:
    """Of what `size` processes share."""
    return cpu_gather.HEAD_BYTES + 2 * size * AREA_BYTES


class Group:
    """Process number `rank` of `size`. handle: a file of `memory_bytes(size)` zeros that all of them have open."""

    def __init__(self, rank: int, size: int, handle: int) -> None:
        self.rank = rank
        self.size = size
        self._memory = mmap.mmap(handle, memory_bytes(size))
        self._word = ctypes.c_int64.from_buffer(self._memory)
        words = (0, rank, size, AREA_BYTES, ctypes.addressof(self._word))
        self._control = torch.tensor(words, dtype=torch.int64)
        for each, num_arguments in cpu_gather.NUM_ARGUMENTS.items():  # compiled, or loaded, now and not in the midst of a step
            each.step("", (0,) * num_arguments)
        self._pieces: dict[tuple[Division, int], torch.Tensor] = {}

    def break_off(self) -> None:
        """Nobody waits for anybody any more."""
        self._word.value = 1

    @property
    def is_broken(self) -> bool:
        return bool(self._word.value)

    def gather(self, x: torch.Tensor, division: Division, *, only_first: bool = False) -> torch.Tensor:
        """[T, num_rows] of what each process has of its columns: x [T, own_rows]. only_first: the first process gets it, and the
        others anything."""
        tokens, size = x.shape[0], x.itemsize
        out = new_tensor((tokens, division.num_rows), x.dtype)
        own = address_of(x, x.dtype, tokens, division.own_rows(self.rank))
        control, own_bytes, out_bytes = self._control.data_ptr(), x.shape[1] * size, division.num_rows * size
        table, chunk = self._table(division, size), _rows_at_once(division.most_rows * size)
        pieces, gives = (table.data_ptr(), 0 if only_first and self.rank else len(table)), bool(self.rank) or not only_first
        it = Gather(control, own, own_bytes, out.data_ptr(), out_bytes, tokens, *pieces, chunk, int(gives))
        gather(it, in_one=tokens <= 4)  # of few tokens always: they may be an expert's, whose steps have to be alike
        return out

    def own_rows(self, ids: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Which of this process's rows of a table `ids` [T] int64 ask for; any, where they are another one's. bounds [size + 1]
        int64: where the rows of each begin."""
        own = new_tensor((ids.shape[0],), torch.int64)
        first, end = bounds[self.rank : self.rank + 2].tolist()
        launch(cpu_gather.own_rows, 0, "", (address_of(ids, torch.int64, *own.shape), own.data_ptr(), len(own), first, end))
        return own

    def gather_rows(self, x: torch.Tensor, ids: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """[T, width] of rows that one process has each: x alike, as `own_rows` asked for it."""
        out = new_tensor((x.shape[0], x.shape[1]), x.dtype)
        row_bytes = x.shape[1] * x.itemsize
        ints = (
            self._control.data_ptr(), address_of(x, x.dtype, *out.shape), out.data_ptr(), row_bytes, len(out),
            address_of(ids, torch.int64, len(out)), address_of(bounds, torch.int64, self.size + 1), _rows_at_once(row_bytes),
        )  # fmt: skip
        launch(cpu_gather.gather_rows, 0, "", ints)
        return out

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
