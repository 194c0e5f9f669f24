"""What embeddings of n-grams add to the residual streams in front of a layer (Qwen4-Exp): see `NGramSpec`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.kernels.ngrams import NGramHashes, NGramTable, NGramWeights
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.slots import Slots, WeightSlot, table_slot
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.quant.rows import QuantizedRows
from nanovllm_cli.state_spec import NGramSpec

NORMS = ("key", "stream", "taps")


class NGrams:
    """Keys and a value of each token are made of its n-grams' rows. The table stays in its files: its slots take views of
    them."""

    def __init__(self, spec: NGramSpec, norm: NormSpec, kit: Kit) -> None:
        self.spec, self.norm, self.backend, self.dtype = spec, norm, kit.backend, kit.dtype
        self.projection = Linear(spec.width, {"ngram_key": spec.channels}, kit)
        self.value = Linear(spec.width, {"ngram_value": spec.hidden}, kit)
        self.gains = kit.zeros(len(NORMS), spec.channels)
        self.taps = kit.zeros(spec.taps, spec.channels)
        told = spec.multipliers, spec.sizes, spec.offsets
        multipliers, sizes, offsets = (torch.tensor(each, dtype=torch.int64) for each in told)
        self.hashes = NGramHashes(multipliers, sizes, offsets, spec.end)
        self._pieces: dict[int, torch.Tensor] = {}
        self._table: NGramTable | None = None

    def __call__(self, streams: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> None:
        """streams [S, T, hidden] are changed in place."""
        self._table = self._table or NGramTable([self._pieces[i] for i in range(len(self.spec.shards))])
        rows = self.backend.ngram_rows(inputs.batch.token_ids, self._table, self.hashes, self.dtype, cache, inputs.step)
        weights = NGramWeights(self.gains, self.norm.eps, self.norm.offset, self.taps, self.spec.longest)
        self.backend.join_ngrams(self.projection(rows), self.value(rows), streams, weights, cache, inputs.step)

    def slots(self) -> Slots:
        own = {f"ngram_{name}_norm.weight": table_slot(gains, self.norm.stored_offset)
               for name, gains in zip(NORMS, self.gains, strict=True)}  # fmt: skip
        shards = {f"shards.{i}.weight": WeightSlot((count, self.spec.row_width), self._keeper(i), stays=True)
                  for i, count in enumerate(self.spec.shards)}  # fmt: skip
        return self.projection.slots() | self.value.slots() | own | {"ngram_taps": table_slot(self.taps.T)} | shards

    def _keeper(self, number: int) -> Callable[[torch.Tensor | QuantizedRows, int], None]:
        def keep(rows: torch.Tensor | QuantizedRows, first: int) -> None:
            assert isinstance(rows, torch.Tensor), "a slot that stays"
            assert first == 0, "which comes whole"
            self._pieces[number] = rows

        return keep
