"""Several residual streams, of which layers compute with one (AltUp, Baykal et al. 2023), and a path of low rank beside attention
(LAuReL, Menghani et al. 2024), as Gemma 3n has both.

    predict   each stream p_k = x_k + sum over j of a_kj x_j             a: what a small router makes of the first stream
    compute   the layer reads p_0 and makes y of it
    correct   x_k = p_k + (1 + b_k) (y - p_0)                            b: the same of y
    then      what the layer has of each token joins all but the first

Streams lie one behind the other, [S, T, hidden]. Before the first layer the others are projections of the embedding, behind the
last one all are projected and their mean is taken; projections get the size of the first stream.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels.ops import Addend
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.streams_spec import StreamsSpec


class Streams:
    """All streams out of one, and one out of all. Legend: S streams, T tokens."""

    def __init__(self, spec: StreamsSpec, hidden_size: int, kit: Kit) -> None:
        self.ops, self.count = kit.ops, spec.count
        self.into = Linear(hidden_size, {f"altup_in.{i}": hidden_size for i in range(spec.count - 1)}, kit)
        self.out_of = [Linear(hidden_size, {f"altup_out.{i}": hidden_size}, kit) for i in range(spec.count - 1)]

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [S, T, hidden]."""
        return self.ops.altup_enter(x, self.into(x))

    def leave(self, streams: torch.Tensor) -> torch.Tensor:
        """[S, T, hidden] -> their mean [T, hidden]. The first stream itself is changed."""
        first = streams[0]
        others = [self.ops.altup_match(out(streams[i + 1]), first) for i, out in enumerate(self.out_of)]
        for i, other in enumerate(others):
            self.ops.add(first, other, 1 / self.count if i == len(others) - 1 else 1.0)
        return first

    def slots(self) -> Slots:
        return {name: slot for linear in (self.into, *self.out_of) for name, slot in linear.slots().items()}


class AltUp:
    """A layer's part of it. Its router and what that decides of are plain and small; sums are fp32."""

    def __init__(self, spec: StreamsSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        count = spec.count
        self.ops, self.factor = kit.ops, 1.0 / hidden_size
        self.norm = RMSNorm(norm, hidden_size, kit)
        self.router = kit.undivided.weight({"altup_router": count}, hidden_size)
        self.to_predict = kit.zeros(count * count, count, dtype=torch.float32)
        self.to_correct = kit.zeros(count, count, dtype=torch.float32)
        self.gains = kit.zeros(hidden_size)
        self.left = Linear(hidden_size, {"laurel_left": spec.rank}, kit)
        self.right = Linear(spec.rank, {"laurel_right": hidden_size}, kit)
        self.laurel_norm = RMSNorm(norm, hidden_size, kit)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """streams become their predictions; the first [T, hidden] comes back as a tensor of its own."""
        return self.ops.altup_predict(streams, self._logits(streams[0]), self.to_predict, self.factor)

    def correct(self, streams: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """streams, predictions, are corrected by what a layer found [T, hidden]; the first comes back times its gains."""
        return self.ops.altup_correct(streams, found, self._logits(found), self.to_correct, self.gains, self.factor)

    def beside(self, h: torch.Tensor) -> Addend:
        """What joins the stream of what attention reads [T, hidden], beside h itself."""
        return self.laurel_norm.before_joining(self.right(self.left(h)))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.router.matmul(self.norm.alone(x), None, torch.float32)

    def slots(self) -> Slots:
        router = WeightSlot((self.router.num_rows, self.router.width), lambda rows, first: self.router.load_rows(first, rows))
        own = {
            "altup_router.weight": router,
            "altup_router_norm.weight": self.norm.slots()["weight"],
            "altup_predict.weight": table_slot(self.to_predict),
            "altup_correct.weight": table_slot(self.to_correct),
            "altup_scale": table_slot(self.gains),
            "laurel_norm.weight": self.laurel_norm.slots()["weight"],
        }
        return own | self.left.slots() | self.right.slots()
