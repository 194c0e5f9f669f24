"""The layer of an EAGLE-3 drafter (`eagle.py`)."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.kernels.ops import Addend, Hidden, side_by_side
from nanovllm_cli.layers.embedding import Embedding, Head
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.layers.taps import Taps
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.eagle import EagleSpec


class Eagle(Decoder):
    """Rows that it reads and gives are as the taps of `model` give them, which it brings."""

    reads_hidden = True

    def __init__(self, eagle: EagleSpec, kit: Kit, model: Decoder) -> None:
        spec = eagle.spec
        super().__init__(spec, kit, model)
        self.eagle, width = eagle, spec.hidden_size
        if eagle.own_head:
            self.head = Head(spec.vocab_size, width, kit, tied=False)
        if eagle.own_embedding:
            self.embedding = Embedding(kit.weight({"embedding": model.spec.vocab_size}, width))
        self._embedded_norm = RMSNorm(spec.norm, width, kit)
        self.fuses = Taps(eagle.places, eagle.width, width, eagle.normed, spec.norm, kit)
        self._own_rows = torch.empty(0)

    def slots(self) -> Slots:
        shared = [*([] if self.eagle.own_embedding else ["embedding."]), *([] if self.eagle.own_head else ["head."])]
        slots = {name: slot for name, slot in super().slots().items() if not name.startswith(tuple(shared) or ("\0",))}
        return slots | {"embedding_norm.weight": self._embedded_norm.slots()["weight"]} | self.fuses.slots()

    def run(self, inputs: StepInputs, cache: KVCache) -> Hidden:
        batch, (block,) = inputs.batch, self.blocks
        assert batch.hidden is not None
        assert block.mixer is not None
        assert isinstance(block.attention_norm, RMSNorm)
        assert self.norm is not None
        embedded = self._embedded_norm.alone(self.embedding(batch.token_ids, batch.token_table))
        residual = block.attention_norm.alone(batch.hidden)
        joined = side_by_side(embedded, residual, self.ops)
        if not self.eagle.stream_normed:
            self.ops.put_columns(batch.hidden, residual, 0)
        added = block.mixer.onto(residual, joined, inputs, cache.layers[0])
        x, rows = None if added is None else Addend(added), batch.logit_rows
        if rows.shape[0] < batch.num_tokens:
            x, residual = None if x is None else x.taken(rows), residual[rows]
        x = block.fed(x, residual, inputs, None)
        if x is not None:
            self.ops.join(x, residual)
        found = self.norm.alone(residual)
        self._own_rows = found if self.eagle.output_normed else residual
        return found

    def kept(self, hidden: Hidden) -> torch.Tensor:
        return self._own_rows
