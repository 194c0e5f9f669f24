"""The attention of a block: projections and norms around an AttentionBackend, and gates where there are any."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import QKNorm, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Mixer
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.model_spec import AttentionSpec, NormSpec
from nanovllm_cli.quant.rows import QuantizedRows, num_rows, take_rows


def gates_first(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [2 * H * D, …], each head's query followed by its gate, with all gates before all queries."""
    heads = rows.view(-1, 2, head_dim, *rows.shape[1:])
    return torch.cat([heads[:, 1].flatten(0, 1), heads[:, 0].flatten(0, 1)])


class Attention(Mixer):
    """out(attend(qkv(x)))."""

    def __init__(self, spec: AttentionSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.backend = kit.backend
        self.ops = kit.ops
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._gate_rows = q if spec.gated else 0
        assert not (spec.gated and (spec.fused_qkv or spec.qkv_bias)), "no model has gates there"
        parts = {"qkv": q + 2 * kv} if spec.fused_qkv else {"q": q + self._gate_rows, "k": kv, "v": kv}
        self.qkv = Linear(hidden_size, parts, kit, spec.qkv_bias)
        self.out = Linear(q, {"o": hidden_size}, kit, spec.out_bias)
        q_gains, k_gains = kit.zeros(2, spec.head_dim).fill_(1 - norm.offset)
        self.norm = QKNorm(q_gains, k_gains, norm.eps, norm.offset) if spec.qk_norm else QKNorm()
        self.stored_offset = norm.stored_offset
        self.sinks = kit.zeros(spec.num_heads, dtype=torch.float32) if spec.sinks else None

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        angles, projected = inputs.angles[self.spec.rope], self.qkv(x)
        width = self._gate_rows
        qkv = projected[:, width:] if width else projected
        found = self.backend.attend(self.spec, qkv, self.norm, angles, self.sinks, cache, inputs.step)
        return self.ops.sigmoid_gate(found, projected[:, :width]) if width else found

    def slots(self) -> Slots:
        slots = self.qkv.slots() | self.out.slots()
        if self.spec.gated:
            slots["q.weight"] = WeightSlot(slots["q.weight"].shape, self._load_gated)
        norms = {"q_norm.weight": self.norm.q, "k_norm.weight": self.norm.k}
        slots |= {name: table_slot(weight, self.stored_offset) for name, weight in norms.items() if weight is not None}
        if self.sinks is not None:
            slots["sinks"] = table_slot(self.sinks)
        return slots

    def _load_gated(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """Rows of q, where each head's query is followed by its gate. All gates come to lie before all queries, which have keys
        and values behind them as everywhere."""
        dim, behind = self.spec.head_dim, first + num_rows(rows)
        for begin in range(first - first % dim, behind, dim):
            own = range(max(begin, first), min(begin + dim, behind))
            head, is_gate = divmod(begin // dim, 2)
            place = (0 if is_gate else self._gate_rows) + head * dim + own.start - begin
            self.qkv.weight.load_rows(place, take_rows(rows, slice(own.start - first, own.stop - first)))
