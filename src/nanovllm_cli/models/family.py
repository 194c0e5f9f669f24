"""Family: how one family's configs are read and its tensors called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.model_spec import BlockOrder, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.experts import ExpertKeys
from nanovllm_cli.models.names import GGUF_NAMES, HF_NAMES
from nanovllm_cli.norm_spec import NormSpec

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


GGUFTable = list[float] | list[list[float]]
GGUFField = float | str | list[bool] | list[int] | list[float]


def usual_keys(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """What a config says by names of its own, by those that others have for it."""
    return {usual: config[own] for own, usual in keys.items() if config.get(own) is not None}


def check_usual(read: ConfigReader, name: str, **usual: bool) -> None:
    """UnsupportedError where a flag is other than in all that is computed of such models."""
    for key, value in usual.items():
        if read.flag(key, value) is not value:
            raise UnsupportedError(f"{read.where}: {name} whose {key!r} is {str(not value).lower()}", ANOTHER)


def has_all(name: str, **parts: bool) -> None:
    """UnsupportedError for what llama.cpp takes for granted in files of an architecture and a model lacks."""
    lacking = [part.replace("_", " ") for part, there in parts.items() if not there]
    if lacking:
        what = f"GGUF cannot say this of a {name} model: that it has no {', no '.join(lacking)}"
        raise UnsupportedError(what, "keep the model as a folder")


def has_none(of: str, **parts: bool) -> None:
    """The same for what they have no place for and a model has."""
    if found := [part.replace("_", " ") for part, there in parts.items() if there]:
        raise UnsupportedError(f"GGUF cannot say this of {of}: {', '.join(found)}", "keep the model as a folder")


def weight_keys(spec: ModelSpec) -> dict[str, GGUFField]:
    """What many files say of the weights that a token's experts have, where there are any."""
    mixture = spec.mixture
    return {} if mixture is None else {"expert_weights_scale": mixture.scale, "expert_weights_norm": mixture.norm_topk}


IDS_OF_IMAGES = tuple(f"{kind}{place}_token_id" for kind in ("image", "video") for place in ("", "_start", "_end"))
"""Of tokens that stand for images and videos, or are around them, in the config of the whole."""


