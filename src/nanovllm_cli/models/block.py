"""Block: one layer of a decoder, by what its BlockSpec says. It knows no family by name."""

from __future__ import annotations

import torch

from nanovllm_cli.attention.backend import StepInputs
from nanovllm_cli.attention.kv_cache import LayerCache
from nanovllm_cli.digest_spec import SharedSpec
from nanovllm_cli.kernels.ops import Addend, Hidden, plain, taken_out
from nanovllm_cli.layers.ahead import AheadOfState
from nanovllm_cli.layers.altup import AltUp
from nanovllm_cli.layers.attention import Attention
from nanovllm_cli.layers.connections import Connection, connection_of
from nanovllm_cli.layers.conv import ShortConv
from nanovllm_cli.layers.convolved import ConvolvedAttention
from nanovllm_cli.layers.cross import Cross, Look
from nanovllm_cli.layers.delta import ChannelDelta, Delta, Mamba
from nanovllm_cli.layers.gated_norm import GatedNorm
from nanovllm_cli.layers.gated_streams import GatedConnection
from nanovllm_cli.layers.kit import Kit
from nanovllm_cli.layers.latent import LatentAttention
from nanovllm_cli.layers.mixer import Mixer
from nanovllm_cli.layers.mlp import MLP
from nanovllm_cli.layers.moe import MoE
from nanovllm_cli.layers.ngrams import NGrams
from nanovllm_cli.layers.norm import RMSNorm, StreamNorm
from nanovllm_cli.layers.pair import Pair
from nanovllm_cli.layers.per_layer import PerLayer
from nanovllm_cli.layers.rescaling import RescaledJoin, SphereJoin
from nanovllm_cli.layers.scan import HeadScan, Scan
from nanovllm_cli.layers.shared_key import SharedKeyAttention
from nanovllm_cli.layers.slots import Slots, number_slot
from nanovllm_cli.layers.wkv import ChannelShift, TimeMix
from nanovllm_cli.mixer_spec import AheadSpec, AttentionSpec, ConvolvedSpec, LatentSpec, MixerSpec, PairSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, ScanSpec, WkvSpec
from nanovllm_cli.streams_spec import ConnectionsSpec, GatedStreamsSpec, StreamsSpec


