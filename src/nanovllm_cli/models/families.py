"""The Llama-shaped families: from a config to a ModelSpec, and from our slot names to the checkpoint's.

Llama 1 to 3, Mistral, Qwen2 / 2.5 and Qwen3 (dense) differ in a handful of values only, so they share these two functions, and
a family is the `Family` that says which. What they share with the rest of the world (rope scaling, windows) is read here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec, RopeSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import (
    GGUF_EXPERT_NAMES,
    MIXTRAL_KEYS,
    MIXTRAL_NAMES,
    QWEN_KEYS,
    QWEN_NAMES,
    ExpertKeys,
    mlps_from_gguf,
    mlps_from_hf,
)

ANOTHER = "take another model; README.md lists what runs"
MAX_LAYERS = 1024
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """How one family's configs are read.

    qkv_bias: None reads "attention_bias". window_switch: the config key that must be true for "sliding_window" to count;
    None: a window counts wherever it is given. interleaved_gguf: its GGUF files hold q and k with rotary pairs side by side.
    experts: what its configs call them, where it has any. hf_names, gguf_names: where its tensors are called otherwise than
    HF_NAMES and GGUF_NAMES have it, or are others.
    """

    name: str
    qk_norm: bool = False
    qkv_bias: bool | None = None
    has_window: bool = False
    window_switch: str | None = None
    interleaved_gguf: bool = False
    tied_by_default: bool = False
    experts: ExpertKeys | None = None
    hf_names: Mapping[str, str] = field(default_factory=dict, hash=False)
    gguf_names: Mapping[str, str] = field(default_factory=dict, hash=False)

    def names(self, kind: Literal["hf", "gguf"]) -> dict[str, str]:
        """Our names of slots, {i} for the layer -> those in its files."""
        return {**HF_NAMES, **self.hf_names} if kind == "hf" else {**GGUF_NAMES, **self.gguf_names}


LLAMA = Family("llama", interleaved_gguf=True)
MISTRAL = Family("mistral", has_window=True, interleaved_gguf=True)
QWEN2 = Family("qwen2", qkv_bias=True, has_window=True, window_switch="use_sliding_window")
QWEN3 = Family("qwen3", qk_norm=True, has_window=True, window_switch="use_sliding_window")
MIXTRAL = replace(MISTRAL, name="mixtral", experts=MIXTRAL_KEYS, hf_names=MIXTRAL_NAMES)
QWEN3_MOE = replace(QWEN3, name="qwen3_moe", experts=QWEN_KEYS, hf_names=QWEN_NAMES)

HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blocks.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    **{
        f"blocks.{{i}}.{part}.{kind}": f"model.layers.{{i}}.self_attn.{part}_proj.{kind}"
        for part in "qkvo"
        for kind in ("weight", "bias")
    },
    **{f"blocks.{{i}}.{part}_norm.weight": f"model.layers.{{i}}.self_attn.{part}_norm.weight" for part in "qk"},
    **{
        f"blocks.{{i}}.{part}.{kind}": f"model.layers.{{i}}.mlp.{part}_proj.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}

GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    "blocks.{i}.attention_norm.weight": "blk.{i}.attn_norm.weight",
    "blocks.{i}.mlp_norm.weight": "blk.{i}.ffn_norm.weight",
    **{f"blocks.{{i}}.{part}.{kind}": f"blk.{{i}}.attn_{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.o.{kind}": f"blk.{{i}}.attn_output.{kind}" for kind in ("weight", "bias")},
    **{f"blocks.{{i}}.{part}_norm.weight": f"blk.{{i}}.attn_{part}_norm.weight" for part in "qk"},
    **{
        f"blocks.{{i}}.{part}.{kind}": f"blk.{{i}}.ffn_{part}.{kind}"
        for part in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    **GGUF_EXPERT_NAMES,
}

# Left by some exporters, and worth nothing to us: frequencies follow from the config.
HF_IGNORED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def spec_from_hf(config: Mapping[str, Any], family: Family) -> ModelSpec:
    """config.json -> ModelSpec, with the meanings that transformers gives its keys."""
    read = ConfigReader(config, "config.json")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    hidden = read.integer("hidden_size")
    head_dim = read.integer("head_dim", hidden // heads)
    layers = _layers(read.integer("num_hidden_layers"), read)
    max_position = read.integer("max_position_embeddings", 2048)
    _check_heads(heads, kv_heads, head_dim, read)
    activation = read.text("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"activation {activation!r} is not supported", f"known: {', '.join(sorted(ACTIVATIONS))}"
        )
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope_from_hf(read, head_dim, max_position),
        qkv_bias=read.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias,
        out_bias=read.flag("attention_bias", False) if family.qkv_bias is None else False,
        qk_norm=family.qk_norm,
    )
    mlp = MLPSpec(read.integer("intermediate_size"), ACTIVATIONS[activation], bias=read.flag("mlp_bias", False))  # type: ignore[arg-type]
    windows = _windows_from_hf(read, family, layers)
    mlps = mlps_from_hf(read, family.experts, mlp, layers)
    assert attention.rope is not None
    return ModelSpec(
        architecture=family.name,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(
            BlockSpec(replace(attention, window=window), each) for window, each in zip(windows, mlps, strict=True)
        ),
        norm=NormSpec(read.number("rms_norm_eps", 1e-6)),
        max_position=_stretched(attention.rope, max_position),
        tied_head=read.flag("tie_word_embeddings", family.tied_by_default),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )


def _windows_from_hf(read: ConfigReader, family: Family, layers: int) -> list[int | None]:
    """The window of each layer. "layer_types" says which layers have one; older configs, from which layer on."""
    if not family.has_window or not read.has("sliding_window"):
        return [None] * layers
    if family.window_switch is not None and not read.flag(family.window_switch, False):
        return [None] * layers
    window = read.integer("sliding_window")
    types = read.values.get("layer_types")
    if isinstance(types, list):
        if len(types) != layers:
            raise CheckpointError(f"config.json lists {len(types)} layer_types for {layers} layers", BROKEN)
        unknown = sorted({str(t) for t in types} - {"sliding_attention", "full_attention"})
        if unknown:
            raise UnsupportedError(
                f"layer type {unknown[0][:80]!r} is not supported", "known: full_attention, sliding_attention"
            )
        return [window if kind == "sliding_attention" else None for kind in types]
    first = read.integer("max_window_layers", 0, least=0) if family.window_switch is not None else 0
    return [window if i >= first else None for i in range(layers)]


def _rope_from_hf(read: ConfigReader, head_dim: int, max_position: int) -> RopeSpec:
    """ "rope_parameters" (transformers 5), or "rope_theta" beside "rope_scaling" (before)."""
    rope = read.section("rope_parameters" if read.has("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta") if rope.has("rope_theta") else read.number("rope_theta", 10000.0)
    share = rope.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    original = rope.integer(
        "original_max_position_embeddings", read.integer("original_max_position_embeddings", max_position), least=2
    )
    base = RopeSpec(dim=int(head_dim * share), theta=theta, original_len=original)
    _check_rope(base, head_dim, read)
    if rope.has("attention_factor"):
        base = replace(base, attention_factor=rope.number("attention_factor"))
    match kind:
        case "default" | "none":
            return base
        case "linear":
            return replace(base, scaling="linear", factor=rope.number("factor"))
        case "dynamic":
            if base.dim < 4:  # the exponent of its base is dim / (dim - 2)
                raise UnsupportedError(f"{rope.where}: dynamic scaling of {base.dim} rotary dims", ANOTHER)
            return replace(base, scaling="dynamic", factor=rope.number("factor"), original_len=max_position)
        case "llama3":
            return replace(
                base, scaling="llama3", factor=rope.number("factor"),
                low_freq=rope.number("low_freq_factor"), high_freq=rope.number("high_freq_factor"),
            )  # fmt: skip
        case "yarn":
            return replace(
                base, scaling="yarn", factor=rope.number("factor", max_position / original),
                beta_fast=rope.number("beta_fast", 32.0), beta_slow=rope.number("beta_slow", 1.0),
                truncate=rope.flag("truncate", True),
                mscale=rope.number("mscale", 0.0, positive=False),
                mscale_all_dim=rope.number("mscale_all_dim", 0.0, positive=False),
            )  # fmt: skip
        case "longrope" | "su":
            return replace(
                base, scaling="longrope", factor=rope.number("factor", max_position / original),
                short_divisors=rope.numbers("short_factor", base.dim // 2),
                long_divisors=rope.numbers("long_factor", base.dim // 2),
            )  # fmt: skip
    raise UnsupportedError(
        f"rope scaling {kind!r} is not supported", "known: default, linear, dynamic, llama3, yarn, longrope"
    )


def _stretched(rope: RopeSpec, max_position: int) -> int:
    """The context that a scaling makes of the one in the config; vLLM's rule. llama3 and longrope configs say it themselves."""
    if rope.scaling in ("linear", "dynamic"):
        return int(max_position * rope.factor)
    if rope.scaling == "yarn":
        return max(max_position, int(rope.original_len * rope.factor))
    return max_position


