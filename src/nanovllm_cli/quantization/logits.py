"""A model opened for measuring: hidden rows and logits of every token of a text, or what a text's rows become together, from the
engine's own model.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import DTypeName, EngineConfig
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.runner import pooled_of
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError
from nanovllm_cli.kernels.ops import Addend
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.models.block import Block
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader

STEP = 512
"""Most tokens that the model reads at once: what the engine takes, too, and more is no faster."""
_DTYPES: dict[torch.dtype, DTypeName] = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
ON_CPU = EngineConfig(device="cpu")


def check_reads_texts(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedError for a model that reads no text without something else in front of it."""
    spec = read_spec(checkpoint, open_reader(checkpoint))
    if spec.cross is not None:
        why = "its texts begin with a sound" if spec.encoder is None else "its texts are answers to others"
        told = f"a {spec.architecture} model is not measured, or calibrated: {why}"
        raise UnsupportedError(told, "quantize --no-verify rounds to nearest; run --quant int8 does while it loads")


class MeasuredModel:
    """A checkpoint, loaded as the engine loads it, that runs texts of up to max_len tokens.

    config: where, and in what. at_once: how many of them `scored` takes together. Raises what loading raises, and
    DoesNotFitError where there is no room for their KV cache.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_len: int,
        config: EngineConfig = ON_CPU,
        *,
        progress: LoadProgress | None = None,
    ) -> None:
        check_reads_texts(checkpoint)
        self.at_once = max(1, STEP // max_len)
        config = replace(config, num_blocks=1, max_num_seqs=self.at_once)
        self._worker = Worker(checkpoint, config, progress=progress)
        self._platform = self._worker.platform
        self._block_size = config.block_size
        self.dtype = self._worker.dtype
        self.model: Decoder = self._worker.model
        self._blocks_each = -(-max_len // config.block_size)
        num_blocks = self.at_once * self._blocks_each
        free, needed = self._platform.available_bytes(), num_blocks * self._worker.block_bytes
        if needed > free:
            raise DoesNotFitError(
                f"{max_len} tokens need {needed / 2**30:.1f} GiB of KV cache, and {free / 2**30:.1f} GiB are free",
                "take less text at once",
            )
        self._cache = KVCache(num_blocks, self._worker.spec.mixers, self.model.backend, self.at_once)

    @property
    def dtype_name(self) -> DTypeName:
        """What it computes in, as another one is told to."""
        return _DTYPES[self.dtype]

    def hidden(self, ids: Sequence[int]) -> torch.Tensor:
        """Rows [T, hidden] of all tokens, after the last norm."""
        return self._run([self._share(0, ids, 0, len(ids), len(ids))], 0)

    def scored(self, texts: Sequence[Sequence[int]], first: int = 0) -> torch.Tensor:
        """Rows after the last norm of each text's tokens from `first` on, without its last, behind which nothing is known:
        [sum of len - 1 - first, hidden], in the order of the texts, of which there are at_once at most."""
        assert len(texts) <= self.at_once
        step = STEP if self.at_once == 1 else STEP // self.at_once
        found: list[torch.Tensor] = []
        for start in range(0, max(map(len, texts)) - 1, step):
            ends = [min(start + step, len(ids) - 1) for ids in texts]
            parts = zip(range(len(texts)), texts, ends, strict=True)
            found.append(self._run([self._share(i, ids, start, end, len(ids)) for i, ids, end in parts if start < end], first))
        return torch.cat(found)

    def pooled(self, texts: Sequence[Sequence[int]], seconds: Sequence[int], pooling: Pooled) -> torch.Tensor:
        """[texts, hidden] float64: each text's rows after the last norm as one, or [tokens, hidden] where nothing is pooled
        ("each"), of at_once texts at most, each whole in one step. seconds: of each, where the second of two texts begins that
        are read together, or 0."""
        assert len(texts) <= self.at_once
        whole = [self._share(i, ids, 0, len(ids), len(ids)) for i, ids in enumerate(texts)]
        shares = [share._replace(pooling=pooling, second=second) for share, second in zip(whole, seconds, strict=True)]
        batch, owners = build_batch(shares, self._block_size)
        self._platform.enter()
        with torch.inference_mode():
            sums = pooled_of(self.model, self.model.run(self.model.prepare(batch), self._cache), owners)
        if pooling == "each":
            rows = (torch.tensor(sums[i], dtype=torch.float64) for i in range(len(texts)))
            return torch.cat([numbers.view(-1, self.model.spec.hidden_size) for numbers in rows])
        counts = [len(ids) if pooling == "mean" else 1 for ids in texts]
        return torch.tensor([[number / count for number in sums[i]] for i, count in enumerate(counts)], dtype=torch.float64)

    def _share(self, place: int, ids: Sequence[int], start: int, end: int, prompt_len: int) -> Scheduled:
        """Tokens start to end of a text that has the cache's blocks and state at `place`."""
        first = place * self._blocks_each
        blocks = list(range(first, first - (-end // self._block_size)))
        return Scheduled(place, list(ids[start:end]), start, blocks, (), prompt_len=prompt_len, state=place)

    def _run(self, shares: list[Scheduled], first: int) -> torch.Tensor:
        batch, _ = build_batch(shares, self._block_size)
        rows = (batch.positions >= first).nonzero().flatten()
        self._platform.enter()
        with torch.inference_mode():
            return self.model.normed(self.model.run(self.model.prepare(replace(batch, logit_rows=rows)), self._cache))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, V] float32 of hidden rows, on the host: of the tokens that may be drawn."""
        self._platform.enter()
        with torch.inference_mode():
            return self.model.logits(hidden)[:, : self.model.spec.num_drawn].cpu()

    def free_bytes(self) -> int:
        return self._platform.available_bytes()

    def streams(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """The residual stream [T, hidden] before each layer, then the rows after the last norm; float32, on the host."""
        found: list[torch.Tensor] = []
        blocks = self.model.blocks
        self.model.blocks = [cast(Block, _Watched(block, found)) for block in blocks]
        try:
            last = self.hidden(ids)
        finally:
            self.model.blocks = blocks
        return [*found, last.float().cpu()]

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
        self.looks = block.looks

    def __call__(self, x: Addend | None, residual: torch.Tensor, *rest: Any) -> Addend | None:
        stream = residual.clone()
        if x is not None:
            self._block.ops.join(x, stream)
        self._found.append(stream.float().cpu())
        return self._block(x, residual, *rest)
