"""The checked front of cpu_compact.py: tensors in, checks, addresses to compiled kernels, tensors out (see cpu.py)."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import ahead, cpu, cpu_compact, simd_compact
from nanovllm_cli.kernels.cpu import address_of, launch, new_tensor
from nanovllm_cli.kernels.simd import TILE_COLUMNS

AVAILABLE = simd_compact.AVAILABLE
_STEPS_PER_ENTRY = 4


def num_bytes(num_rows: int, width: int) -> int:
    """What a `Compact` of this shape takes, if its exponents are few enough."""
    return -(-num_rows // TILE_COLUMNS) * (_record_bytes(width // 2) + (_most_listed(width // 2) + 1) * simd_compact.ENTRY_BYTES)


def _record_bytes(steps: int) -> int:
    return simd_compact.TABLE_BYTES + steps * simd_compact.STEP_BYTES


def _most_listed(steps: int) -> int:
    """Of normally distributed numbers, one pair in 5,000 has an exponent that is not among the 16 most common: room for one in
    256."""
    return max(16, steps // _STEPS_PER_ENTRY)


class Compact:
    """A bf16 weight [num_rows, width], width even, exactly, in 12 bits a number (layout: cpu_compact). All zeros at first."""

    recordable = True

    def __init__(self, num_rows: int, width: int) -> None:
        assert width % 2 == 0
        self.num_rows = num_rows
        self.width = width
        self._steps = width // 2
        tiles = -(-num_rows // TILE_COLUMNS)
        self._most = _most_listed(self._steps)
        self._records = cpu.zeros(tiles * _record_bytes(self._steps), torch.uint8, huge_pages=True)
        self._listed = torch.zeros(tiles, self._most + 1, 2, dtype=torch.int32)
        self._listed[:, 0, 0] = self._steps * TILE_COLUMNS
        self._whole: dict[int, torch.Tensor] = {}
        self._whole_at = torch.zeros(tiles, dtype=torch.int64)

    @property
    def num_bytes(self) -> int:
        return self._records.nbytes + self._listed.nbytes + sum(tile.nbytes for tile in self._whole.values())

    @property
    def num_whole(self) -> int:
        """Tiles of 64 rows with too many different exponents, which are kept in 16 bits as well."""
        return len(self._whole)

    def _addresses(self) -> tuple[int, int, int, int]:
        return self._records.data_ptr(), self._listed.data_ptr(), self._most, self._whole_at.data_ptr()

    def load_rows(self, first_row: int, rows: torch.Tensor) -> None:
        """rows [n, width] bf16 become rows first_row … first_row + n - 1."""
        begin, end = first_row, first_row + rows.shape[0]
        assert 0 <= begin <= end <= self.num_rows
        first, last = begin // TILE_COLUMNS * TILE_COLUMNS, min(self.num_rows, -(-end // TILE_COLUMNS) * TILE_COLUMNS)
        if (first, last) != (begin, end):  # a tile's table is made of all its rows
            rows = torch.cat([self.rows(torch.arange(first, begin)), rows, self.rows(torch.arange(end, last))])
        tiles = range(first // TILE_COLUMNS, -(-last // TILE_COLUMNS))
        overfull = torch.zeros(len(tiles), dtype=torch.int64)
        ints = (
            address_of(rows, torch.bfloat16, last - first, self.width), last - first, self._steps, *self._addresses()[:3],
            tiles.start, overfull.data_ptr(),
        )  # fmt: skip
        launch(cpu_compact.compact_rows, rows.numel(), "", ints)
        for tile, too_many in zip(tiles, overfull.tolist(), strict=True):
            if too_many:
                whole = cpu.zeros(cpu.packed_size(TILE_COLUMNS, self.width, torch.bfloat16), torch.bfloat16)
                cpu.pack_rows(whole, 0, rows[tile * TILE_COLUMNS - first :][:TILE_COLUMNS])
                self._whole[tile], self._whole_at[tile] = whole, whole.data_ptr()
            elif self._whole.pop(tile, None) is not None:
                self._whole_at[tile] = 0

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        """x [T, width] bf16 times it, transposed: [T, num_rows] in out_dtype, bfloat16 or float32. bias [num_rows] in out_dtype.
        To the bit what `cpu.matmul` gives with the same weights in 16 bits."""
        tokens = x.shape[0]
        out = new_tensor((tokens, self.num_rows), out_dtype)
        ints = (
            int(out_dtype == torch.float32), address_of(x, torch.bfloat16, tokens, self.width), tokens, *self._addresses(),
            self.num_rows, self._steps, 0 if bias is None else address_of(bias, out_dtype, self.num_rows), out.data_ptr(),
            ahead.distance(),
        )  # fmt: skip
        launch(cpu_compact.compact_matmul, tokens * self.num_rows * self.width, "", ints)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` [n] int64, as [n, width] bf16. The caller has checked the ids."""
        count = ids.shape[0]
        out = new_tensor((count, self.width), torch.bfloat16)
        ints = (*self._addresses(), address_of(ids, torch.int64, count), count, self._steps, out.data_ptr())
        launch(cpu_compact.expand_rows, count * self.width, "", ints)
        return out
