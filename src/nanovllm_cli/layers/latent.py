"""Latent attention of a block: projections around a backend that keeps one vector of a token for all heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from nanovllm_cli.attention.backend import LatentWeights, StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ops import Hidden, plain, side_by_side, taken_out
from nanovllm_cli.layers.indexer import Indexer
from nanovllm_cli.layers.kit import Cut, Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.mixer_spec import AttentionSpec, LatentSpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows, num_rows, take_rows


def gates_before_queries(rows: torch.Tensor, latent: LatentSpec) -> torch.Tensor:
    """Rows of q_b, each head's query followed by its gates, with all gates before all queries."""
    heads = rows.view(-1, latent.query_dim + latent.value_dim, *rows.shape[1:])
    return torch.cat([heads[:, latent.query_dim :].flatten(0, 1), heads[:, : latent.query_dim].flatten(0, 1)])


class LatentAttention(Projected):
    """See `LatentSpec`. The checkpoint's kv_b has each head's key_dim rows of keys and then its value_dim rows of values. They
    are kept in the compute type whatever they come in: keys are turned over, along which no format has its scales. Where several
    processes compute the model each has some of the heads, and all have what is kept of a token. Gates of what
    heads find stand in q_b, behind each head's query, or have a projection of their own."""

    def __init__(self, spec: AttentionSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        assert spec.latent is not None
        more = spec.qkv_bias, spec.out_bias, spec.qk_norm, spec.window, spec.softcap, spec.clip, spec.gate_is != "sigmoid"
        assert not any(more), "no model has these there"
        latent = self.latent = spec.latent
        norm = norm if latent.eps is None else replace(norm, eps=latent.eps)
        self.spec, self._whole = kit.own_mixer(spec), spec
        self.backend = kit.backend
        self.ops = kit.ops
        self._own, cut, self._gather = range(spec.num_heads), None, None
        queries, found = spec.num_heads * latent.query_dim, spec.num_heads * latent.value_dim
        assert not (spec.gates_in_queries and latent.query_rank is None), "no model has gates in such queries"
        in_queries = found if spec.gates_in_queries else 0
        self.gates, of_gates = None, None
        if (own := kit.own_units(spec)) is not None:
            self._own = own
            cut = Cut((found, queries) if in_queries else (queries,), spec.num_heads, "none")
            of_gates = Cut((spec.num_gates,), spec.num_heads, "none")
            self._gather = kit.gathering(found, spec.num_heads)
        if latent.query_rank is None:
            self.q = Linear(hidden_size, {"q": queries}, kit, cut=cut)
            self.q_norm, self.q_b = None, None
        else:
            self.q = Linear(hidden_size, {"q_a": latent.query_rank}, kit)
            self.q_norm = RMSNorm(norm, latent.query_rank, kit)
            self.q_b = Linear(latent.read_by_queries or 0, {"q_b": in_queries + queries}, kit, cut=cut)
        self._num_gates = self.spec.num_gates if in_queries else 0
        if spec.gated and not in_queries:
            self.gates = Linear(hidden_size, {"attention_gate": spec.num_gates}, kit, cut=of_gates)
        self.indexer: Indexer | None = None
        if (indexer := latent.own_indexer) is not None:
            assert latent.query_rank is not None, "no model has queries made of the hidden state there"
            self.indexer = Indexer(indexer, latent.query_rank, hidden_size, kit)
        self.kept = Linear(hidden_size, {"kv_a": latent.rank + latent.rotary_dim}, kit)
        self.norm = RMSNorm(norm, latent.rank, kit)
        keys = kit.ops.head_matrices(len(self._own), latent.rank, latent.key_dim, kit.dtype)
        values = kit.ops.head_matrices(len(self._own), latent.value_dim, latent.rank, kit.dtype)
        self.weights = LatentWeights(self.norm.weight, norm.eps, norm.offset, keys, values)
        self.sinks = kit.zeros(spec.num_heads, dtype=torch.float32) if spec.sinks else None
        self.out = Linear(found, {"o": hidden_size}, kit)
        self._parts: dict[tuple[str, int], list[torch.Tensor]] = {}

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        q, index = self.q(x), None
        if self.q_norm is not None and self.q_b is not None:
            normed = self.q_norm(None, q)
            index = self.indexer(x, normed) if self.indexer is not None and self.backend.chooses else None
            q = self.q_b(side_by_side(plain(normed, self.ops), q, self.ops) if self.latent.beside else normed)
        gates = None if self.gates is None else self.gates(x)
        if self._num_gates:
            gates, q = q[:, : self._num_gates], taken_out(q, self._num_gates, self.ops)
        if (own := self.spec.temperature) is not None:
            self.ops.temper(q, inputs.positions, own.length, own.scale, own.offset)
        angles = inputs.angles[self.spec.rope]
        sinks = None if self.sinks is None else self.sinks[self._own.start : self._own.stop]
        found = self.backend.attend_latent(self.spec, q, self.kept(x), self.weights, angles, cache, inputs.step, index, sinks)
        found = found if gates is None else self.ops.sigmoid_gate(found, gates)
        return found if self._gather is None else self._gather(found)

    def slots(self) -> Slots:
        latent, heads = self.latent, range(self._whole.num_heads)
        slots = self.q.slots() | self.kept.slots() | self.out.slots()
        slots |= {"kv_a_norm.weight": self.norm.slots()["weight"]}
        slots |= {} if self.sinks is None else {"sinks": table_slot(self.sinks)}
        if self.q_norm is not None and self.q_b is not None:
            slots |= {} if self.indexer is None else self.indexer.slots()
            slots |= {"q_a_norm.weight": self.q_norm.slots()["weight"]} | self.q_b.slots()
            if self._num_gates:
                slots["q_b.weight"] = WeightSlot(slots["q_b.weight"].shape, self._load_gated)
        slots |= {} if self.gates is None else self.gates.slots()
        if not latent.by_head:
            shape = len(heads) * (latent.key_dim + latent.value_dim), latent.rank
            return slots | {"kv_b.weight": WeightSlot(shape, self._load_both, plain=True)}
        for head in heads:
            for name, shape in (("k_b", (latent.rank, latent.key_dim)), ("v_b", (latent.value_dim, latent.rank))):
                slots[f"{name}.{head}.weight"] = WeightSlot(shape, self._loader(name, head, shape[0]), plain=True)
        return slots

    @property
    def head_bytes(self) -> int:
        return self.weights.keys.num_bytes + self.weights.values.num_bytes

    def _load_gated(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        """Rows of q_b, where each head's query is followed by its gates. All gates come to lie before all queries."""
        assert self.q_b is not None
        of_query, of_gates, behind = self.latent.query_dim, self.latent.value_dim, first + num_rows(rows)
        place, all_gates = first, self._whole.num_gates
        while place < behind:
            head, row = divmod(place, of_query + of_gates)
            is_gate = row >= of_query
            count = min(behind - place, (of_gates if is_gate else 0) + of_query - row)
            target = head * of_gates + row - of_query if is_gate else all_gates + head * of_query + row
            self.q_b.weight.load_rows(target, take_rows(rows, slice(place - first, place - first + count)))
            place += count

    def _loader(self, name: str, head: int, num_rows: int) -> Callable[[torch.Tensor | QuantizedRows, int], None]:
        def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
            assert isinstance(rows, torch.Tensor), "a plain slot"
            self._take(name, head, num_rows, rows)

        return load

    def _load_both(self, rows: torch.Tensor | QuantizedRows, first: int) -> None:
        assert isinstance(rows, torch.Tensor), "a plain slot"
        key_dim, together = self.latent.key_dim, self.latent.key_dim + self.latent.value_dim
        end = first + len(rows)
        place = first
        while place < end:
            head, row = divmod(place, together)
            name, behind = ("k", key_dim) if row < key_dim else ("v", together)
            count = min(end - place, behind - row)
            part = rows[place - first : place - first + count]
            self._take(name, head, key_dim if name == "k" else together - key_dim, part)
            place += count

    def _take(self, name: str, head: int, num_rows: int, rows: torch.Tensor) -> None:
        """Rows of a head's matrix, in order; "k" has them turned over. What is there of it waits for the rest."""
        parts = self._parts.setdefault((name, head), [])
        parts.append(rows)
        if sum(map(len, parts)) < num_rows:
            return
        matrix = torch.cat(self._parts.pop((name, head)))
        if head not in self._own:
            return
        if name.startswith("k"):
            self.weights.keys.load(head - self._own.start, matrix.T if name == "k" else matrix)
        else:
            self.weights.values.load(head - self._own.start, matrix)
