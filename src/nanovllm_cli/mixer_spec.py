"""What carries numbers from token to token in a layer, as plain values: attention, and it beside a state (`state_spec.py`).

Frozen values without tensors, which `model_spec.py` makes a model of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nanovllm_cli.digest_spec import SharedSpec
from nanovllm_cli.index_spec import BlockIndexerSpec, IndexerSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.rope_spec import RopeSpec, TemperatureSpec
from nanovllm_cli.state_spec import ConvSpec, DeltaSpec, StateSpec


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention (DeepSeek-V2, Liu et al. 2024): of a token `rank` normed numbers are kept, of which each head's key_dim
    numbers of a key and value_dim of a value are made, and rotary_dim rotated ones, which end all heads' keys. query_rank: normed
    numbers that queries are made of; None: they are made of the hidden state. by_head: what makes keys and values is a matrix of
    the checkpoint for each head, and those of keys are turned over (GGUF). eps: of its norms, None: as of the model's others.
    indexer: what chooses the tokens that a query sees, None: it sees all up to its own. beside: queries are made of those numbers
    normed and, behind these, of the same as they are (A.X-K2)."""

    query_rank: int | None
    rank: int
    key_dim: int
    rotary_dim: int
    value_dim: int
    by_head: bool = False
    eps: float | None = None
    indexer: IndexerSpec | None = None
    beside: bool = False

    @property
    def query_dim(self) -> int:
        """Of a head, as its projection leaves it."""
        return self.key_dim + self.rotary_dim

    @property
    def read_by_queries(self) -> int | None:
        """Numbers that queries are made of; None for those of the hidden state."""
        return self.query_rank if self.query_rank is None or not self.beside else 2 * self.query_rank

    @property
    def own_indexer(self) -> IndexerSpec | None:
        """That of a layer which chooses."""
        return self.indexer if self.indexer is not None and self.indexer.chooses else None


