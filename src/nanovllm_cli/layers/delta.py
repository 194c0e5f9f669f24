"""The gated delta rule of a block, with a decay a head or a channel, and Mamba-2's: projections around a backend that keeps a
state of each sequence."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch

from nanovllm_cli.attention.backend import DeltaWeights, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.states import ByChannel
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows, num_rows, take_rows
from nanovllm_cli.state_spec import DeltaSpec


class Delta(Projected):
    """See `DeltaSpec`. What decides how much of a state is kept and changed (b, a) has plain weights: it is little, and all that
    comes later depends on it. Where several processes compute the model, each has some of the heads, and their states."""

    def __init__(self, spec: DeltaSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec, self._whole = kit.own_mixer(spec), spec
        self.backend = kit.backend
        assert not spec.mamba, "see Mamba"
        self._own, self._gather, cut, gates_cut = kit.own_units(spec), None, None, None
        if self._own is not None:
            cut = Cut((spec.keys, spec.keys, spec.values, spec.values), spec.num_keys, "none")
            gates_cut = Cut((spec.num_values,) * 2, spec.num_keys, "none")
            self._gather = kit.gathering(spec.values, spec.num_keys)
        self.projection = Linear(hidden_size, read_parts(spec) | {"delta_z": spec.values}, kit, cut=cut)
        gates = kit if gates_cut else kit.undivided
        self.gates = Linear(hidden_size, {"delta_b": spec.num_values, "delta_a": spec.num_values}, gates, cut=gates_cut)
        decay, decay_bias = kit.zeros(2, spec.num_values, dtype=torch.float32)
        gains = kit.zeros(spec.value_dim, dtype=torch.float32)
        self.weights = DeltaWeights(kit.zeros(spec.width, spec.channels), decay, decay_bias, gains, spec.eps or norm.eps)
        self.out = Linear(spec.values, {"delta_out": hidden_size}, kit)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        gates = self.gates.weight.matmul(x, None, torch.float32)
        found = self.backend.recur(self.spec, self.projection(x), gates, self._own_weights, cache, inputs.step)
        return found if self._gather is None else self._gather(found)

    @cached_property
    def _own_weights(self) -> DeltaWeights:
        """Those of the heads that are computed here, once all are there."""
        if self._own is None:
            return self.weights
        whole, own = self._whole, self._own
        ratio, keys = whole.num_values // whole.num_keys, whole.num_keys * whole.key_dim
        values = slice(own.start * ratio, own.stop * ratio)
        a_key, a_value = whole.key_dim, ratio * whole.value_dim
        sections = (0, a_key), (keys, a_key), (2 * keys, a_value)
        taps = [self.weights.taps[:, first + own.start * size : first + own.stop * size] for first, size in sections]
        decays = self.weights.decay[values], self.weights.decay_bias[values]
        return self.weights._replace(taps=torch.cat(taps, dim=1), decay=decays[0], decay_bias=decays[1])

    def slots(self) -> Slots:
        linears = self.projection.slots() | self.gates.slots() | self.out.slots()
        return linears | tables_of(self._whole, self.weights)


class ChannelDelta(Projected):
    """`DeltaSpec` with a channel_rank. What decays are made of, and gates of outputs, goes through two narrow matrices each,
    which stay plain and whole, as they are small; or through one, which stays whole, and plain where decays are made of it."""

    def __init__(self, spec: DeltaSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        assert spec.channel_rank
        assert spec.apart
        self.spec = spec
        self.backend = kit.backend
        rank, decays, whole = spec.channel_rank, spec.num_values * spec.key_dim, kit.undivided
        self.projection = Linear(hidden_size, read_parts(spec), kit)
        self.betas = Linear(hidden_size, {"delta_b": spec.num_values}, whole)
        self.rates, self.z = (
            [Linear(hidden_size, {name: size}, whole)] if spec.at_once
            else [Linear(hidden_size, {f"{name}_a": rank}, whole), Linear(rank, {f"{name}_b": size}, whole)]
            for name, size in (("delta_f", decays), ("delta_g", spec.values))
        )  # fmt: skip
        decay, decay_bias, gains = (kit.zeros(size, dtype=torch.float32) for size in (spec.num_values, decays, spec.value_dim))
        self.weights = DeltaWeights(kit.zeros(spec.width, spec.channels), decay, decay_bias, gains, spec.eps or norm.eps)
        self.out = Linear(spec.values, {"delta_out": hidden_size}, kit)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        betas = self.betas.weight.matmul(x, None, torch.float32)
        between, z = x, x
        for narrow in self.rates[:-1]:
            between = narrow(between)
        for each in self.z:
            z = each(z)
        assert isinstance(z, torch.Tensor), "what a matrix gives"
        apart = ByChannel(self.rates[-1].weight.matmul(between, None, torch.float32), z, self.spec.floor)
        return self.backend.recur(self.spec, self.projection(x), betas, self.weights, cache, inputs.step, apart)

    def slots(self) -> Slots:
        linears = {name: slot for each in (self.projection, self.betas, *self.rates, *self.z, self.out)
                   for name, slot in each.slots().items()}  # fmt: skip
        return linears | tables_of(self.spec, self.weights)


def read_parts(spec: DeltaSpec) -> dict[str, int]:
    """Rows of what makes queries, keys and values, by name, as a checkpoint has it."""
    if not spec.apart:
        return {"delta_qkv": spec.channels}
    return {"delta_q": spec.keys, "delta_k": spec.keys, "delta_v": spec.values}


def tables_of(spec: DeltaSpec, weights: DeltaWeights) -> Slots:
    """Slots of a delta rule's small weights."""
    taps = {"taps": weights.taps}
    if spec.apart:
        parts = torch.split(weights.taps, [spec.keys, spec.keys, spec.values], dim=1)
        taps = {f"{part}_taps": own for part, own in zip("qkv", parts, strict=True)}
    own = {name: table_slot(each.T) for name, each in taps.items()} | {
        "decay": WeightSlot((spec.num_values,), lambda rows, first: load_decay(spec, weights.decay, rows, first)),
        "decay_bias": table_slot(weights.decay_bias),
        "norm.weight": table_slot(weights.norm),
    }
    return {f"delta.{name}": slot for name, slot in own.items()}


