"""Calibration: what the layers of a model see when texts run through it, block by block.

A text runs as a whole, so that tokens may see those behind them. One block's weights are in memory at a time; between blocks the
residual stream of all tokens is kept, [T, hidden] in the compute type. A block is the engine's own, with storages that look at
what they multiply. The caller brings the weights:

    calibration = Calibration(spec, sequences, embedding, platform, dtype)  # and what `Entry` and `PerLayer` make, if any
    for i in range(spec.num_layers):
        calibration.load(weights_of_block)           slot names without "blocks.i."
        seen = calibration.observe()                 "qkv", "o", "gate_up", "down" -> InputStatistics
        calibration.load(quantized_weights)          so that the next block sees what quantized ones give it
        calibration.advance()

Experts see the tokens that take them: `routed` says which, and `observe_expert` what that makes of one expert's input.

A run that is resumed loads what it has already quantized, and advances without observing.
Not covered: reading weights and texts, choosing numbers (quant/gptq.py, quant/awq.py).

Legend: T tokens, K columns (inputs) of a linear layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import rms_norm

from nanovllm_cli.attention.kv_cache import KVCache, LayerCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.plan import Scheduled
from nanovllm_cli.engine.step_batch import build_batch
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.layers.attention import Attention
from nanovllm_cli.layers.conv import ShortConv
from nanovllm_cli.layers.delta import ChannelDelta, Delta, Mamba
from nanovllm_cli.layers.kit import Kit, Share
from nanovllm_cli.layers.latent import LatentAttention
from nanovllm_cli.layers.linear import Linear
from nanovllm_cli.layers.mlp import MLP
from nanovllm_cli.layers.moe import MoE
from nanovllm_cli.layers.pair import Pair
from nanovllm_cli.layers.scan import Scan
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.decoder import Decoder
from nanovllm_cli.quant.dense import DenseStorage
from nanovllm_cli.quant.statistics import InputStatistics
from nanovllm_cli.quant.storage import WeightStorage

EVERY_INPUT: dict[str, tuple[str, ...]] = {
    "conv_in": ("conv_in",), "conv_out": ("conv_out",),
    "delta_qkv": ("delta_qkv", "delta_q", "delta_k", "delta_v", "delta_z"), "delta_out": ("delta_out",),
    "mamba_in": ("mamba_in",), "mamba_out": ("mamba_out",),
    "scan_in": ("scan_in",), "scan_out": ("scan_out",),
    "qkv": ("attention_gate", "q", "k", "v", "q_a", "kv_a"), "q_b": ("q_b",), "o": ("o",),
    "gate_up": ("gate", "up"), "down": ("down",),
    "latent_in": ("latent_in",), "latent_out": ("latent_out",),
    "per_layer_gate": ("per_layer_gate",), "per_layer_out": ("per_layer_out",),
}  # fmt: skip
"""What the linear layers of blocks read, and the weights ("<name>.weight") that share it, in the order of their rows; all in the
order of their computation. An expert's are behind "experts.<number>."."""

PerLayerRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""See `PerLayerInputs`: token ids [T] and what the first layer reads [T, hidden] -> [T, layers * width]."""
EntryRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""See `Entry`: rows [T, hidden] of the embedding, their positions and segments [T] -> what the first layer reads [T, hidden]."""
BATCH_TOKENS = 2048
SAMPLE_ROWS = 1024


def parts_reading(source: str, slots: Collection[str], expert: str = "") -> list[str]:
    """Of a block with these slots, the weights that read an input: EVERY_INPUT's, or the one that has their rows together.
    expert: what is before an expert's names, "experts.<number>." or "shared."."""
    parts = [f"{expert}{part}" for part in dict.fromkeys((*EVERY_INPUT[source], source))]
    return [part for part in parts if f"{part}.weight" in slots]


