"""Decoder: the only model class. It builds what a ModelSpec says and runs it; it knows no family by name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from nanovllm_cli.attention.backend import Angles, Looking, StepInputs, WholeRows
from nanovllm_cli.attention.encoded import EncodedRows, taken_apart
from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.batch import Batch
from nanovllm_cli.kernels.ops import Addend, Hidden, plain, taken_out
from nanovllm_cli.layers.ahead import AheadOfState, Shared
from nanovllm_cli.layers.altup import Streams
from nanovllm_cli.layers.connections import Connections
from nanovllm_cli.layers.distances import Distances
from nanovllm_cli.layers.embedding import Embedding, Head
from nanovllm_cli.layers.entry import entry_of
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.moe import MoE
from nanovllm_cli.layers.norm import RMSNorm
from nanovllm_cli.layers.passes import passes_of
from nanovllm_cli.layers.per_layer import PerLayerInputs
from nanovllm_cli.layers.rope import Rope
from nanovllm_cli.layers.router import HandedOn
from nanovllm_cli.layers.slots import Slots
from nanovllm_cli.layers.taps import Taps
from nanovllm_cli.layers.wkv import FirstValues, TimeMix
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.block import Block
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.streams_spec import ConnectionsSpec, GatedStreamsSpec, StreamsSpec

NOBODY = 0
"""The token whose numbers a layer gets of an image's tokens, where it gets some of each token's own: padding, in Gemma 4."""


class Decoder:
    """A decoder, or an encoder, made of what the kit has. shared: whose embedding and head it has, if not its own.
    reads_hidden: whether a batch has to bring rows beside its tokens. taps: what its layers read, for what guesses by that.
    directions: [hidden] fp32 that are added to the residual stream behind layers, by their numbers; a model of several streams
    has none. encoder: what reads the texts that its layers attend to; it is run by itself (`models/text_encoder.py`).
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
            self.head = Head(spec.num_drawn, spec.hidden_size, kit, spec.tied_head, spec.head_bias, spec.logit_factor)
            self.embedding = Embedding(
                self.head.weight if spec.tied_head else kit.weight({"embedding": spec.vocab_size}, spec.hidden_size)
            )
        else:
            self.head, self.embedding = shared.head, shared.embedding
        self.per_layer = PerLayerInputs(spec, kit) if spec.per_layer_width else None
        self.streams = _streams(spec, kit)
        self.order = range(spec.num_layers) if spec.passes is None else spec.passes.order
        self.last_keeper = spec.last_keeper
        self.has_readers = any(block.mixer or block.looks for block in spec.computed[self.last_keeper + 1 :])
        self.blocks = [Block(block, spec, kit.at(f"blocks.{i}")) for i, block in enumerate(spec.blocks)]
        self.handed, owners, first = HandedOn(spec.mixture), dict[int, Shared](), FirstValues()
        for block in self.blocks:
            if isinstance(block.mixer, AheadOfState):
                block.mixer.share(owners)
            if isinstance(block.mixer, TimeMix):
                block.mixer.first = first
            if isinstance(block.mlp, MoE):
                block.mlp.share(self.handed)
        self.reads_entry = bool(owners) or any(block.entry_factor for block in self.blocks)
        self.norm = RMSNorm(spec.last_norm or spec.norm, spec.hidden_size, kit) if spec.ends_normed else None
        self.passes = passes_of(spec.passes, spec.norm, self.norm, spec.hidden_size, kit)
        plain_norm = NormSpec(spec.norm.eps, unit=spec.norm.unit)
        self.embedding_norm = RMSNorm(plain_norm, spec.hidden_size, kit) if spec.embedding_normed else None
        self.entry = entry_of(spec.entry, spec.hidden_size, kit) if spec.entry is not None else None
        self.distances = [] if spec.distances is None else [
            Distances(spec.distances, spec.attentions[0].num_heads, kit)
            for _ in range(spec.num_layers if spec.distances.by_layer else 1)
        ]
        self.encoder = None if spec.encoder is None else Decoder(spec.encoder, kit.at("encoder"), shared=self)
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
        for i, distances in enumerate(self.distances):
            place = f"blocks.{i}." if distances.spec.by_layer else ""
            slots |= {f"{place}{name}": slot for name, slot in distances.slots().items()}
        for name, slot in ({} if self.encoder is None else self.encoder.slots()).items():
            slots |= {} if name.startswith(("embedding.", "head.")) else {f"encoder.{name}": slot}
        slots |= {} if self.norm is None else {f"norm.{name}": slot for name, slot in self.norm.slots().items()}
        return slots | {f"head.{name}": slot for name, slot in self.head.slots().items()}

    @property
    def most_unread(self) -> float:
        """Most tokens of a step in which the host reads nothing that the device computes: see `Mixture.most_unread`."""
        return min((each.mixture.most_unread for block in self.blocks for each in block.mixtures), default=math.inf)

    def rehearse_experts(self, num_tokens: int) -> None:
        """Runs an expert of each layer where the host will divide a step of so many tokens on 1, 2, 4, … rows: how many meet an
        expert, no rehearsal of a step can tell."""
        for each in (mixture for block in self.blocks for mixture in block.mixtures):
            if each.mixture.most_unread < num_tokens:
                for i in range(num_tokens.bit_length()):
                    each.experts[0](torch.empty(1 << i, each.expert_width, dtype=self.dtype, device=self.device))

    def prepare(self, batch: Batch) -> StepInputs:
        """What all layers share, computed once a step. The batch is on the host; what comes back is on the device."""
        if (self.spec.cross or self.spec.looks) is not None and bool((batch.positions < 0).any()):
            text, encoded = taken_apart(batch, self.device)
            return (StepInputs(batch, {}, None) if text is None else self.prepare(text))._replace(encoded=encoded)
        there, whole = batch.to(self.device), None
        if batch.whole is not None and there.whole is not None:
            apart = batch.taken(batch.whole.rows, batch.whole.numbers)
            step = self.backend.prepare(apart, apart.to(self.device), is_whole=True)
            whole = WholeRows(there.whole.rows, step, batch.whole.in_windows)
        inputs = self.inputs(there, self.backend.prepare(batch, there, whole=whole))
        if (lookers := batch.lookers) is not None:
            inputs = inputs._replace(looking=Looking(None if len(lookers) == batch.num_tokens else lookers.to(self.device)))
        if not self.has_readers or batch.logit_rows.shape[0] in (0, batch.num_tokens):
            return inputs
        return inputs._replace(asked=self.prepare(batch.asked()))

    def inputs(self, batch: Batch, step: Any) -> StepInputs:
        """Of a batch on the device, and what the attention backend has made of it."""
        return StepInputs(batch, self.angles(batch), step, self.distances[0].table if self.distances else None)

    def seen_from(self, number: int, inputs: StepInputs) -> StepInputs:
        """What a layer reads of them, by its number: tables of distances may be its own."""
        return inputs._replace(distances=self.distances[number].table) if len(self.distances) > 1 else inputs

    def angles(self, batch: Batch) -> dict[RopeSpec | None, Angles]:
        """cos and sin of the batch's positions, by rope."""
        none = torch.empty(batch.num_tokens, 0, device=self.device)
        tables: dict[RopeSpec | None, Angles] = {None: (none, none)}
        return tables | {spec: rope.tables(batch.positions, batch.rope_lens) for spec, rope in self.ropes.items()}

    def run(self, inputs: StepInputs, cache: KVCache) -> Hidden:
        """Hidden rows [R, hidden] of batch.logit_rows after the last norm; K and V of all tokens are written to the cache."""
        batch = inputs.batch
        if inputs.encoded is not None:
            self._keep_encoded(inputs.encoded, cache)
        if inputs.step is None:
            return self.no_rows(0)
        self._choose(batch.lora)
        self.handed.begin(batch.token_ids)
        residual, x = self.enter(batch)
        ids = batch.token_ids if batch.images is None else batch.token_ids.index_fill(0, batch.images.rows, NOBODY)
        every = None if self.per_layer is None else self.per_layer(ids, batch.token_table, residual)
        residual = residual if self.streams is None else self.streams.enter(residual)
        if self.reads_entry:
            inputs = inputs._replace(entered=taken_out(residual, 0, self.ops))
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
            if block.looks is not None:
                x = self._looked(block, x, residual, inputs, cache)
                continue
            its = self.seen_from(number, inputs.of_layer(cache.is_near[i]))
            if i != self.last_keeper or all_asked or i <= deepest:
                x = block(x, residual, its, layer, own)
                if batch.images is not None and i in deep:
                    residual.index_add_(0, batch.images.rows, deep[i])
                continue
            x = block.mixed(x, residual, its, layer) if block.has_halves else block(x, residual, its, layer, own)
            if rows.shape[0] == 0:
                break  # nothing is asked, and what is to be kept is
            x, residual, all_asked = self._taken(rows, x), residual[..., rows, :], True
            every, own = None if every is None else every[rows], None if own is None else own[rows]
            lora = None if batch.lora is None else batch.lora[rows]
            entered = None if inputs.entered is None else inputs.entered[rows]
            inputs = inputs.asked or inputs._replace(batch=replace(batch, slots=batch.slots[rows], lora=lora))
            inputs = inputs._replace(entered=entered)
            self._choose(inputs.batch.lora)
            if block.has_halves:
                x = block.fed(x, residual, inputs, own)
        if not all_asked:
            x, residual = self._taken(rows, x), residual[..., rows, :]
        x = self._tapped(len(self.order), self._led(len(self.order), x, residual), residual)
        residual = residual if self.streams is None else self.streams.leave(residual)
        if self.norm is not None:
            return self.norm(x, residual)
        if x is not None:
            self.ops.join(x, residual)
        return residual

    def _keep_encoded(self, encoded: EncodedRows, cache: KVCache) -> None:
        self._choose(encoded.lora)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            if block.cross is not None:
                block.cross.keep(encoded, layer)
            if block.looks is not None:
                block.looks.keep(encoded, cache.layers[block.looks.keeper])

    def _looked(
        self, block: Block, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, cache: KVCache
    ) -> Addend | None:
        """What a block that looks at something gives, of the tokens that do; all others pass it by."""
        if (looking := inputs.looking) is None:
            return x
        assert block.looks is not None
        layer = cache.layers[block.looks.keeper]
        if (rows := looking.rows) is None:
            return block(x, residual, inputs, layer)
        if x is not None:
            self.ops.join(x, residual)
        own, lora = residual[rows], inputs.batch.lora
        self._choose(None if lora is None else lora[rows])
        found = block(None, own, inputs, layer)
        assert found is not None
        self.ops.join(found, own)
        residual[rows] = own
        self._choose(lora)
        return None

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
        """x of these rows, those of the taps and what routers hand on being left alone as well."""
        if self.taps is not None:
            self.taps.keep(rows)
        self.handed.keep(rows)
        return None if x is None else x.taken(rows)

    def _choose(self, lora: torch.Tensor | None) -> None:
        """Weights with adapters that requests choose read rows that take this of them from now on; see `Batch`."""
        if self.chosen is not None:
            self.chosen.scales = lora

    def enter(self, batch: Batch) -> tuple[torch.Tensor, Addend | None]:
        """What the first block reads: the residual stream [T, hidden], and what has still to join it."""
        residual = self.embedding(batch.token_ids, batch.token_table)
        if self.embedding_norm is not None:
            residual = self.embedding_norm.alone(residual)
        if self.embedding_scale != 1.0:
            self.ops.scale(residual, self.embedding_scale)
        if batch.images is not None and batch.images.added:
            residual.index_add_(0, batch.images.rows, batch.images.values)
        elif batch.images is not None:
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


def _streams(spec: ModelSpec, kit: Kit) -> Streams | Connections | None:
    match spec.streams:
        case StreamsSpec() as streams:
            return Streams(streams, spec.hidden_size, kit)
        case ConnectionsSpec() | GatedStreamsSpec() as streams:
            return Connections(streams, spec.norm, spec.hidden_size, kit)
    return None
