"""Apertus: Llama with norms of heads, and MLPs without a gate whose activation has two learned numbers a layer (xIELU). 1.5 sees
and hears by tokens of its vocabulary; its text is the same, but for a head that may lack these tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nanovllm_cli.curve_spec import XieluSpec
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.models.family import ANOTHER, Family, GGUFField, ReadValues, has_none
from nanovllm_cli.models.names import XIELU_PARTS

MOST = 1e3
"""Of one of its numbers: what is published has some below 1 and some below 10."""
_LAYER = "model.layers.{i}"
_PREFIXES = "model.", "model.language_model.", "language_model.model."


def _with(spec: ModelSpec, numbers: Sequence[Sequence[float]], where: str) -> ModelSpec:
    """numbers: of each layer, those of XieluSpec."""
    if not all(abs(number) <= MOST for each in numbers for number in each):  # a NaN is none either
        raise CheckpointError(f"{where}: the numbers of an activation must lie between -{MOST:g} and {MOST:g}", BROKEN)
    curves = iter(XieluSpec(*each) for each in numbers)

    def curved(mlp: MLPSpec | MoESpec) -> MLPSpec | MoESpec:
        assert isinstance(mlp, MLPSpec)
        return replace(mlp, curve=next(curves))

    return spec.each_mlp(curved)


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    """As they are before a training, which made-up weights are."""
    if read.flag("post_norm", False) or not read.flag("qk_norm", True):
        raise UnsupportedError(f"{read.where}: an Apertus with norms elsewhere, or without those of heads", ANOTHER)
    return _with(spec, [(0.20338232, -1.05022561, 0.5, -1e-6)] * spec.num_layers, read.where)


def _fewer_drawn(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    spec = _from_hf(spec, read)
    if not read.has("output_vocab_size"):
        return spec
    rows = read.integer("output_vocab_size")
    if rows > spec.vocab_size:
        raise CheckpointError(f"{read.where}: a head of {rows} rows, of {spec.vocab_size} tokens", BROKEN)
    if rows == spec.vocab_size:
        return spec
    if spec.tied_head:
        raise UnsupportedError(f"{read.where}: a head that is the embedding and has fewer rows", ANOTHER)
    return replace(spec, head_rows=rows)


def _from_tensors(spec: ModelSpec, values: ReadValues, where: str) -> ModelSpec:
    numbers = []
    first = f"layers.0.mlp.act_fn.{XIELU_PARTS[0]}"
    prefix = next((prefix for prefix in _PREFIXES if values(prefix + first) is not None), _PREFIXES[0])
    for i in range(spec.num_layers):
        names = [f"{prefix}layers.{i}.mlp.act_fn.{part}" for part in XIELU_PARTS]
        found = [values(name) or () for name in names]
        wrong = [name for name, each in zip(names, found, strict=True) if len(each) != 1]
        if wrong:
            raise CheckpointError(f"{where}: tensor {wrong[0]!r} must hold one number", BROKEN)
        numbers.append([number for each in found for number in each])
    return _with(spec, numbers, where)


def _from_gguf(spec: ModelSpec, read: ConfigReader, key: Callable[[str], str]) -> ModelSpec:
    """A list of all layers' numbers, or one for all."""
    columns = []
    for part in XIELU_PARTS:
        value = read.values.get(f"xielu.{part}")
        column: list[Any] = [*value] if isinstance(value, list | tuple) else [value] * spec.num_layers
        if len(column) != spec.num_layers or any(isinstance(each, bool) or not isinstance(each, int | float) for each in column):
            raise CheckpointError(f"{read.where}: 'xielu.{part}' must be a number, or a list of {spec.num_layers}", BROKEN)
        columns.append([float(each) for each in column])
    return _with(spec, [*zip(*columns, strict=True)], read.where)


def _keys(spec: ModelSpec) -> dict[str, GGUFField]:
    curves = [mlp.curve for mlp in spec.mlps if mlp.curve is not None]
    return {f".xielu.{part}": [getattr(curve, part) for curve in curves] for part in XIELU_PARTS}


def _keys_of_whole_heads(spec: ModelSpec) -> dict[str, GGUFField]:
    has_none("an Apertus", a_head_of_fewer_rows_than_the_embedding=spec.head_rows > 0)
    return _keys(spec)


APERTUS = Family(
    "apertus",
    qk_norm=True,
    ungated={"xielu": "xielu"},
    gguf_activation="xielu",
    defaults={
        "hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "rope_theta": 12e6,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    hf_names={
        "blocks.{i}.attention_norm.weight": f"{_LAYER}.attention_layernorm.weight",
        "blocks.{i}.mlp_norm.weight": f"{_LAYER}.feedforward_layernorm.weight",
    },
    hf=_from_hf,
    tensors=_from_tensors,
    gguf=_from_gguf,
    gguf_keys=_keys,
)  # fmt: skip
APERTUS_1_5 = replace(APERTUS, name="apertus1p5", gguf_name="apertus", hf=_fewer_drawn,
                      gguf_keys=_keys_of_whole_heads,
                      defaults={**APERTUS.defaults, "vocab_size": 266752})  # fmt: skip
