"""Dory (NVIDIA Nemotron Labs): nGPT (Loshchilov et al. 2024), whose rows lie on a sphere and go to what attention and MLPs find
by a learned part of the way, with layers in the middle that are gone through several times.

Attention and MLPs are layers of their own here, as they are published, and in GGUF files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import attention_in
from nanovllm_cli.model_spec import BlockSpec, ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.families import FULL, MAX_LAYERS, SLIDING
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, check_usual, has_all
from nanovllm_cli.models.names import MATRICES, projections
from nanovllm_cli.norm_spec import NormSpec
from nanovllm_cli.passes_spec import LoopSpec

_EPS = 1e-6  # of all norms, whatever a config says
_EVERY = 4
_MLP = "mlp"
_KINDS = {"S": SLIDING, "*": FULL, "-": _MLP}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_PARTS = ("input", "recurrent", "output")
_MODE = "recurrent_kv_cache_mode"
_FACTORS = {"deviation": "init_std", "alpha": "alpha_init", "gate": "gate_init"}
_PLACE = "backbone.layers.{i}.mixer"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 2560, "intermediate_size": 7168, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "initializer_range": 0.0177,
    "sliding_window": 1024, "ngpt_alpha_init": 0.05, "n_input_layers": 8, "n_output_layers": 8, "n_recurrent_loops": 2,
    "rope_parameters": {SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e7}},
}  # fmt: skip


def _config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With halves as layers, as "layer_types" that has MLPs says. Without, a config means both halves by a layer."""
    read = ConfigReader({**_DEFAULTS, **config}, "config.json")
    count, kinds = read.integer("num_hidden_layers"), config.get("layer_types")
    if count > MAX_LAYERS:
        return config
    listed = isinstance(kinds, list) and len(kinds) == count and all(str(kind) in _LETTERS for kind in kinds)
    if kinds is not None and not listed:
        known = ", ".join(_LETTERS)
        raise CheckpointError(f"config.json: 'layer_types' must be a list of {count} layers' kinds, {known}", BROKEN)
    found = dict(config)
    if kinds is None or _MLP not in kinds:
        kinds = kinds or [SLIDING if (i + 1) % _EVERY else FULL for i in range(count)]
        kinds = [each for kind in kinds for each in (kind, _MLP)]
        parts = [f"n_{part}_layers" for part in _PARTS]
        found |= {"num_hidden_layers": 2 * count} | {part: 2 * read.integer(part, least=0) for part in parts if read.has(part)}
    letters = "".join(_LETTERS[kind] for kind in kinds)
    return {**found, "letters": letters, "layer_types": [FULL if kind == _MLP else kind for kind in kinds]}


def _built(
    spec: ModelSpec, letters: str, parts: Sequence[int], times: int, factors: Mapping[str, float], where: str
) -> ModelSpec:
    """parts: layers in front, of those that are gone through `times` times, and behind."""
    first, inner, last = parts
    if first + inner + last != spec.num_layers or not {"S", "*"} & set(letters):
        raise CheckpointError(f"{where}: {first} + {inner} + {last} layers of {spec.num_layers}, {letters[:80]!r}", BROKEN)
    if spec.num_layers + (times - 1) * inner > MAX_LAYERS:
        what = f"{times} times {inner} layers beside {first + last}; at most {MAX_LAYERS} are believed"
        raise CheckpointError(f"{where} asks for {what}", BROKEN)
    if any(rope.scaling in ("yarn", "longrope") for rope in spec.ropes):
        raise UnsupportedError(f"{where}: positions of a Dory that make its heads grow", ANOTHER)
    head_dim, deviation = spec.attention.head_dim, factors["deviation"]
    rate = factors["alpha"] / deviation
    spec = spec.with_attention(
        qk_norm_of="turned head", scale=head_dim**-1.5,  # of heads whose squares are 1 on average
        query_factor=math.sqrt(head_dim) / deviation, gate_factor=math.sqrt(factors["gate"]) / deviation,
    )  # fmt: skip
    spec = spec.with_mlps(normed=True, factor=math.sqrt(spec.hidden_size))
    blocks = (
        BlockSpec(None, block.mlp, "sphere", rate=rate) if letter == "-" else BlockSpec(block.mixer, None, "sphere", rate=rate)
        for letter, block in zip(letters, spec.blocks, strict=True)
    )
    return replace(
        spec, blocks=tuple(blocks), norm=NormSpec(_EPS, gains=False, unit=True), embedding_normed=True, ends_normed=False,
        passes=LoopSpec(first, first + inner, times, spec.num_layers), logit_factor=1 / deviation,
    )  # fmt: skip


