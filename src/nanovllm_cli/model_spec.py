"""ModelSpec: a model as slots filled with plain values. A family fills them from a config; `decoder.py` builds what they say.

Frozen values without tensors: specs can be compared, hashed, printed and sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanovllm_cli.cross_spec import CrossSpec, LookSpec
from nanovllm_cli.mixer_spec import AttentionSpec, MixerSpec, PairSpec, attention_in, state_in
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.passes_spec import LoopSpec, PassesSpec
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.state_spec import DeltaSpec, WkvSpec
from nanovllm_cli.streams_spec import AnyStreams, GatedStreamsSpec, StreamsSpec

FARTHEST = 1 << 17
"""No model reads more at once that has a number for each distance and layers that go by nothing else."""
Pooling = Literal["mean", "last", "cls"]
"""How the hidden rows of a text become one: their mean, the last, or the first."""
Pooled = Pooling | Literal["each"]
"""The last: nothing is pooled, and each token has a vector of its own."""


BlockOrder = Literal["pre", "open", "sandwich", "post", "parallel", "beside", "original", "sphere"]
_NORMS: dict[BlockOrder, tuple[str, ...]] = {
    "pre": ("attention_norm", "mlp_norm"),
    "open": ("attention_norm", "mlp_norm", "after_mlp_norm"),
    "sandwich": ("attention_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm"),
    **dict.fromkeys(("post", "original"), ("after_attention_norm", "after_mlp_norm")),
    "parallel": ("attention_norm",),
    "beside": ("attention_norm", "mlp_norm"),
    "sphere": (),
}


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One layer. order:

    pre       x += mixer(norm(x)); x += mlp(norm(x))
    open      x += mixer(norm(x)); x += norm(mlp(norm(x)))                (A.X-K1's layers with experts)
    sandwich  x += norm(mixer(norm(x))); x += norm(mlp(norm(x)))          (Gemma 2 and 3, GLM-4)
    post      x += norm(mixer(x)); x += norm(mlp(x))                      (OLMo 2)
    parallel  x += mixer(norm(x)) + mlp(norm(x)), one norm for both       (Command R)
    beside    the same with a norm of each                                (GPT-NeoX)
    original  x = norm(x + mixer(x)); x = norm(x + mlp(x))                (Vaswani et al. 2017; BERT)
    sphere    x = norm(x + r * (norm(mixer(x)) - x)), or with its MLP     (nGPT, Loshchilov et al. 2024; Dory)

    Of "pre" it may lack one of both (Nemotron-H) or both (Nemotron Ultra), which is None then. scaled: at its end x is times a
    number of the checkpoint's. bare: of "pre", its mixer reads x as it is, normed already (ModernBERT's first). rescaled: of
    "pre", x and what joins it are (ZAYA1). streams: x is the first of several, of "sandwich" (Gemma 3n), or made of all, of
    "pre" (Hy4, and Qwen4-Exp, where that is normed already). gated_norms: those of its norms, by name, whose numbers are times
    the sigmoids of as many, which two matrices make of them by way of `gate_rank` and a SiLU (A.X-K2). rate: of "sphere", which
    has one of both: r is the size of the checkpoint's number of a column times this. factors (Talkie): of "pre", of what its
    mixer, its MLP and, once more, the entry add. cross: of "pre" and "original" with both, between the two, x += cross(norm(x))
    (Whisper) or x = norm(x + cross(x)) (BART).
    looks: instead of a mixer, see `LookSpec`."""

    mixer: MixerSpec | None
    mlp: MLPSpec | MoESpec | None
    order: BlockOrder = "pre"
    scaled: bool = False
    bare: bool = False
    rescaled: bool = False
    streams: AnyStreams | None = None
    gated_norms: tuple[str, ...] = ()
    gate_rank: int = 0
    rate: float | None = None
    factors: tuple[float, float, float] | None = None
    cross: CrossSpec | None = None
    looks: LookSpec | None = None

    @property
    def norms(self) -> tuple[str, ...]:
        """Those of its order, by name."""
        if isinstance(self.streams, GatedStreamsSpec):
            return ()
        has_none = self.mixer is None and self.looks is None
        lacking = {"attention_norm": has_none or self.bare, "mlp_norm": self.mlp is None}
        names = [name for name in _NORMS[self.order] if not lacking.get(name)]
        return tuple(names) if self.cross is None else (*names, "cross_norm")

    @property
    def has_halves(self) -> bool:
        """Whether its MLP reads what its mixer has made, by a norm of its own, so that rows may leave between the two."""
        if None in (self.mixer, self.mlp) or isinstance(self.streams, StreamsSpec) or self.order == "beside":
            return False
        if isinstance(self.mixer, WkvSpec):  # whose MLP reads what came of the token before, too
            return False
        return self.bare or isinstance(self.streams, GatedStreamsSpec) or {"attention_norm", "mlp_norm"} <= set(self.norms)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        gates = hidden_size * (2 * self.gate_rank * len(self.gated_norms) + (self.rate is not None))
        parts = (self.mixer, self.mlp, self.streams, self.cross, self.looks)
        return gates + sum(part.num_weights(hidden_size) for part in parts if part is not None)

    def num_active(self, hidden_size: int) -> int:
        """Those that a token is multiplied with."""
        parts = (self.mlp, self.mixer if isinstance(self.mixer, AttentionSpec) else None)
        idle = sum(part.num_weights(hidden_size) - part.num_active(hidden_size) for part in parts if part is not None)
        return self.num_weights(hidden_size) - idle - self.num_stored

    @property
    def num_stored(self) -> int:
        """Numbers that stay in their files, of which a token takes a few rows."""
        ngrams = self.mixer.ngrams if isinstance(self.mixer, DeltaSpec) else None
        return 0 if ngrams is None else ngrams.num_stored