ReadValues = Callable[[str], tuple[float, ...] | None]
"""Name of a small tensor of the checkpoint -> its values, or None where there is none."""


def spec_from_gguf(
    metadata: Mapping[str, Any], family: Family, vocab_size: int, names: set[str], values: ReadValues
) -> ModelSpec:
    """GGUF metadata -> ModelSpec, with the meanings that llama.cpp gives its keys.

    vocab_size: rows of the embedding. names: the file's tensors, which tell what metadata doesn't (biases, a tied head).
    """
    read = ConfigReader(metadata, "GGUF metadata")
    arch = read.text("general.architecture")

    def key(name: str) -> str:
        return f"{arch}.{name}"

    heads = read.integer(key("attention.head_count"))
    kv_heads = read.integer(key("attention.head_count_kv"), heads)
    hidden = read.integer(key("embedding_length"))
    head_dim = read.integer(key("attention.key_length"), hidden // heads)
    layers = _layers(read.integer(key("block_count")), read)
    _check_heads(heads, kv_heads, head_dim, read)
    if read.integer(key("attention.value_length"), head_dim) != head_dim:
        raise UnsupportedError("keys and values of different lengths are not supported", ANOTHER)
    max_position = read.integer(key("context_length"), 2048)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=_rope_from_gguf(read, key, head_dim, max_position, family, values),
        qkv_bias="blk.0.attn_q.bias" in names,
        out_bias="blk.0.attn_output.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        window=read.integer(key("attention.sliding_window"))
        if read.values.get(key("attention.sliding_window"))
        else None,
    )
    mlp = MLPSpec(read.integer(key("feed_forward_length")), bias="blk.0.ffn_gate.bias" in names)
    return ModelSpec(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        blocks=tuple(BlockSpec(attention, each) for each in mlps_from_gguf(read, key, mlp, layers, names)),
        norm=NormSpec(read.number(key("attention.layer_norm_rms_epsilon"))),
        max_position=max_position,
        tied_head="output.weight" not in names,
    )


