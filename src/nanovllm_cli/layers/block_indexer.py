"""What chooses the blocks of tokens that sparse attention sees: see `BlockIndexerSpec`."""

from __future__ import annotations

from nanovllm_cli.index_spec import BlockIndexerSpec
from nanovllm_cli.kernels.block_index import BlockIndexInputs
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.slots import Slots, table_slot
from nanovllm_cli.norm_spec import NormSpec


class BlockIndexer:
    """Queries and the key of a token are made of what attention reads, by one matrix."""

    def __init__(self, spec: BlockIndexerSpec, norm: NormSpec, read_size: int, kit: Kit) -> None:
        self.norm = norm
        self.projection = Linear(read_size, {"index_qk": (spec.heads + 1) * spec.dim}, kit)
        self.gains = kit.zeros(2, spec.dim)

    def __call__(self, x: Hidden) -> BlockIndexInputs:
        q_norm, k_norm = self.gains
        return BlockIndexInputs(self.projection(x), q_norm, k_norm, self.norm.eps, self.norm.offset)

    def slots(self) -> Slots:
        gains = zip("qk", self.gains, strict=True)
        norms = {f"index_{part}_norm.weight": table_slot(own, self.norm.stored_offset) for part, own in gains}
        return self.projection.slots() | norms
