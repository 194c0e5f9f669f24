"""Kit: what layers are made of on one device. They get it in their constructor and know nothing else of the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nanovllm_cli.attention.backend import AttentionBackend
from nanovllm_cli.distributed.division import Division, Gathers
from nanovllm_cli.distributed.group import Group
from nanovllm_cli.distributed.heads import Mixer, own_mixer, own_units
from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.mixer_spec import MixerSpec
from nanovllm_cli.quant.low_rank import Chosen
from nanovllm_cli.quant.storage import WeightStorage


class Cut(NamedTuple):
    """How a weight is divided among processes. sections: its rows, each of which is divided alike; units: what a section is made
    of and no process has a part of, None for rows. gathers: who gets whole products; "none": each process its own columns."""

    sections: tuple[int, ...]
    units: int | None = None
    gathers: Gathers = "all"


class Share(NamedTuple):
    """A process's part of a weight; gathers: see `Cut`."""

    division: Division
    gathers: Gathers


MakeStorage = Callable[[dict[str, int], int, Share | None], WeightStorage]
"""(rows of each part by its full name, width, what of them is kept here if not all) -> an empty weight of these parts behind
each other, each in its format."""


class Kit(NamedTuple):
    """dtype: of activations, norms and biases. place: what the names of weights made here begin with. group: the processes that
    compute the model together, if there are several. chosen: tells weights which adapters rows take, where requests choose."""

    dtype: torch.dtype
    make: MakeStorage
    ops: Ops
    backend: AttentionBackend
    place: str = ""
    group: Group | None = None
    chosen: Chosen | None = None

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
        is_divided = cut.gathers == "none" or division.is_worth_it()
        return self.make(named, width, Share(division, cut.gathers) if is_divided else None)

    def own_units(self, mixer: MixerSpec) -> range | None:
        """See `heads.own_units`."""
        return None if self.group is None else own_units(mixer, self.group.rank, self.group.size)

    def own_mixer(self, mixer: Mixer) -> Mixer:
        """See `heads.own_mixer`."""
        return mixer if self.group is None else own_mixer(mixer, self.group.rank, self.group.size)

    def gathering(self, columns: int, units: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes rows of so many columns whole, of which each process has its units'."""
        assert self.group is not None
        group, division = self.group, Division((columns,), self.group.size, units)
        return lambda own: group.gather(own, division)

    @property
    def undivided(self) -> Kit:
        """The kit for what all processes have, as it is small."""
        return self._replace(group=None)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A table on the device, of the kit's dtype."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.ops.device)
