"""RWKV-7's time mixing of a block, and what its MLP reads: projections around a backend that keeps a state of each sequence.

Which rows of a table are which shares of the token before is a checkpoint's order: r, w, k, v, a and g.
"""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden, plain
from nanovllm_cli.kernels.wkv import CHANNEL, TIME, WkvInputs
from nanovllm_cli.kernels.wkv_rules import TABLES
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.state_spec import WkvSpec

SHARES = ("r", "w", "k", "v", "a", "g")


class FirstValues:
    """What a step's first layer leaves to the others: its values [T, V * D]."""

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None


class TimeMix(Projected):
    """See `WkvSpec`. What decays, rates, values and gates are made of goes through two narrow matrices each, which stay plain and
    whole, as they are small and much depends on them. first: shared by all layers of a model."""

    def __init__(self, spec: WkvSpec, hidden_size: int, kit: Kit) -> None:
        self.spec, self.backend, self.ops, self.dtype = spec, kit.backend, kit.ops, kit.dtype
        self.first = FirstValues()
        whole, values = kit.undivided, spec.values
        self.r, self.k, self.v = (Linear(hidden_size, {f"time_{part}": values}, kit) for part in "rkv")
        ranks = {"w": spec.decay_rank, "a": spec.rate_rank, "v": spec.value_rank, "g": spec.gate_rank}
        self.narrow = {part: (Linear(hidden_size, {f"time_{part}1": rank}, whole), Linear(rank, {f"time_{part}2": values}, whole))
                       for part, rank in ranks.items() if part != "v" or not spec.is_first}  # fmt: skip
        self.shares = kit.zeros(len(SHARES), hidden_size, dtype=torch.float32)
        self.tables = kit.zeros(len(TABLES), values, dtype=torch.float32)
        self.out = Linear(values, {"time_out": hidden_size}, kit)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        spec, step, f32 = self.spec, inputs.step, torch.float32
        shifted = self.backend.shift(spec, plain(x, self.ops), self.shares, TIME, cache, step)
        of = {part: shifted[i] for i, part in enumerate(SHARES)}
        v = self.v(of["v"])
        if spec.is_first:
            self.first.rows = v
        (w1, w2), (a1, a2), (g1, g2) = (self.narrow[part] for part in "wag")
        decays = w2.weight.matmul(self.ops.squash(w1.weight.matmul(of["w"], None, f32), "tanh", self.dtype), None, f32)
        gates = g2(self.ops.squash(g1.weight.matmul(of["g"], None, f32), "sigmoid", self.dtype))
        rates, mixes = a2.weight.matmul(a1(of["a"]), None, f32), None
        if not spec.is_first:
            assert self.first.rows is not None, "the first layer has left them"
            v1, v2 = self.narrow["v"]
            mixes = v2.weight.matmul(v1(of["v"]), None, f32)
        first = None if spec.is_first else self.first.rows
        read = WkvInputs(self.r(of["r"]), self.k(of["k"]), v, gates, decays, rates, mixes, first)
        return self.backend.advance(spec, read, self.tables, cache, step)

    def slots(self) -> Slots:
        linears = (self.r, self.k, self.v, *(each for both in self.narrow.values() for each in both), self.out)
        shares = {f"share_{part}": table_slot(row) for part, row in zip(SHARES, self.shares, strict=True)}
        named = zip(TABLES, self.tables, strict=True)
        tables = {name: table_slot(row) for name, row in named if name != "value" or not self.spec.is_first}
        slots = {name: slot for each in linears for name, slot in each.slots().items()}
        return slots | {f"time.{name}": slot for name, slot in (shares | tables).items()}


class ChannelShift:
    """What the MLP behind it reads: a share of each column is that of the token before."""

    def __init__(self, spec: WkvSpec, hidden_size: int, kit: Kit) -> None:
        self.spec, self.backend, self.ops = spec, kit.backend, kit.ops
        self.shares = kit.zeros(1, hidden_size, dtype=torch.float32)

    def __call__(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        return self.backend.shift(self.spec, plain(x, self.ops), self.shares, CHANNEL, cache, inputs.step)[0]

    def slots(self) -> Slots:
        return {"channel.share_k": table_slot(self.shares[0])}
