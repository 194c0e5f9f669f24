"""Falcon-H1: in every layer attention and Mamba-2's state space side by side, on what one norm gives (Zuo et al. 2025).

Its configs have numbers that products are multiplied with on their way. As llama.cpp's converter does, they are put into the
weights where a folder is read, so that nothing behind knows of them; where embedding and head are one tensor, these keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mixer_spec import PairSpec, state_in
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, Folding, GGUFField, Sections
from nanovllm_cli.models.mamba import MAMBA_GGUF_NAMES, mamba_from_gguf, mamba_from_hf, mamba_gguf_keys, mamba_hf_names
from nanovllm_cli.models.names import projections
from nanovllm_cli.state_spec import DeltaSpec

_LAYER = "model.layers.{i}"
_NAMES = mamba_hf_names(f"{_LAYER}.mamba") | {
    "norm.weight": "model.final_layernorm.weight",
    "blocks.{i}.mlp_norm.weight": f"{_LAYER}.pre_ff_layernorm.weight",
    **projections("blocks.{i}.", f"{_LAYER}.feed_forward."),
}
_BIASES = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
_OF_LAYERS = ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier")
_OF_TOKENS = ("embedding_multiplier", "lm_head_multiplier")


def _factor(read: ConfigReader, name: str) -> float:
    found = read.number(name, 1.0, positive=False)
    if not found:
        raise CheckpointError(f"{read.where}: {name!r} is 0, which leaves nothing of a product", BROKEN)
    return found


def _sections(read: ConfigReader) -> dict[str, Sections]:
    """What rows of a folder's weights are multiplied with."""
    mlp, ssm = (read.numbers(name, size) if read.has(name) else (1.0,) * size for name, size in _LISTS.items())
    into, out, keys, ssm_in, ssm_out = (_factor(read, name) for name in _OF_LAYERS)
    mamba = _mamba(read)
    groups = mamba.num_keys * mamba.key_dim
    parts = zip((mamba.values, mamba.values, groups, groups, mamba.num_values), ssm, strict=True)
    whole = {"q": into, "k": into * keys, "v": into, "o": out, "mamba_out": ssm_out, "gate": mlp[0], "down": mlp[1]}
    found: dict[str, Sections] = {f"blocks.{{i}}.{part}.weight": ((None, factor),) for part, factor in whole.items()}
    found["blocks.{i}.mamba_in.weight"] = tuple((rows, ssm_in * factor) for rows, factor in parts)
    if not _is_tied(read.values):
        embedding, head = (_factor(read, name) for name in _OF_TOKENS)
        found |= {"embedding.weight": ((None, embedding),), "head.weight": ((None, head),)}
    return found


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose numbers are in the weights."""
    names = _OF_LAYERS if _is_tied(config) else (*_OF_LAYERS, *_OF_TOKENS)
    return {**config, **dict.fromkeys(names, 1.0), **{name: [1.0] * size for name, size in _LISTS.items()}}


def _is_tied(config: Mapping[str, Any]) -> bool:
    return config.get("tie_word_embeddings") is True


def _mamba(read: ConfigReader) -> DeltaSpec:
    inner = read.integer("mamba_d_ssm") if read.has("mamba_d_ssm") else read.integer("mamba_expand") * read.integer("hidden_size")
    return mamba_from_hf(read, inner, normed=read.flag("mamba_rms_norm", False))


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    for name in _BIASES:
        if read.flag(name, False):
            raise UnsupportedError(f"a Falcon-H1 with biases ({name})", ANOTHER)
    mamba = _mamba(read)
    if mamba.normed and read.flag("mamba_norm_before_gate", True):
        raise UnsupportedError("a Falcon-H1 whose state spaces have a norm before their gate", ANOTHER)
    _sections(read)  # what can't be multiplied with is told of here
    spec = _paired(spec, mamba)
    if not spec.tied_head:
        return spec
    embedding, head = (_factor(read, name) for name in _OF_TOKENS)
    return replace(spec, embedding_scale=embedding, logit_scale=head)


def _paired(spec: ModelSpec, mamba: DeltaSpec) -> ModelSpec:
    return spec.with_mixers(PairSpec(attention, mamba) for attention in spec.attentions)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    return _paired(spec, mamba_from_gguf(read, key))


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    mamba = state_in(spec.blocks[0].mixer)
    assert isinstance(mamba, DeltaSpec)
    return mamba_gguf_keys(mamba)


FALCON_H1 = Family(
    "falcon_h1",
    gguf_name="falcon-h1",
    hf_names=_NAMES,
    gguf_names=MAMBA_GGUF_NAMES | {"blocks.{i}.mlp_norm.weight": "blk.{i}.ffn_norm"},  # as llama.cpp has it
    hf=_from_hf,
    gguf=_from_gguf,
    gguf_keys=_keys,
    folding=Folding(_sections, _without),
    defaults={
        "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 8192, "mamba_d_ssm": 1024,
        "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    },
)  # fmt: skip