def no_file(name: str) -> Callable[[ModelSpec], Family]:
    """A `Family.gguf_like` of models that llama.cpp has no architecture for."""

    def refuse(spec: ModelSpec) -> Family:
        raise UnsupportedError(f"GGUF has no {name}: llama.cpp knows none", "keep the model as a folder")

    return refuse


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A line of `registry.py` points to one. "Its" is: its models', their configs' or their files'."""

    name: str

    # What its models are made of.
    order: BlockOrder = "pre"  # see `BlockSpec`
    attention: Mapping[str, Any] = field(default_factory=dict)  # values of `AttentionSpec` that all have
    qk_norm: bool = False
    layer_norm: bool = False  # norms are centered, and what is added to their squares has another name
    shifted: bool = False  # and have a bias
    qkv_bias: bool | None = None  # None: as "attention_bias" says
    interleaved: bool = False  # rotary pairs lie side by side
    ungated: Mapping[str, str] = field(default_factory=dict)  # activations of MLPs, by their names in configs, that have no gate
    both_ways: bool = False  # tokens see those behind them
    has_encoder: bool = False  # which reads a text that layers attend to
    # It guesses for another model, and does nothing by itself: by what that one keeps (`assistant.py`), or by rows of its layers
    # (`eagle.py`).
    assists: Literal["", "cache", "rows"] = ""
    convolutions: bool = False  # in place of attention, in some layers
    varied: bool = False  # layers have key-value heads and MLPs of their own numbers
    narrow_values: bool = False  # heads' values may be of fewer numbers than their keys
    latent: bool = False  # attention is, so that GGUF files speak of what is kept where others do of keys and values

    # Which layers have a window, and positions.
    has_window: bool = False
    window_switch: str | None = None  # the key that must be true for "sliding_window" to count; None: it counts where it is given
    full_every: int | None = None  # where no list of layers is, each so many-th has no window; None: all have one
    full_first: bool = False  # or those in front of which a multiple of that lies
    halves_window: bool = False  # where tokens see those behind them, files mean both sides together
    local_theta: float | None = None  # rotary base of layers with a window, where that is another
    no_rope_every: int | None = None  # where no list of layers is, each so many-th has no positions

    # What configs call things and leave out.
    config: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config  # config.json by the keys that others have
    metadata: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda metadata: metadata  # the same of GGUF files
    experts: ExpertKeys | None = None  # None: it has none
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json
    tied_by_default: bool = False

    # What is left to be made of a config; these get the spec that the rest makes.
    hf: FromHF = lambda spec, read: spec
    gguf: FromGGUF = lambda spec, read, key: spec
    tensors: Callable[[ModelSpec, ReadValues, str], ModelSpec] | None = None  # of a folder's; the third: its name in messages

    # What folders call tensors, and how they have them.
    hf_names: Mapping[str, str] = field(default_factory=dict)  # where they are other than HF_NAMES
    vector_names: Mapping[str, str] = field(default_factory=dict)  # by kind of checkpoint: what vectors go through when pooled
    template: str = ""  # of `text/builtin_templates.py`, where a model brings none
    also_embedded: tuple[str, ...] = ()  # names of the embedding where it is not there under its own
    outer: str = "model."  # what names begin with, but for the model alone, without a head
    aside: tuple[str, ...] = ()  # beginnings of names of what is for tasks that nothing here does
    unread_without_experts: tuple[str, ...] = ()  # endings of names of what layers without experts have to no purpose
    fused_qkv: bool = False  # q, k and v are one tensor
    qkv_by_head: bool = False  # which has a key head's queries, key and value together
    fused_mlp: bool = False  # gate and up are one
    turned_over: bool = False  # matrices of layers are (`weights/stacked.py`), and PEFT's adapters say it of theirs
    mtp_names: Mapping[str, str] = field(default_factory=dict)  # beside the block of a layer that guesses; empty: none is known
    folding: Folding | None = None  # see `weights/folded.py`
    peft_names: Mapping[str, str] = field(default_factory=dict)  # what the code that trains adapters calls weights otherwise

    # Of GGUF files.
    gguf_name: str = ""  # of the architecture, where it is another
    gguf_like: Callable[[ModelSpec], Family] | None = None  # the family whose files hold such a model, where that is another
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # where they are other than GGUF_NAMES
    mtp_gguf_names: Mapping[str, str] = field(default_factory=dict)  # where they are other than MTP_GGUF_NAMES
    interleaved_gguf: bool = False  # rotary pairs lie side by side
    mirrored_gguf: bool = False  # rotary pairs, which turn backwards in folders, do not: rows of their second numbers are negated
    gguf_activation: str = "silu"  # the one that is meant without a word
    gguf_values: Callable[[ModelSpec, ReadValues, str], ModelSpec] | None = None  # what small tensors say that no layer asks for
    gguf_told_by: tuple[str, ...] = ()  # endings of their names
    gguf_tables: Callable[[ModelSpec], Mapping[str, GGUFTable]] = lambda spec: {}  # the same tensors, as they are written
    # What they say beyond what all do, by keys without the architecture, but for those that begin with a dot, which have none;
    # None: they are not written.
    gguf_keys: Callable[[ModelSpec], Mapping[str, GGUFField]] | None = lambda spec: {}
    gguf_homeless: tuple[str, ...] = ()  # endings of names of tensors for which llama.cpp refuses a file
    gguf_gate_up: bool = False  # gate and up of a layer's experts are one tensor
    gguf_parallel: bool = False  # those without norms of MLPs have these read what attention reads, whatever they say in words
    gguf_unread: bool = False  # keys and values of layers that read those of others, which llama.cpp asks for, are there
    gguf_indexer_apart: bool = False  # rotary pairs of what chooses tokens for latent attention lie apart
    gguf_heads_dealt: bool = False  # value heads of the delta rule are dealt out to key heads in turn
    gguf_truncates: bool = True  # see `RopeSpec`, of what they mean by yarn

    def norm(self, eps: float) -> NormSpec:
        """Of its models, as a config gives it."""
        return NormSpec(eps, centered=self.layer_norm, shifted=self.shifted)

    def shaped(self, spec: ModelSpec) -> ModelSpec:
        """The same with what all its models have, whatever a config or file says."""
        return spec.in_order(self.order).with_attention(**self.attention)

    def names(self, kind: Literal["hf", "gguf"]) -> dict[str, str]:
        """Our names of slots, {i} for the layer -> those in its files."""
        return {**HF_NAMES, **self.hf_names} if kind == "hf" else {**GGUF_NAMES, **self.gguf_names}
