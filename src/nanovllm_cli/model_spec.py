"""ModelSpec: a model as slots filled with plain values. A family fills them from a config; `decoder.py` builds what they say.

Frozen values without tensors: specs can be compared, hashed, printed and sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Pooling = Literal["mean", "last", "cls"]
"""How the hidden rows of a text become one: their mean, the last, or the first."""

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "divisors"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions over the first `dim` dims of a head. Lengths in tokens. Meanings by scaling:

    none; linear: positions / factor; dynamic: NTK base grown with the sequence past original_len; llama3: low frequencies /
    factor, smoothed between low_freq and high_freq; yarn: interpolation by frequency between beta_fast and beta_slow;
    longrope: one divisor a frequency, short_divisors up to original_len and long_divisors past it; divisors: short_divisors
    always (GGUF's rope_freqs). attention_factor multiplies cos and sin; None takes the method's own rule.
    interleaved: pairs are (2i, 2i + 1) rather than (i, dim / 2 + i).
    """

    dim: int
    theta: float = 10000.0
    interleaved: bool = False
    scaling: RopeScaling = "none"
    factor: float = 1.0
    original_len: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    short_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """True where a token's angle depends on how long its sequence is, not on its position alone."""
        return self.scaling in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention (DeepSeek-V2, Liu et al. 2024): of a token `rank` normed numbers are kept, of which each head's key_dim
    numbers of a key and value_dim of a value are made, and rotary_dim rotated ones, which end all heads' keys. query_rank: normed
    numbers that queries are made of; None: they are made of the hidden state. by_head: what makes keys and values is a matrix of
    the checkpoint for each head, and those of keys are turned over (GGUF)."""

    query_rank: int | None
    rank: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    by_head: bool = False

    @property
    def query_dim(self) -> int:
        """Of a head, as its projection leaves it."""
        return self.key_dim + self.rotary_dim


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention with num_heads query heads over num_kv_heads key and value heads of head_dim.

    scale: None for head_dim ** -0.5. window: keys a query sees, itself included; None for all. softcap: cap on scores. sinks: a
    learned logit a head that takes part in the softmax. rope None: no positions. qk_norm: RMS norm of every head of q and k;
    qk_norm_of: or of each head as rope leaves it (Hunyuan), or of all heads of q, and of k, together (OLMo 2). value_norm: every
    head of v is divided by its root mean square. fused_qkv: q, k and v are one tensor of the checkpoint, in this order.
    keys_are_values: k's projection gives both. reads: the layer before whose keys and values it attends to, having none of its
    own. gated: what a head finds is multiplied with the sigmoids of as many numbers, which the checkpoint's q has behind each
    head's query; gate_apart: or which have a projection of their own. latent: keys and values are made of what all heads share,
    so that num_kv_heads is 1 and head_dim what is kept of a token: a head's query is turned into what its key is made of, and
    rotates its first numbers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_of: Literal["head", "turned head", "all heads"] = "head"
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_norm: bool = False
    fused_qkv: bool = False
    keys_are_values: bool = False
    reads: int | None = None
    gated: bool = False
    gate_apart: bool = False
    latent: LatentSpec | None = None

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def interleaved(self) -> bool:
        return self.rope is not None and self.rope.interleaved

    @property
    def qk_norm_sizes(self) -> dict[str, int]:
        """Gains of its norms of q and k, by part; of k none where another layer's are read."""
        parts = {"q": self.num_heads, "k": self.num_kv_heads} if self.reads is None else {"q": self.num_heads}
        whole = self.qk_norm_of == "all heads"
        return {part: heads * self.head_dim if whole else self.head_dim for part, heads in parts.items() if self.qk_norm}

    @property
    def queries_a_key(self) -> int:
        return self.num_heads // self.num_kv_heads

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        if (latent := self.latent) is not None:
            queries = self.num_heads * latent.query_dim
            of_queries = hidden_size * queries if latent.query_rank is None else (hidden_size + queries) * latent.query_rank
            of_heads = self.num_heads * (latent.key_dim + latent.value_dim) * latent.rank
            return of_queries + of_heads + hidden_size * (latent.rank + latent.rotary_dim + self.num_heads * latent.value_dim)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        keys *= 0 if self.reads is not None else 1 if self.keys_are_values else 2
        biases = (queries + keys) * self.qkv_bias + hidden_size * self.out_bias
        return hidden_size * ((2 + self.gated) * queries + keys) + biases + self.num_heads * self.sinks


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A gated short convolution in place of attention (LFM2): in(x) is b, c and h, of `channels` each; then out(c * conv(b * h)),
    where conv sums a channel's value and those of the `width` - 1 tokens before, each times a weight. bias: of in, conv and out.
    """

    channels: int
    width: int
    bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width."""
        biases = (4 * self.channels + hidden_size) * self.bias
        return 4 * hidden_size * self.channels + self.channels * self.width + biases


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """The gated delta rule in place of attention (Qwen3-Next): see `kernels.reference.gated_delta`. Value heads of value_dim have
    a state of key_dim rows each; num_keys divides num_values. tiled: which of them share a key head. log_decay: the checkpoint
    has the logarithm of the decay, without its sign. mamba: the rule of Mamba-2 instead, see `kernels.reference.state_space`.
    conv_bias: of its convolution. Behind mamba's rule is a norm of all values, those of each key head by
    themselves.
    """

    num_keys: int
    key_dim: int
    num_values: int
    value_dim: int
    width: int
    tiled: bool = False
    log_decay: bool = True
    mamba: bool = False
    conv_bias: bool = False

    @property
    def values(self) -> int:
        """Numbers of a token that its heads find."""
        return self.num_values * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.num_keys * self.key_dim + self.values

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        gates = 1 if self.mamba else 2
        matrices = hidden_size * (self.channels + 2 * self.values + gates * self.num_values)
        tables = self.num_values * (3 if self.mamba else 2) + self.channels * self.conv_bias
        return matrices + self.channels * self.width + tables


