"""Granite 3, with and without experts, and Granite 4: Llama, with factors for embeddings, scores, what joins the residual stream,
and logits. Most layers of a Granite 4 H have Mamba-2's rule in place of attention; most of a Granite SWA, dense or with experts,
a window, all its heads a sink, and some layers no positions. Bamba (IBM, Princeton and UIUC 2024) is a Granite 4 H without these
factors, half of whose heads' numbers rotate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.exaone import window_pattern
from nanovllm_cli.models.experts import ExpertKeys, with_shared
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField
from nanovllm_cli.models.mamba import MAMBA_GGUF_NAMES, mamba_from_gguf, mamba_from_hf, mamba_gguf_keys, mamba_hf_names
from nanovllm_cli.models.names import MATRICES, each_expert, weights_and_biases
from nanovllm_cli.models.rotary import checked_rope
from nanovllm_cli.rope_spec import RopeSpec
from nanovllm_cli.state_spec import DeltaSpec

_EXPERTS = "model.layers.{i}.block_sparse_moe"
_MOE_NAMES = {
    "blocks.{i}.router.weight": f"{_EXPERTS}.router.layer.weight",
    **each_expert(f"{_EXPERTS}.experts"),
}
_SHARED = {"gate": "gate_proj", "up": "up_proj", "down": "output_linear"}
_HYBRID_NAMES = _MOE_NAMES | mamba_hf_names("model.layers.{i}.mamba") | {
    **{f"blocks.{{i}}.{place}{part}.weight": f"model.layers.{{i}}.shared_mlp.{theirs}.weight"
       for place in ("", "shared.") for part, theirs in _SHARED.items()},
}  # fmt: skip
"""Where gate and up are one tensor; weights/stacked.py takes it apart."""
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def _scaled(spec: ModelSpec, embedding: float, residual: float, scores: float | None, logits: float) -> ModelSpec:
    spec = spec.with_attention(scale=scores)
    return replace(spec, embedding_scale=embedding, residual_scale=residual, logit_scale=1 / logits)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return _scaled(spec, *(read.number(name, 1.0) for name in names))


def _hybrid_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    kinds = read.kinds("layer_types", spec.num_layers, *_KINDS) or ["mamba"] * spec.num_layers
    is_mamba, shared = [_KINDS[kind] for kind in kinds], read.integer("shared_intermediate_size")
    spec = with_shared(spec.with_mlps(intermediate_size=shared), shared)  # all tokens have it, alone or beside experts
    spec = _with_states(spec, read, is_mamba)
    spec = _from_hf(spec, read)
    return spec if read.text("position_embedding_type", "") == "rope" else spec.with_attention(rope=None)


def _with_states(spec: ModelSpec, read: ConfigReader, is_mamba: list[bool]) -> ModelSpec:
    if any(is_mamba):
        if read.flag("mamba_proj_bias", False):
            raise UnsupportedError(f"a {spec.architecture} with biases of its state spaces' projections", ANOTHER)
        spec = _hybrid(spec, mamba_from_hf(read, read.integer("mamba_expand") * spec.hidden_size), is_mamba, read)
    return spec


def _bamba_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whatever it says of the numbers that rotate outside of "rope_parameters", they are half of a head's."""
    return {**config, "partial_rotary_factor": 0.5}


def _bamba_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    listed = read.values.get("attn_layer_indices")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < spec.num_layers for layer in listed):
        raise CheckpointError(f"{read.where}: 'attn_layer_indices' must be a list of layers below {spec.num_layers}", BROKEN)
    spec = spec.with_attention(scale=spec.attention.score_scale)  # said, as files say it
    return _with_states(spec, read, [layer not in listed for layer in range(spec.num_layers)])