def _rope_from_gguf(
    read: ConfigReader, key: Callable[[str], str], head_dim: int, max_position: int, family: Family, values: ReadValues
) -> RopeSpec:
    original = read.integer(key("rope.scaling.original_context_length"), max_position, least=2)
    base = RopeSpec(
        dim=read.integer(key("rope.dimension_count"), head_dim),
        theta=read.number(key("rope.freq_base"), 10000.0),
        interleaved=family.interleaved_gguf,
        original_len=original,
    )
    _check_rope(base, head_dim, read)
    divisors, short, long = (values(f"rope_{name}.weight") for name in ("freqs", "factors_short", "factors_long"))
    for name, found in (("freqs", divisors), ("factors_short", short), ("factors_long", long)):
        if found is not None and (len(found) != base.dim // 2 or not all(0 < v < math.inf for v in found)):
            raise CheckpointError(f"tensor 'rope_{name}.weight' must hold {base.dim // 2} positive numbers", BROKEN)
    if short and long:
        factor = max_position / original
        spec = replace(base, scaling="longrope", factor=factor, short_divisors=short, long_divisors=long)
        if read.has(key("rope.scaling.attn_factor")):
            spec = replace(spec, attention_factor=read.number(key("rope.scaling.attn_factor")))
        return spec
    if divisors:
        return replace(base, scaling="divisors", short_divisors=divisors)
    kind = read.text(key("rope.scaling.type"), "none")
    if kind == "none" and read.has(key("rope.scale_linear")):
        kind = "linear"
    factor = read.number(key("rope.scaling.factor"), read.number(key("rope.scale_linear"), 1.0))
    if kind == "none" or factor == 1.0:
        return base
    if kind not in ("linear", "yarn"):
        raise UnsupportedError(f"rope scaling {kind!r} in GGUF is not supported", "known: none, linear, yarn, longrope")
    spec = replace(base, scaling=kind, factor=factor)  # type: ignore[arg-type]
    if kind == "linear":
        return spec
    stretch = key("rope.scaling.yarn_attn_factor")  # what llama.cpp's converter makes of config.json's attention_factor
    return replace(
        spec,
        beta_fast=read.number(key("rope.scaling.yarn_beta_fast"), spec.beta_fast),
        beta_slow=read.number(key("rope.scaling.yarn_beta_slow"), spec.beta_slow),
        attention_factor=read.number(stretch) if read.has(stretch) else None,
    )


def _layers(count: int, read: ConfigReader) -> int:
    if count > MAX_LAYERS:
        raise CheckpointError(f"{read.where} asks for {count} layers; at most {MAX_LAYERS} are believed", BROKEN)
    return count


def _check_heads(heads: int, kv_heads: int, head_dim: int, read: ConfigReader) -> None:
    if heads % kv_heads:
        raise CheckpointError(
            f"{read.where}: {heads} query heads can't share {kv_heads} key-value heads evenly", BROKEN
        )
    if head_dim < 2 or head_dim % 2:
        raise UnsupportedError(f"{read.where}: head dim {head_dim} is not an even number", ANOTHER)


def _check_rope(rope: RopeSpec, head_dim: int, read: ConfigReader) -> None:
    """What the kernels and the formulas of layers/rope.py take for granted."""
    if not 2 <= rope.dim <= head_dim or rope.dim % 2:
        raise CheckpointError(f"{read.where}: {rope.dim} rotary dims do not fit heads of {head_dim}", BROKEN)
    if rope.theta <= 1:
        raise CheckpointError(f"{read.where}: the rotary base must be above 1, not {rope.theta:g}", BROKEN)
