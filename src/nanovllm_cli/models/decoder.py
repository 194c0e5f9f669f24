"""Decoder: the only model class. It builds what a ModelSpec says and runs it; it knows no family by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from nanovllm_cli.attention.backend import Angles, StepInputs, WholeRows
from nanovllm_cli.attention.kv_cache import KVCache, LayerCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.kernels.ops import Addend, Hidden, plain
from nanovllm_cli.layers.altup import AltUp, Streams
from nanovllm_cli.layers.attention import Attention
from nanovllm_cli.layers.conv import ShortConv
from nanovllm_cli.layers.delta import ChannelDelta, Delta, Mamba
from nanovllm_cli.layers.distances import Distances
from nanovllm_cli.layers.embedding import Embedding, Head
from nanovllm_cli.layers.entry import entry_of
from nanovllm_cli.layers.gated_norm import GatedNorm
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.latent import LatentAttention
from nanovllm_cli.layers.mixer import Mixer
from nanovllm_cli.layers.mlp import MLP
from nanovllm_cli.layers.moe import MoE
from nanovllm_cli.layers.norm import RMSNorm, StreamNorm
from nanovllm_cli.layers.pair import Pair
from nanovllm_cli.layers.passes import Passes
from nanovllm_cli.layers.per_layer import PerLayer, PerLayerInputs
from nanovllm_cli.layers.rope import Rope
from nanovllm_cli.layers.scan import Scan
from nanovllm_cli.layers.slots import Slots, number_slot
from nanovllm_cli.layers.taps import Taps
from nanovllm_cli.mixer_spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    LatentSpec,
    MixerSpec,
    PairSpec,
    RopeSpec,
    ScanSpec,
)
from nanovllm_cli.model_spec import BlockSpec, MLPSpec, ModelSpec, MoESpec, NormSpec

NOBODY = 0
"""The token whose numbers a layer gets of an image's tokens, where it gets some of each token's own: padding, in Gemma 4."""


class Block:
    """One layer. `x` is what of the layer before has still to join the residual stream, or None."""

    def __init__(self, spec: BlockSpec, model: ModelSpec, kit: Kit) -> None:
        width = model.hidden_size

        self.order, self.has_halves = spec.order, spec.has_halves
        self.ops = kit.ops
        self.scale = model.residual_scale
        self.mixer = None if spec.mixer is None else _mixer(spec.mixer, model.norm, width, kit)
        self.mlp = None if spec.mlp is None else _mlp(spec.mlp, model.norm, width, kit)
        self.closing = {name: StreamNorm(model.norm, width, kit) for name in spec.norms} if spec.order == "original" else {}
        self.norms = {} if self.closing else {name: RMSNorm(model.norm.named(name), width, kit)
                                              for name in spec.norms if name not in spec.gated_norms}  # fmt: skip
        self.gated = {name: GatedNorm(model.norm, spec.gate_rank, width, kit, name) for name in spec.gated_norms}
        self.attention_norm, self.mlp_norm = (
            self.gated.get(name) or self.norms.get(name) for name in ("attention_norm", "mlp_norm")
        )
        assert not self.gated or self.has_halves, "no model has these elsewhere"
        self.after_attention, self.after_mlp = (self.norms.get(name) for name in ("after_attention_norm", "after_mlp_norm"))
        self.per_layer = PerLayer(model, kit) if model.per_layer_width else None
        self.altup = None if spec.streams is None else AltUp(spec.streams, model.norm, width, kit)
        self.is_scaled, self.factor = spec.scaled, 1.0
        assert spec.order == "sandwich" or not (self.per_layer or spec.scaled or self.altup), "no model has these elsewhere"
        assert self.scale == 1.0 or (len(self.norms) > 1 and spec.order not in ("beside", "open")), "nor factors of what is alone"

    def __call__(
        self,
        x: Addend | None,
        residual: torch.Tensor,
        inputs: StepInputs,
        cache: LayerCache,
        own: torch.Tensor | None = None,
    ) -> Addend | None:
        """own: see `PerLayer`."""
        if self.has_halves:
            return self.fed(self.mixed(x, residual, inputs, cache), residual, inputs.batch.slots, own)
        if self.altup is not None:
            assert own is not None, "no model has several streams without these"
            self._streamed(self.altup, residual, inputs, cache, own)
            return None
        if self.closing:
            self._closed(residual, inputs, cache)
            return None
        if self.mixer is None or self.mlp is None:
            return self._alone(x, residual, inputs, cache)
        if self.attention_norm is None:
            return self._behind(x, residual, inputs, cache)
        h = self.attention_norm(x, residual)
        read = h if self.mlp_norm is None else self.mlp_norm(None, residual)
        return Addend(self.ops.add(self.mixer(h, inputs, cache), _computed(self.mlp, read, inputs.batch.slots)))

    def mixed(self, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> Addend | None:
        """The first half: all that the cache is to keep, and what has still to join the residual stream."""
        assert self.mixer is not None
        if self.attention_norm is None:
            assert x is None, "only the first layer reads a stream that is normed already"
            return _addend(self.mixer(residual, inputs, cache))
        h = self.attention_norm(x, residual)
        if self.after_attention is not None:
            return self.after_attention.before_joining(self.mixer(h, inputs, cache))
        if self.scale != 1.0:
            return Addend(self.ops.scale(self.mixer(h, inputs, cache), self.scale))
        return _addend(self.mixer.onto(residual, h, inputs, cache))

    def fed(self, x: Addend | None, residual: torch.Tensor, slots: torch.Tensor, own: torch.Tensor | None) -> Addend | None:
        """The second half, of all rows or some. x: what `mixed` gave of them."""
        mlp = self.mlp
        assert mlp is not None
        assert self.mlp_norm is not None
        h = self.mlp_norm(x, residual)
        if self.after_mlp is not None:
            if isinstance(mlp, MoE) and mlp.apart is not None:
                found = mlp.beside(h, residual, slots)
            else:
                found = _computed(mlp, h, slots)
            if self.per_layer is None or own is None:
                return self.after_mlp.before_joining(found, self.factor)
            self.ops.join(self.after_mlp.before_joining(found), residual)
            return self.per_layer(residual, own, self.factor)
        if self.scale != 1.0:
            return Addend(self.ops.scale(_computed(mlp, h, slots), self.scale))
        return _addend(_onto(mlp, residual, h, slots))

    def _alone(self, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> Addend | None:
        """Of a block that lacks a mixer or an MLP, or both."""
        if not self.norms:
            return x
        (norm,) = self.norms.values()
        h = norm(x, residual)
        if self.mixer is not None:
            return _addend(self.mixer.onto(residual, h, inputs, cache))
        assert self.mlp is not None
        return _addend(_onto(self.mlp, residual, h, inputs.batch.slots))

    def _behind(self, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> Addend:
        """Of a block that reads the residual stream as it is: norms are of what joins it."""
        assert self.mixer is not None
        assert self.mlp is not None
        assert self.after_attention is not None
        assert self.after_mlp is not None
        if x is not None:
            self.ops.join(x, residual)
        self.ops.join(self.after_attention.before_joining(self.mixer(residual, inputs, cache)), residual)
        return self.after_mlp.before_joining(_computed(self.mlp, residual, inputs.batch.slots))

    def _closed(self, stream: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> None:
        """Of a block that norms the residual stream itself; what joins it has joined."""
        assert self.mixer is not None
        assert self.mlp is not None
        self.closing["after_attention_norm"](self.mixer(stream, inputs, cache), stream)
        self.closing["after_mlp_norm"](_computed(self.mlp, stream, inputs.batch.slots), stream)

    def _streamed(self, altup: AltUp, streams: torch.Tensor, inputs: StepInputs, cache: LayerCache, own: torch.Tensor) -> None:
        """Of a block with several streams [S, T, hidden], which are changed in place."""
        assert self.mixer is not None
        assert self.mlp is not None
        assert self.attention_norm is not None
        assert self.mlp_norm is not None
        assert self.after_attention is not None
        assert self.after_mlp is not None
        assert self.per_layer is not None
        stream = altup.predict(streams)
        h = plain(self.attention_norm(None, stream), self.ops)
        self.ops.join(Addend(h), stream)
        self.ops.join(altup.beside(h), stream)
        x = self.after_attention.before_joining(self.mixer(h, inputs, cache), 0.5**0.5)
        h = plain(self.mlp_norm(x, stream), self.ops)
        self.ops.join(self.after_mlp.before_joining(_computed(self.mlp, h, inputs.batch.slots)), stream)
        added = self.per_layer(altup.correct(streams, stream), own, 1.0)
        for i in range(1, len(streams)):
            self.ops.join(added, streams[i])

    def slots(self) -> Slots:
        norms: dict[str, RMSNorm | StreamNorm] = {**self.norms, **self.closing}
        named = {f"{name}.{kind}": slot for name, norm in norms.items() for kind, slot in norm.slots().items()}
        slots = {name: slot for part in (self.mixer, self.mlp) if part is not None for name, slot in part.slots().items()} | named
        for part in (self.per_layer, self.altup, *self.gated.values()):
            slots |= {} if part is None else part.slots()
        return slots | ({"scale": number_slot(self._take_factor)} if self.is_scaled else {})

    def _take_factor(self, factor: float) -> None:
        self.factor = factor


def _mixer(spec: MixerSpec, norm: NormSpec, width: int, kit: Kit) -> Mixer:
    match spec:
        case ConvSpec():
            return ShortConv(spec, width, kit)
        case DeltaSpec(mamba=True):
            return Mamba(spec, norm, width, kit)
        case DeltaSpec(channel_rank=rank) if rank:
            return ChannelDelta(spec, norm, width, kit)
        case DeltaSpec():
            return Delta(spec, norm, width, kit)
        case ScanSpec():
            return Scan(spec, norm, width, kit)
        case AttentionSpec(latent=LatentSpec()):
            return LatentAttention(spec, norm, width, kit)
        case PairSpec():
            return Pair(spec, norm, width, kit)
    return Attention(spec, norm, width, kit)


def _mlp(spec: MLPSpec | MoESpec, norm: NormSpec, width: int, kit: Kit) -> MLP | MoE:
    return MoE(spec, norm, width, kit) if isinstance(spec, MoESpec) else MLP(spec, norm, width, kit)


def _computed(mlp: MLP | MoE, h: Hidden, slots: torch.Tensor) -> torch.Tensor:
    return mlp(h, slots) if isinstance(mlp, MoE) else mlp(h)


def _onto(mlp: MLP | MoE, residual: torch.Tensor, h: Hidden, slots: torch.Tensor) -> torch.Tensor | None:
    """See `Linear.onto`."""
    return mlp.onto(residual, h, slots) if isinstance(mlp, MoE) else mlp.onto(residual, h)


def _addend(rows: torch.Tensor | None) -> Addend | None:
    return None if rows is None else Addend(rows)


class Decoder:
    """A decoder, or an encoder, made of what the kit has. shared: whose embedding and head it has, if not its own.
    reads_hidden: whether a batch has to bring rows beside its tokens. taps: what its layers read, for what guesses by that.
    directions: [hidden] fp32 that are added to the residual stream behind layers, by their numbers; a model of several streams
    has none.
    own_mixers: what this process computes of each layer; its KV cache is for these."""

    reads_hidden = False
    taps: Taps | None = None

    def __init__(self, spec: ModelSpec, kit: Kit, shared: Decoder | None = None) -> None:
        self.spec = spec
        self.directions: dict[int, torch.Tensor] = {}
        self.own_mixers = [mixer and kit.own_mixer(mixer) for mixer in spec.mixers]
        self.dtype = kit.dtype
        self.ops = kit.ops
        self.device = kit.ops.device
        self.backend = kit.backend
        self.chosen = kit.chosen
        if shared is None:
            self.head = Head(spec.num_drawn, spec.hidden_size, kit, spec.tied_head, spec.head_bias)
            self.embedding = Embedding(
                self.head.weight if spec.tied_head else kit.weight({"embedding": spec.vocab_size}, spec.hidden_size)
            )
        else:
            self.head, self.embedding = shared.head, shared.embedding
        self.per_layer = PerLayerInputs(spec, kit) if spec.per_layer_width else None
        self.streams = None if spec.streams is None else Streams(spec.streams, spec.hidden_size, kit)
        self.passes = None if spec.passes is None else Passes(spec.passes, spec.norm, spec.hidden_size, kit)
        self.order = range(spec.num_layers) if spec.passes is None else spec.passes.order
        self.last_keeper = spec.last_keeper
        self.has_readers = any(mixer is not None for mixer in spec.mixers[self.last_keeper + 1 :])
        self.blocks = [Block(block, spec, kit.at(f"blocks.{i}")) for i, block in enumerate(spec.blocks)]
        self.norm = RMSNorm(spec.last_norm or spec.norm, spec.hidden_size, kit) if spec.ends_normed else None
        self.embedding_norm = RMSNorm(NormSpec(spec.norm.eps), spec.hidden_size, kit) if spec.embedding_normed else None
        self.entry = entry_of(spec.entry, spec.hidden_size, kit) if spec.entry is not None else None
        self.distances = None if spec.distances is None else Distances(spec.distances, spec.attentions[0].num_heads, kit)
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=kit.dtype))  # as Gemma was trained
        self.ropes = {rope: Rope(rope, kit.ops) for rope in spec.ropes}

    def slots(self) -> Slots:
        """Every tensor that a checkpoint must bring, by our names."""
        slots = {f"embedding.{name}": slot for name, slot in self.embedding.slots().items()}
        for part in (self.per_layer, self.streams, self.passes):
            slots |= {} if part is None else part.slots()
        for i, block in enumerate(self.blocks):
            slots |= {f"blocks.{i}.{name}": slot for name, slot in block.slots().items()}
        slots |= {} if self.entry is None else self.entry.slots()
        slots |= {} if self.distances is None else self.distances.slots()
        slots |= {} if self.norm is None else {f"norm.{name}": slot for name, slot in self.norm.slots().items()}
        return slots | {f"head.{name}": slot for name, slot in self.head.slots().items()}

    @property
    def most_unread(self) -> float:
        """Most tokens of a step in which the host reads nothing that the device computes: see `Mixture.most_unread`."""
        return min((block.mlp.mixture.most_unread for block in self.blocks if isinstance(block.mlp, MoE)), default=math.inf)

    def rehearse_experts(self, num_tokens: int) -> None:
        """Runs an expert of each layer where the host will divide a step of so many tokens on 1, 2, 4, … rows: how many meet an
        expert, no rehearsal of a step can tell."""
        for block in self.blocks:
            if isinstance(block.mlp, MoE) and block.mlp.mixture.most_unread < num_tokens:
                for i in range(num_tokens.bit_length()):
                    block.mlp.experts[0](torch.empty(1 << i, block.mlp.expert_width, dtype=self.dtype, device=self.device))

    def prepare(self, batch: Batch) -> StepInputs:
        """What all layers share, computed once a step. The batch is on the host; what comes back is on the device."""
        there, whole = batch.to(self.device), None
        if batch.whole is not None and there.whole is not None:
            apart = batch.taken(batch.whole.rows, batch.whole.numbers)
            step = self.backend.prepare(apart, apart.to(self.device), is_whole=True)
            whole = WholeRows(there.whole.rows, step, batch.whole.in_windows)
        inputs = self.inputs(there, self.backend.prepare(batch, there, whole=whole))
        if not self.has_readers or batch.logit_rows.shape[0] in (0, batch.num_tokens):
            return inputs
        return inputs._replace(asked=self.prepare(batch.asked()))

    def inputs(self, batch: Batch, step: Any) -> StepInputs:
        """Of a batch on the device, and what the attention backend has made of it."""
        return StepInputs(batch, self.angles(batch), step, None if self.distances is None else self.distances.table)

    def angles(self, batch: Batch) -> dict[RopeSpec | None, Angles]:
        """cos and sin of the batch's positions, by rope."""
        none = torch.empty(batch.num_tokens, 0, device=self.device)
        tables: dict[RopeSpec | None, Angles] = {None: (none, none)}
        return tables | {spec: rope.tables(batch.positions, batch.rope_lens) for spec, rope in self.ropes.items()}

    def run(self, inputs: StepInputs, cache: KVCache) -> Hidden:
        """Hidden rows [R, hidden] of batch.logit_rows after the last norm; K and V of all tokens are written to the cache."""
        batch = inputs.batch
        self._choose(batch)
        residual, x = self.enter(batch)
        ids = batch.token_ids if batch.images is None else batch.token_ids.index_fill(0, batch.images.rows, NOBODY)
        every = None if self.per_layer is None else self.per_layer(ids, batch.token_table, residual)
        residual = residual if self.streams is None else self.streams.enter(residual)
        rows, width = batch.logit_rows, self.spec.per_layer_width
        all_asked = rows.shape[0] == batch.num_tokens
        deep = {} if batch.images is None else dict(zip(batch.images.behind, batch.images.deep, strict=True))
        deepest = max(deep, default=-1)
        if self.taps is not None:
            self.taps.begin(batch.num_tokens)
        residual = residual if self.passes is None else self.passes.begin(residual)
        for i, (number, layer) in enumerate(zip(self.order, cache.layers, strict=True)):
            block = self.blocks[number]
            if self.passes is not None and i in self.passes.joints:
                residual, x = self.passes.join(i, x, residual), None
            own = None if every is None else every[:, i * width : (i + 1) * width]
            x = self._tapped(i, self._led(i, x, residual), residual)
            if i != self.last_keeper or all_asked or i <= deepest:
                x = block(x, residual, inputs, layer, own)
                if batch.images is not None and i in deep:
                    residual.index_add_(0, batch.images.rows, deep[i])
                continue
            x = block.mixed(x, residual, inputs, layer) if block.has_halves else block(x, residual, inputs, layer, own)
            if rows.shape[0] == 0:
                break  # nothing is asked, and what is to be kept is
            x, residual, all_asked = self._taken(rows, x), residual[..., rows, :], True
            every, own = None if every is None else every[rows], None if own is None else own[rows]
            lora = None if batch.lora is None else batch.lora[rows]
            inputs = inputs.asked or inputs._replace(batch=replace(batch, slots=batch.slots[rows], lora=lora))
            self._choose(inputs.batch)
            if block.has_halves:
                x = block.fed(x, residual, inputs.batch.slots, own)
        if not all_asked:
            x, residual = self._taken(rows, x), residual[..., rows, :]
        x = self._tapped(len(self.order), self._led(len(self.order), x, residual), residual)
        residual = residual if self.streams is None else self.streams.leave(residual)
        if self.norm is not None:
            return self.norm(x, residual)
        if x is not None:
            self.ops.join(x, residual)
        return residual

    def _led(self, place: int, x: Addend | None, residual: torch.Tensor) -> Addend | None:
        """What has still to join the residual stream behind a direction, which joins it now. All of the layer before has joined
        first: some of it may bring a factor of the whole sum."""
        direction = self.directions.get(place - 1)
        if direction is None:
            return x
        if x is not None:
            self.ops.join(x, residual)
        self.ops.add_row(residual, direction)
        return None

    def _tapped(self, place: int, x: Addend | None, residual: torch.Tensor) -> Addend | None:
        """What has still to join the residual stream behind a tap, which wants it whole."""
        if self.taps is None or place not in self.taps.places:
            return x
        if x is not None:
            self.ops.join(x, residual)
        self.taps.take(place, residual)
        return None

    def _taken(self, rows: torch.Tensor, x: Addend | None) -> Addend | None:
        """x of these rows, those of the taps being left alone as well."""
        if self.taps is not None:
            self.taps.keep(rows)
        return None if x is None else x.taken(rows)

    def _choose(self, batch: Batch) -> None:
        """Weights with adapters that requests choose read rows like the batch's from now on."""
        if self.chosen is not None:
            self.chosen.scales = batch.lora

    def enter(self, batch: Batch) -> tuple[torch.Tensor, Addend | None]:
        """What the first block reads: the residual stream [T, hidden], and what has still to join it."""
        residual = self.embedding(batch.token_ids, batch.token_table)
        if self.embedding_norm is not None:
            residual = self.embedding_norm.alone(residual)
        if self.embedding_scale != 1.0:
            self.ops.scale(residual, self.embedding_scale)
        if batch.images is not None:
            residual.index_copy_(0, batch.images.rows, batch.images.values)
        if self.entry is not None:
            residual = self.entry(residual, batch.positions, batch.segments)
        return residual, None

    def no_rows(self, count: int) -> torch.Tensor:
        """Rows of zeros as `normed` gives them."""
        return torch.zeros(count, self.spec.hidden_size, dtype=self.dtype, device=self.device)

    def normed(self, hidden: Hidden) -> torch.Tensor:
        """What `run` gave, as plain numbers also where the next matmul was to normalise it."""
        return plain(hidden, self.ops)

    def kept(self, hidden: Hidden) -> torch.Tensor:
        """Of what `run` gave, and right behind it: the rows that what guesses reads, of a model with taps theirs."""
        return self.normed(hidden) if self.taps is None else self.taps.fused()

    def logits(self, hidden: Hidden) -> torch.Tensor:
        """hidden [R, hidden] -> logits [R, vocab] fp32."""
        return self.finish(self.head(hidden))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap of the head's own output, and -inf of tokens that it has no rows for."""
        if self.spec.logit_scale != 1.0 or self.spec.logit_softcap:
            logits = self.ops.scale(logits, self.spec.logit_scale, self.spec.logit_softcap or 0.0)
        return self.ops.widened(logits, self.spec.vocab_size - self.spec.head_rows) if self.spec.head_rows else logits
