"""Gemma 4 (the part that writes): layers with a window have heads of their own size, and the last ones read what others keep.

E2B and E4B give each layer numbers of a token's own, from a second embedding (`layers/per_layer.py`); in the larger ones keys are
values in layers that see everything, and 26B-A4B has a mixture of experts beside each MLP. Values are normed, scores are not
scaled, and a layer's end is multiplied with a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.gemma import SANDWICH_HF_NAMES
from nanovllm_cli.models.names import MATRICES, SANDWICH_GGUF_NAMES, each_expert, projections
from nanovllm_cli.models.rotary import rope_from_hf
from nanovllm_cli.rope_spec import RopeSpec

_LAYER, _OTHERS = "model.layers.{i}", "model.per_layer"
PER_LAYER_HF_NAMES = SANDWICH_HF_NAMES | {
    "per_layer_embedding.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_projection.weight": f"{_OTHERS}_model_projection.weight",
    "per_layer_norm.weight": f"{_OTHERS}_projection_norm.weight",
    "blocks.{i}.per_layer_gate.weight": f"{_LAYER}.per_layer_input_gate.weight",
    "blocks.{i}.per_layer_out.weight": f"{_LAYER}.per_layer_projection.weight",
    "blocks.{i}.after_per_layer_norm.weight": f"{_LAYER}.post_per_layer_input_norm.weight",
}
_HF_NAMES = PER_LAYER_HF_NAMES | {
    "blocks.{i}.scale": f"{_LAYER}.layer_scalar",
    "blocks.{i}.router.weight": f"{_LAYER}.router.proj.weight",
    "blocks.{i}.router.norm.weight": f"{_LAYER}.router.scale",
    "blocks.{i}.router.expert_scale": f"{_LAYER}.router.per_expert_scale",
    "blocks.{i}.experts_norm.weight": f"{_LAYER}.pre_feedforward_layernorm_2.weight",
    "blocks.{i}.after_shared_norm.weight": f"{_LAYER}.post_feedforward_layernorm_1.weight",
    "blocks.{i}.after_experts_norm.weight": f"{_LAYER}.post_feedforward_layernorm_2.weight",
    **projections("blocks.{i}.shared.", f"{_LAYER}.mlp."),
    **each_expert(f"{_LAYER}.experts"),
}
PER_LAYER_GGUF_NAMES = SANDWICH_GGUF_NAMES | {
    "per_layer_embedding.weight": "per_layer_token_embd.weight",
    "per_layer_projection.weight": "per_layer_model_proj.weight",
    "per_layer_norm.weight": "per_layer_proj_norm.weight",
    "blocks.{i}.per_layer_gate.weight": "blk.{i}.inp_gate.weight",
    "blocks.{i}.per_layer_out.weight": "blk.{i}.proj.weight",
    "blocks.{i}.after_per_layer_norm.weight": "blk.{i}.post_norm.weight",
}
_GGUF_NAMES = PER_LAYER_GGUF_NAMES | {
    "blocks.{i}.scale": "blk.{i}.layer_output_scale.weight",
    "blocks.{i}.router.norm.weight": "blk.{i}.ffn_gate_inp.scale",
    "blocks.{i}.router.expert_scale": "blk.{i}.ffn_down_exps.scale",
    "blocks.{i}.experts_norm.weight": "blk.{i}.pre_ffw_norm_2.weight",
    "blocks.{i}.after_shared_norm.weight": "blk.{i}.post_ffw_norm_1.weight",
    "blocks.{i}.after_experts_norm.weight": "blk.{i}.post_ffw_norm_2.weight",
    **{f"blocks.{{i}}.shared.{part}.weight": f"blk.{{i}}.ffn_{part}.weight" for part in MATRICES},
}
FULL = "full_attention"


def _layer_values(read: ConfigReader, layer: int) -> ConfigReader:
    """What "per_layer_config" has of a layer, whose number may begin with zeros: transformers makes all of one length."""
    section = read.section("per_layer_config")
    names = {key: str(key).lstrip("0") or "0" for key in section.values}
    return ConfigReader({names[key]: value for key, value in section.values.items()}, section.where).section(str(layer))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    if read.values.get("use_bidirectional_attention") == "all":
        raise UnsupportedError("attention in both directions is not supported", ANOTHER)
    if (activation := read.text("hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise UnsupportedError(f"activation {activation[:80]!r} in a gemma4 model", "known: gelu_pytorch_tanh")
    if read.flag("attention_bias", False):
        raise UnsupportedError("a gemma4 model with biases of attention", ANOTHER)
    width = read.integer("hidden_size_per_layer_input", 0, least=0)
    if width and (rows := read.integer("vocab_size_per_layer_input", spec.vocab_size)) != spec.vocab_size:
        raise UnsupportedError(f"embeddings of layers for {rows} tokens where there are {spec.vocab_size}", ANOTHER)
    keys_are_values = read.flag("attention_k_eq_v", False)
    ropes, attentions = {}, []
    for i, attention in enumerate(spec.attentions):
        if attention.window is not None and i + 1 < spec.num_layers:  # the last one sees everything, whatever is said of it
            attentions.append(attention)
            continue
        own = _layer_values(read, i)
        dim = own.integer("head_dim", read.integer("global_head_dim", 512))
        heads = read.integer("num_global_key_value_heads", attention.num_kv_heads) if keys_are_values else attention.num_kv_heads
        if dim not in ropes:
            ropes[dim] = _rope_of_all(read, dim, spec.max_position)
        attentions.append(replace(attention, head_dim=dim, num_kv_heads=own.integer("num_key_value_heads", heads),
                                  rope=ropes[dim], window=None, keys_are_values=keys_are_values))  # fmt: skip
    readers = read.integer("num_kv_shared_layers", 0, least=0)
    sizes = [block.mlp.intermediate_size if isinstance(block.mlp, MLPSpec) else 0 for block in spec.blocks]
    if read.flag("use_double_wide_mlp", False):
        sizes = [2 * size if i >= spec.num_layers - readers else size for i, size in enumerate(sizes)]
    spec = replace(spec, logit_softcap=read.cap("final_logit_softcapping"), per_layer_width=width)
    return _gemma4(spec, read, attentions, sizes, readers)


def _rope_of_all(read: ConfigReader, dim: int, max_position: int) -> RopeSpec:
    """Of layers that see everything, for heads of this size."""
    sections = read.section("rope_parameters")
    own = sections.section(FULL).values if sections.has(FULL) else sections.values
    return rope_from_hf(ConfigReader({**read.values, "rope_parameters": own}, f"{read.where}: {FULL}"), dim, max_position)


def _gemma4(spec: ModelSpec, read: ConfigReader, attentions: list[AttentionSpec], sizes: list[int], readers: int) -> ModelSpec:
    """What all of them have. sizes: of each layer's MLP. readers: layers at the end that have no keys and values."""
    blocks = []
    attentions = [replace(attention, scale=1.0, value_norm=True, qk_norm=True) for attention in attentions]
    whole = with_readers(attentions, readers, read)
    for block, attention, size in zip(spec.blocks, whole, sizes, strict=True):
        mlp: MLPSpec | MoESpec = MLPSpec(size, "gelu_tanh")
        if isinstance(block.mlp, MoESpec):
            expert = replace(block.mlp.expert, activation="gelu_tanh")
            mlp = replace(block.mlp, expert=expert, shared=MLPSpec(_dense_size(read), "gelu_tanh"), apart=True, expert_scale=True)
        blocks.append(BlockSpec(attention, mlp, "sandwich", scaled=True))
    return replace(spec, blocks=tuple(blocks), embedding_scale=spec.hidden_size**0.5)


