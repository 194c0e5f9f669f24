"""A weight of which each of several processes has some rows; the others' part of its products comes from them."""

from __future__ import annotations

import torch

from nanovllm_cli.distributed.division import Division, Gathers
from nanovllm_cli.distributed.group import Group
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.rows import QuantizedRows, num_rows, take_rows
from nanovllm_cli.quant.storage import WeightStorage


class Divided:
    """A WeightStorage. own: this process's rows, as `division` has them. gathers: whether products are whole, on all processes or
    on the first; else whoever asks for them gets this process's columns. dtype: what is computed in."""

    def __init__(self, own: WeightStorage, division: Division, group: Group, dtype: torch.dtype, gathers: Gathers) -> None:
        self.num_rows, self.width = division.num_rows, own.width
        self._own = own
        self._division = division
        self._group = group
        self._dtype = dtype
        self._gathers = gathers
        self._ranges = division.ranges(group.rank)
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    @property
    def recordable(self) -> bool:
        return self._own.recordable

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        place = 0
        for own in self._ranges:
            wanted = range(max(own.start, first_row), min(own.stop, first_row + num_rows(rows)))
            if wanted:
                taken = take_rows(rows, slice(wanted.start - first_row, wanted.stop - first_row))
                self._own.load_rows(place + wanted.start - own.start, taken)
            place += len(own)

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        return self._whole(self._own.matmul(x, self._own_part(bias), out_dtype), self._division)

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return self._whole(self._own.gated_matmul(x, self._own_part(bias), activation), self._of_values)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        return self.matmul(x, bias, self._dtype)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return self._group.table_rows(self._division, ids, table, lambda own: self._own.rows(own, None))

    @property
    def _of_values(self) -> Division:
        """Of what an activation leaves of a product."""
        values, *gates = self._division.sections
        assert gates in ([], [values]), "a gate for each value, or none"
        return Division((values,), self._division.size, self._division.units)

    def _whole(self, own: torch.Tensor, division: Division) -> torch.Tensor:
        return own if self._gathers == "none" else self._group.gather(own, division, only_first=self._gathers == "first")

    def _own_part(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Of a bias, which is always the same one and does not change."""
        if bias is None:
            return None
        if self._bias is None or self._bias[0] is not bias:
            self._bias = bias, torch.cat([bias[own.start : own.stop] for own in self._ranges])
        return self._bias[1]
