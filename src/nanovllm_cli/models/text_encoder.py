"""TextEncoder: the encoder of a model that reads texts (T5) as what a tower is: rows of a text, layer by layer.

It is a `Decoder` that the model has as a part, with the model's embedding. Its tokens see all others, so a text is computed at
once; and as a layer reads the keys and values of its own alone, all layers, and all texts, have the same memory for these.
"""

from __future__ import annotations

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.models.tower_layers import Stages, TowerRows
from nanovllm_cli.vision_spec import Image, Sound


class TextEncoder:
    """block_size: tokens of a block, as the backend has them."""

    def __init__(self, encoder: Decoder, block_size: int) -> None:
        self._encoder, self._block_size = encoder, block_size
        self._cache: KVCache | None = None

    def stages(self, text: Image | Sound) -> Stages:
        """A layer each. The rows [n, hidden] are of the text's tokens."""
        assert isinstance(text, Sound)
        encoder = self._encoder
        inputs = encoder.prepare(self._batch(text.ids))
        residual, x = encoder.enter(inputs.batch)
        for number, block in enumerate(encoder.blocks):
            if number:
                yield
            (layer,) = self._layers(text.frames).layers
            x = block(x, residual, encoder.seen_from(number, inputs), layer)
        if encoder.norm is None:
            assert x is None, "layers that norm the stream itself have joined it"
            return TowerRows(residual)
        return TowerRows(encoder.normed(encoder.norm(x, residual)))

    def _layers(self, num_tokens: int) -> KVCache:
        """Of one layer, with room for so many tokens."""
        count = -(-num_tokens // self._block_size)
        if self._cache is None or self._cache.num_blocks < count:
            self._cache = KVCache(1 << (count - 1).bit_length(), self._encoder.own_mixers[:1], self._encoder.backend)
        return self._cache

    def _batch(self, ids: list[int]) -> Batch:
        places = torch.arange(len(ids))
        length = torch.tensor([len(ids)], dtype=torch.int32)
        return Batch(
            token_ids=torch.tensor(ids),
            positions=places,
            rope_lens=torch.full_like(places, len(ids)),
            query_starts=torch.tensor([0, len(ids)], dtype=torch.int32),
            kv_lens=length,
            known_lens=length,
            slots=places,
            block_tables=torch.arange(-(-len(ids) // self._block_size), dtype=torch.int32)[None],
            logit_rows=places,
            states=torch.zeros(1, dtype=torch.int32),
        )
