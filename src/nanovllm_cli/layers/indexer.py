"""What chooses the tokens that sparse attention sees: see `IndexerSpec`."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import IndexInputs
from nanovllm_cli.index_spec import IndexerSpec
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import StreamNorm
from nanovllm_cli.layers.slots import Slots, WeightSlot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows, num_rows, take_rows


class Indexer:
    """Queries are made of what attention's are made of, query_rank numbers of a token."""

    def __init__(self, spec: IndexerSpec, query_rank: int, hidden_size: int, kit: Kit) -> None:
        self.spec = spec
        self.q = Linear(query_rank, {"index_q": spec.heads * spec.dim}, kit)
        self.key = Linear(hidden_size, {"index_k": spec.dim}, kit)
        self.key_norm = StreamNorm(NormSpec(spec.eps, centered=True, shifted=True), spec.dim, kit)
        self.weights = Linear(hidden_size, {"index_weights": spec.heads}, kit)

    def __call__(self, x: Hidden, queries: Hidden) -> IndexInputs:
        key = self.key(x)
        self.key_norm(None, key)
        return IndexInputs(self.q(queries), key, self.weights.weight.matmul(x, None, torch.float32))

    def slots(self) -> Slots:
        norm = {f"index_k_norm.{name}": slot for name, slot in self.key_norm.slots().items()}
        slots = self.q.slots() | self.key.slots() | norm
        if self.spec.last_rotate:
            slots = {name: self._turning_first(slot) for name, slot in slots.items()}
        return slots | self.weights.slots()

    def _turning_first(self, slot: WeightSlot) -> WeightSlot:
        """A slot whose heads' last numbers, which rotate, are kept as their first, as backends expect them: of queries and keys
        alike, so that their products stay what they are."""
        dim, turning = self.spec.dim, self.spec.last_rotate

        def load(rows: torch.Tensor | QuantizedRows, first: int) -> None:
            place, end = first, first + num_rows(rows)
            while place < end:
                head, own = divmod(place, dim)
                stop = min(end, head * dim + (dim - turning if own < dim - turning else dim))
                moved = own + turning if own < dim - turning else own - (dim - turning)
                slot.load(take_rows(rows, slice(place - first, stop - first)), head * dim + moved)
                place = stop

        return slot._replace(load=load)