class Routed(NamedTuple):
    """rows [T, K] that a mixture of experts reads; chosen [T, k]: the experts of each; scaled: rows as experts read them, where
    the router scales them, or there are fewer."""

    rows: torch.Tensor
    chosen: torch.Tensor
    scaled: torch.Tensor | None = None

    def num_taken_by(self, expert: int) -> int:
        """Rows that take an expert."""
        return int((self.chosen == expert).sum())

    def of(self, expert: int) -> torch.Tensor:
        """The rows of an expert. One with fewer than they are wide gets others beside them, evenly spread over all: what it is
        asked about in other texts will be more like these than like nothing."""
        own = (self.chosen == expert).any(1)
        rows = self.rows if self.scaled is None else self.scaled
        lacking = min(rows.shape[1] - int(own.sum()), int((~own).sum()))
        if lacking <= 0:
            return rows[own]
        others = (~own).nonzero()[:, 0]
        return torch.cat([rows[own], rows[others[torch.arange(lacking) * len(others) // lacking]]])


class Calibration:
    """The residual stream of the calibration tokens, somewhere in a model; at first before block 0.

    sequences: token ids, none empty. embedding [vocab, hidden]: as the quantized model will have it. dtype: to compute in.
    per_layer: of a model whose layers get numbers of each token; entry: of one that has an `Entry` before them. second_text: of
    one that tells two texts apart, where the second begins in a sequence, or 0. Keys and values that later layers read are kept
    until the end. residuals: the stream, a tensor [T, hidden] for each batch of sequences.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sequences: Sequence[Sequence[int]],
        embedding: torch.Tensor,
        platform: CpuPlatform,
        dtype: torch.dtype,
        per_layer: PerLayerRows | None = None,
        entry: EntryRows | None = None,
        second_text: Callable[[Sequence[int]], int] | None = None,
    ) -> None:
        assert (spec.entry is None) == (entry is None)
        self.spec = spec
        self.layer = 0
        self._read = {attention.reads for attention in spec.attentions} - {None}
        self._kept: dict[int, list[LayerCache]] = {}
        self._platform = platform
        self._dtype = dtype
        self._batches = [_batch_of(part, platform.config.block_size, second_text) for part in _parts(sequences)]
        self.num_tokens = sum(batch.num_tokens for batch in self._batches)
        self._num_blocks = max(int(batch.slots.max()) for batch in self._batches) // platform.config.block_size + 1
        platform.enter()
        self.residuals = [_embed(batch.token_ids, embedding, spec, dtype) for batch in self._batches]
        if entry is not None:
            pairs = zip(self._batches, self.residuals, strict=True)
            self.residuals = [entry(residual, batch.positions, batch.segments) for batch, residual in pairs]
        self._own: list[torch.Tensor] | None = None
        if per_layer is not None:
            pairs = zip(self._batches, self.residuals, strict=True)
            self._own = [per_layer(batch.token_ids, residual) for batch, residual in pairs]
        reads_entry = any(block.factors is not None for block in spec.blocks)
        self._entered = [residual.clone() for residual in self.residuals] if reads_entry else None
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
        stays where it is. What comes behind an input that is named alone is not computed."""
        seen = {name: _Watch(self.num_tokens, is_last=len(inputs) == 1) for name in inputs or self._block.storages()}
        self._run_watched(seen)
        return {name: watch.statistics() for name, watch in seen.items()}

    def routed(self) -> Routed:
        """Of the current block's mixture, with the weights that are loaded. The stream stays where it is."""
        moe = self._block.moe
        router = moe.router
        assert isinstance(router, _Watched)
        router.watch = rows = _Rows()
        try:
            self._run_all()
        finally:
            router.watch = None
        x = torch.cat(rows.seen)
        with torch.inference_mode():
            logits = router.matmul(x, moe.router_bias, torch.float32)
            return Routed(x, moe.mixture.choose(logits)[0], moe.read(x, logits))

    @property
    def num_experts(self) -> int:
        """Of the current block."""
        mlp = self.spec.blocks[self.layer].mlp
        return mlp.num_experts if isinstance(mlp, MoESpec) else 0

    def observe_expert(self, expert: int | None, source: str, routed: Routed) -> InputStatistics:
        """What "gate_up" or "down" of an expert, or of the one that all tokens take, reads with the weights that are loaded."""
        seen = self._read_by_expert(expert, source, routed)
        watch = _Watch(len(seen))
        watch.add(seen)
        return watch.statistics()

    def mean_squares(self) -> dict[str, torch.Tensor]:
        """Of each column [K] of every input of the current block, experts' too ("experts.3.down"), with the weights that are
        loaded: what an importance matrix holds. The stream stays where it is."""
        seen = {name: _Squares() for name in self._block.storages()}
        self._run_watched(seen)
        found = {name: watch.mean() for name, watch in seen.items()}
        if self.num_experts:
            routed = self.routed()
            own: list[int | None] = [*range(self.num_experts), *([None] if self._block.moe.shared is not None else [])]
            for expert in own:
                for source in ("gate_up", "down"):
                    watch = _Squares()
                    watch.add(self._read_by_expert(expert, source, routed))
                    found[f"shared.{source}" if expert is None else f"experts.{expert}.{source}"] = watch.mean()
        return found

    def _read_by_expert(self, expert: int | None, source: str, routed: Routed) -> torch.Tensor:
        """Rows [T, K]."""
        self._platform.enter()
        moe = self._block.moe
        rows, own = (routed.rows, moe.shared) if expert is None else (routed.of(expert), moe.experts[expert])
        assert own is not None
        with torch.inference_mode():
            return rows if source == "gate_up" else own.inner(rows)

    def advance(self) -> None:
        """The stream goes through the current block, with the weights that are loaded, and to the next one."""
        kept = self._kept[self.layer] = []
        for number, residual in enumerate(self.residuals):
            self._run(number, residual)
            if self.layer in self._read:
                kept.append(tuple(each.clone() for each in self._block.own_cache))
        self.layer += 1
        if self.layer < self.spec.num_layers:
            self._block = self._build()

    def _build(self) -> _Block:
        spec = replace(self.spec, blocks=(self.spec.blocks[self.layer],))
        return _Block(spec, self._platform, self._dtype, self._num_blocks, max(batch.num_seqs for batch in self._batches))

    def _run_watched(self, watches: Mapping[str, _Watch] | Mapping[str, _Squares]) -> None:
        """Shows inputs of the block, by name, to who watches them."""
        watched = self._block.storages()
        for name, watch in watches.items():
            watched[name].watch = watch
        try:
            self._run_all()
        finally:
            for name in watches:
                watched[name].watch = None

    def _run_all(self) -> None:
        """The stream stays where it is."""
        for number, residual in enumerate(self.residuals):
            with contextlib.suppress(_Seen):
                self._run(number, residual.clone())

    @torch.inference_mode()
    def _run(self, number: int, residual: torch.Tensor) -> None:
        """A batch's residual stream [T, hidden] goes through the block, in place."""
        self._platform.enter()
        mixer, width = self.spec.blocks[self.layer].mixer, self.spec.per_layer_width
        reads = mixer.reads if isinstance(mixer, AttentionSpec) else None
        own = None if self._own is None else self._own[number][:, self.layer * width : (self.layer + 1) * width]
        entered = None if self._entered is None else self._entered[number]
        self._block.run(self._batches[number], residual, own, None if reads is None else self._kept[reads][number], entered)


class _Block:
    """A model of one layer, of which embedding and head are never used, nor their memory touched."""

    def __init__(self, spec: ModelSpec, platform: CpuPlatform, dtype: torch.dtype, num_blocks: int, num_states: int) -> None:
        def make(parts: dict[str, int], width: int, share: Share | None) -> _Watched:
            return _Watched(sum(parts.values()), width, dtype)

        backend = platform.backend(spec, dtype)
        self.model = Decoder(spec, Kit(dtype, make, platform.ops, backend))
        (mixer,) = spec.mixers
        has_none = mixer is None or (isinstance(mixer, AttentionSpec) and mixer.reads is not None)
        self.own_cache: LayerCache = () if has_none else KVCache(num_blocks, spec.mixers, backend, num_states).layers[0]

    def run(
        self, batch: Batch, residual: torch.Tensor, own: torch.Tensor | None, cache: LayerCache | None,
        entered: torch.Tensor | None,
    ) -> None:
        """The residual stream [T, hidden] goes through the layer, in place. own: see `PerLayer`. cache: another layer's, which
        this one reads; None where it has its own. entered: see `StepInputs`."""
        inputs = self.model.prepare(batch)._replace(entered=entered)
        x = self.model.blocks[0](None, residual, inputs, self.own_cache if cache is None else cache, own)
        if x is not None:
            self.model.ops.join(x, residual)

    def storages(self) -> dict[str, _Watched]:
        """By the inputs that they read."""
        found: dict[str, WeightStorage | Linear | None]
        match self.model.blocks[0].mixer:
            case None:
                found = {}
            case ShortConv() as conv:
                found = {"conv_in": conv.projection, "conv_out": conv.out}
            case Delta() | ChannelDelta() as delta:
                found = {"delta_qkv": delta.projection, "delta_out": delta.out}
            case Mamba() as mamba:
                found = {"mamba_in": mamba.projection, "mamba_out": mamba.out}
            case Scan() as scan:
                found = {"scan_in": scan.projection, "scan_out": scan.out}
            case Pair(attention=attention, state=mamba):
                found = {"qkv": attention.qkv, "o": attention.out, "mamba_in": mamba.projection, "mamba_out": mamba.out}
            case LatentAttention() as latent:
                found = {"qkv": latent.q, "q_b": latent.q_b, "o": latent.out}
            case Attention() as attention:
                found = {"qkv": attention.qkv, "o": attention.out}
            case other:
                raise AssertionError(other)
        mlp = self.model.blocks[0].mlp
        if isinstance(mlp, MLP):
            found |= {"gate_up": mlp.gate_up, "down": mlp.down}
        elif mlp is not None:
            found |= {"latent_in": mlp.latent_in, "latent_out": mlp.latent_out}
        if (per_layer := self.model.blocks[0].per_layer) is not None:
            found |= {"per_layer_gate": per_layer.gate, "per_layer_out": per_layer.out}
        weights = {name: each.weight if isinstance(each, Linear) else each for name, each in found.items()}
        return {name: storage for name, storage in weights.items() if isinstance(storage, _Watched)}

    @property
    def moe(self) -> MoE:
        mlp = self.model.blocks[0].mlp
        assert isinstance(mlp, MoE)
        return mlp


class _Watched(DenseStorage):
    """A weight that shows its inputs to whoever watches. All its matmuls come through this one."""

    watch: _Watch | _Rows | _Squares | None = None

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        if self.watch is not None:
            assert isinstance(x, torch.Tensor)
            self.watch.add(x)
            if self.watch.is_last:
                raise _Seen
        return super().matmul(x, bias, out_dtype)


class _Seen(Exception):
    """Nothing behind this is asked for."""


class _Rows:
    """Keeps the inputs of a layer."""

    is_last = True

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def add(self, x: torch.Tensor) -> None:
        self.seen.append(x.clone())


class _Squares:
    """Adds up the squares of a layer's inputs, over all batches."""

    is_last = False

    def __init__(self) -> None:
        self._sums = torch.zeros((), dtype=torch.float64)
        self._seen = 0

    def add(self, x: torch.Tensor) -> None:
        """x [T, K]."""
        self._sums = self._sums + x.float().square().sum(0, dtype=torch.float64)
        self._seen += x.shape[0]

    def mean(self) -> torch.Tensor:
        """[K] float32."""
        return (self._sums / self._seen).float()


class _Watch:
    """Adds up the inputs of a layer over all batches; num_tokens of them will come. is_last: nothing else is watched."""

    def __init__(self, num_tokens: int, is_last: bool = False) -> None:
        self.num_tokens = num_tokens
        self.is_last = is_last
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


def _batch_of(
    sequences: list[Sequence[int]], block_size: int, second_text: Callable[[Sequence[int]], int] | None
) -> Batch:
    """Whole sequences from their beginning, in blocks of their own."""
    scheduled: list[Scheduled] = []
    first = 0
    for i, ids in enumerate(sequences):
        end = first + -(-len(ids) // block_size)
        second = 0 if second_text is None else second_text(ids)
        blocks = list(range(first, end))
        scheduled.append(Scheduled(i, list(ids), 0, blocks, (), prompt_len=len(ids), state=i, second=second))
        first = end
    return build_batch(scheduled, block_size)[0]


def _embed(ids: torch.Tensor, embedding: torch.Tensor, spec: ModelSpec, dtype: torch.dtype) -> torch.Tensor:
    rows = embedding[ids].to(dtype)
    if spec.embedding_normed:
        rows = rms_norm(rows.float(), rows.shape[1:], eps=spec.norm.eps).to(dtype)
    return rows if spec.embedding_scale == 1.0 else rows * torch.tensor(spec.embedding_scale, dtype=dtype)