def mamba_rows(rows: torch.Tensor, spec: DeltaSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """What a checkpoint's z, v, k, q and gates [N, …] are here: q, k, v and z, and the gates by themselves."""
    keys = spec.num_keys * spec.key_dim
    z, v, k, q, gates = torch.split(rows, [spec.values, spec.values, keys, keys, spec.num_values])
    return torch.cat([q, k, v, z]), gates


class Mamba(Projected):
    """`DeltaSpec` with mamba. What it projects is one tensor of the checkpoint: z, v, k, q and gates, as the delta rule calls
    them. Its gates are a weight of their own, whose results are fp32. The norm behind it is of heads that share a key head."""

    def __init__(self, spec: DeltaSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.backend, self.ops = kit.backend, kit.ops
        self.width = hidden_size
        keys = spec.num_keys * spec.key_dim
        sections = Cut((keys, keys, spec.values, spec.values))
        self.projection = kit.weight({"mamba_in": spec.channels + spec.values}, hidden_size, sections)
        self.gates = kit.undivided.weight({"mamba_in": spec.num_values}, hidden_size)
        decay, decay_bias, skip = kit.zeros(3, spec.num_values, dtype=torch.float32)
        taps_bias = kit.zeros(spec.channels) if spec.conv_bias else None
        nothing = torch.empty(0, device=kit.ops.device)
        taps = kit.zeros(spec.width, spec.channels)
        self.weights = DeltaWeights(taps, decay, decay_bias, nothing, norm.eps, skip, taps_bias)
        norm = norm if spec.eps is None else replace(norm, eps=spec.eps)
        self.norm = RMSNorm(norm, spec.values, kit) if spec.normed else None
        self.step_bias = kit.zeros(spec.num_values, dtype=torch.float32) if spec.least_step else decay_bias
        self.out = Linear(spec.values, {"mamba_out": hidden_size}, kit)
        self.dtype = kit.dtype

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        gates = self.gates.matmul(x, None, torch.float32)
        if self.spec.least_step:  # a softplus grows with what it is of
            self.ops.add_row(gates, self.step_bias)
            self.ops.clip(gates, math.log(math.expm1(self.spec.least_step)), math.inf)
        projected = self.projection.matmul(x, None, self.dtype)
        found = self.backend.recur(self.spec, projected, gates, self.weights, cache, inputs.step)
        if self.norm is None:
            return found
        if self.spec.num_keys == 1:
            return self.norm.alone(found)
        return self.norm.alone(found.view(-1, self.spec.values // self.spec.num_keys)).view(found.shape)

    def slots(self) -> Slots:
        spec, weights = self.spec, self.weights
        rows = spec.channels + spec.values + spec.num_values
        own = {
            "taps": WeightSlot((spec.channels, spec.width), self._load_taps),
            "decay": WeightSlot((spec.num_values,), self._load_decay),
            "decay_bias": table_slot(self.step_bias),
        }
        if self.norm is not None:
            own["norm.weight"] = self.norm.slots()["weight"]
        assert weights.skip is not None
        own["skip"] = table_slot(weights.skip)
        if weights.taps_bias is not None:
            own["taps_bias"] = WeightSlot((spec.channels,), self._load_taps_bias)
        projection = {"mamba_in.weight": WeightSlot((rows, self.width), self._load_projection)}
        return projection | self.out.slots() | {f"delta.{name}": slot for name, slot in own.items()}

    def _parts(self) -> list[tuple[int, int]]:
        """Of the checkpoint's rows behind z, in their order: how many, and where they are here, where queries come first."""
        keys = self.spec.num_keys * self.spec.key_dim
        return [(self.spec.values, 2 * keys), (keys, keys), (keys, 0)]

    def _load_projection(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        channels, values = self.spec.channels, self.spec.values
        parts = [(values, channels, self.projection), *((count, place, self.projection) for count, place in self._parts())]
        begin = 0
        for count, place, weight in [*parts, (self.spec.num_values, 0, self.gates)]:
            own = range(max(begin, first), min(begin + count, first + num_rows(rows)))
            if own:
                weight.load_rows(place + own.start - begin, take_rows(rows, slice(own.start - first, own.stop - first)))
            begin += count

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        values, keys, queries = torch.split(rows, [count for count, _ in self._parts()])
        return torch.cat([queries, keys, values])

    def _load_taps(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        assert len(rows) == self.spec.channels, "a small tensor comes as a whole"
        self.weights.taps.copy_(self._in_order(rows).T)

    def _load_taps_bias(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        assert self.weights.taps_bias is not None
        self.weights.taps_bias.copy_(self._in_order(rows))

    def _load_decay(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        load_decay(self.spec, self.weights.decay, rows, first)


def load_decay(spec: DeltaSpec, decay: torch.Tensor, rows: torch.Tensor | QuantizedRows, first: int) -> None:
    """As the checkpoint has it, or of its logarithm; with a floor, checkpoints have no sign."""
    assert isinstance(rows, torch.Tensor), "tables are plain numbers"
    kept = rows.float().exp() if spec.log_decay else rows.float()
    decay[first : first + len(rows)].copy_(-kept if spec.log_decay or spec.floor else kept)