def _hybrid(spec: ModelSpec, mamba: DeltaSpec, is_mamba: list[bool], read: ConfigReader) -> ModelSpec:
    if mamba.num_keys != 1:
        raise UnsupportedError(f"{read.where}: a state space of {mamba.num_keys} groups, each with a norm of its own", ANOTHER)
    if all(is_mamba):
        raise UnsupportedError(f"{read.where}: no layer has attention", ANOTHER)
    return spec.with_mixers(mamba if own else mixer for mixer, own in zip(spec.mixers, is_mamba, strict=True))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    if read.has(key("deepstack_mapping")):
        raise UnsupportedError("layers of a Granite that see are not supported", ANOTHER)
    if not read.flag(key("rope.scaling.finetuned"), True):  # what says in its files that there are no positions
        spec = spec.with_attention(rope=None)
    scores = read.number(key("attention.scale"), 0.0, positive=False) or None
    embedding, residual = (read.number(key(name), 1.0) for name in ("embedding_scale", "residual_scale"))
    lacks_scale = spec.has_states and not read.has(key("logit_scale"))  # as files of a Bamba do
    logits = 1.0 if lacks_scale else read.number(key("logit_scale"))
    return _scaled(spec, embedding, residual, scores, logits)


def _hybrid_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A layer without key and value heads is a state space."""
    is_mamba = read.zeros(key("attention.head_count_kv"), spec.num_layers)
    shared = key("expert_shared_feed_forward_length")
    if any(isinstance(block.mlp, MoESpec) for block in spec.blocks):
        spec = with_shared(spec, read.integer(shared))
    return _from_gguf(_hybrid(spec, mamba_from_gguf(read, key), is_mamba, read), read, key)


def _moe_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """Granite 4's have an MLP beside the experts."""
    shared = key("expert_shared_feed_forward_length")
    return _from_gguf(with_shared(spec, read.integer(shared)) if read.has(shared) else spec, read, key)


def _shared_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    shared = read.integer("shared_intermediate_size", 0, least=0)
    return _from_hf(with_shared(spec, shared) if shared else spec, read)


def _windowed_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """Where "layer_types" says nothing, each fourth layer has no window, from the first on. "layer_rope_theta" has a 0 for those
    without positions."""
    thetas = read.values.get("layer_rope_theta")
    if thetas is not None and not _is_a_number_a_layer(thetas, spec.num_layers):
        raise CheckpointError(f"{read.where}: 'layer_rope_theta' must be a list of {spec.num_layers} numbers", BROKEN)
    window = read.integer("sliding_window") if read.has("sliding_window") else None
    is_listed = read.values.get("layer_types") is not None

    def turned(rope: RopeSpec | None, layer: int) -> RopeSpec | None:
        if rope is None or thetas is None:
            return rope
        return checked_rope(replace(rope, theta=float(thetas[layer])), rope.dim, read) if thetas[layer] else None

    def own(layer: int, attention: AttentionSpec) -> AttentionSpec:
        seen = attention.window if is_listed else window if layer % 4 else None
        return replace(attention, window=seen, rope=turned(attention.rope, layer))

    spec = _from_hf(spec.each_attention(own), read)
    shared = read.integer("shared_intermediate_size", 0, least=0)
    return spec if spec.mixture is None or not shared else with_shared(spec, shared)


def _is_a_number_a_layer(values: object, layers: int) -> bool:
    return isinstance(values, list) and len(values) == layers and all(type(value) in (int, float) for value in values)


def _windowed_from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    turns = read.values.get(key("attention.rope_pattern"), [True] * spec.num_layers)
    if not isinstance(turns, list | tuple) or [type(each) for each in turns] != [bool] * spec.num_layers:
        raise CheckpointError(f"{read.where}: the rope_pattern must be a list of {spec.num_layers} flags", BROKEN)
    spec = spec.each_attention(lambda layer, a: replace(a, rope=a.rope if turns[layer] else None))
    return _moe_from_gguf(spec, read, key)


def _windowed_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    if spec.mixture is not None and spec.mixture.shared is not None:
        what = "GGUF files of a Granite SWA with an MLP beside its experts are not written"
        raise UnsupportedError(what, "llama.cpp's converter knows them")
    turns = [attention.rope is not None for attention in spec.attentions]
    return _keys(spec) | window_pattern(spec) | ({} if all(turns) else {"attention.rope_pattern": turns})


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mixture = spec.mixture
    shared = None if mixture is None else mixture.shared
    keys: dict[str, GGUFField] = {} if shared is None else {"expert_shared_feed_forward_length": shared.intermediate_size}
    return keys | {
        "embedding_scale": spec.embedding_scale,
        "residual_scale": spec.residual_scale,
        "attention.scale": spec.attention.score_scale,
        "logit_scale": 1 / spec.logit_scale,
    }


