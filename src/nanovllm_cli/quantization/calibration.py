"""Calibration: what the layers of a model see when texts run through it, block by block.

One block's weights are in memory at a time; between blocks the residual stream of all tokens is kept, [T, hidden] in the compute
type. A block is the engine's own, with storages that look at what they multiply. The caller brings the weights:

    calibration = Calibration(spec, sequences, embedding, platform, dtype)
    for i in range(spec.num_layers):
        calibration.load(weights_of_block)           slot names without "blocks.i."
        seen = calibration.observe()                 "qkv", "o", "gate_up", "down" -> InputStatistics
        calibration.load(quantized_weights)          so that the next block sees what quantized ones give it
        calibration.advance()

A run that is resumed loads what it has already quantized, and advances without observing.
Not covered: reading weights and texts, choosing numbers (quant/gptq.py, quant/awq.py).

Legend: T tokens, K columns (inputs) of a linear layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.attention import Attention
from nanovllm_cli.layers.conv import ShortConv
from nanovllm_cli.layers.delta import Delta
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.mlp import MLP
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quant.statistics import InputStatistics

INPUTS: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""What the linear layers of a block read, and the weights ("<name>.weight") that share it, in the order of their rows."""
EVERY_INPUT = {
    "conv_in": ("conv_in",), "conv_out": ("conv_out",),
    "delta_qkv": ("delta_qkv", "delta_z"), "delta_out": ("delta_out",), **INPUTS,
}  # fmt: skip
"""Those of blocks with a convolution or the delta rule in place of attention, too; in the order of their computation."""

BATCH_TOKENS = 2048
SAMPLE_ROWS = 1024


def parts_reading(source: str, slots: Collection[str]) -> list[str]:
    """Of a block with these slots, the weights that read an input: EVERY_INPUT's, or the one that has their rows together."""
    return [part for part in dict.fromkeys((*EVERY_INPUT[source], source)) if f"{part}.weight" in slots]


class Calibration:
    """The residual stream of the calibration tokens, somewhere in a model; at first before block 0.

    sequences: token ids, none empty. embedding [vocab, hidden]: as the quantized model will have it. dtype: to compute in.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sequences: Sequence[Sequence[int]],
        embedding: torch.Tensor,
        platform: CpuPlatform,
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self.layer = 0
        self._platform = platform
        self._dtype = dtype
        self._batches = [_batch_of(part, platform.config.block_size) for part in _parts(sequences)]
        self.num_tokens = sum(batch.num_tokens for batch in self._batches)
        self._num_blocks = max(int(batch.slots.max()) for batch in self._batches) // platform.config.block_size + 1
        platform.enter()
        self._residuals = [_embed(batch.token_ids, embedding, spec, dtype) for batch in self._batches]
        self._block = self._build()

    def slots(self) -> list[str]:
        """What the current block is made of, by our names within it."""
        return list(self._block.model.blocks[0].slots())

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Slots of the current block by name ("q.weight", "mlp_norm.weight"), floats; what was loaded before stays."""
        slots = self._block.model.blocks[0].slots()
        for name, weight in weights.items():
            slots[name].load(weight, 0)

    def observe(self, inputs: Collection[str] = ()) -> dict[str, InputStatistics]:
        """What those inputs of the current block look like, all where none is named, with the weights that are loaded. The stream
        stays where it is."""
        watched = self._block.storages()
        seen = {name: _Watch(self.num_tokens) for name in inputs or watched}
        for name, watch in seen.items():
            watched[name].watch = watch
        try:
            for batch, residual in zip(self._batches, self._residuals, strict=True):
                self._run(batch, residual.clone())
        finally:
            for name in seen:
                watched[name].watch = None
        return {name: watch.statistics() for name, watch in seen.items()}

    def advance(self) -> None:
        """The stream goes through the current block, with the weights that are loaded, and to the next one."""
        self._residuals = [
            self._run(batch, residual) for batch, residual in zip(self._batches, self._residuals, strict=True)
        ]
        self.layer += 1
        if self.layer < self.spec.num_layers:
            self._block = self._build()

    def _build(self) -> _Block:
        spec = replace(self.spec, blocks=(self.spec.blocks[self.layer],))
        return _Block(spec, self._platform, self._dtype, self._num_blocks, max(batch.num_seqs for batch in self._batches))

    @torch.inference_mode()
    def _run(self, batch: Batch, residual: torch.Tensor) -> torch.Tensor:
        self._platform.enter()
        return self._block.run(batch, residual)


