"""Decode steps recorded once and replayed: one graph for each number of sequences and guesses, and width of the block table.

On the CPU a graph is a `kernels.cpu.Program`. A step where every token's logits are wanted, as of sequences that feed one token
and guesses behind it, has the same kernels at the same addresses as the last one whose inputs were as large, so only these are
filled in anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.kernels.cpu import MemoryPool, Program
from nanovllm_cli.models.decoder import Decoder

MAX_GRAPHS = 32


class DecodeGraph:
    """One recorded step, with the inputs it reads and the logits it writes, and the rows that the head reads where these are
    kept."""

    def __init__(self, model: Decoder, cache: KVCache, inputs: StepInputs, pool: MemoryPool, keeps_hidden: bool) -> None:
        self._model = model
        self._inputs = list(_tensors(inputs))
        with Program(pool) as self._program:
            hidden = model.run(inputs, cache)
            rows = model.kept(hidden) if keeps_hidden else None
            logits = model.head(hidden)
            # The memory itself goes back to the pool: every step of a batch that drains has its own graph.
            self._logits = pool.not_held(logits)
            self._rows = None if rows is None else pool.not_held(rows)

    def replay(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [T, vocab] of this step, which the next replay, of any graph, overwrites; the rows that are kept."""
        for mine, fresh in zip(self._inputs, _tensors(inputs), strict=True):
            if mine is not fresh:
                mine.copy_(fresh)
        self._program.replay()
        return self._model.finish(self._logits), None if self._rows is None else self._rows.clone()


class GraphCache:
    """The graphs of one model, least recently used out first. recordable: whether its weights' formats allow it."""

    def __init__(self, model: Decoder, cache: KVCache, recordable: bool) -> None:
        self._recordable = recordable
        self._pool = MemoryPool()
        self._model = model
        self._cache = cache
        self._graphs: OrderedDict[tuple[object, ...], DecodeGraph] = OrderedDict()

    def fits(self, batch: Batch) -> bool:
        """True for a step of decodes only, with their guesses, none of which takes experts for images."""
        return self._recordable and batch.num_tokens == len(batch.logit_rows) and self._model.handed.are_texts(batch.token_ids)

    def logits(self, inputs: StepInputs, keeps_hidden: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [T, vocab] and, if they are kept, rows [T, hidden], by a graph that is there or is recorded now."""
        key = (*(tensor.shape for tensor in _tensors(inputs)), inputs.batch.lora is None, keeps_hidden)
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = DecodeGraph(self._model, self._cache, inputs, self._pool, keeps_hidden)
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph.replay(inputs)


def _tensors(inputs: StepInputs) -> Iterator[torch.Tensor]:
    """All tensors that `Decoder.run` reads, in a fixed order."""
    yield inputs.batch.token_ids
    yield inputs.batch.positions
    if inputs.batch.hidden is not None:
        yield inputs.batch.hidden
    if inputs.batch.lora is not None:
        yield inputs.batch.lora
    for pair in inputs.angles.values():
        yield from pair
    yield from inputs.step.tensors
