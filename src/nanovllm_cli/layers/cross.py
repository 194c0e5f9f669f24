"""Attention to what an encoder has made (`CrossSpec`, `LookSpec`): queries are of a step's tokens, keys and values of the
encoder's rows, and kept once, in the step that has the tokens which stand for these."""

from __future__ import annotations

import math

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.encoded import AttendsToEncoded, EncodedRows
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.cross_spec import LookSpec
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.norm import norm_heads
from nanovllm_cli.layers.slots import Slots, number_slot, table_slot
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.norm_spec import NormSpec


class Cross(Projected):
    """out(attend(q(x))). Where several processes compute the model, each has some of the heads, and their part of the cache."""

    def __init__(self, spec: AttentionSpec, hidden_size: int, kit: Kit) -> None:
        self.spec, self._whole = kit.own_mixer(spec), spec
        self._backend = kit.backend
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        plain = AttentionSpec(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, None, spec.qkv_bias, spec.out_bias, scale=spec.scale,
            key_bias=spec.key_bias,
        )  # fmt: skip
        assert spec == plain, "no model has more there"
        of_queries, of_kept, self._gather = None, None, None
        if kit.own_units(spec) is not None:
            of_queries, of_kept = (Cut(sections, spec.num_kv_heads, "none") for sections in ((q,), (kv, kv)))
            self._gather = kit.gathering(q, spec.num_kv_heads)
        self.q = Linear(hidden_size, {"cross_q": q}, kit, spec.qkv_bias, of_queries)
        self.kv = Linear(hidden_size, {"cross_k": kv, "cross_v": kv}, kit, spec.qkv_bias, of_kept)
        self.out = Linear(q, {"cross_o": hidden_size}, kit, spec.out_bias)

    @property
    def backend(self) -> AttendsToEncoded:
        assert isinstance(self._backend, AttendsToEncoded), "platforms whose backends can't refuse such a model"
        return self._backend

    def keep(self, rows: EncodedRows, cache: LayerCache) -> None:
        """Writes keys and values of an encoder's rows to the cache."""
        self.backend.keep_encoded(self.spec, self.kv(rows.values), rows, cache)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        q = self.q(x)
        if inputs.asks is not None:
            inputs.asks.append(q.clone())
        found = self.backend.attend_encoded(self.spec, q, cache, inputs.step)
        return found if self._gather is None else self._gather(found)

    def slots(self) -> Slots:
        slots = self.q.slots() | self.kv.slots() | self.out.slots()
        if not self._whole.key_bias:
            slots.pop("cross_k.bias", None)
        return slots


class Look(Cross):
    """The same of queries and keys that are normed a head. gate, mlp_gate: what is found is times the one, and what the layer's
    MLP makes of it times the other. keeper: the layer whose cache it has."""

    def __init__(self, spec: LookSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        super().__init__(spec.attention, hidden_size, kit)
        self.keeper, self._eps, self._offset, self._ops = spec.keeper, norm.eps, norm.offset, kit.ops
        self._gains = kit.zeros(2, spec.attention.head_dim).fill_(1 - norm.offset)
        self._key_columns = self.spec.num_kv_heads * self.spec.head_dim
        self.gate = self.mlp_gate = 0.0

    def keep(self, rows: EncodedRows, cache: LayerCache) -> None:
        kv = self.kv(rows.values)
        self._norm(kv[:, : self._key_columns], 1)
        self.backend.keep_encoded(self.spec, kv, rows, cache)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        q = self.q(x)
        self._norm(q, 0)
        found = self.backend.attend_encoded(self.spec, q, cache, inputs.step)
        return found if self._gather is None else self._gather(found)

    def _norm(self, rows: torch.Tensor, which: int) -> None:
        norm_heads(rows, self._gains[which], self.spec.head_dim, self._eps, self._offset, self._ops)

    def slots(self) -> Slots:
        gains = {f"{part}_norm.weight": table_slot(self._gains[i]) for i, part in enumerate(("cross_q", "cross_k"))}
        gates = {"attention_factor": number_slot(self._take_gate), "mlp_factor": number_slot(self._take_mlp_gate)}
        return super().slots() | gains | gates

    def _take_gate(self, number: float) -> None:
        self.gate = math.tanh(number)

    def _take_mlp_gate(self, number: float) -> None:
        self.mlp_gate = math.tanh(number)