class Block:
    """One layer. `x` is what of the layer before has still to join the residual stream, or None."""

    def __init__(self, spec: BlockSpec, model: ModelSpec, kit: Kit) -> None:
        width = model.hidden_size

        self.order, self.has_halves = spec.order, spec.has_halves
        self.ops = kit.ops
        self.scales = (model.residual_scale,) * 2 if spec.factors is None else spec.factors[:2]
        self.entry_factor = 0.0 if spec.factors is None else spec.factors[2]
        self.mixer = None if spec.mixer is None else _mixer(spec.mixer, model.norm, width, kit)
        self.cross = None if spec.cross is None else Cross(spec.cross.attention, width, kit)
        self.looks = None if spec.looks is None else Look(spec.looks, model.norm, width, kit)
        self.mlp = None if spec.mlp is None else _mlp(spec.mlp, model.norm, width, kit)
        self.routed_early = self.mlp if isinstance(self.mlp, MoE) and self.mlp.early is not None else None
        assert self.routed_early is None or (self.has_halves and not (spec.bare or spec.streams)), "nor elsewhere"
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
        self.altup = AltUp(spec.streams, model.norm, width, kit) if isinstance(spec.streams, StreamsSpec) else None
        self.connections: list[Connection | GatedConnection] = []
        if isinstance(spec.streams, ConnectionsSpec | GatedStreamsSpec):
            names = "attention_connection", "mlp_connection"
            self.connections = [connection_of(spec.streams, model.norm, width, kit, name) for name in names]
            assert (spec.order, self.has_halves, self.scales) == ("pre", True, (1.0, 1.0)), "no model has these elsewhere"
        ngrams = spec.mixer.ngrams if isinstance(spec.mixer, DeltaSpec) else None
        self.ngrams = None if ngrams is None else NGrams(ngrams, model.norm, kit)
        assert self.ngrams is None or self.connections, "no model has these elsewhere"
        self.channel = ChannelShift(spec.mixer, width, kit) if isinstance(spec.mixer, WkvSpec) else None
        assert self.channel is None or (spec.order, self.scales, spec.rescaled) == ("pre", (1.0, 1.0), False), "nor elsewhere"
        changed = spec.bare or spec.rescaled or spec.factors or spec.streams or self.scales != (1.0, 1.0)
        may_cross = (spec.order == "pre" and self.has_halves) or spec.order == "original"
        assert self.cross is None or (may_cross and not changed), "nor attention to an encoder"
        assert self.looks is None or (spec.order == "pre" and spec.mixer is None and not (changed or self.cross)), "nor a look"
        self.is_scaled, self.factor = spec.scaled, 1.0
        self.joins = [RescaledJoin(kind, width, kit) for kind in ("attention", "mlp")] if spec.rescaled else []
        kind = "mlp" if spec.mixer is None else "attention"
        self.sphere = SphereJoin(kind, spec.rate, model.norm, width, kit) if spec.rate is not None else None
        assert (self.sphere is not None) == (spec.order == "sphere"), "a rate is of these alone"
        assert spec.order == "sandwich" or not (self.per_layer or spec.scaled or self.altup), "no model has these elsewhere"
        own = model.residual_scale
        assert spec.factors is None or (spec.order, self.has_halves, own) == ("pre", True, 1.0), "nor elsewhere"
        assert own == 1.0 or (len(self.norms) > 1 and spec.order not in ("beside", "open")), "nor factors of what is alone"

    @property
    def mixtures(self) -> list[MoE]:
        """Its mixtures of experts."""
        values = self.mixer.values if isinstance(self.mixer, Attention) else None
        return [each for each in (values, self.mlp) if isinstance(each, MoE)]

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
            return self.fed(self.mixed(x, residual, inputs, cache), residual, inputs, own)
        if self.altup is not None:
            assert own is not None, "no model has several streams without these"
            self._streamed(self.altup, residual, inputs, cache, own)
            return None
        if self.closing:
            self._closed(residual, inputs, cache)
            return None
        if self.sphere is not None:
            self.sphere(self._found(residual, inputs, cache), residual)
            return None
        if self.channel is not None:
            return self._shifted(self.channel, x, residual, inputs, cache)
        if self.looks is not None:
            return self._looked(self.looks, x, residual, inputs, cache)
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
        if self.connections:
            if self.ngrams is not None:
                self.ngrams(residual, inputs, cache)
            read, weights = self.connections[0].read(residual)
            h = read if self.attention_norm is None else self.attention_norm(None, read)
            self.ops.write_streams(residual, self.mixer(h, inputs, cache), weights)
            return None
        if self.attention_norm is None:
            assert x is None, "only the first layer reads a stream that is normed already"
            return _addend(self.mixer(residual, inputs, cache))
        h = self.attention_norm(x, residual)
        if self.routed_early is not None:
            self.routed_early.route(residual)
        if self.after_attention is not None:
            return self.after_attention.before_joining(self.mixer(h, inputs, cache))
        if self.scales[0] != 1.0:
            return Addend(self.ops.scale(self.mixer(h, inputs, cache), self.scales[0]))
        if self.joins:
            return self.joins[0](self.mixer(h, inputs, cache), residual)
        if self.cross is not None:
            h = self.norms["cross_norm"](_addend(self.mixer.onto(residual, h, inputs, cache)), residual)
            return _addend(self.cross.onto(residual, h, inputs, cache))
        return _addend(self.mixer.onto(residual, h, inputs, cache))

    def fed(self, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, own: torch.Tensor | None) -> Addend | None:
        """The second half, of all rows or some, which inputs are of. x: what `mixed` gave of them."""
        mlp, slots = self.mlp, inputs.batch.slots
        assert mlp is not None
        if self.connections:
            read, weights = self.connections[1].read(residual)
            h = read if self.mlp_norm is None else self.mlp_norm(None, read)
            self.ops.write_streams(residual, _computed(mlp, h, slots), weights)
            return None
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
        if self.entry_factor:
            assert inputs.entered is not None
            found = self.ops.scale(_computed(mlp, h, slots), self.scales[1])
            again = self.ops.scale(taken_out(inputs.entered, 0, self.ops), self.entry_factor)
            self.ops.join(Addend(again), residual)
            return Addend(found)
        if self.scales[1] != 1.0:
            return Addend(self.ops.scale(_computed(mlp, h, slots), self.scales[1]))
        if self.joins:
            return self.joins[1](_computed(mlp, h, slots), residual)
        return _addend(_onto(mlp, residual, h, slots))

    def _alone(self, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> Addend | None:
        """Of a block that lacks a mixer or an MLP, or both."""
        if not self.norms:
            return x
        (norm,) = self.norms.values()
        if isinstance(self.mixer, AheadOfState):
            return Addend(self.mixer.led(x, residual, norm, inputs, cache))
        h = norm(x, residual)
        if self.mixer is not None:
            return _addend(self.mixer.onto(residual, h, inputs, cache))
        assert self.mlp is not None
        return _addend(_onto(self.mlp, residual, h, inputs.batch.slots))

    def _shifted(
        self, channel: ChannelShift, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, cache: LayerCache
    ) -> Addend | None:
        """Of a block whose MLP reads what came of the token before, too, so that no row leaves in front of it."""
        assert self.mixer is not None
        assert self.mlp is not None
        assert self.attention_norm is not None
        assert self.mlp_norm is not None
        x = _addend(self.mixer.onto(residual, self.attention_norm(x, residual), inputs, cache))
        h = channel(self.mlp_norm(x, residual), inputs, cache)
        return _addend(_onto(self.mlp, residual, h, inputs.batch.slots))

    def _looked(
        self, looks: Look, x: Addend | None, residual: torch.Tensor, inputs: StepInputs, cache: LayerCache
    ) -> Addend:
        """Of a block that looks at something, of tokens that do."""
        assert self.mlp is not None
        assert self.attention_norm is not None
        assert self.mlp_norm is not None
        found = self.ops.scale(looks(self.attention_norm(x, residual), inputs, cache), looks.gate)
        h = self.mlp_norm(Addend(found), residual)
        return Addend(self.ops.scale(_computed(self.mlp, h, inputs.batch.slots), looks.mlp_gate))

    def _found(self, stream: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """What the one part of a block makes of a stream that is normed already."""
        if self.mixer is not None:
            return self.mixer(stream, inputs, cache)
        assert self.mlp is not None
        return _computed(self.mlp, stream, inputs.batch.slots)

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
        if self.cross is not None:
            self.closing["cross_norm"](self.cross(stream, inputs, cache), stream)
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
        parts = [part for part in (self.mixer, self.cross, self.looks, self.mlp) if part is not None]
        slots = {name: slot for part in parts for name, slot in part.slots().items()} | named
        others = (self.per_layer, self.altup, self.channel, self.ngrams, self.sphere)
        for part in (*others, *self.connections, *self.joins, *self.gated.values()):
            slots |= {} if part is None else part.slots()
        return slots | ({"scale": number_slot(self._take_factor)} if self.is_scaled else {})

    def _take_factor(self, factor: float) -> None:
        self.factor = factor


def _mixer(spec: MixerSpec, norm: NormSpec, width: int, kit: Kit) -> Mixer:
    match spec:
        case AttentionSpec(convolved=ConvolvedSpec()):
            return ConvolvedAttention(spec, width, kit)
        case ConvSpec():
            return ShortConv(spec, width, kit)
        case DeltaSpec(mamba=True):
            return Mamba(spec, norm, width, kit)
        case DeltaSpec(channel_rank=rank) if rank:
            return ChannelDelta(spec, norm, width, kit)
        case DeltaSpec():
            return Delta(spec, norm, width, kit)
        case ScanSpec(heads=heads) if heads:
            return HeadScan(spec, norm, width, kit)
        case ScanSpec():
            return Scan(spec, norm, width, kit)
        case WkvSpec():
            return TimeMix(spec, width, kit)
        case AttentionSpec(latent=LatentSpec()):
            return LatentAttention(spec, norm, width, kit)
        case AttentionSpec(shared=SharedSpec()):
            return SharedKeyAttention(spec, norm, width, kit)
        case PairSpec(ahead=AheadSpec()):
            return AheadOfState(spec, norm, width, kit)
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
