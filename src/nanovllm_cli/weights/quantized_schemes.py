"""What compressed-tensors says about each module: config_groups, targets and ignore lists of quantization_config.

A group's targets are names of modules ("model.layers.0.mlp.down_proj"), patterns ("re:.*down_proj") or classes ("Linear",
"Embedding"); a module belongs to the first group that has it by name, else by pattern, else by class. Tensors' shapes and types
are checked elsewhere, against what is read here. Source: compressed-tensors' QuantizationArgs and match_targets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.quant.format import FP8_BLOCK

MAX_GROUPS = 1000
MAX_PATTERN_LEN = 300
MAX_REPEATS = 4
MAX_NAME_LEN = 500  # of a module that patterns are tried on: what they take grows with a power of it
STRATEGIES = ("tensor", "channel", "group", "block")
EMBEDDINGS = ("embed_tokens",)

Kind = Literal["int", "float"]
Activation = Literal["none", "int8", "dynamic", "static"]


@dataclass(frozen=True)
class Scheme:
    """group: columns that share a scale, with the strategy "group". ordered: weight_g_idx says which columns those are.
    activation: int8 of integers, dynamic and static of FP8; inputs of 4-bit floats are kept, whatever they may be rounded to."""

    kind: Kind
    bits: int
    strategy: Literal["tensor", "channel", "group", "block"]
    group: int
    symmetric: bool
    ordered: bool
    activation: Activation


class Schemes:
    """All groups of a config."""

    def __init__(self, config: ConfigReader) -> None:
        self._where = config.where
        groups = config.section("config_groups")
        if not groups.values or len(groups.values) > MAX_GROUPS:
            raise CheckpointError(
                f"{groups.where}: expected 1 to {MAX_GROUPS} groups, found {len(groups.values)}", BROKEN
            )
        sections = [groups.section(name) for name in groups.values]
        self._groups = [(_Targets(section, "targets"), section) for section in sections]
        self._ignored = _Targets(config, "ignore")
        for section in sections:
            if not section.values.get("targets"):
                raise CheckpointError(f"{section.where}: has no 'targets'", BROKEN)

    def of(self, module: str) -> Scheme:
        """Of a module that has quantized weights. CheckpointError where no group has it, or the config says it is left alone."""
        if len(module) > MAX_NAME_LEN:
            raise CheckpointError(f"{self._where}: a quantized module has a name of {len(module)} characters", BROKEN)
        if any(has(self._ignored, module) for has in _WAYS) or self._ignored.has_end(module):
            raise CheckpointError(
                f"{self._where}: {module!r} is among those to ignore, and yet has quantized tensors",
                "config.json and weights don't belong together",
            )
        for has in _WAYS:
            for targets, section in self._groups:
                if has(targets, module):
                    return _scheme(section)
        raise CheckpointError(f"{self._where}: no config group has {module!r}, which has quantized tensors", BROKEN)


class _Targets:
    """The strings of a list in a config: names and classes of modules, and patterns."""

    def __init__(self, config: ConfigReader, key: str) -> None:
        values = config.values.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise CheckpointError(f"{config.where}: {key!r} must be a list of strings", BROKEN)
        where = f"{config.where}: {key!r}"
        self._names = {value for value in values if not value.startswith("re:")}
        self._patterns = [bounded_pattern(value, where) for value in values if value.startswith("re:")]

    def has_name(self, module: str) -> bool:
        return module in self._names

    def has_pattern(self, module: str) -> bool:
        return any(pattern.match(module) for pattern in self._patterns)

    def has_class(self, module: str) -> bool:
        """Only these two kinds of modules have matrices."""
        return ("Embedding" if module.endswith(EMBEDDINGS) else "Linear") in self._names

    def has_end(self, module: str) -> bool:
        """Some tools list what they left alone by the ends of names."""
        parts = module.split(".")
        return any(".".join(parts[first:]) in self._names for first in range(1, len(parts)))


_WAYS = (_Targets.has_name, _Targets.has_pattern, _Targets.has_class)


def _scheme(section: ConfigReader) -> Scheme:
    if section.has("output_activations"):
        raise UnsupportedError(f"{section.where}: quantized outputs of layers", "known: quantized weights and inputs")
    if not section.has("weights"):
        raise CheckpointError(f"{section.where}: says nothing about weights, though there are quantized ones", BROKEN)
    weights = section.section("weights")
    kind = _kind(weights)
    bits = weights.integer("num_bits", 8)
    group = weights.integer("group_size", 0, least=-1)
    strategy = weights.text("strategy", {0: "tensor", -1: "channel"}.get(group, "group")).lower()
    if (kind, bits, strategy) == ("float", 4, "tensor_group"):  # the tensors show whether there is a scale for all of them
        strategy = "group"
    if strategy not in STRATEGIES:
        raise UnsupportedError(f"{weights.where}: the strategy {strategy[:40]!r}", f"known: {', '.join(STRATEGIES)}")
    if strategy == "group" and group < 1:
        raise CheckpointError(f"{weights.where}: 'group_size' must be above 0", BROKEN)
    if strategy == "block" and _block(weights) != (FP8_BLOCK, FP8_BLOCK):
        raise UnsupportedError(f"{weights.where}: blocks of {_block(weights)}", f"known: {FP8_BLOCK} x {FP8_BLOCK}")
    if weights.values.get("dynamic"):
        raise CheckpointError(f"{weights.where}: weights can't have dynamic scales", BROKEN)
    return Scheme(
        kind,
        bits,
        strategy,  # type: ignore[arg-type]
        group if strategy == "group" else 0,
        weights.flag("symmetric", True),
        weights.values.get("actorder") in ("group", "dynamic", True),
        "none" if (kind, bits) == ("float", 4) else _activation(section, kind),
    )


def _activation(section: ConfigReader, weights: Kind) -> Activation:
    """What inputs are rounded to. Coarser dynamic scales than ours (one a tensor) are read as ours (one a token, or group)."""
    if not section.has("input_activations"):
        return "none"
    inputs = section.section("input_activations")
    kind, bits = _kind(inputs), inputs.integer("num_bits", 8)
    dynamic = inputs.values.get("dynamic", False)
    if dynamic not in (True, False):
        raise UnsupportedError(f"{inputs.where}: scales that are dynamic as {dynamic!r:.40}", "known: true, false")
    if bits != 8 or kind != weights:
        raise UnsupportedError(
            f"{inputs.where}: inputs of {bits} bits ({kind}) to {weights} weights",
            "known: inputs of 8 bits of the weights' kind, or left as they are",
        )
    if not inputs.flag("symmetric", True):
        raise UnsupportedError(f"{inputs.where}: inputs with zero points", "known: symmetric inputs")
    if kind == "int":
        if not dynamic:
            raise UnsupportedError(f"{inputs.where}: int8 inputs with static scales", "known: dynamic scales")
        return "int8"
    if not dynamic and inputs.text("strategy", "tensor").lower() != "tensor":
        raise UnsupportedError(
            f"{inputs.where}: static scales that are not one a tensor", "known: one a tensor, or dynamic ones"
        )
    return "dynamic" if dynamic else "static"


def _kind(read: ConfigReader) -> Kind:
    kind = read.text("type", "int").lower()
    if kind not in ("int", "float"):
        raise UnsupportedError(f"{read.where}: numbers of the type {kind[:40]!r}", "known: int, float")
    return kind  # type: ignore[return-value]


def _block(read: ConfigReader) -> tuple[float, ...]:
    structure = read.values.get("block_structure")
    if isinstance(structure, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", structure):  # as older versions wrote it
        return tuple(float(size) for size in structure.split("x"))
    return read.numbers("block_structure", 2)


def bounded_pattern(value: str, where: str) -> re.Pattern[str]:
    """Of "re:…". A pattern out of a file may be made to match for hours: few repeats, none of groups."""
    bare = re.sub(r"\[[^\]]*\]", "x", re.sub(r"\\.", "x", value))
    repeats = re.findall(r"[*+{]|(?<![(*+?}])\?", bare)
    if len(value) > MAX_PATTERN_LEN or len(repeats) > MAX_REPEATS or re.search(r"\)[*+{]", bare):
        raise UnsupportedError(
            f"{where} has the pattern {value[:80]!r}, which may take too long to match", "write names instead"
        )
    try:
        return re.compile(value.removeprefix("re:"))
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where} has the pattern {value[:80]!r}, which is none: {error}", BROKEN) from error