def with_readers(attentions: list[AttentionSpec], readers: int, read: ConfigReader) -> list[AttentionSpec]:
    """The same where so many at the end read the keys and values of the last one before them that has a window, or none, as they
    have. CheckpointError where there is none such."""
    first = len(attentions) - readers
    producers = {attention.window: i for i, attention in enumerate(attentions[: max(0, first)])}  # the last of a kind
    found = []
    for i, attention in enumerate(attentions):
        if attention.num_heads % attention.num_kv_heads or attention.head_dim % 2:
            heads = f"{attention.num_heads} query and {attention.num_kv_heads} key-value heads of {attention.head_dim}"
            raise CheckpointError(f"{read.where}: layer {i} can't have {heads}", BROKEN)
        reads = None
        if i >= first:
            if attention.window not in producers:
                raise CheckpointError(f"{read.where}: layer {i} reads the keys of a layer like it, and there is none", BROKEN)
            reads = producers[attention.window]
            own = attentions[reads]
            if (own.head_dim, own.num_kv_heads) != (attention.head_dim, attention.num_kv_heads):
                raise CheckpointError(f"{read.where}: layer {i} reads the keys of layer {reads}, whose heads are others", BROKEN)
        found.append(replace(attention, reads=reads, keys_are_values=attention.keys_are_values and reads is None))
    return found