@dataclass(frozen=True, slots=True)
class ConvolvedSpec:
    """Compressed convolutional attention (ZAYA1; Figliolia et al. 2025): queries and keys go through a convolution of each
    channel over `taps` tokens and one of each head over `head_taps`, and what comes out is added to the mean of a query and its
    key; half of the values are made of the token before. See `kernels.compressed_rules.met_heads`."""

    taps: int
    head_taps: int

    @property
    def width(self) -> int:
        """Tokens that it reads, its own included."""
        return self.taps + self.head_taps - 1


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention with num_heads query heads over num_kv_heads key and value heads of head_dim.

    both_ways: a query sees the keys behind its own, too. scale: None for head_dim ** -0.5. window: keys a query sees, itself
    included, with both_ways on either side; None for all. chunk: it sees none before its own chunk of so many tokens, a multiple
    of 64. softcap: cap on scores. sinks: a learned logit a head that takes part in the softmax. rope None: no positions.
    qk_norm: RMS norm of every head of q and k; qk_norm_of: or of each head as rope leaves it (Hunyuan), or of all heads of q,
    and of k, together (OLMo 2), or of every head with gains of its own (PLaMo 2); without qk_gains the checkpoint has nothing
    for it. value_norm: every head of v is divided by its root mean square. fused_qkv: q, k and v are one tensor of the
    checkpoint, in this order. keys_are_values: k's projection gives both. reads: the layer before whose keys and values it
    attends to, having none of its own. clip: queries, keys and values are held between -clip and clip before they rotate, behind
    norms of all heads (OLMo). gated: what a head finds is multiplied with the sigmoids of as many numbers, which the
    checkpoint's q has behind each head's query; gate_apart: or which have a projection of their own; gate_by_head: of one number
    a head then; gate_is: with what else of them (Laguna), of two to their power (K2 Horizon). found_norm: what all heads find is
    normed (BitNet). temperature: by which queries grow. value_dim: of a head's value, where it is narrower than its key;
    value_scale: a factor of what heads find (MiMo-V2). latent: keys and values are made of what all heads share, so that
    num_kv_heads is 1 and head_dim what is kept of a token: a head's query is turned into what its key is made of, and rotates
    its first numbers. read_size: numbers of the rows that it reads, where they are not those of the residual stream. convolved:
    queries and keys are, before they meet. query_factor (nGPT), of a "turned head": gains of each head's own queries are squares
    of the checkpoint's numbers times this, and keys have none; gate_factor: so are what gates are multiplied with. query_gains:
    of a "turned head" without gains, one for each head's queries (Talkie). values: what makes them, where it is a mixture whose
    experts are of one matrix (K2 Horizon). key_bias: whether keys have one, where qkv_bias (Whisper's do not). blocks: what
    chooses those that a query sees, None: it sees all up to its own token. shared: the one key is a head's value, too, and what
    is beyond the window is seen by digests; window is given then, and sinks are there.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_of: Literal["head", "turned head", "all heads", "each head"] = "head"
    qk_gains: bool = True
    both_ways: bool = False
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    value_norm: bool = False
    fused_qkv: bool = False
    keys_are_values: bool = False
    reads: int | None = None
    clip: float | None = None
    gated: bool = False
    gate_apart: bool = False
    gate_by_head: bool = False
    gate_is: Literal["sigmoid", "softplus", "softplus of 2"] = "sigmoid"
    temperature: TemperatureSpec | None = None
    found_norm: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    latent: LatentSpec | None = None
    read_size: int = 0
    convolved: ConvolvedSpec | None = None
    query_factor: float | None = None
    gate_factor: float | None = None
    query_gains: tuple[float, ...] = ()
    values: MoESpec | None = None
    key_bias: bool = True
    blocks: BlockIndexerSpec | None = None
    shared: SharedSpec | None = None

    @property
    def past(self) -> ConvSpec:
        """What is kept of what goes into convolutions, in a layer that has some: queries, keys, and half of the values."""
        assert self.convolved is not None
        return ConvSpec((self.num_heads + self.num_kv_heads) * self.head_dim + self._half_values, self.convolved.width)

    @property
    def _half_values(self) -> int:
        return self.num_kv_heads * self.head_dim // 2

    @property
    def found_dim(self) -> int:
        """Numbers of a head's value, and of what it finds."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def interleaved(self) -> bool:
        return self.rope is not None and self.rope.interleaved

    @property
    def qk_norm_sizes(self) -> dict[str, int]:
        """Gains of its norms of q and k, by part; of k none where another layer's are read, and none at all without qk_gains."""
        if not self.qk_gains:
            return {}
        parts = {"q": self.num_heads, "k": self.num_kv_heads} if self.reads is None else {"q": self.num_heads}
        whole = self.qk_norm_of in ("all heads", "each head")
        return {part: heads * self.head_dim if whole else self.head_dim for part, heads in parts.items() if self.qk_norm}

    @property
    def num_gates(self) -> int:
        """Rows of the projection that gates have."""
        each = self.head_dim if self.latent is None else self.latent.value_dim
        return self.gated * (self.num_heads if self.gate_by_head else self.num_heads * each)

    @property
    def gates_in_queries(self) -> bool:
        """Whether they stand behind each head's query."""
        return self.gated and not (self.gate_apart or self.gate_by_head)

    @property
    def indexer(self) -> IndexerSpec | None:
        return None if self.latent is None else self.latent.indexer

    @property
    def most_seen(self) -> int | None:
        """Tokens that one sees at the most, where that is chosen."""
        return self.blocks.most_seen if self.blocks is not None else None if self.indexer is None else self.indexer.most

    @property
    def index_products(self) -> int:
        """Multiply-adds with which a token ranks one up to it."""
        if self.blocks is not None:
            return -(-self.blocks.heads * self.blocks.dim // self.blocks.ratio)
        if self.shared is not None and self.shared.digests is not None and (indexer := self.shared.digests.indexer) is not None:
            return -(-indexer.heads * indexer.dim // self.shared.digests.rate)
        return 0 if self.indexer is None or not self.indexer.chooses else self.indexer.heads * self.indexer.dim

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """All that something of it turns by: heads, and digests."""
        if self.rope is None:
            return ()
        return (self.rope,) if self.digest_rope is None else (self.rope, self.digest_rope)

    @property
    def digest_rope(self) -> RopeSpec | None:
        """By the first of the tokens that a digest stands for."""
        if self.shared is None or self.shared.digests is None or self.rope is None:
            return None
        return replace(self.rope, every=self.shared.digests.rate)

    @property
    def rows_a_token(self) -> float:
        """That a token further back has beside what a window sees: a share of a digest, where there are such."""
        if self.shared is None:
            return 1.0
        return 0.0 if self.shared.digests is None else 1 / self.shared.digests.rate

    def num_seen(self, keys: float) -> float:
        """Rows that a token sees of so many tokens up to its own, which it sees all of but for a window."""
        near = min(keys, self.window or keys)
        if self.shared is None or self.shared.digests is None:
            return near
        most = keys if self.shared.digests.indexer is None else self.shared.digests.indexer.most
        return near + min(keys * self.rows_a_token, most)

    @property
    def queries_a_key(self) -> int:
        return self.num_heads // self.num_kv_heads

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        if (latent := self.latent) is not None:
            queries, rank = self.num_heads * latent.query_dim, latent.query_rank
            queries, gates = (queries + self.num_gates, 0) if self.gates_in_queries else (queries, self.num_gates)
            of_queries = hidden_size * (queries if rank is None else rank) + queries * (latent.read_by_queries or 0)
            of_queries += hidden_size * gates
            of_heads = self.num_heads * (latent.key_dim + latent.value_dim) * latent.rank + self.num_heads * self.sinks
            if (indexer := latent.own_indexer) is not None and latent.query_rank is not None:
                of_heads += latent.query_rank * indexer.heads * indexer.dim + hidden_size * (indexer.dim + indexer.heads)
            return of_queries + of_heads + hidden_size * (latent.rank + latent.rotary_dim + self.num_heads * latent.value_dim)
        queries, found = self.num_heads * self.head_dim, self.num_heads * self.found_dim
        if (shared := self.shared) is not None:
            outs = shared.out_rank * queries + shared.groups * shared.out_rank * hidden_size
            own = hidden_size * (shared.query_rank + self.head_dim) + shared.query_rank * queries + outs + self.num_heads
            digests = shared.digests
            return own + (0 if digests is None else digests.num_weights(hidden_size, shared.query_rank, self.head_dim))
        kept = self.head_dim if self.keys_are_values or self.values is not None else self.head_dim + self.found_dim
        keys = 0 if self.reads is not None else self.num_kv_heads * kept
        biases = (queries + keys) * self.qkv_bias + hidden_size * self.out_bias
        if self.convolved is not None:
            channels = queries + self.num_kv_heads * self.head_dim
            biases += channels * (self.convolved.taps + 2 + self.head_dim * self.convolved.head_taps) + self.num_kv_heads
        biases += queries * sum(factor is not None for factor in (self.query_factor, self.gate_factor))
        read_size = self.read_size or hidden_size
        values = 0 if self.values is None else self.values.num_weights(read_size)
        values += 0 if self.blocks is None else read_size * (self.blocks.heads + 1) * self.blocks.dim
        return values + read_size * (queries + self.num_gates + keys) + hidden_size * found + biases + self.num_heads * self.sinks

    def num_active(self, hidden_size: int) -> int:
        """Those that a token is multiplied with."""
        read_size, values = self.read_size or hidden_size, self.values
        idle = 0 if values is None else values.num_weights(read_size) - values.num_active(read_size)
        return self.num_weights(hidden_size) - idle


@dataclass(frozen=True, slots=True)
class AheadSpec:
    """Attention ahead of a state space (Zamba 2), with norms and a gated MLP of `inner` rows that layers with the same `of` have
    in common: a norm, attention, a norm and the MLP go over the residual stream and, side by side with it, what the first layer
    read; a matrix of the layer's own makes of that what joins the stream for the state's norm alone. use: the layer's number
    among those that have such; uses: of the first one of its kind, whose weights these are, the numbers of all of them. Each
    has products of `rank` beside those of the MLP, with beside_attention beside queries, keys and values as well."""

    inner: int
    activation: str
    rank: int
    beside_attention: bool = False
    of: int = 0
    use: int = 0
    uses: tuple[int, ...] = ()

    def num_weights(self, hidden_size: int, attention: AttentionSpec) -> int:
        """Numbers that a use of it takes beside attention's, in a model of this width; norms left out."""
        turned = 3 * attention.read_size + (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        beside = self.rank * (hidden_size + 2 * self.inner + turned * self.beside_attention)
        return 3 * hidden_size * self.inner + hidden_size**2 + beside


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Attention and a state space side by side (Falcon-H1): both read what one norm gives, and what they find is added up. ahead:
    attention goes ahead of the state instead."""

    attention: AttentionSpec
    state: DeltaSpec
    ahead: AheadSpec | None = None

    def num_weights(self, hidden_size: int) -> int:
        """Numbers in it, in a model of this width; norms left out."""
        both = self.attention.num_weights(hidden_size) + self.state.num_weights(hidden_size)
        return both if self.ahead is None else both + self.ahead.num_weights(hidden_size, self.attention)


MixerSpec = AttentionSpec | ConvSpec | StateSpec | PairSpec
"""What carries numbers from token to token in a layer."""


def attention_in(mixer: MixerSpec | None) -> AttentionSpec | None:
    """What a layer has of it, alone or beside a state."""
    mixer = mixer.attention if isinstance(mixer, PairSpec) else mixer
    return mixer if isinstance(mixer, AttentionSpec) else None


def state_in(mixer: MixerSpec | None) -> StateSpec | None:
    """The same of what keeps a state."""
    mixer = mixer.state if isinstance(mixer, PairSpec) else mixer
    return mixer if isinstance(mixer, StateSpec) else None
