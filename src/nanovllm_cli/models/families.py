"""From a config to a ModelSpec: what the families have in common, and those that are nothing else.

Llama 1 to 3, Mistral, Qwen2 / 2.5 and Qwen3 differ in a handful of values only; they are a `Family` each, below. Others
(gemma.py, phi.py, …) add what only they have, by the functions that their Family names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec, PairSpec
from nanovllm_cli.mlp_spec import MLPSpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import MIXTRAL_KEYS, QWEN_KEYS, mlps_from_gguf, mlps_from_hf
from nanovllm_cli.models.family import ANOTHER, IDS_OF_IMAGES, SQUARED, Family, GGUFField, ReadValues, has_all, no_file
from nanovllm_cli.models.names import MIXTRAL_NAMES, MLP_BIASES, OUT_BIAS, QWEN_NAMES
from nanovllm_cli.models.rotary import check_one_rope, rope_from_gguf, rope_from_hf, rope_of_windows, stretched, woven
from nanovllm_cli.overrides import above_defaults
from nanovllm_cli.rope_spec import RopeSpec

MAX_LAYERS = 1024
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2_gated",
}
SLIDING, FULL = "sliding_attention", "full_attention"

_MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

LLAMA = Family("llama", interleaved_gguf=True)
LLAMA_BOTH_WAYS = replace(LLAMA, name="llama_bidirec", gguf_name="llama-embed", both_ways=True)
EUROBERT = Family("eurobert", both_ways=True, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 8192})
MISTRAL = Family("mistral", gguf_name="llama", has_window=True, interleaved_gguf=True, defaults=_MISTRAL_DEFAULTS)
QWEN2 = Family("qwen2", qkv_bias=True, has_window=True, window_switch="use_sliding_window", defaults=_QWEN_DEFAULTS)
QWEN3 = Family("qwen3", qk_norm=True, has_window=True, window_switch="use_sliding_window", gguf_homeless=(OUT_BIAS,),
               defaults=_QWEN_DEFAULTS | {"head_dim": 128})  # fmt: skip


def _biased(spec: ModelSpec) -> dict[str, GGUFField]:
    biases = {"biases_of_attention": spec.attention.qkv_bias and spec.attention.out_bias, "biases_of_MLPs": spec.mlps[0].bias}
    has_all(spec.architecture, **biases)
    return {}


ARCEE = Family(
    "arcee", interleaved_gguf=True, ungated=SQUARED, gguf_activation="relu2", gguf_homeless=(OUT_BIAS, *MLP_BIASES),
    defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)  # fmt: skip
CWM = replace(
    LLAMA, name="cwm", has_window=True, full_every=4, full_first=True, gguf_like=no_file("Code World Model"),
    defaults={"sliding_window": 8192, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 131072, "rope_theta": 1e6,
              "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 8192}},
)  # fmt: skip
HELIUM = replace(
    LLAMA, name="helium", interleaved=True, gguf_like=no_file("Helium"), attention={"out_bias": False},
    defaults={"rms_norm_eps": 1e-8, "rope_theta": 1e5, "head_dim": 128, "max_position_embeddings": 4096},
)  # fmt: skip
JAIS2 = Family(
    "jais2", layer_norm=True, shifted=True, ungated=SQUARED, gguf_activation="relu2", gguf_keys=_biased,
    defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True,
              "max_position_embeddings": 8192},
)  # fmt: skip
MINISTRAL = replace(MISTRAL, name="ministral", gguf_like=no_file("Ministral with windows"))
MIXTRAL = replace(
    MISTRAL,
    name="mixtral",
    experts=MIXTRAL_KEYS,
    hf_names=MIXTRAL_NAMES,
    defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072},
)
QWEN3_MOE = replace(QWEN3, name="qwen3_moe", gguf_name="qwen3moe", experts=QWEN_KEYS, hf_names=QWEN_NAMES,
                    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 4})  # fmt: skip


def section_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    rope = spec.attention.rope
    return {"rope.dimension_sections": [*rope.sections, 0][:4]} if rope is not None and rope.sections else {}


# Of models that see: their positions of a text are those of any other, an image's go by rows and columns, too.
QWEN2_VL = replace(QWEN2, gguf_name="qwen2vl", gguf_keys=section_keys,
                   defaults=_QWEN_DEFAULTS | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8,
                                              "max_window_layers": 80})  # fmt: skip
QWEN3_VL = replace(QWEN3, has_window=False, hf=lambda spec, read: woven(spec, (24, 20, 20)), gguf_name="qwen3vl",
                   gguf_keys=section_keys,
                   defaults={"rope_theta": 5e5, "head_dim": 128, "num_key_value_heads": 32,
                             "max_position_embeddings": 128000})  # fmt: skip
QWEN3_VL_MOE = replace(QWEN3_VL, name="qwen3_moe", gguf_name="qwen3vlmoe", hf_names=QWEN_NAMES,
                       experts=replace(QWEN_KEYS, norm_topk=True),
                       defaults={**QWEN3_VL.defaults, "num_key_value_heads": 16})  # fmt: skip
# What thinks in the Omnis, which see and hear.
QWEN2_5_OMNI = replace(QWEN2_VL, defaults=_QWEN_DEFAULTS | {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
})  # fmt: skip
QWEN3_OMNI = replace(QWEN3_VL_MOE, defaults={
    "vocab_size": 3584, "hidden_size": 2048, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 1e6, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
})  # fmt: skip
# Of models that hear: all tokens of a sound have positions of their own, as those of a text.
QWEN3_ASR = replace(QWEN3_VL, tied_by_default=True,
                    defaults={"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
                              "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65536})  # fmt: skip
QWEN2_AUDIO = replace(QWEN2, defaults=_QWEN_DEFAULTS | {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
})  # fmt: skip
SEED_OSS = Family(
    "seed_oss", gguf_names={"blocks.{i}.mlp_norm.weight": "blk.{i}.post_attention_norm.weight"},
    hf=lambda spec, read: spec.with_attention(out_bias=read.flag("attention_out_bias", False)),
    defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 524288},
    gguf_homeless=(OUT_BIAS, *MLP_BIASES),
)  # fmt: skip
SMOLLM3 = Family(
    "smollm3", has_window=True, window_switch="use_sliding_window", no_rope_every=4, interleaved_gguf=True, tied_by_default=True,
    gguf_homeless=(OUT_BIAS, *MLP_BIASES),
    defaults={"rope_theta": 2e6, "num_key_value_heads": 4, "max_position_embeddings": 32768},
)  # fmt: skip
VOXTRAL = replace(LLAMA, name="voxtral", gguf_name="llama", defaults={
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1e8, "rms_norm_eps": 1e-5,
})  # fmt: skip


def spec_from_hf(config: Mapping[str, Any], family: Family) -> ModelSpec:
    """config.json -> ModelSpec, with the meanings that transformers gives its keys. Of a model that also sees or hears, the part
    that reads and writes text."""
    config = family.config(text_config(config))
    check_one_rope(config)
    read = ConfigReader(above_defaults(config, family.defaults), "config.json")
    heads = read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", heads)
    hidden = read.integer("hidden_size")
    head_dim = read.integer("head_dim", hidden // heads)
    layers = _layers(read.integer("num_hidden_layers"), read)
    max_position = read.integer("max_position_embeddings", 2048)
    _check_heads(heads, kv_heads, head_dim, read)
    activation, known = read.text("hidden_act", "silu"), family.ungated or ACTIVATIONS
    if activation not in known:
        raise UnsupportedError(f"activation {activation[:80]!r} is not supported", f"known: {', '.join(sorted(known))}")
    has_rope = _layers_with_rope(read, family, layers)
    window, kinds = _windows_from_hf(read, family, has_rope)
    ropes = _ropes_from_hf(read, family, kinds, head_dim, max_position)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=None,
        qkv_bias=read.flag("attention_bias", False) if family.qkv_bias is None else family.qkv_bias,
        out_bias=read.flag("attention_bias", False) if family.qkv_bias is None else False,
        qk_norm=family.qk_norm,
        fused_qkv=family.fused_qkv,
    )
    mlp = MLPSpec(
        read.integer("intermediate_size"),
        known[activation],  # type: ignore[arg-type]
        bias=read.flag("mlp_bias", False),
        fused=family.fused_mlp,
    )
    mlps = mlps_from_hf(read, family.experts, mlp, layers)
    blocks = (
        BlockSpec(replace(attention, window=window if kind == SLIDING else None, rope=ropes[kind] if rotates else None), each)
        for kind, rotates, each in zip(kinds, has_rope, mlps, strict=True)
    )
    spec = ModelSpec(
        architecture=family.name,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        blocks=tuple(blocks),
        norm=family.norm(read.number("layer_norm_eps" if family.layer_norm else "rms_norm_eps", 1e-6)),
        max_position=stretched(ropes[FULL], max_position),
        tied_head=read.flag("tie_word_embeddings", family.tied_by_default),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
    )
    both_ways = config.get("is_causal") is False or config.get("use_bidirectional_attention") in (True, "all")
    return _both_ways(family.hf(family.shaped(spec), read), family, both_ways=both_ways)


def _both_ways(spec: ModelSpec, family: Family, *, both_ways: bool) -> ModelSpec:
    """The same where tokens see those behind them, if that is so."""
    if not (both_ways or family.both_ways):
        return spec
    windows = any(attention.window is not None for attention in spec.attentions)
    if len(spec.attentions) < spec.num_layers or spec.attention.latent is not None or (windows and not family.halves_window):
        raise UnsupportedError(f"{spec.architecture}: attention in both directions is not supported in such a model", ANOTHER)
    spec = replace(spec, has_head=False, tied_head=True)
    return spec.each_attention(lambda layer, a: replace(a, both_ways=True, window=a.window and a.window // 2 + 1))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json, or what it says of the part that reads and writes text."""
    inner = config.get("text_config")
    if inner is None:
        return config
    if not isinstance(inner, Mapping):
        raise CheckpointError("config.json: 'text_config' must be an object", BROKEN)
    asked = IDS_OF_IMAGES if inner.get("model_type") == "ernie4_5_vl_moe_text" else ()  # by which its experts are chosen
    outer = {key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype", *asked) if config.get(key) is not None}
    return {**inner, **outer}


def _windows_from_hf(read: ConfigReader, family: Family, has_rope: list[bool]) -> tuple[int | None, list[str]]:
    """The window, and the kind of each layer: SLIDING or FULL. "layer_types" says it; older configs, a pattern or from which
    layer on; where layers without positions are usual, those have it."""
    layers = len(has_rope)
    everywhere = [FULL] * layers
    if not family.has_window or not read.has("sliding_window"):
        return None, everywhere
    if family.window_switch is not None and not read.flag(family.window_switch, False):
        return None, everywhere
    window = read.integer("sliding_window")
    if (listed := read.kinds("layer_types", layers, FULL, SLIDING)) is not None:
        return window, listed
    if family.full_every is not None:
        return window, _every(layers, read.integer("sliding_window_pattern", family.full_every), family)
    if family.no_rope_every is not None:
        return window, [FULL if rotates else SLIDING for rotates in has_rope]
    first = read.integer("max_window_layers", 0, least=0) if family.window_switch is not None else 0
    return window, [SLIDING if i >= first else FULL for i in range(layers)]


def _every(layers: int, full_every: int, family: Family) -> list[str]:
    return [SLIDING if (i if family.full_first else i + 1) % full_every else FULL for i in range(layers)]


def _ropes_from_hf(
    read: ConfigReader, family: Family, kinds: list[str], head_dim: int, max_position: int
) -> dict[str, RopeSpec]:
    """Of each kind of layer; FULL is always there. "rope_parameters" may have a section for each kind."""
    sections = read.values.get("rope_parameters")
    local = None if family.local_theta is None else read.number("rope_local_base_freq", family.local_theta)
    if isinstance(sections, Mapping) and {FULL, SLIDING} & sections.keys():
        readers = {}
        for kind in {FULL, *kinds}:
            if not isinstance(sections.get(kind), Mapping):
                raise CheckpointError(f"config.json: 'rope_parameters' says nothing of {kind}", BROKEN)
            own = {**read.values, "rope_parameters": sections[kind]}
            own |= {} if kind != SLIDING or local is None else {"rope_theta": local}  # of a section that says nothing
            readers[kind] = ConfigReader(own, f"{read.where}: {kind}")
        found = {kind: rope_from_hf(reader, head_dim, max_position) for kind, reader in readers.items()}
    else:
        found = dict.fromkeys((FULL, SLIDING), rope_from_hf(read, head_dim, max_position))
        if local is not None:
            found[SLIDING] = RopeSpec(dim=found[FULL].dim, theta=local, original_len=found[FULL].original_len)
    return {kind: replace(rope, interleaved=family.interleaved) for kind, rope in found.items()}


def _layers_with_rope(read: ConfigReader, family: Family, layers: int) -> list[bool]:
    """ "no_rope_layers" has, in spite of its name, a 1 for each layer with positions."""
    if family.no_rope_every is None:
        return [True] * layers
    listed = read.values.get("no_rope_layers")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != layers or not all(isinstance(entry, int) for entry in listed):
            raise CheckpointError(f"config.json: 'no_rope_layers' must be a list of {layers} numbers", BROKEN)
        return [bool(entry) for entry in listed]
    interval = read.integer("no_rope_layer_interval", family.no_rope_every)
    return [(i + 1) % interval != 0 for i in range(layers)]


def spec_from_gguf(
    metadata: Mapping[str, Any], family: Family, vocab_size: int, names: set[str], values: ReadValues
) -> ModelSpec:
    """GGUF metadata -> ModelSpec, with the meanings that llama.cpp gives its keys. Phi-3's window counts here as it does in
    transformers; llama.cpp leaves it out, because of what its converter wrote.

    vocab_size: rows of the embedding. names: the file's tensors, which tell what metadata doesn't (biases, a tied head, what is
    one tensor).
    """
    read = whole = ConfigReader(family.metadata(metadata), "GGUF metadata")
    arch = read.text("general.architecture")

    def key(name: str) -> str:
        return f"{arch}.{name}"

    if family.varied:
        may_differ = ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_feed_forward_length",
                      "expert_used_count")  # fmt: skip
        read = read.with_firsts(*map(key, may_differ))
    heads = read.integer(key("attention.head_count"))
    kv_heads = _kv_heads(read, key("attention.head_count_kv"), heads, family)
    hidden = read.integer(key("embedding_length"))
    head_dim = read.integer(key("attention.key_length"), hidden // heads)
    further = 0 if family.assists else read.integer(key("nextn_predict_layers"), 0, least=0)  # behind the model's own
    layers = _layers(read.integer(key("block_count"), least=further + 1) - further, read)
    _check_heads(heads, kv_heads, head_dim, read)
    if not (family.latent or family.narrow_values) and read.integer(key("attention.value_length"), head_dim) != head_dim:
        raise UnsupportedError("keys and values of different lengths are not supported", ANOTHER)
    max_position = read.integer(key("context_length"), 2048)
    rope = rope_from_gguf(read, key, head_dim, max_position, family.interleaved_gguf, values)
    local = rope_of_windows(rope, read, key, family.local_theta, head_dim)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        qkv_bias=bool(names & {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
        out_bias="blk.0.attn_output.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        fused_qkv="blk.0.attn_qkv.weight" in names,
    )
    inner = key("feed_forward_length")
    if not read.has(inner) and family.experts is not None and read.has(key("expert_feed_forward_length")):
        inner = key("expert_feed_forward_length")  # of a model without a dense layer
    mlp = MLPSpec(
        read.integer(inner),
        next(iter(family.ungated.values()), "silu"),  # type: ignore[arg-type]
        bias="blk.0.ffn_up.bias" in names if family.ungated else "blk.0.ffn_gate.bias" in names,
        fused=family.fused_mlp and "blk.0.ffn_gate.weight" not in names,
    )
    sees_all = replace(attention, rope=rope)
    window = read.integer(key("attention.sliding_window"), 0, least=0) or None
    blocks = []
    may_mix = family.experts is not None or family is LLAMA  # Mixtral's are of the architecture llama
    if not may_mix and read.integer(key("expert_count"), 0, least=0) > 1:  # Hunyuan's first files say 1 of none
        raise UnsupportedError(f"{arch} with experts is not supported", ANOTHER)
    mlps = mlps_from_gguf(read, key, family.experts, mlp, layers, names) if may_mix else [mlp] * layers
    for i, kind in enumerate(_windows_from_gguf(read, key, family, layers)):
        own = replace(attention, rope=local, window=window) if kind == SLIDING and window is not None else sees_all
        own = replace(own, keys_are_values=family.varied and f"blk.{i}.attn_v.weight" not in names)
        rotates = family.no_rope_every is None or (i + 1) % family.no_rope_every
        blocks.append(BlockSpec(own if rotates else replace(own, rope=None), mlps[i]))
    eps, root = key("attention.layer_norm_epsilon"), key("attention.layer_norm_rms_epsilon")
    eps = eps if family.layer_norm or (read.has(eps) and not read.has(root)) else root
    spec = ModelSpec(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        blocks=tuple(blocks),
        norm=family.norm(read.number(eps)),
        max_position=max_position,
        tied_head="output.weight" not in names,
    )
    spec = family.shaped(spec)
    if family.gguf_parallel and "blk.0.ffn_norm.weight" not in names:
        spec = spec.in_order("parallel")
    spec = family.gguf(spec, whole, key)
    spec = spec if family.gguf_values is None else family.gguf_values(spec, values, whole.where)
    if any(own.gated and not own.gate_by_head and (own.fused_qkv or own.qkv_bias) for own in spec.attentions):
        raise UnsupportedError(f"{arch}: gates of what heads find beside biases, or q, k and v as one tensor", ANOTHER)
    if not any(name.endswith(".ssm_norm.weight") for name in names):
        spec = _without_state_norms(spec)
    if spec.entry is not None and "token_types.weight" not in names:
        spec = replace(spec, entry=replace(spec.entry, segments=0))
    return _both_ways(spec, family, both_ways=not read.flag(key("attention.causal"), True))


def _without_state_norms(spec: ModelSpec) -> ModelSpec:
    """The same where no state beside attention has a norm behind it, of which metadata says nothing."""
    mixers = (block.mixer for block in spec.blocks)
    return spec.with_mixers(
        replace(own, state=replace(own.state, normed=False)) if isinstance(own, PairSpec) else own for own in mixers
    )


def _kv_heads(read: ConfigReader, name: str, heads: int, family: Family) -> int:
    """Of all layers; a list of layers has a 0 for those with a convolution instead. Granites without states have a list, too."""
    listed = read.values.get(name)
    if not isinstance(listed, list | tuple):
        return read.integer(name, heads)
    layers = read.integer(name.replace("attention.head_count_kv", "block_count"))
    others, what = ({0}, "alike or 0") if family.convolutions else (set(), "alike")
    found = set(listed) - others if all(type(each) is int for each in listed) else set()
    if len(listed) != layers or len(found) != 1:
        raise CheckpointError(f"{read.where}: {name!r} must be a list of {layers} layers' heads, {what}", BROKEN)
    return ConfigReader({name: found.pop()}, read.where).integer(name)


def _windows_from_gguf(read: ConfigReader, key: Callable[[str], str], family: Family, layers: int) -> list[str]:
    """The kind of each layer, where there is a window: by a list, by a number as in `Family.full_every`, or by the family."""
    pattern = read.values.get(key("attention.sliding_window_pattern"))
    if isinstance(pattern, list | tuple):
        if len(pattern) != layers or not all(isinstance(entry, bool) for entry in pattern):
            raise CheckpointError(f"{read.where}: the sliding_window_pattern must be a list of {layers} flags", BROKEN)
        return [SLIDING if entry else FULL for entry in pattern]
    if family.full_every is None:
        return [SLIDING] * layers
    return _every(layers, read.integer(key("attention.sliding_window_pattern"), family.full_every), family)


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
