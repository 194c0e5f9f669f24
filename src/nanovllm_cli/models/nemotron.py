"""Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano, Super and Puzzle: a layer is one of Mamba-2's state spaces, attention without
positions, an MLP without a gate or a mixture of such, and a norm before it. A pattern says which, by letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import AttentionSpec
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.family import ANOTHER, SQUARED, Family, GGUFField, usual_keys, weight_keys
from nanovllm_cli.models.mamba import (
    MAMBA_GGUF_NAMES,
    check_kind,
    checked_mamba,
    mamba_from_gguf,
    mamba_gguf_keys,
    mamba_hf_names,
)
from nanovllm_cli.models.names import each_expert, projections, weights_and_biases
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.state_spec import DeltaSpec

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M", "*", "-", "E"
_LETTERS = {
    "mamba": _MAMBA, "linear_attention": _MAMBA, "attention": _ATTENTION, "full_attention": _ATTENTION, "mlp": _MLP,
    "moe": _EXPERTS,
}  # fmt: skip
_PLACE = "backbone.layers.{i}.mixer"
_WITHOUT_GATE = ("up", "down")
_LATENT = {"latent_in": "fc1", "latent_out": "fc2"}
_NAMES = mamba_hf_names(_PLACE) | {
    "embedding.weight": "backbone.embeddings.weight",
    "norm.weight": "backbone.norm_f.weight",
    **{f"blocks.{{i}}.{norm}_norm.weight": "backbone.layers.{i}.norm.weight" for norm in ("attention", "mlp")},
    **projections("blocks.{i}.", f"{_PLACE}.", "qkvo"),
    **weights_and_biases({f"blocks.{{i}}.{part}": f"{_PLACE}.{part}_proj" for part in _WITHOUT_GATE}),
    "blocks.{i}.router.weight": f"{_PLACE}.gate.weight",
    "blocks.{i}.router.selection_bias": f"{_PLACE}.gate.e_score_correction_bias",
    **{f"blocks.{{i}}.{ours}.weight": f"{_PLACE}.{theirs}_latent_proj.weight" for ours, theirs in _LATENT.items()},
    **projections("blocks.{i}.shared.", f"{_PLACE}.shared_experts.", _WITHOUT_GATE),
    **each_expert(f"{_PLACE}.experts", _WITHOUT_GATE),
}


def _usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Its config by the keys that others have. How many layers there are, some say by their kinds alone."""
    said = (config.get(key) for key in ("layers_block_type", "hybrid_override_pattern"))
    counts = [len(kinds) for kinds in said if isinstance(kinds, list | str)]
    return {
        **({"num_hidden_layers": counts[0]} if counts else {}), **config,
        "head_dim": config.get("head_dim") or config.get("attention_head_dim") or 128,
        "hidden_act": config.get("mlp_hidden_act", "relu2"), "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }  # fmt: skip


_SIZES = {"moe_intermediate_size": "expert_feed_forward_length", "num_experts_per_tok": "expert_used_count"}
"""What of experts may differ in layers that a search has made (Puzzle): in config.json, and in files."""


def _puzzle_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What it says by layer as others do of all: something that holds until the layers are read."""
    layers = config.get("block_configs")
    if not isinstance(layers, list) or not all(isinstance(layer, Mapping) for layer in layers):
        raise CheckpointError("config.json: 'block_configs' must be a list of objects", BROKEN)
    firsts = {key: next(filter(None, (layer.get(key) for layer in layers)), None) for key in _SIZES}
    kinds = [layer.get("block_type") for layer in layers]
    return _usual_keys({**config, **firsts, "num_hidden_layers": len(layers), "layers_block_type": kinds})


def _puzzle_from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    layers, spec = read.values["block_configs"], _from_hf(spec, read)
    sizes = {key: [layer.get(key) or 0 for layer in layers] for key in _SIZES}
    return _with_sizes(spec, sizes, read.where)


def _with_sizes(spec: ModelSpec, sizes: Mapping[str, Sequence[Any]], where: str) -> ModelSpec:
    """The same with these of each layer's experts."""
    blocks = []
    for i, block in enumerate(spec.blocks):
        if isinstance(mixture := block.mlp, MoESpec):
            own = ConfigReader({key: listed[i] for key, listed in sizes.items()}, f"{where}: layer {i}")
            size, taken = (own.integer(key) for key in _SIZES)
            if taken > mixture.num_experts:
                raise CheckpointError(f"{own.where}: a token can't take {taken} of {mixture.num_experts} experts", BROKEN)
            mixture = replace(mixture, experts_per_token=taken, expert=replace(mixture.expert, intermediate_size=size))
        blocks.append(replace(block, mlp=mixture))
    return replace(spec, blocks=tuple(blocks))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    listed, pattern = read.values.get("layers_block_type"), read.values.get("hybrid_override_pattern")
    known = ", ".join(dict.fromkeys(_LETTERS))
    if listed is not None:
        is_good = isinstance(listed, list) and all(str(kind) in _LETTERS for kind in listed)
        letters = "".join(_LETTERS[kind] for kind in listed) if is_good else ""
    else:
        is_good = isinstance(pattern, str) and set(pattern) <= set(_LETTERS.values())
        letters, known = str(pattern) if is_good else "", ", ".join(dict.fromkeys(_LETTERS.values()))
    if not is_good or len(letters) != spec.num_layers:
        name = "hybrid_override_pattern" if listed is None else "layers_block_type"
        raise CheckpointError(f"{read.where}: {name!r} must say of {spec.num_layers} layers what they are: {known}", BROKEN)
    if read.flag("use_bias", False) or read.flag("mamba_proj_bias", False):
        raise UnsupportedError("a Nemotron with biases of its state spaces' projections", ANOTHER)
    check_kind(read, "mamba_hidden_act")
    heads, size = read.integer("mamba_num_heads"), read.integer("mamba_head_dim")
    mamba = DeltaSpec(
        read.integer("n_groups"), read.integer("ssm_state_size"), heads, size, read.integer("conv_kernel"), mamba=True,
        conv_bias=read.flag("use_conv_bias", True),
    )  # fmt: skip
    dense = replace(spec.mlps[0], intermediate_size=read.integer("intermediate_size"))
    mixture = spec.mixture
    if mixture is not None:
        size = read.integer("moe_shared_expert_intermediate_size")
        latent = read.integer("moe_latent_size") if read.has("moe_latent_size") else None
        mixture = replace(mixture, shared=replace(mixture.expert, intermediate_size=size), latent_size=latent)
    return _built(spec, letters, checked_mamba(mamba, mamba.values, read), dense, mixture, read)


def _built(
    spec: ModelSpec, letters: str, mamba: DeltaSpec, dense: MLPSpec, mixture: MoESpec | None, read: ConfigReader
) -> ModelSpec:
    if _ATTENTION not in letters:
        raise UnsupportedError(f"{read.where}: no layer has attention", ANOTHER)
    if _EXPERTS in letters and mixture is None:
        raise CheckpointError(f"{read.where}: nothing is said of the experts that some layers have", BROKEN)
    attention = replace(spec.attention, rope=None, keys_are_values=False)
    kinds = {
        _MAMBA: BlockSpec(mamba, None), _ATTENTION: BlockSpec(attention, None), _MLP: BlockSpec(None, dense),
        _EXPERTS: BlockSpec(None, mixture),
    }  # fmt: skip
    return replace(spec, blocks=tuple(kinds[letter] for letter in letters))


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A layer that has neither key and value heads nor an MLP is a state space."""
    heads, sizes = (_of_layers(read, key(name), spec) for name in ("attention.head_count_kv", "feed_forward_length"))
    has = [_EXPERTS if isinstance(block.mlp, MoESpec) else _MLP for block in spec.blocks]
    letters = "".join(
        has[i] if size else _ATTENTION if count else _MAMBA for i, (count, size) in enumerate(zip(heads, sizes, strict=True))
    )
    counts, inner = set(heads) - {0}, {size for size, letter in zip(sizes, letters, strict=True) if letter == _MLP}
    if len(counts) > 1 or len(inner) > 1:
        raise UnsupportedError(f"{read.where}: layers of a Nemotron that differ in their heads or MLPs", ANOTHER)
    dense = replace(spec.mlps[0], intermediate_size=inner.pop()) if inner else spec.mlps[0]
    mixture, latent = spec.mixture, read.integer(key("moe_latent_size"), 0, least=0)
    if mixture is not None and latent:
        mixture = replace(mixture, latent_size=latent)
    spec = _built(spec, letters, mamba_from_gguf(read, key), dense, mixture, read)
    if not isinstance(read.values.get(key("expert_used_count")), list | tuple):
        return spec
    return _with_sizes(spec, {ours: _of_layers(read, key(theirs), spec) for ours, theirs in _SIZES.items()}, read.where)


def _of_layers(read: ConfigReader, name: str, spec: ModelSpec) -> list[int]:
    """A number for each layer, behind which those of layers that guess may be."""
    listed = read.values.get(name)
    if not isinstance(listed, list | tuple) or len(listed) < spec.num_layers:
        raise CheckpointError(f"{read.where}: {name!r} must be a list of {spec.num_layers} numbers", BROKEN)
    return [ConfigReader({name: each}, read.where).integer(name, least=0) for each in listed[: spec.num_layers]]


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    heads = [mixer.num_kv_heads if isinstance(mixer, AttentionSpec) else 0 for mixer in spec.mixers]
    mlps = (block.mlp.expert if isinstance(block.mlp, MoESpec) else block.mlp for block in spec.blocks)
    keys: dict[str, GGUFField] = {
        "attention.head_count_kv": heads,
        "feed_forward_length": [0 if mlp is None else mlp.intermediate_size for mlp in mlps],
        "attention.layer_norm_epsilon": spec.norm.eps,
        "rope.scaling.finetuned": False,
    }
    for mamba in [mixer for mixer in spec.mixers if isinstance(mixer, DeltaSpec)][:1]:
        keys |= mamba_gguf_keys(mamba)
    if (mixture := spec.mixture) is not None and mixture.shared is not None:
        keys |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": mixture.shared.intermediate_size}
        keys |= weight_keys(spec)
        keys |= {} if mixture.latent_size is None else {"moe_latent_size": mixture.latent_size}
    mixtures = [block.mlp if isinstance(block.mlp, MoESpec) else None for block in spec.blocks]
    if len({(each.experts_per_token, each.expert.intermediate_size) for each in mixtures if each is not None}) > 1:
        keys["expert_used_count"] = [0 if each is None else each.experts_per_token for each in mixtures]
        keys["expert_feed_forward_length"] = [0 if each is None else each.expert.intermediate_size for each in mixtures]
    return keys


def _like(spec: ModelSpec) -> Family:
    return NEMOTRON_H if spec.mixture is None else NEMOTRON_H_MOE


NEMOTRON_H = Family(
    "nemotron_h", interleaved_gguf=True, ungated=SQUARED, qkv_bias=False, varied=True, config=_usual_keys,
    experts=ExpertKeys(
        ("n_routed_experts",), "moe_intermediate_size", "norm_topk_prob", switch="n_routed_experts", shared="n_shared_experts",
        scale="routed_scaling_factor", groups=("n_group", "topk_group"), scoring="sigmoid", selection_bias=True,
    ),
    hf_names=_NAMES,
    gguf_names=MAMBA_GGUF_NAMES | {
        "blocks.{i}.mlp_norm.weight": "blk.{i}.attn_norm.weight",
        "blocks.{i}.latent_in.weight": "blk.{i}.ffn_latent_down.weight",
        "blocks.{i}.latent_out.weight": "blk.{i}.ffn_latent_up.weight",
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_activation="relu2",
    gguf_keys=_keys,
    gguf_like=_like,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096, "norm_topk_prob": True},
)  # fmt: skip
NEMOTRON_H_MOE = replace(NEMOTRON_H, gguf_name="nemotron_h_moe", gguf_like=None)
"""Files of those that have experts."""
NEMOTRON_PUZZLE = replace(NEMOTRON_H, config=_puzzle_keys, hf=_puzzle_from_hf)


def _classic(spec: ModelSpec, stored_offset: float) -> ModelSpec:
    """Its layer norms multiply by 1 more than the checkpoint's numbers; those of files have it already."""
    return replace(spec, norm=NormSpec(spec.norm.eps, 1.0, stored_offset, centered=True, shifted=True))


NEMOTRON = Family(
    "nemotron",
    layer_norm=True,
    ungated=SQUARED,
    config=lambda config: {**config, **usual_keys(config, {"norm_eps": "layer_norm_eps"})},
    defaults={"hidden_act": "relu2", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    hf=lambda spec, read: _classic(spec, 0.0),
    gguf=lambda spec, read, key: _classic(spec, 1.0),
    gguf_activation="relu2",
)
"""Nemotron-4, Nemotron Mini and Minitron: attention in all layers."""
