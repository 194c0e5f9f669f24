"""Attention of a block whose heads share one key, which is their value as well (DeepSeek-V4): projections around a backend that
keeps it, and digests of tokens beyond the window. See `SharedSpec`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.digest_spec import DigestSpec
from nanovllm_cli.kernels.digests import DigestMaker, SharedInputs, SharedWeights
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mixer import Projected
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows


class Digests:
    """What tokens have for digests, by one matrix: for those that heads see, and for those that choose, each what is summed and
    what weighs it. queries: of what chooses, None where all are seen."""

    def __init__(self, spec: DigestSpec, attention: AttentionSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        assert attention.shared is not None
        indexer, parts = spec.indexer, 2 if spec.overlaps else 1
        sizes = {"digest": attention.head_dim} | ({} if indexer is None else {"index": indexer.dim})
        rows = {f"{kind}_{part}": parts * dim for kind, dim in sizes.items() for part in ("k", "gate")}
        self.raw = Linear(hidden_size, rows, kit)
        self.makers: dict[str, DigestMaker] = {}
        at = 0
        for kind, dim in sizes.items():
            bias, gains = kit.zeros(spec.rate, parts * dim, dtype=torch.float32), kit.zeros(dim)
            self.makers[kind] = DigestMaker(at, at + parts * dim, parts, bias, gains, norm.eps, norm.offset)
            at += 2 * parts * dim
        self.queries = self.weights = None
        if indexer is not None:
            self.queries = Linear(attention.shared.query_rank, {"index_q": indexer.heads * indexer.dim}, kit)
            self.weights = Linear(hidden_size, {"index_weights": indexer.heads}, kit)
        self.stored_offset = norm.stored_offset

    def slots(self) -> Slots:
        slots = self.raw.slots()
        for kind, maker in self.makers.items():
            slots[f"{kind}_bias.weight"] = table_slot(maker.bias)
            slots[f"{kind}_norm.weight"] = table_slot(maker.gains, self.stored_offset)
        for linear in (self.queries, self.weights):
            slots |= {} if linear is None else linear.slots()
        return slots


class SharedKeyAttention(Projected):
    """out(of groups(attend(q, k))). What groups of heads go through are matrices in the compute type, whatever they are stored
    in. Where several processes compute the model, each has the whole layer."""

    def __init__(self, spec: AttentionSpec, norm: NormSpec, hidden_size: int, kit: Kit) -> None:
        shared, self.spec = spec.shared, spec
        assert shared is not None
        more = spec.qkv_bias, spec.out_bias, spec.qk_norm, spec.softcap, spec.clip, spec.gated, spec.value_dim, spec.temperature
        assert not any(more), "no model has these there"
        assert spec.sinks, "all have these"
        self.backend, self.ops = kit.backend, kit.ops
        width = spec.num_heads * spec.head_dim
        self.q = Linear(hidden_size, {"q_a": shared.query_rank}, kit)
        self.q_norm = RMSNorm(norm, shared.query_rank, kit)
        self.q_b = Linear(shared.query_rank, {"q_b": width}, kit)
        self.key = Linear(hidden_size, {"k": spec.head_dim}, kit)
        self.digests = None if shared.digests is None else Digests(shared.digests, spec, norm, hidden_size, kit)
        makers = {} if self.digests is None else self.digests.makers
        self.weights = SharedWeights(kit.zeros(spec.head_dim), norm.eps, norm.offset, makers.get("digest"), makers.get("index"))
        self.stored_offset = norm.stored_offset
        self.sinks = kit.zeros(spec.num_heads, dtype=torch.float32)
        self._group_width = width // shared.groups
        self.groups = kit.ops.head_matrices(shared.groups, shared.out_rank, self._group_width, kit.dtype)
        self._shape, self._waiting = (shared.groups, shared.out_rank), list[torch.Tensor]()
        self.out = Linear(shared.groups * shared.out_rank, {"o": hidden_size}, kit)

    def mix(self, x: Hidden, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        normed, own = self.q_norm(None, self.q(x)), self.digests
        raw = None if own is None else own.raw(x)
        queries = weights = None
        if own is not None and own.queries is not None and own.weights is not None:
            queries, weights = own.queries(normed), own.weights.weight.matmul(x, None, torch.float32)
        made = SharedInputs(self.q_b(normed), self.key(x), raw, queries, weights)
        digest_rope = self.spec.digest_rope
        of_digests = None if digest_rope is None else inputs.angles[digest_rope]
        angles = inputs.angles[self.spec.rope], of_digests
        found = self.backend.attend_shared(self.spec, made, self.weights, *angles, self.sinks, cache, inputs.step)
        return self.groups.products(found, 0, self._group_width)

    def slots(self) -> Slots:
        slots = self.q.slots() | {"q_a_norm.weight": self.q_norm.slots()["weight"]} | self.q_b.slots() | self.key.slots()
        slots |= {"k_norm.weight": table_slot(self.weights.gains, self.stored_offset), "sinks": table_slot(self.sinks)}
        slots |= {} if self.digests is None else self.digests.slots()
        groups, rank = self._shape
        slots["o_a.weight"] = WeightSlot((groups * rank, self._group_width), self._loader(), plain=True)
        return slots | self.out.slots()

    @property
    def head_bytes(self) -> int:
        return self.groups.num_bytes

    def _loader(self) -> Callable[[torch.Tensor | QuantizedRows, int], None]:
        rank = self._shape[1]

        def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
            """Of a group whose rows are not all there they wait."""
            assert isinstance(rows, torch.Tensor), "a plain slot"
            waiting = torch.cat([*self._waiting, rows])
            group, count = (first + len(rows) - len(waiting)) // rank, len(waiting) // rank
            for i in range(count):
                self.groups.load(group + i, waiting[i * rank : (i + 1) * rank])
            self._waiting = [waiting[count * rank :].clone()] if len(waiting) % rank else []

        return load