@dataclass(frozen=True, slots=True)
class EntrySpec:
    """What is added to an embedding before the first layer reads it, and a norm of the sum: a row of a table of `positions` for
    the token's position, the first token's being `first_position`, and that of a table of `segments`, whose first row is for all
    but the second of two texts that are read together. 0: no such table. norm: see `NormSpec`; None: the sum stays as it is, as a
    decoder's mostly does. rescaled: each column is, and there is nothing else. waves: no checkpoint has the positions, whose
    columns are sines, in the second half cosines, of the position over 10000 ** (i / waves), i from 0 on in each half (Vaswani
    et al. 2017)."""

    norm: NormSpec | None
    positions: int = 0
    first_position: int = 0
    segments: int = 0
    rescaled: bool = False
    waves: int = 0


@dataclass(frozen=True, slots=True)
class DistanceSpec:
    """What scores get by how far a key lies from its query, in all layers. reach: the longest sequence. buckets: of
    distances, wider ones up to `farthest`, each with a learned number a head (T5, Raffel et al. 2020); 0: a slope a head times
    the distance is taken off (ALiBi, Press et al. 2022). both_ways: half of them are of keys behind a query; else it sees none.
    by_layer: each layer has numbers of its own (UMT5)."""

    reach: int
    buckets: int = 0
    farthest: int = 0
    both_ways: bool = True
    by_layer: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder, or an encoder. max_position: the longest sequence it was made for, in tokens. embedding_scale multiplies
    embeddings, residual_scale what attention and MLP add to the residual stream, logit_scale logits; logit_softcap caps them.
    per_layer_width: numbers of each token's own that a layer gets, see `layers/per_layer.py`; 0: none. per_layer_rows: tokens
    that have some, the first ones; those behind have the first one's; 0: all. per_layer_embedded: of a table, too. has_head:
    without one no token is drawn, and texts are embedded alone; tied_head holds then, and no weight is asked for. head_rows: of
    a head that has fewer than the embedding, and tokens behind are never drawn; 0: all. entry: None where an embedding goes into
    the first layer as it is. embedding_normed: it is divided by its root mean square. ends_normed: whether a norm is behind the
    last layer; last_norm: where it is another than layers'. passes: in which layers are computed, None: once. logit_factor: each
    token's logit is times a number of the checkpoint's times this (nGPT); None: there are none. encoder: what reads a text for
    layers to attend to (`CrossSpec`), by the same embedding, and has no head; None: nothing does."""

    architecture: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    max_position: int
    tied_head: bool = False
    head_bias: bool = False
    has_head: bool = True
    head_rows: int = 0
    embedding_scale: float = 1.0
    embedding_normed: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer_width: int = 0
    per_layer_rows: int = 0
    per_layer_embedded: bool = True
    entry: EntrySpec | None = None
    distances: DistanceSpec | None = None
    ends_normed: bool = True
    last_norm: NormSpec | None = None
    passes: PassesSpec | LoopSpec | None = None
    logit_factor: float | None = None
    encoder: ModelSpec | None = None
    dtype: str = field(default="bfloat16", compare=False)

    def in_order(self, order: BlockOrder) -> ModelSpec:
        """The same with all blocks in this order."""
        return replace(self, blocks=tuple(replace(block, order=order) for block in self.blocks))

    def with_attention(self, **changes: Any) -> ModelSpec:
        """The same with these values in every AttentionSpec."""
        return self.each_attention(lambda layer, attention: replace(attention, **changes))

    def each_attention(self, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
        """The same with each layer's AttentionSpec as `change` has it."""

        def changed(layer: int, mixer: MixerSpec | None) -> MixerSpec | None:
            if isinstance(mixer, PairSpec):
                return replace(mixer, attention=change(layer, mixer.attention))
            return change(layer, mixer) if isinstance(mixer, AttentionSpec) else mixer

        return self.with_mixers(changed(i, block.mixer) for i, block in enumerate(self.blocks))

    def with_mixers(self, mixers: Iterable[MixerSpec | None]) -> ModelSpec:
        """The same with these, one for each layer."""
        return replace(self, blocks=tuple(replace(block, mixer=own) for block, own in zip(self.blocks, mixers, strict=True)))

    def each_rope(self, change: Callable[[RopeSpec], RopeSpec]) -> ModelSpec:
        """The same with each RopeSpec as `change` has it."""
        return self.each_attention(lambda layer, a: a if a.rope is None else replace(a, rope=change(a.rope)))

    def each_mlp(self, change: Callable[[MLPSpec | MoESpec], MLPSpec | MoESpec]) -> ModelSpec:
        """The same with each layer's MLP or mixture as `change` has it."""
        return replace(self, blocks=tuple(b if b.mlp is None else replace(b, mlp=change(b.mlp)) for b in self.blocks))

    def with_mlps(self, kind: type[MLPSpec | MoESpec] = MLPSpec, **changes: Any) -> ModelSpec:
        """The same with these values in every MLP that has no experts, or in every mixture."""
        return self.each_mlp(lambda mlp: replace(mlp, **changes) if isinstance(mlp, kind) else mlp)

    @property
    def mixers(self) -> list[MixerSpec | None]:
        """Of each layer as it is computed, None where it has none; what a KV cache has to keep follows from them."""
        return [block.mixer for block in self.computed]

    def mixer_at(self, place: str) -> MixerSpec | None:
        """Of the layer that a name of ours is of, the encoder's included; None of what is outside of layers."""
        match place.split("."):
            case ["encoder", *inner] if self.encoder is not None:
                return self.encoder.mixer_at(".".join(inner))
            case ["blocks", number, *_]:
                return self.blocks[int(number)].mixer
        return None

    @property
    def computed(self) -> tuple[BlockSpec, ...]:
        """Layers as they are computed, one as often as it is gone through."""
        return self.blocks if self.passes is None else tuple(self.blocks[i] for i in self.passes.order)

    @property
    def num_drawn(self) -> int:
        """Tokens that may be drawn, the first ones."""
        return self.head_rows or self.vocab_size

    @property
    def attentions(self) -> list[AttentionSpec]:
        """Of the layers that have one."""
        return [attention for mixer in self.mixers if (attention := attention_in(mixer)) is not None]

    @property
    def reads_both_ways(self) -> bool:
        """Whether tokens see those behind them, so that a text is computed as a whole, and nothing can be drawn."""
        return any(attention.both_ways for attention in self.attentions)

    @property
    def tells_texts_apart(self) -> bool:
        """Whether tokens of the second of two texts that are read together are marked."""
        return self.entry is not None and self.entry.segments > 1

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state, which only the tokens behind it can go on from."""
        return any(state_in(mixer) is not None for mixer in self.mixers)

    @property
    def last_keeper(self) -> int:
        """The last layer that keeps something of a token, or -1: behind its mixer only tokens whose logits are wanted go on."""
        kept = (mixer is not None and not (isinstance(mixer, AttentionSpec) and mixer.reads is not None) for mixer in self.mixers)
        return max((i for i, keeps in enumerate(kept) if keeps), default=-1)

    @property
    def for_prompts(self) -> ModelSpec:
        """What of it a token goes through whose logits nobody wants: the encoder, where there is one."""
        if self.encoder is not None:
            return self.encoder
        *before, last = self.computed[: self.last_keeper + 1]
        return replace(self, blocks=(*before, replace(last, mlp=None) if last.has_halves else last), passes=None)

    def reaching(self, length: int | None) -> ModelSpec:
        """The same for sequences of so many tokens, where nothing knows positions: no layer has attention, or, of a model with an
        encoder, layers go by distances alone, of which all from some on are one (T5)."""
        goes_by_places = self.attentions and (self.encoder is None or self.distances is None)
        if length is None or length <= self.max_position or goes_by_places:
            return self
        if self.encoder is None or self.distances is None:
            return replace(self, max_position=length)
        assert self.encoder.distances is not None
        length = max(self.max_position, min(length, FARTHEST))
        distances, seen = (replace(each, reach=length) for each in (self.distances, self.encoder.distances))
        return replace(self, max_position=length, distances=distances, encoder=replace(self.encoder, distances=seen))

    @property
    def attention(self) -> AttentionSpec:
        """The first one: in most models, but for windows and positions, every one."""
        return self.attentions[0]

    @property
    def cross(self) -> CrossSpec | None:
        """The first layer's, which is as all others'; None of a model that has no encoder."""
        return self.blocks[0].cross

    @property
    def looks(self) -> LookSpec | None:
        """That of the first layer which looks at images; None where none does."""
        return next((block.looks for block in self.blocks if block.looks is not None), None)

    @property
    def chunk(self) -> int | None:
        """What layers that see no further than their chunk of tokens have of these; None where there are none."""
        return next((attention.chunk for attention in self.attentions if attention.chunk is not None), None)

    @property
    def most_seen(self) -> int | None:
        """Tokens that one sees at the most in layers of sparse attention; None where there are none."""
        return next((most for attention in self.attentions if (most := attention.most_seen) is not None), None)

    @property
    def dense_mlp(self) -> MLPSpec | None:
        """The first layer's that has one without experts; None where all layers have experts."""
        return next((block.mlp for block in self.blocks if isinstance(block.mlp, MLPSpec)), None)

    @property
    def mixture(self) -> MoESpec | None:
        """The first layer's that has experts; None where none has."""
        return next((block.mlp for block in self.blocks if isinstance(block.mlp, MoESpec)), None)

    @property
    def mlps(self) -> list[MLPSpec]:
        """Of the layers that have one, or the experts'; all of a mixture's are of one kind."""
        return [mlp.expert if isinstance(mlp, MoESpec) else mlp for block in self.blocks if (mlp := block.mlp) is not None]

    @property
    def ropes(self) -> set[RopeSpec]:
        return {rope for attention in self.attentions for rope in attention.ropes}

    @property
    def streams(self) -> AnyStreams | None:
        """All layers have them, or none."""
        return self.blocks[0].streams

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def expert_share(self) -> float:
        """Of its experts, those that a text's token takes; 1 where there are none."""
        return min((b.mlp.share_taken(self.hidden_size) for b in self.blocks if isinstance(b.mlp, MoESpec)), default=1.0)

    @property
    def prompt_work(self) -> int:
        """Multiplications with weights for a token whose logits nobody wants."""
        return sum(block.num_active(self.hidden_size) for block in self.for_prompts.blocks)

    @property
    def read_work(self) -> int:
        """The same for one all of whose rows are wanted, of a model without a head."""
        return sum(block.num_active(self.hidden_size) for block in self.blocks)

    @property
    def num_by_token(self) -> int:
        """Numbers of the embedding that has layers' own, of which a token takes a row."""
        return self.per_layer_embedded * (self.per_layer_rows or self.vocab_size) * self.num_layers * self.per_layer_width

    @property
    def num_idle(self) -> int:
        """Numbers that a token is not computed with: of experts that it does not take, and what layers have of other tokens."""
        return self.num_by_token + sum(b.num_weights(self.hidden_size) - b.num_active(self.hidden_size) for b in self.blocks)

    def rope_regime(self, prompt_len: int) -> int:
        """0, or a number that tells apart prompts whose K/V can't be shared because their angles depend on the length."""
        passed = (rope for rope in self.ropes if rope.depends_on_length and prompt_len > rope.original_len)
        return max((prompt_len if rope.scaling == "dynamic" else 1 for rope in passed), default=0)
