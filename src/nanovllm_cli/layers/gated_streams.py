"""Gated residual streams (Qwen4-Exp): attention and MLP read a mean of several, and to each of these what they make is added
times a weight of a token's own.

    n_s     norm(x_s)                                       x_s: a stream of a token; n: all of its norms, one behind the other
    read    mean over s of sigmoid((up @ silu(down @ n / S))_s) n_s
    write   x_s += 2 sigmoid((inject @ n)_s / S) y          y: what attention or MLP has made of what was read

Streams lie one behind the other, [S, T, hidden]. All begin as the embedding; behind the last layer they are read once more, which
is the model's last norm. What is read is normed already.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Ops
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.streams_spec import GatedStreamsSpec


class GatedConnection:
    """Of one half of a layer; without writes of what stands behind all layers. Legend: S streams, T tokens."""

    def __init__(
        self, spec: GatedStreamsSpec, norm: NormSpec, hidden_size: int, kit: Kit, name: str, *, writes: bool = True
    ) -> None:
        width = spec.count * hidden_size
        self.name, self.norm, self.count = name, norm, spec.count
        self.ops: Ops = kit.ops
        self.gains = kit.zeros(width)
        self.down = Linear(width, {f"{name}.down": spec.rank}, kit)
        self.up = Linear(spec.rank, {f"{name}.up": width}, kit)
        self.inject = Linear(width, {f"{name}.inject": spec.count}, kit) if writes else None

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, T, hidden] -> what a half of the layer reads [T, hidden], and by what weights it writes [T, S or 0] fp32."""
        normed = self.ops.norm_streams(streams, self.gains, self.norm.eps, self.norm.offset)
        inner = self.ops.scale(self.down(normed), 1 / self.count)
        gates = self.up(self.ops.sigmoid_gate(inner, inner))  # a SiLU of each
        weights = None if self.inject is None else self.inject.weight.matmul(normed, None, torch.float32)
        mixed = self.ops.mix_streams(normed, gates, self.count, weights)
        return mixed, self.ops.room(len(mixed), 0, torch.float32) if weights is None else weights

    def slots(self) -> Slots:
        linears = (self.down, self.up) if self.inject is None else (self.down, self.up, self.inject)
        norm = {f"{self.name}.norm.weight": table_slot(self.gains, self.norm.stored_offset)}
        return norm | {name: slot for each in linears for name, slot in each.slots().items()}