def _check_mode(read: ConfigReader, key: str) -> None:
    """What a loop reads of others' would depend on how a prompt is divided."""
    if (mode := read.text(key, "per_loop")) != "per_loop":
        raise UnsupportedError(f"{read.where}: {key} {mode[:80]!r}", "known: per_loop")


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    check_usual(read, "a Dory", attention_bias=False, mlp_bias=False)
    if (activation := read.text("hidden_act", "silu")) != "silu":
        raise UnsupportedError(f"{read.where}: activation {activation[:80]!r} in a Dory", "known: silu")
    _check_mode(read, _MODE)
    first, last = (read.integer(f"n_{part}_layers", least=0) for part in ("input", "output"))
    inner = read.integer("n_recurrent_layers", max(0, spec.num_layers - first - last), least=0)
    factors = {
        "deviation": read.number("initializer_range"), "alpha": read.number("ngpt_alpha_init"), "gate": spec.hidden_size**0.5,
    }  # fmt: skip
    return _built(spec, read.text("letters"), (first, inner, last), read.integer("n_recurrent_loops"), factors, read.where)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A profile says by layers of which of two bases their positions are; llama.cpp scales none."""
    letters, count = read.text(key("layer_pattern")), spec.num_layers
    profile = read.values.get(key("rope.profile"))
    if len(letters) != count or not set(letters) <= set(_KINDS):
        raise CheckpointError(f"{read.where}: {key('layer_pattern')!r} must have {count} of {' '.join(_KINDS)}", BROKEN)
    if not isinstance(profile, list | tuple) or len(profile) != count or not all(each in (1, 2) for each in profile):
        raise CheckpointError(f"{read.where}: {key('rope.profile')!r} must be a list of {count} layers' 1 or 2", BROKEN)
    if any(rope.scaling != "none" or rope.dim != spec.attention.head_dim for rope in spec.ropes):
        raise UnsupportedError(f"{read.where}: scaled positions of a Dory, or of a part of its heads", ANOTHER)
    thetas = read.number(key("rope.freq_base")), read.number(key("rope.freq_base_2"))
    window = read.integer(key("attention.sliding_window"))
    blocks = []
    for block, letter, base in zip(spec.blocks, letters, profile, strict=True):
        assert spec.attention.rope is not None
        rope = replace(spec.attention.rope, theta=thetas[base - 1])
        mixer = replace(spec.attention, rope=rope, window=window if letter == "S" else None)
        blocks.append(replace(block, mixer=mixer))
    _check_mode(read, key(_MODE))
    parts = [read.integer(key(f"{part}_layer_count"), least=0) for part in _PARTS]
    factors = {name: read.number(key(theirs)) for name, theirs in _FACTORS.items()}
    spec = replace(spec, blocks=tuple(blocks))
    return _built(spec, letters, parts, read.integer(key("recurrent_loop_count")), factors, read.where)


def _gguf_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """What llama.cpp takes for granted must be so."""
    loops, rate, gate = spec.passes, spec.blocks[0].rate, spec.attention.gate_factor
    assert isinstance(loops, LoopSpec)
    assert spec.logit_factor is not None
    assert rate is not None
    assert gate is not None
    attentions = [attention_in(block.mixer) for block in spec.blocks]
    letters = "".join("-" if own is None else "*" if own.window is None else "S" for own in attentions)
    without_first = sorted(spec.attentions, key=lambda own: own.window is not None)  # whose base is that of all files
    ropes = [own.rope for own in without_first if own.rope is not None]
    bases = list(dict.fromkeys(rope.theta for rope in ropes))
    has_all(
        spec.architecture, head_of_its_own=not spec.tied_head, layers_with_windows="S" in letters,
        layers_without_windows="*" in letters, layers_in_front_between_and_behind=0 < loops.first < loops.end < spec.num_layers,
        plain_positions_of_two_bases=len(bases) < 3 and all(rope.scaling == "none" for rope in ropes),
    )  # fmt: skip
    profile = [1 if own is None or own.rope is None else 1 + bases.index(own.rope.theta) for own in attentions]
    return {
        "input_layer_count": loops.first, "recurrent_layer_count": loops.end - loops.first,
        "output_layer_count": spec.num_layers - loops.end, "recurrent_loop_count": loops.times, "layer_pattern": letters,
        _MODE: "per_loop", "rope.profile": profile, "rope.freq_base_2": bases[-1], "init_std": 1 / spec.logit_factor,
        "alpha_init": rate / spec.logit_factor, "gate_init": (gate / spec.logit_factor) ** 2,
    }  # fmt: skip


_SCALES = {"gate_scales": "suv_gate", "up_scales": "suv_up", "query_scales": "sqk", "attention_gate_scales": "s_gate"}
DORY = Family(
    "dory",
    attention={"gated": True, "gate_apart": True, "qk_norm": True, "qk_gains": False, "found_norm": True},
    has_window=True,
    config=_config,
    metadata=lambda metadata: {"dory.attention.layer_norm_rms_epsilon": _EPS, **metadata},
    defaults=_DEFAULTS,
    outer="backbone.",
    hf_names={
        "embedding.weight": "backbone.embeddings.weight",
        "head.scales": "lm_head.logit_scale",
        **projections("blocks.{i}.", f"{_PLACE}.", (*"qkvo", *MATRICES)),
        "blocks.{i}.attention_gate.weight": f"{_PLACE}.g_proj.weight",
        **{f"blocks.{{i}}.{ours}": f"{_PLACE}.{theirs}" for ours, theirs in _SCALES.items()},
        "blocks.{i}.attention_rates": "backbone.layers.{i}.attn_alpha",
        "blocks.{i}.mlp_rates": "backbone.layers.{i}.mlp_alpha",
    },
    gguf_names={
        "head.scales": "dory_logit_scale.weight",
        "blocks.{i}.attention_gate.weight": "blk.{i}.attn_gate.weight",
        **{f"blocks.{{i}}.{ours}": f"blk.{{i}}.dory_{theirs}.weight" for ours, theirs in _SCALES.items()},
        **{f"blocks.{{i}}.{part}_rates": "blk.{i}.dory_alpha.weight" for part in ("attention", "mlp")},
    },
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_gguf_keys,
)
