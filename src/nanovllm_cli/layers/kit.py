"""Kit: what layers are made of on one device. They get it in their constructor and know nothing else of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm_cli.attention.backend import AttentionBackend
from nanovllm_cli.distributed.division import Division
from nanovllm_cli.distributed.group import Group
from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.quant.storage import WeightStorage


class Cut(NamedTuple):
    """How a weight is divided among processes. sections: its rows, each of which is divided alike; units: what a section is made
    of and no process has a part of, None for rows. gathers: products are whole; else a process gets its own columns."""

    sections: tuple[int, ...]
    units: int | None = None
    gathers: bool = True


class Share(NamedTuple):
    """A process's part of a weight; gathers: see `Cut`."""

    division: Division
    gathers: bool


MakeStorage = Callable[[dict[str, int], int, Share | None], WeightStorage]
"""(rows of each part by its full name, width, what of them is kept here if not all) -> an empty weight of these parts behind
each other, each in its format."""


class Kit(NamedTuple):
    """dtype: of activations, norms and biases. place: what the names of weights made here begin with. group: the processes that
    compute the model together, if there are several."""

    dtype: torch.dtype
    make: MakeStorage
    ops: Ops
    backend: AttentionBackend
    place: str = ""
    group: Group | None = None

    def at(self, place: str) -> Kit:
        """The kit for a part of the model."""
        return self._replace(place=f"{self.place}{place}.")

    def weight(self, parts: dict[str, int], width: int, cut: Cut | None = None) -> WeightStorage:
        """A weight whose parts are the slots "<name>.weight" of this place. Among several processes it is divided as cut says,
        or each part by itself; where that is too little for each, all have the whole."""
        named = {f"{self.place}{name}.weight": rows for name, rows in parts.items()}
        if self.group is None:
            return self.make(named, width, None)
        cut = cut or Cut(tuple(parts.values()))
        division = Division(cut.sections, self.group.size, cut.units)
        is_divided = not cut.gathers or division.is_worth_it()
        return self.make(named, width, Share(division, cut.gathers) if is_divided else None)

    @property
    def undivided(self) -> Kit:
        """The kit for what all processes have, as it is small."""
        return self._replace(group=None)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A table on the device, of the kit's dtype."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.ops.device)