MixerSpec = AttentionSpec | ConvSpec | DeltaSpec
"""What carries numbers from token to token in a layer."""


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """down(act(gate(x)) * up(x)). fused: gate and up are one tensor of the checkpoint, in this order. swiglu_oai: see
    `kernels.reference.gated_activation`. relu2: without a gate, down(relu(up(x)) ** 2)."""

    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"] = "silu"
    bias: bool = False
    fused: bool = False

    @property
    def gated(self) -> bool:
        return self.activation != "relu2"

    @property
    def parts(self) -> dict[str, int]:
        """Rows of what reads its input, by name, as a checkpoint has it."""
        if self.fused:
            return {"gate_up": 2 * self.intermediate_size}
        return dict.fromkeys(("gate", "up") if self.gated else ("up",), self.intermediate_size)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width."""
        inner = (2 if self.gated else 1) * self.intermediate_size
        return hidden_size * (inner + self.intermediate_size) + (inner + hidden_size) * self.bias

    def num_active(self, hidden_size: int) -> int:
        """Those that a token is multiplied with."""
        return self.num_weights(hidden_size)


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture of experts: sum over a token's experts of weight * expert(x). Shazeer et al. 2017.

    The router gives each token a logit for each of num_experts, plus a learned one with router_bias. The experts_per_token with
    the largest logits take part, the lower number first among equals; their weights are the softmax of all logits, or with
    norm_topk of theirs alone. scoring, selection_bias, scale, expert_scale: see `mixture.Scoring`. groups, groups_taken: experts
    of so many groups alone are looked at; a group's rank is that of its best, with sigmoids of its two best together. shared: an
    expert that every token takes, which weighs 1, or with shared_gate a sigmoid of a number that a row of weights gives it.

    apart (Gemma 4): the shared expert has the layer's MLP's place, the mixture goes beside it: experts and router each read the
    residual stream through a norm of their own, logits are divided by sqrt(hidden_size), and both results are normed.
    """

    num_experts: int
    experts_per_token: int
    expert: MLPSpec
    norm_topk: bool
    router_bias: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    selection_bias: bool = False
    scale: float = 1.0
    expert_scale: bool = False
    groups: int = 1
    groups_taken: int = 1
    shared: MLPSpec | None = None
    shared_gate: bool = False
    apart: bool = False

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width."""
        return self._every(hidden_size) + self.num_experts * self.expert.num_weights(hidden_size)

    def num_active(self, hidden_size: int) -> int:
        """Those that a token is multiplied with: the router's, and of the experts that it takes."""
        return self._every(hidden_size) + self.experts_per_token * self.expert.num_weights(hidden_size)

    def _every(self, hidden_size: int) -> int:
        """What all tokens take."""
        shared = 0 if self.shared is None else self.shared.num_weights(hidden_size)
        gate = hidden_size * self.shared_gate
        return shared + gate + self.num_experts * (hidden_size + self.router_bias + self.selection_bias + self.expert_scale)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm: x / rms(x) * (offset + weight). offset is 1 for Gemma, else 0. stored_offset: what the checkpoint's numbers have
    of it already, as in Gemma's GGUF files; it is taken off them, because what is left has few bits. centered: of x without its
    mean, which is layer norm without a bias; those of heads are not."""

    eps: float
    offset: float = 0.0
    stored_offset: float = 0.0
    centered: bool = False


BlockOrder = Literal["pre", "sandwich", "post", "parallel"]
_NORMS: dict[BlockOrder, tuple[str, ...]] = {
    "pre": ("attention_norm", "mlp_norm"),
    "sandwich": ("attention_norm", "mlp_norm", "after_attention_norm", "after_mlp_norm"),
    "post": ("after_attention_norm", "after_mlp_norm"),
    "parallel": ("attention_norm",),
}


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One layer. order:

    pre       x += mixer(norm(x)); x += mlp(norm(x))
    sandwich  x += norm(mixer(norm(x))); x += norm(mlp(norm(x)))          (Gemma 2 and 3, GLM-4)
    post      x += norm(mixer(x)); x += norm(mlp(x))                      (OLMo 2)
    parallel  x += mixer(norm(x)) + mlp(norm(x)), one norm for both       (Command R)

    Of "pre" it may have but one of both, None being the other (Nemotron-H). scaled: at its end x is multiplied with a number of
    the checkpoint's.
    """

    mixer: MixerSpec | None
    mlp: MLPSpec | MoESpec | None
    order: BlockOrder = "pre"
    scaled: bool = False

    @property
    def norms(self) -> tuple[str, ...]:
        """Those of its order, by name."""
        lacking = {"attention_norm"} if self.mixer is None else {"mlp_norm"} if self.mlp is None else set()
        return tuple(name for name in _NORMS[self.order] if name not in lacking)

    @property
    def has_halves(self) -> bool:
        """Whether its MLP reads what its mixer has made, by a norm of its own, so that rows may leave between the two."""
        return None not in (self.mixer, self.mlp) and {"attention_norm", "mlp_norm"} <= set(self.norms)

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        return sum(part.num_weights(hidden_size) for part in (self.mixer, self.mlp) if part is not None)

    def num_active(self, hidden_size: int) -> int:
        """Those that a token is multiplied with."""
        idle = 0 if self.mlp is None else self.mlp.num_weights(hidden_size) - self.mlp.num_active(hidden_size)
        return self.num_weights(hidden_size) - idle


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole decoder. max_position: the longest sequence it was made for, in tokens. embedding_scale multiplies embeddings,
    residual_scale what attention and MLP add to the residual stream, logit_scale logits; logit_softcap caps them.
    per_layer_width: numbers of each token's own that a layer gets, see `layers/per_layer.py`; 0: none. has_head: without one no
    token is drawn, and texts are embedded alone; tied_head holds then, so that no weight is asked for."""

    architecture: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    max_position: int
    tied_head: bool = False
    has_head: bool = True
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    per_layer_width: int = 0
    dtype: str = field(default="bfloat16", compare=False)

    def in_order(self, order: BlockOrder) -> ModelSpec:
        """The same with all blocks in this order."""
        return replace(self, blocks=tuple(replace(block, order=order) for block in self.blocks))

    def with_attention(self, **changes: Any) -> ModelSpec:
        """The same with these values in every AttentionSpec."""
        return self.each_attention(lambda layer, attention: replace(attention, **changes))

    def each_attention(self, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
        """The same with each layer's AttentionSpec as `change` has it."""
        mixers = (change(i, mixer) if isinstance(mixer, AttentionSpec) else mixer for i, mixer in enumerate(self.mixers))
        blocks = (replace(block, mixer=mixer) for block, mixer in zip(self.blocks, mixers, strict=True))
        return replace(self, blocks=tuple(blocks))

    def each_rope(self, change: Callable[[RopeSpec], RopeSpec]) -> ModelSpec:
        """The same with each RopeSpec as `change` has it."""
        return self.each_attention(lambda layer, a: a if a.rope is None else replace(a, rope=change(a.rope)))

    def each_mlp(self, change: Callable[[MLPSpec | MoESpec], MLPSpec | MoESpec]) -> ModelSpec:
        """The same with each layer's MLP or mixture as `change` has it."""
        mlps = (None if block.mlp is None else change(block.mlp) for block in self.blocks)
        blocks = (replace(block, mlp=mlp) for block, mlp in zip(self.blocks, mlps, strict=True))
        return replace(self, blocks=tuple(blocks))

    @property
    def mixers(self) -> list[MixerSpec | None]:
        """Of each layer, None where it has none; what a KV cache has to keep follows from them."""
        return [block.mixer for block in self.blocks]

    @property
    def attentions(self) -> list[AttentionSpec]:
        """Of the layers that have one."""
        return [mixer for mixer in self.mixers if isinstance(mixer, AttentionSpec)]

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state, which only the tokens behind it can go on from."""
        return any(isinstance(mixer, DeltaSpec) for mixer in self.mixers)

    @property
    def last_keeper(self) -> int:
        """The last layer that keeps something of a token, or -1: behind its mixer only tokens whose logits are wanted go on."""
        kept = (mixer is not None and not (isinstance(mixer, AttentionSpec) and mixer.reads is not None) for mixer in self.mixers)
        return max((i for i, keeps in enumerate(kept) if keeps), default=-1)

    @property
    def for_prompts(self) -> ModelSpec:
        """What of it a token goes through whose logits nobody wants."""
        *before, last = self.blocks[: self.last_keeper + 1]
        return replace(self, blocks=(*before, replace(last, mlp=None) if last.has_halves else last))

    @property
    def attention(self) -> AttentionSpec:
        """The first one: in most models, but for windows and positions, every one."""
        return self.attentions[0]

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
        return {attention.rope for attention in self.attentions if attention.rope is not None}

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def expert_share(self) -> float:
        """Of its experts, those that a token takes; 1 where there are none."""
        return min((b.mlp.experts_per_token / b.mlp.num_experts for b in self.blocks if isinstance(b.mlp, MoESpec)), default=1.0)

    @property
    def num_by_token(self) -> int:
        """Numbers of the embedding that has layers' own, of which a token takes a row."""
        return self.vocab_size * self.num_layers * self.per_layer_width

    @property
    def num_idle(self) -> int:
        """Numbers that a token is not computed with: of experts that it does not take, and what layers have of other tokens."""
        return self.num_by_token + sum(b.num_weights(self.hidden_size) - b.num_active(self.hidden_size) for b in self.blocks)

    def rope_regime(self, prompt_len: int) -> int:
        """0, or a number that tells apart prompts whose K/V can't be shared because their angles depend on the length."""
        passed = (rope for rope in self.ropes if rope.depends_on_length and prompt_len > rope.original_len)
        return max((prompt_len if rope.scaling == "dynamic" else 1 for rope in passed), default=0)