def _hybrid_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """A layer without key and value heads is a state space; the files have positions in none, or in all, with attention."""
    mamba = next(mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec))
    heads = [0 if isinstance(mixer, DeltaSpec) else spec.attention.num_kv_heads for mixer in spec.mixers]
    own: dict[str, GGUFField] = {"attention.head_count_kv": heads, "rope.scaling.finetuned": spec.attention.rope is not None}
    return _keys(spec) | own | mamba_gguf_keys(mamba)


def _like(spec: ModelSpec) -> Family:
    return GRANITE_STATES if spec.has_states else GRANITE if spec.mixture is None else GRANITE_MOE


GRANITE = Family("granite", interleaved_gguf=True, hf=_from_hf, gguf=_from_gguf, gguf_keys=_keys)
GRANITE_DOCLING = replace(
    GRANITE,
    name="granite_docling",
    gguf_name="granite",
    tied_by_default=True,
    defaults={
        "vocab_size": 133800, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "embedding_multiplier": 12.0,
        "logits_scaling": 4.0, "residual_multiplier": 0.263, "attention_multiplier": 0.015625,
    },
)  # fmt: skip
"""What writes in a Granite Docling; what sees: towers_docling.py."""
GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    experts=ExpertKeys(("num_local_experts",), "intermediate_size", norm_topk=True),
    hf_names=_MOE_NAMES,
    gguf=_moe_from_gguf,
)
GRANITE_MOE_SHARED = replace(GRANITE_MOE, hf_names=_HYBRID_NAMES, hf=_shared_from_hf)
GRANITE_HYBRID = replace(
    GRANITE, hf=_hybrid_from_hf, hf_names=_HYBRID_NAMES, gguf_like=_like,
    experts=ExpertKeys(("num_local_experts",), "intermediate_size", norm_topk=True, switch="num_local_experts"),
    defaults={
        "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "intermediate_size": 11008,
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    },
)  # fmt: skip
"""GraniteMoeHybrid, as its configs call what may have neither experts nor states; to llama.cpp such a one is a Granite."""
GRANITE_STATES = replace(
    GRANITE_HYBRID,
    name="granitehybrid",
    convolutions=True,
    gguf=_hybrid_from_gguf,
    gguf_names=MAMBA_GGUF_NAMES,
    gguf_keys=_hybrid_keys,
)
"""Files of those that have states."""
BAMBA = replace(
    GRANITE_HYBRID, name="bamba", experts=None, config=_bamba_keys, hf=_bamba_from_hf,
    hf_names=mamba_hf_names("model.layers.{i}.mamba") | {
        "blocks.{i}.mlp_norm.weight": "model.layers.{i}.pre_ff_layernorm.weight",
        **weights_and_biases({f"blocks.{{i}}.{part}": f"model.layers.{{i}}.feed_forward.{part}_proj" for part in MATRICES}),
        "norm.weight": "model.final_layernorm.weight",
    },
    defaults={
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "mamba_n_heads": 128,
        "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    },
)  # fmt: skip
GRANITE_SWA = replace(
    GRANITE,
    name="granite_swa",
    gguf_name="granite_swa",
    attention={"sinks": True},
    has_window=True,
    full_every=4,
    tied_by_default=True,
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 4, "max_position_embeddings": 8192, "sliding_window": 128},
    hf_names={"blocks.{i}.sinks": "model.layers.{i}.self_attn.sinks"},
    gguf_names={"blocks.{i}.sinks": "blk.{i}.attn_sinks.weight"},
    hf=_windowed_from_hf,
    gguf=_windowed_from_gguf,
    gguf_keys=_windowed_keys,
)
GRANITE_MOE_SWA = replace(
    GRANITE_SWA,
    name="granitemoe_swa",
    tied_by_default=False,
    experts=GRANITE_MOE.experts,
    defaults={"sliding_window": 128, "num_local_experts": 8, "num_experts_per_tok": 2},
    hf_names={**GRANITE_SWA.hf_names, **_HYBRID_NAMES, "blocks.{i}.router.weight": f"{_EXPERTS}.router.weight"},
    gguf_gate_up=True,
)
"""Its GGUF files, and those of dense ones, have one architecture."""
