"""Family: how one family's configs are read and its tensors called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import BlockOrder, ModelSpec, NormSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.names import GGUF_NAMES, HF_NAMES

SQUARED = {"relu2": "relu2"}
"""See `Family.ungated`."""
ANOTHER = "take another model; README.md lists what runs"

ReadValues = Callable[[str], tuple[float, ...] | None]
"""Name of a small tensor of the checkpoint -> its values, or None where there is none."""
FromHF = Callable[[ModelSpec, ConfigReader], ModelSpec]
FromGGUF = Callable[[ModelSpec, ConfigReader, Callable[[str], str]], ModelSpec]
"""The third: a key's name without the architecture -> with it."""

Sections = tuple[tuple[int | None, float], ...]
"""Of a weight's rows: so many (None: all) are multiplied with a factor, those behind them with the next."""


@dataclass(frozen=True, slots=True)
class Folding:
    """Factors of weights that a folder's config has and its weights do not. sections: of which weights, by our names; without:
    the config of a folder whose weights have them."""

    sections: Callable[[ConfigReader], Mapping[str, Sections]]
    without: Callable[[Mapping[str, Any]], Mapping[str, Any]]


GGUFField = float | str | list[bool] | list[int] | list[float]


def usual_keys(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """What a config says by names of its own, by those that others have for it."""
    return {usual: config[own] for own, usual in keys.items() if config.get(own) is not None}


def has_all(name: str, **parts: bool) -> None:
    """UnsupportedError for what llama.cpp takes for granted in files of an architecture and a model lacks."""
    lacking = [part.replace("_", " ") for part, there in parts.items() if not there]
    if lacking:
        what = f"GGUF cannot say this of a {name} model: that it has no {', no '.join(lacking)}"
        raise UnsupportedError(what, "keep the model as a folder")


def no_file(name: str) -> Callable[[ModelSpec], Family]:
    """A `Family.gguf_like` of models that llama.cpp has no architecture for."""

    def refuse(spec: ModelSpec) -> Family:
        raise UnsupportedError(f"GGUF has no {name}: llama.cpp knows none", "keep the model as a folder")

    return refuse


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A line of `registry.py` points to one.

    config: what its config.json says, by the keys that others have; metadata: the same of its GGUF files. order, attention: of
    its blocks, and what all their attention has; see `BlockSpec`, `AttentionSpec`. layer_norm: its norms are centered, and what
    is added to their squares has another name; shifted: they have a bias. qkv_bias: None reads "attention_bias". window_switch:
    the config key that must be true for "sliding_window" to count; None: a window counts wherever it is given. full_every: where
    a config doesn't list its layers, each so many-th has no window, None: all have one; full_first: or those in front of which a
    multiple of that lies. local_theta: rotary base of layers with a window, where that is another. no_rope_every: where the
    config doesn't list them, each so many-th layer has no positions. interleaved: rotary pairs lie side by side;
    interleaved_gguf: in its GGUF files. fused_qkv: q, k and v are one tensor of its folders, qkv_by_head: which has a key head's
    queries, key and value together; fused_mlp: gate and up are. turned_over: its folders have matrices of layers so
    (`weights/stacked.py`), and PEFT's adapters say it of theirs. assists: it guesses for another model, and does nothing by
    itself (`assistant.py`). ungated: activations of its MLPs, by their names in configs, where these have no gate. both_ways:
    tokens see those behind them; halves_window: where they do, what files call the window is as wide on both sides together.
    outer: what the names of a folder's tensors begin with, but for the model alone, without a head. aside: beginnings of names of
    what is for tasks that nothing here does. convolutions: in place of attention, in some layers. varied: layers have key-value
    heads and MLPs of their own numbers. latent: its attention is, so that its GGUF files speak of what is kept where others do of
    keys and values. experts: what its configs call them, where it has any. defaults: what configs leave out. hf_names,
    gguf_names: where its tensors are called otherwise than HF_NAMES and GGUF_NAMES have it, or are others. hf, gguf: what is left
    to be made of a config; they get the spec that the rest makes. tensors: of a folder, too; their third is what it is called in
    messages. gguf_name: of the architecture, where its GGUF files call it otherwise. gguf_activation: the one that they mean
    without a word. gguf_values: what small tensors of theirs say, those whose names end in gguf_told_by, which no layer asks for;
    gguf_tables: the same tensors, as they are written. gguf_keys: what they say beyond what all do, by keys without the
    architecture, but for those that begin with a dot, which have none; None: they are not written. gguf_gate_up: they have gate
    and up of a layer's experts in one tensor. gguf_parallel: those without norms of MLPs have these read what attention reads,
    whatever they say in words. gguf_unread: and keys and values of layers that read those of others, which llama.cpp asks for
    though nothing reads them. gguf_heads_dealt: and value heads of the delta rule dealt out to key heads in turn. gguf_truncates:
    see `RopeSpec`, of what they mean by yarn. gguf_like: the family whose files hold such a model, where that is another.
    mtp_names: of what its folders have beside the block of a layer that predicts further tokens; empty where none is known.
    mtp_gguf_names: of its files, where they are others than MTP_GGUF_NAMES. folding: see `weights/folded.py`. peft_names: what
    the code that trains adapters calls weights otherwise than its folders do.
    """

    name: str
    order: BlockOrder = "pre"
    attention: Mapping[str, Any] = field(default_factory=dict)
    qk_norm: bool = False
    layer_norm: bool = False
    shifted: bool = False
    qkv_bias: bool | None = None
    has_window: bool = False
    window_switch: str | None = None
    full_every: int | None = None
    full_first: bool = False
    local_theta: float | None = None
    no_rope_every: int | None = None
    interleaved: bool = False
    interleaved_gguf: bool = False
    fused_qkv: bool = False
    qkv_by_head: bool = False
    turned_over: bool = False
    fused_mlp: bool = False
    ungated: Mapping[str, str] = field(default_factory=dict)
    assists: bool = False
    both_ways: bool = False
    halves_window: bool = False
    outer: str = "model."
    aside: tuple[str, ...] = ()
    tied_by_default: bool = False
    convolutions: bool = False
    varied: bool = False
    latent: bool = False
    experts: ExpertKeys | None = None
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    metadata: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda metadata: metadata
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    hf: FromHF = lambda spec, read: spec
    tensors: Callable[[ModelSpec, ReadValues, str], ModelSpec] | None = None
    gguf: FromGGUF = lambda spec, read, key: spec
    gguf_values: Callable[[ModelSpec, ReadValues, str], ModelSpec] | None = None
    gguf_told_by: tuple[str, ...] = ()
    gguf_tables: Callable[[ModelSpec], Mapping[str, list[float]]] = lambda spec: {}
    gguf_name: str = ""
    gguf_activation: str = "silu"
    gguf_keys: Callable[[ModelSpec], Mapping[str, GGUFField]] | None = lambda spec: {}
    gguf_gate_up: bool = False
    gguf_parallel: bool = False
    gguf_unread: bool = False
    gguf_heads_dealt: bool = False
    gguf_truncates: bool = True
    gguf_like: Callable[[ModelSpec], Family] | None = None
    mtp_names: Mapping[str, str] = field(default_factory=dict)
    mtp_gguf_names: Mapping[str, str] = field(default_factory=dict)
    folding: Folding | None = None
    peft_names: Mapping[str, str] = field(default_factory=dict)

    def norm(self, eps: float) -> NormSpec:
        """Of its models, as a config gives it."""
        return NormSpec(eps, centered=self.layer_norm, shifted=self.shifted)

    def shaped(self, spec: ModelSpec) -> ModelSpec:
        """The same with what all its models have, whatever a config or file says."""
        return spec.in_order(self.order).with_attention(**self.attention)

    def names(self, kind: Literal["hf", "gguf"]) -> dict[str, str]:
        """Our names of slots, {i} for the layer -> those in its files."""
        return {**HF_NAMES, **self.hf_names} if kind == "hf" else {**GGUF_NAMES, **self.gguf_names}
