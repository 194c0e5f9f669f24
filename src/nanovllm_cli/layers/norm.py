"""RMS norm or layer norm, alone or together with the addition to the residual stream before it, and layer norm of the stream
itself."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Addend, Hidden, Normed, Ops
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.norm_spec import NormSpec


class RMSNorm:
    """out = residual' / rms(residual') * (offset + weight), residual' = residual + x, kept in `residual`. x may be None. Centered
    where the spec says so, and shifted."""

    def __init__(self, spec: NormSpec, width: int, kit: Kit) -> None:
        self.spec = spec.at(width)
        self.ops = kit.ops
        self.weight = kit.zeros(width).fill_(spec.first_gain)
        self.bias = kit.zeros(width) if spec.shifted else None

    def __call__(self, x: Addend | None, residual: torch.Tensor) -> Hidden:
        spec = self.spec
        if spec.groups > 1:
            if x is not None:
                self.ops.join(x, residual)
            return self.alone(residual)
        return self.ops.add_rms_norm(x, residual, self.weight, spec.eps, spec.offset, spec.centered, self.bias)

    def before_joining(self, x: torch.Tensor, factor: float = 1.0) -> Addend:
        """The norm of x, which whoever reads the residual stream next has to take and to add."""
        assert not self.spec.centered, "no model centers what joins"
        assert self.spec.groups == 1, "nor has it parts"
        return Addend(Normed(x, self.weight, self.spec.eps, self.spec.offset), factor)

    def alone(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, which joins no residual stream yet. Its rows may be parts of one that is as wide as the gains."""
        assert not self.spec.centered, "nor what does not"
        parts = x if self.spec.groups == 1 else x.view(-1, self.weight.shape[0] // self.spec.groups)
        return self.ops.rms_norm(parts, self.weight, self.spec.eps, self.spec.offset).view(x.shape)

    def slots(self) -> Slots:
        gains = {"weight": table_slot(self.weight, self.spec.stored_offset)} if self.spec.gains else {}
        return gains | _bias_slot(self.bias)


class StreamNorm:
    """stream = (stream + x - mean) / deviation * weight + bias, in its place. x may be None."""

    def __init__(self, spec: NormSpec, width: int, kit: Kit) -> None:
        assert spec.centered, "no model has a norm of squares there"
        assert spec.gains, "nor one without gains"
        self.eps, self.ops = spec.eps, kit.ops
        self.weight = kit.zeros(width).fill_(1)
        self.bias = kit.zeros(width) if spec.shifted else None

    def __call__(self, x: torch.Tensor | None, stream: torch.Tensor) -> None:
        self.ops.norm_sum(x, stream, self.weight, self.bias, self.eps)

    def slots(self) -> Slots:
        return {"weight": table_slot(self.weight)} | _bias_slot(self.bias)


def norm_heads(x: torch.Tensor, gains: torch.Tensor, dim: int, eps: float, offset: float, ops: Ops) -> None:
    """Each head of `dim` columns of x [T, n], which may be columns of a wider tensor, in its place. gains: for one head, or for
    several that heads take turns at."""
    heads = ops.room(len(x), x.shape[1], x.dtype)
    ops.put_columns(x, heads, 0)
    ops.put_columns(ops.rms_norm(heads.view(-1, dim), gains, eps, offset).view(heads.shape), x, 0)


def _bias_slot(bias: torch.Tensor | None) -> Slots:
    return {} if bias is None else {"bias": table_slot(bias)}