def _dense_size(read: ConfigReader) -> int:
    """Of the MLP beside experts."""
    arch = read.values.get("general.architecture")
    return read.integer("intermediate_size" if arch is None else f"{arch}.feed_forward_length")


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Each kind of layer has heads and ropes of its own; whether keys are values is told by tensors, see `families`."""
    layers = spec.num_layers
    heads = read.integers(key("attention.head_count_kv"), layers)
    sizes = read.integers(key("feed_forward_length"), layers)
    small = read.integer(key("attention.key_length_swa"), spec.attention.head_dim)
    if read.integer(key("attention.value_length_swa"), small) != small:
        raise UnsupportedError("keys and values of different lengths are not supported", ANOTHER)
    local = RopeSpec(
        dim=read.integer(key("rope.dimension_count_swa"), small),
        theta=read.number(key("rope.freq_base_swa"), 10000.0),
        original_len=spec.max_position,
    )
    if local.dim > small or local.dim % 2 or local.theta <= 1:
        raise CheckpointError(f"{read.where}: {local.dim} rotary dims by {local.theta:g} for heads of {small}", BROKEN)
    attentions = [
        replace(attention, num_kv_heads=count, head_dim=small, rope=local)
        if attention.window is not None
        else replace(attention, num_kv_heads=count)
        for attention, count in zip(spec.attentions, heads, strict=True)
    ]
    width = read.integer(key("embedding_length_per_layer_input"), 0, least=0)
    spec = replace(spec, logit_softcap=read.cap(key("final_logit_softcapping")), per_layer_width=width)
    readers = read.integer(key("attention.shared_kv_layers"), 0, least=0)
    return _gemma4(spec, read, attentions, sizes, readers)


def _assistant_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """All its layers read those of another model: see `assistant.py`."""
    kept = {name: value for name, value in read.values.items() if name != key("attention.shared_kv_layers")}
    return _from_gguf(spec, ConfigReader(kept, read.where), key)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    local = next((attention for attention in spec.attentions if attention.window is not None), None)
    heads = [attention.num_kv_heads for attention in spec.attentions]
    mlps = (block.mlp.shared if isinstance(block.mlp, MoESpec) else block.mlp for block in spec.blocks)
    sizes = [mlp.intermediate_size for mlp in mlps if mlp is not None]
    found: dict[str, GGUFField] = {
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "feed_forward_length": sizes if len(set(sizes)) > 1 else sizes[0],
        "attention.sliding_window_pattern": [attention.window is not None for attention in spec.attentions],
        "attention.shared_kv_layers": spec.num_layers - 1 - spec.last_keeper,
        "embedding_length_per_layer_input": spec.per_layer_width,
    }
    if spec.logit_softcap:
        found["final_logit_softcapping"] = spec.logit_softcap
    if local is not None and local.rope is not None:
        found |= {f"attention.{side}_length_swa": local.head_dim for side in ("key", "value")}
        found |= {"rope.dimension_count_swa": local.rope.dim, "rope.freq_base_swa": local.rope.theta}
    return found


_DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}  # fmt: skip
GEMMA4 = Family(
    "gemma4",
    qk_norm=True,
    qkv_bias=False,
    has_window=True,
    full_every=6,
    tied_by_default=True,
    varied=True,
    experts=ExpertKeys(("num_experts",), "moe_intermediate_size", True, taken="top_k_experts", switch="enable_moe_block"),
    defaults=_DEFAULTS | {"hidden_size_per_layer_input": 256, "max_position_embeddings": 131072},
    hf_names=_HF_NAMES,
    gguf_names=_GGUF_NAMES,
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="gelu_tanh",
    gguf_keys=_keys,
    gguf_gate_up=True,
)
_ASSISTANT_HF_NAMES = {"join.weight": "pre_projection.weight", "back.weight": "post_projection.weight"}
_ASSISTANT_GGUF_NAMES = {"join.weight": "blk.0.nextn.pre_projection.weight", "back.weight": "nextn.post_projection.weight"}
GEMMA4_ASSISTANT = replace(
    GEMMA4,
    name="gemma4-assistant",
    assists="cache",
    # Which tokens to look at first, of those that are alike; all of them are, here and in llama.cpp.
    aside=("masked_embedding.", "masked_embd_"),
    config=lambda config: {**config, "num_kv_shared_layers": 0},
    defaults=_DEFAULTS | {"max_position_embeddings": 131072},
    hf_names=_HF_NAMES | _ASSISTANT_HF_NAMES,
    gguf_names=_GGUF_NAMES | _ASSISTANT_GGUF_NAMES,
    gguf=_assistant_from_gguf,
)
GEMMA4_UNIFIED = replace(GEMMA4, defaults=_DEFAULTS | {"max_position_embeddings": 262144, "sliding_window": 1024})
"""12B: it sees and hears without parts of their own for it."""
