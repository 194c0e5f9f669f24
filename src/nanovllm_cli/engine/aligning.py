"""When the tokens of a text are said (`Alignment`): what each layer's attention to an encoder asks with is gathered over the
steps that compute such a prompt, and measured against what the cache keeps of the encoder's rows when the last of it is there.

Who asks for no times is not slower for it. The weights themselves never leave the attention's kernel: what they are is computed
here again, for the few heads that tell times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.encoded import AttendsToEncoded
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.attention.warping import first_rows, weights_of
from nanovllm_cli.cross_spec import Alignment, CrossSpec
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.models.decoder import Decoder

Asked = list[list[torch.Tensor]]
"""Of each layer, what its chunks asked with."""


class Aligner:
    """Of one runner. Begins a sequence anew where its text does, so that steps may be repeated."""

    def __init__(self, model: Decoder, cache: KVCache, block_size: int) -> None:
        self._model = model
        self._cache = cache
        self._block_size = block_size
        self._asked: dict[int, Asked] = {}

    def watched(self, scheduled: Sequence[Scheduled], inputs: StepInputs) -> StepInputs:
        """Inputs of a step that gather what is wanted of it, where anything is."""
        return inputs._replace(asks=[]) if any(isinstance(share.pooling, Alignment) for share in scheduled) else inputs

    def forget(self, seq_id: int) -> None:
        self._asked.pop(seq_id, None)

    def times(self, scheduled: Sequence[Scheduled], inputs: StepInputs) -> dict[int, list[float]]:
        """Behind a step of such inputs: what each sequence wants to know that came to its end."""
        if inputs.asks is None:
            return {}
        cross = self._model.spec.cross
        assert cross is not None, "the engine asks no other model for times"
        found, row = {}, 0
        for share in scheduled:
            start, end = max(share.start, cross.lead), share.start + len(share.token_ids)
            rows, row = slice(row, row + max(0, end - start)), row + max(0, end - start)
            if not isinstance(share.pooling, Alignment):
                continue
            if start == cross.lead:
                self._asked[share.seq_id] = [[] for _ in range(self._model.spec.num_layers)]
            for chunks, asks in zip(self._asked[share.seq_id], inputs.asks, strict=False):  # none of a step without a text
                chunks.append(asks[rows])
            if end == share.prompt_len:
                found[share.seq_id] = self._rows(share, share.pooling, cross, self._asked.pop(share.seq_id))
        return found

    def _rows(self, share: Scheduled, wanted: Alignment, cross: CrossSpec, asked: Asked) -> list[float]:
        """NaN where the model's numbers are none."""
        spec, backend = cross.attention, self._model.backend
        assert isinstance(backend, AttendsToEncoded)
        blocks = share.block_table[: cross.lead // self._block_size]
        heads = []
        for layer, head in wanted.heads:
            q = torch.cat(asked[layer]).view(-1, spec.num_heads, spec.head_dim)[:, head].float().cpu()
            k = backend.encoded_keys(spec, self._cache.layers[layer], blocks, head // spec.queries_a_key)
            heads.append((q.numpy(), k.numpy()))
        with np.errstate(all="ignore"):
            weights = weights_of(heads, spec.score_scale, wanted.rows)[wanted.before : -1]
        return first_rows(weights).astype(float).tolist() if np.isfinite(weights).all() else [math.nan]
