"""What lies between stacks of layers that are gone through several times: see `PassesSpec` and `LoopSpec`."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Addend, Ops, plain
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.passes_spec import LoopSpec, PassesSpec


class Passes:
    """A step begins with `begin`, and goes on behind each run but the last with `join`."""

    def __init__(self, spec: PassesSpec, norm: NormSpec, width: int, kit: Kit) -> None:
        assert not norm.gains, "no model has gains there"
        assert spec.between == "sums"
        self.ops, self.joints = kit.ops, spec.joints
        self.norm = RMSNorm(norm, width, kit)
        self.first_fast = kit.zeros(width, dtype=torch.float32)
        self._slow, self._fast = torch.empty(0), torch.empty(0)

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """embedded [T, width] -> what the first run reads."""
        self._slow = embedded
        stream = _copied(embedded, self.ops)
        self.ops.add_row(stream, self.first_fast)
        return stream

    def join(self, place: int, x: Addend | None, residual: torch.Tensor) -> torch.Tensor:
        """What the next run reads, of the residual stream [T, width] that the one in front of this place leaves."""
        made = plain(self.norm(x, residual), self.ops)
        if self.joints[place]:
            self._slow = made
        else:
            self._fast = made
        return self.ops.add(_copied(made, self.ops), self._fast if self.joints[place] else self._slow)

    def slots(self) -> Slots:
        return {"passes.first_fast": table_slot(self.first_fast)}


class NormedPasses:
    """The same of a spec whose streams go through the model's last norm instead, which has its slots."""

    def __init__(self, spec: PassesSpec, norm: RMSNorm, kit: Kit) -> None:
        assert spec.between == "norm"
        self.ops, self.joints, self.norm = kit.ops, spec.joints, norm

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded

    def join(self, place: int, x: Addend | None, residual: torch.Tensor) -> torch.Tensor:
        return plain(self.norm(x, residual), self.ops)

    def slots(self) -> Slots:
        return {}


class Loops:
    """The same of layers that are gone through several times between others."""

    def __init__(self, spec: LoopSpec, norm: NormSpec, width: int, kit: Kit) -> None:
        assert norm.unit, "no model sums up others"
        self.ops, self.joints, self.first = kit.ops, spec.joints, spec.first
        self.norm = RMSNorm(norm, width, kit)
        self._entered = torch.empty(0)

    def begin(self, embedded: torch.Tensor) -> torch.Tensor:
        """embedded [T, width], which the first layers read as it is."""
        return embedded

    def join(self, place: int, x: Addend | None, residual: torch.Tensor) -> torch.Tensor:
        """What is read next of the residual stream [T, width] in front of this place. The first time there is what has been left
        itself: twice a row of length 1, normed."""
        assert x is None, "on a sphere all has joined"
        if place == self.first:
            self._entered = _copied(residual, self.ops)
            return residual
        return plain(self.norm(Addend(self._entered), residual), self.ops)

    def slots(self) -> Slots:
        return {}


def passes_of(
    spec: PassesSpec | LoopSpec | None, norm: NormSpec, last: RMSNorm | None, width: int, kit: Kit
) -> Passes | NormedPasses | Loops | None:
    """norm: of layers. last: the model's last one."""
    if isinstance(spec, LoopSpec):
        return Loops(spec, norm, width, kit)
    if spec is None or spec.between == "nothing":
        return None
    if spec.between == "sums":
        return Passes(spec, norm, width, kit)
    assert last is not None, "no model without one has such passes"
    return NormedPasses(spec, last, kit)


def _copied(rows: torch.Tensor, ops: Ops) -> torch.Tensor:
    """Streams are changed in place, and these are still read."""
    copy = ops.room(rows.shape[0], rows.shape[1], rows.dtype)
    ops.put_columns(rows, copy, 0)
    return copy