class _Block:
    """A model of one layer, of which embedding and head are never used, nor their memory touched."""

    def __init__(self, spec: ModelSpec, platform: CpuPlatform, dtype: torch.dtype, num_blocks: int, num_states: int) -> None:
        def make(parts: dict[str, int], width: int) -> _Watched:
            return _Watched(sum(parts.values()), width, dtype)

        backend = platform.backend(spec, dtype)
        self.model = Decoder(spec, Kit(dtype, make, platform.ops, backend))
        self.cache = KVCache(num_blocks, spec.mixers, backend, num_states)

    def run(self, batch: Batch, residual: torch.Tensor) -> torch.Tensor:
        """The residual stream [T, hidden] behind the layer; the one before it is overwritten."""
        inputs = self.model.prepare(batch)
        x = self.model.blocks[0](None, residual, inputs, self.cache.layers[0])
        if x is not None:
            self.model.ops.join(x, residual)
        return residual

    def storages(self) -> dict[str, _Watched]:
        """By the inputs that they read."""
        mixer, mlp = self.model.blocks[0].mixer, self.model.blocks[0].mlp
        assert isinstance(mlp, MLP), "Walk refuses experts"
        if isinstance(mixer, ShortConv):
            linears = {"conv_in": mixer.projection, "conv_out": mixer.out}
        elif isinstance(mixer, Delta):
            linears = {"delta_qkv": mixer.projection, "delta_out": mixer.out}
        else:
            assert isinstance(mixer, Attention)
            linears = {"qkv": mixer.qkv, "o": mixer.out}
        linears |= {"gate_up": mlp.gate_up, "down": mlp.down}
        found = {name: linear.weight for name, linear in linears.items()}
        return {name: storage for name, storage in found.items() if isinstance(storage, _Watched)}


class _Watched(DenseStorage):
    """A weight that shows its inputs to whoever watches. All its matmuls come through this one."""

    watch: _Watch | None = None

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        if self.watch is not None:
            assert isinstance(x, torch.Tensor)
            self.watch.add(x)
        return super().matmul(x, bias, out_dtype)


class _Watch:
    """Adds up the inputs of a layer over all batches; num_tokens of them will come."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._every = -(-num_tokens // SAMPLE_ROWS)
        self._seen = 0
        self._products = torch.empty(0)
        self._sums = torch.empty(0)
        self._rows: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        """x [T, K]."""
        wide = x.float()
        if self._seen == 0:
            self._products = wide.new_zeros(x.shape[1], x.shape[1])
            self._sums = wide.new_zeros(x.shape[1])
        self._products.addmm_(wide.T, wide)
        self._sums += wide.abs().sum(0)
        self._rows.append(wide[-self._seen % self._every :: self._every].clone())
        self._seen += x.shape[0]

    def statistics(self) -> InputStatistics:
        assert self._seen == self.num_tokens
        return InputStatistics(self._products / self._seen, self._sums / self._seen, torch.cat(self._rows))


def _parts(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    """Sequences that run together, BATCH_TOKENS at most if no sequence is longer."""
    part: list[Sequence[int]] = []
    for sequence in sequences:
        if part and sum(map(len, part)) + len(sequence) > BATCH_TOKENS:
            yield part
            part = []
        part.append(sequence)
    yield part


def _batch_of(sequences: list[Sequence[int]], block_size: int) -> Batch:
    """Whole sequences from their beginning, in blocks of their own."""
    scheduled: list[Scheduled] = []
    first = 0
    for i, ids in enumerate(sequences):
        end = first + -(-len(ids) // block_size)
        scheduled.append(Scheduled(i, list(ids), 0, list(range(first, end)), (), prompt_len=len(ids), state=i))
        first = end
    return build_batch(scheduled, block_size)[0]


def _embed(ids: torch.Tensor, embedding: torch.Tensor, spec: ModelSpec, dtype: torch.dtype) -> torch.Tensor:
    rows = embedding[ids].to(dtype)
    return rows if spec.embedding_scale == 1.0 else rows * torch.tensor(spec.embedding_scale, dtype=dtype)
