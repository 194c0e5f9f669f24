"""What chooses the tokens that sparse attention sees: see `IndexerSpec`."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import IndexInputs
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.norm import StreamNorm
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.mixer_spec import IndexerSpec
from nanovllm_cli.model_spec import NormSpec

EPS = 1e-6
"""Of its norm, in transformers, in llama.cpp and in the code that DeepSeek-V3.2 was published with."""


class Indexer:
    """Queries are made of what attention's are made of, query_rank numbers of a token."""

    def __init__(self, spec: IndexerSpec, query_rank: int, hidden_size: int, kit: Kit) -> None:
        self.q = Linear(query_rank, {"index_q": spec.heads * spec.dim}, kit)
        self.key = Linear(hidden_size, {"index_k": spec.dim}, kit)
        self.key_norm = StreamNorm(NormSpec(EPS, centered=True, shifted=True), spec.dim, kit)
        self.weights = Linear(hidden_size, {"index_weights": spec.heads}, kit)

    def __call__(self, x: Hidden, queries: Hidden) -> IndexInputs:
        key = self.key(x)
        self.key_norm(None, key)
        return IndexInputs(self.q(queries), key, self.weights.weight.matmul(x, None, torch.float32))

    def slots(self) -> Slots:
        norm = {f"index_k_norm.{name}": slot for name, slot in self.key_norm.slots().items()}
        return self.q.slots() | self.key.slots() | norm | self.weights.slots()
