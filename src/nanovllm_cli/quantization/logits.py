"""A model opened for measuring: hidden rows and logits of every token of a text, from the engine's own model.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import DTypeName, EngineConfig
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.kernels.ops import Addend, Hidden
from nanovllm_cli.models.decoder import Block, Decoder
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.checkpoint import Checkpoint


class MeasuredModel:
    """A checkpoint, loaded as the engine loads it on a CPU, that runs texts of up to max_len tokens one at a time.

    Raises what loading raises.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_len: int,
        *,
        dtype: DTypeName = "auto",
        progress: LoadProgress | None = None,
    ) -> None:
        config = EngineConfig(dtype=dtype, device="cpu", num_blocks=1, max_num_seqs=1)
        self._worker = Worker(checkpoint, config, progress=progress)
        self._platform = self._worker.platform
        self._block_size = config.block_size
        self.dtype = self._worker.dtype
        self.model: Decoder = self._worker.model
        num_blocks = -(-max_len // config.block_size)
        self._cache = KVCache(num_blocks, self._worker.spec.mixers, self.model.backend)

    def hidden(self, ids: Sequence[int]) -> Hidden:
        """Rows [T, hidden] of all tokens, after the last norm."""
        blocks = list(range(-(-len(ids) // self._block_size)))
        share = Scheduled(0, list(ids), 0, blocks, (), prompt_logprobs=0, prompt_len=len(ids))
        batch, _ = build_batch([share], self._block_size)
        self._platform.enter()
        with torch.inference_mode():
            return self.model.run(self.model.prepare(batch), self._cache)

    def logits(self, hidden: Hidden) -> torch.Tensor:
        """[R, V] float32 of hidden rows, on the host."""
        self._platform.enter()
        with torch.inference_mode():
            return self.model.logits(hidden).cpu()

    def streams(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """The residual stream [T, hidden] before each layer, then the rows after the last norm; float32, on the host."""
        found: list[torch.Tensor] = []
        blocks = self.model.blocks
        self.model.blocks = [cast(Block, _Watched(block, found)) for block in blocks]
        try:
            last = self.hidden(ids)
        finally:
            self.model.blocks = blocks
        assert isinstance(last, torch.Tensor), "norms are kernels of their own on a CPU"
        return [*found, last.float()]

    def forget_layers(self) -> None:
        """Gives back all memory but that of the head: `logits` of rows that were computed before still works."""
        self._worker.close()
        self.model.blocks.clear()
        del self._cache, self.model.embedding


class _Watched:
    """A block that notes what comes in."""

    def __init__(self, block: Block, found: list[torch.Tensor]) -> None:
        self._block = block
        self._found = found

    def __call__(self, x: Addend | None, residual: torch.Tensor, *rest: Any) -> Addend | None:
        stream = residual.clone()
        if x is not None:
            self._block.ops.join(x, stream)
        self._found.append(stream.float().cpu())
        return self._block(x, residual, *rest)
