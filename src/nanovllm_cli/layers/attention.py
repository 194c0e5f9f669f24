"""The attention of a block: projections and norms around an AttentionBackend, and gates where there are any."""

from __future__ import annotations

import math

import torch

from nanovllm_cli.attention.backend import HeadNorms, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden, plain, side_by_side
from nanovllm_cli.layers.block_indexer import BlockIndexer
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.moe import MoE
from nanovllm_cli.layers.norm import norm_heads
from nanovllm_cli.layers.rescaling import Scales
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows, num_rows, take_rows


def gates_first(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [2 * H * D, …], each head's query followed by its gate, with all gates before all queries."""
    heads = rows.view(-1, 2, head_dim, *rows.shape[1:])
    return torch.cat([heads[:, 1].flatten(0, 1), heads[:, 0].flatten(0, 1)])


class Attention(Projected):
    """out(attend(qkv(x))). Where several processes compute the model, each has some of the heads, and their part of the cache."""

    def __init__(self, spec: AttentionSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        self.spec, self._whole = kit.own_mixer(spec), spec
        self.backend = kit.backend
        self.ops = kit.ops
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        of_values, found = spec.num_kv_heads * spec.found_dim, spec.num_heads * spec.found_dim
        narrow_too = spec.keys_are_values or spec.value_norm or spec.found_norm or spec.reads is not None
        assert spec.found_dim == spec.head_dim or not (narrow_too or spec.gated), "no model has narrow values there"
        assert spec.gate_by_head or not (spec.gated and (spec.fused_qkv or spec.qkv_bias)), "no model has gates there"
        assert not (spec.keys_are_values and (spec.fused_qkv or spec.qkv_bias)), "nor are keys values there"
        parts = {"qkv": q + kv + of_values} if spec.fused_qkv else {"q": q + q * (spec.gated and not spec.gate_apart)}
        assert spec.gate_apart or not spec.gate_by_head, "no model has these in its q"
        parts = {"attention_gate": q} | parts if spec.gate_apart and not spec.gate_by_head else parts
        if spec.reads is None and not spec.fused_qkv and spec.values is not None:
            parts |= {"k": kv}
        elif spec.reads is None and not spec.fused_qkv:
            parts |= {"k": 2 * kv} if spec.keys_are_values else {"k": kv, "v": of_values}
        cut, self._gather = None, None
        self._own_heads = slice(0, spec.num_heads)
        if (own := kit.own_units(spec)) is not None:
            sections = (q,) * (1 + (spec.gated and not spec.gate_by_head)) + (() if spec.reads is not None else (kv, of_values))
            cut = Cut(sections, spec.num_kv_heads, "none")
            self._gather = kit.gathering(found, spec.num_kv_heads)
            self._own_heads = slice(own.start * spec.queries_a_key, own.stop * spec.queries_a_key)
        read_size = spec.read_size or hidden_size
        self._gate_rows = 0 if spec.gate_by_head else self.spec.num_gates
        self.qkv = Linear(read_size, parts, kit, spec.qkv_bias, cut)
        # So few rows in front of the others would leave those anywhere, and kernels load whole vectors.
        few = None if cut is None else Cut((spec.num_heads,), spec.num_kv_heads, "none")
        self.gates = Linear(read_size, {"attention_gate": spec.num_heads}, kit, cut=few) if spec.gate_by_head else None
        self.out = Linear(found, {"o": hidden_size}, kit, spec.out_bias)
        k_gains, v_gains = kit.zeros(2, spec.head_dim).fill_(1 - norm.offset)
        self._is_turned = spec.qk_norm_of == "turned head"
        self._query_gains = kit.zeros(spec.num_heads if self._is_turned else 1, spec.head_dim).fill_(1 - norm.offset)
        if spec.query_gains:
            self._query_gains.copy_(torch.tensor(spec.query_gains)[:, None])
        q_gains = self._query_gains[self._own_heads if self._is_turned else 0]
        assert spec.qk_norm or not spec.value_norm, "no model norms values alone"
        assert spec.temperature is None or not spec.qk_norm, "a norm would undo it"
        values = v_gains if spec.value_norm else None
        whole, by_head = spec.qk_norm_of in ("all heads", "each head"), spec.qk_norm_of == "each head"
        head_eps = norm.at(spec.head_dim).eps
        self.norm = HeadNorms(q_gains, k_gains, values, head_eps, norm.offset) if spec.qk_norm and not whole else HeadNorms()
        assert not (whole and (values is not None or spec.gated or spec.reads is not None)), "no model has these there"
        sizes = spec.qk_norm_sizes if whole else {}
        all_gains = kit.zeros(sum(sizes.values())).fill_(1 - norm.offset)
        self.whole_norms = dict(zip(sizes, torch.split(all_gains, list(sizes.values())), strict=True)) if sizes else {}
        self.gains_by_head = all_gains if by_head and sizes else None
        self.eps, self.offset = norm.eps, norm.offset
        self.stored_offset = norm.stored_offset
        self.found_norm = norm.at(found)
        self.found_gains = kit.zeros(found).fill_(norm.first_gain) if spec.found_norm else None
        assert spec.gate_factor is None or (spec.gate_apart and spec.gated and not spec.gate_by_head), "no model has these there"
        scaled = {"attention_gate": q}
        self.gate_scales = None if spec.gate_factor is None else Scales(scaled, spec.gate_factor, kit, squared=True)
        self.values = None if spec.values is None else MoE(spec.values, norm, read_size, kit.at("values"))
        assert spec.values is None or not (spec.fused_qkv or spec.keys_are_values or spec.qkv_bias), "no model has these there"
        own_gates = self.spec.num_gates if spec.gate_is == "softplus of 2" else 0
        self._gate_shift, self._gate_factors = kit.zeros(2, own_gates, dtype=torch.float32)
        self._gate_factors.fill_(math.log(2))
        self.sinks = kit.zeros(spec.num_heads, dtype=torch.float32) if spec.sinks else None
        self.indexer = None if spec.blocks is None else BlockIndexer(spec.blocks, norm, read_size, kit)
        more = spec.both_ways, spec.window, spec.chunk, spec.sinks, spec.reads is not None, spec.interleaved, spec.convolved
        assert self.indexer is None or not any(more), "no model has these there"

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        x = x if self.values is None else plain(x, self.ops)
        angles, projected = inputs.angles[self.spec.rope], self.qkv(x)
        width = self._gate_rows
        qkv = projected[:, width:] if width else projected
        if self.values is not None:
            qkv = side_by_side(qkv, self.values(x, inputs.batch.slots), self.ops)
        if self.gains_by_head is not None:
            gains = self.gains_by_head
            norm_heads(qkv[:, : len(gains)], gains, self.spec.head_dim, self.eps, self.offset, self.ops)
        else:
            first = 0
            for gains in self.whole_norms.values():
                self.ops.norm_columns(qkv[:, first : first + len(gains)], gains, self.eps, self.offset)
                first += len(gains)
        if self.spec.clip is not None:
            self.ops.clip(qkv, -self.spec.clip, self.spec.clip)
        if (own := self.spec.temperature) is not None:
            queries = qkv[:, : self.spec.num_heads * self.spec.head_dim]
            self.ops.temper(queries, inputs.positions, own.length, own.scale, own.offset)
        sinks = None if self.sinks is None else self.sinks[self._own_heads]
        distances = None if inputs.distances is None else inputs.distances[self._own_heads]
        index = None if self.indexer is None else self.indexer(x)
        found = self.backend.attend(self.spec, qkv, self.norm, angles, sinks, cache, inputs.step, distances, index)
        if self.spec.value_scale != 1.0:
            self.ops.scale(found, self.spec.value_scale)
        gates = projected[:, :width] if width else None if self.gates is None else self.gates(x)
        if gates is not None and self.gate_scales is not None:
            heads, dim = self._own_heads, self.spec.head_dim
            self.gate_scales(gates, slice(heads.start * dim, heads.stop * dim))
        if gates is not None:
            found = self._gated(found, gates)
        found = found if self._gather is None else self._gather(found)
        if self.found_gains is not None:
            self.ops.norm_columns(found, self.found_gains, self.found_norm.eps, self.found_norm.offset)
        return found

    def _gated(self, found: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """What heads find times what is made of gates; log2(1 + 2 ** g) is the softplus of g * ln(2), over ln(2)."""
        if self.spec.gate_is != "softplus of 2":
            return self.ops.sigmoid_gate(found, gates, softplus=self.spec.gate_is == "softplus")
        self.ops.rescale(gates, self._gate_shift, self._gate_factors)
        return self.ops.scale(self.ops.sigmoid_gate(found, gates, softplus=True), 1 / math.log(2))

    def slots(self) -> Slots:
        slots = self.qkv.slots() | self.out.slots() | ({} if self.gates is None else self.gates.slots())
        if not self._whole.key_bias:
            slots.pop("k.bias", None)
        if self._whole.keys_are_values:
            rows, width = slots["k.weight"].shape
            slots["k.weight"] = WeightSlot((rows // 2, width), self._load_twice)
        if self._whole.gated and not self._whole.gate_apart:
            slots["q.weight"] = WeightSlot(slots["q.weight"].shape, self._load_gated)
        for part in self._whole.qk_norm_sizes:
            if part == "q" and self._is_turned:
                slots["q_norm.weight"] = WeightSlot((self._whole.head_dim,), self._load_turned)
                continue
            gains = self.whole_norms.get(part, self.norm.q if part == "q" else self.norm.k)
            assert gains is not None
            gains = gains if self.gains_by_head is None else gains.view(-1, self._whole.head_dim)
            slots[f"{part}_norm.weight"] = table_slot(gains, self.stored_offset)
        if self._whole.query_factor is not None:
            slots["query_scales"] = WeightSlot((self._query_gains.numel(),), self._load_squares)
        slots |= {} if self.gate_scales is None else self.gate_scales.slots()
        if self.found_gains is not None and self.found_norm.gains:
            slots["found_norm.weight"] = table_slot(self.found_gains, self.stored_offset)
        if self.sinks is not None:
            slots["sinks"] = table_slot(self.sinks)
        slots |= {} if self.indexer is None else self.indexer.slots()
        if self.values is not None:
            slots |= {f"values.{name}": slot for name, slot in self.values.slots().items()}
        return slots

    def _load_turned(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """Gains that all heads have: kernels that turn first look for each head's own."""
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        self._query_gains[:, first : first + len(rows)].copy_(rows.float() - self.stored_offset)

    def _load_squares(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """Each head's own, see `AttentionSpec.query_factor`."""
        assert isinstance(rows, torch.Tensor), "tables are plain numbers"
        assert self._whole.query_factor is not None
        self._query_gains.flatten()[first : first + len(rows)].copy_((rows.float() * self._whole.query_factor).square())

    def _load_twice(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """Rows of k that are those of v as well: so kernels need not know, and the layers that have it are few."""
        queries, keys = (count * self._whole.head_dim for count in (self._whole.num_heads, self._whole.num_kv_heads))
        for place in (queries, queries + keys):
            self.qkv.weight.load_rows(place + first, rows)

    def _load_gated(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """Rows of q, where each head's query is followed by its gate. All gates come to lie before all queries, which have keys
        and values behind them as everywhere."""
        dim, behind = self._whole.head_dim, first + num_rows(rows)
        all_gates = self._whole.num_heads * dim
        for begin in range(first - first % dim, behind, dim):
            own = range(max(begin, first), min(begin + dim, behind))
            head, is_gate = divmod(begin // dim, 2)
            place = (0 if is_gate else all_gates) + head * dim + own.start - begin
            self.qkv.weight.load_rows(place, take_rows(rows, slice(own.start - first, own.stop - first)))
