"""Weights as AMD's Quark stores them.

    fp8_e4m3        weight e4m3 [N, K]; weight_scale one, [N] or one a block of 128 x 128; input_scale one
    fp8, fp6        with powers of two as scales of 32: see quantized_microscaled.py
    fp4             MXFP4: weight [N, K / 2] and weight_scale [N, K / 32], see quantized_mxfp4.py; with a scale of fp8 for 16
                    numbers, and weight_scale_2, NVFP4
    int8, uint8     weight [N, K], weight_scale one or [N], weight_zero_point alike; with a scale a group all of them turned:
                    weight [K, N], weight_scale and weight_zero_point [G, N]
    int4, uint4     weight int32 [N, K / 8], by groups [K, N / 8]: of eight neighbours in a word, nibbles hold 0, 2, 4, 6, 1, 3,
                    5, 7 in turn ("reorder"), or all in order; weight_zero_point [G, N / 8] alike
    int3            weight bytes [N, K * 3 / 8], from the lowest bit on; weight_scale as that of int4
    fp8 and int4    int4 by channels, and two scales: one of all numbers, weight_scale, and weight_scale_2 [N]

Codes and zero points of signed types are two's complement. What a module's numbers are, config.json says by name or pattern
(`layer_quant_config`), else for all (`global_quant_config`). Whether it is quantized its tensors show, so `exclude` is not
needed. What its inputs are rounded to is kept of FP8, and of int8 with a scale a token; inputs of four bits, and of int8 with a
scale that is fixed, are kept finer. Outputs are those that a KV cache is made of: its type is not the checkpoint's choice.
Sources: Quark 0.13's pack.py, realquantizer.py and constants.py; vLLM's `quark.py` for what published models say.

Legend: N rows, K columns (inputs), G groups along a row.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.models.config_reader import BROKEN, ConfigReader
from nanovllm_cli.quant.format import FP8_BLOCK, Integer
from nanovllm_cli.quant.rows import IntegerRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.quantized_fp8 import FP8_TYPES, OTHER_FP8_TYPES, fp8_weight
from nanovllm_cli.weights.quantized_gptq import PACK_METHODS, checked_group, rounded_activations, unpack_awq
from nanovllm_cli.weights.quantized_microscaled import EIGHT, SIX, MicroscaledWeight, check_blocks
from nanovllm_cli.weights.quantized_mxfp4 import BLOCK, SCALE_TYPES, mxfp4_weight
from nanovllm_cli.weights.quantized_nvfp4 import nvfp4_weight
from nanovllm_cli.weights.quantized_schemes import MAX_GROUPS, MAX_NAME_LEN, bounded_pattern
from nanovllm_cli.weights.quantized_weight import FLOATS, Module, Part, QuantizedWeight, modules, those, unpack

SUFFIXES = (
    "weight", "weight_scale", "weight_scale_2", "weight_zero_point", "weight_zero_point_2", "input_scale", "input_scale_2",
    "input_zero_point", "bias_scale", "input_rotation", "input_prescale",
)  # fmt: skip
BITS: dict[str, Literal[3, 4, 8]] = {"int8": 8, "uint8": 8, "int4": 4, "uint4": 4, "int3": 3}
_STORED = {"int8": "I8", "uint8": "U8", "int3": "U8"}
KNOWN = f"known: fp8_e4m3, MXFP4 and NVFP4 (fp4), MXFP8 and MXFP6 (fp8_e5m2, {', '.join(SIX)}), {', '.join(BITS)}"
_CACHED = re.compile(r"(?:[qkv]|qkv|kv_b|kv_a\w*)_proj|qkv|query_key_value|Wqkv")
"""Modules whose outputs go to a KV cache, or meet what is in it."""


@dataclass(frozen=True)
class IntegerWeight:
    """kind: of the codes. scales: one, [N] or [N, 1]; grouped: [G, N]. reordered: of four bits. whole: a scale of all numbers
    besides. others: tensors that are not read."""

    format: Integer
    shape: tuple[int, int]
    kind: str
    codes: Part
    scales: Part
    zeros: Part | None
    whole: Part | None
    others: tuple[Part, ...]
    grouped: bool
    reordered: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.scales, self.zeros, self.whole, *self.others)

    def rows(self, first: int, end: int) -> IntegerRows:
        scales = self._of_rows(self.scales.read(), first, end)
        if self.whole is not None:
            scales = scales.float() * self.whole.checked_scales(self.whole.read().float().reshape(1))
        return IntegerRows(self._codes(first, end), self.scales.checked_scales(scales.contiguous()), self._zeros(first, end))

    def _codes(self, first: int, end: int) -> torch.Tensor:
        stored, width = self.codes.read(), self.shape[1]
        if self.kind == "int3":
            codes = unpack(stored[first:end].contiguous(), 3, width)
        elif self.grouped:
            codes = self._turned(stored, first, end)
        elif self.format.bits == 8:
            codes = stored[first:end]
        else:
            codes = unpack_awq(stored[first:end], 0, width, reordered=self.reordered).t()
        return self._shifted(codes)

    def _zeros(self, first: int, end: int) -> torch.Tensor | None:
        """None where all are in the middle, as symmetric weights' must be."""
        if self.zeros is None:
            return None
        stored = self.zeros.read()
        packed = self.format.bits == 4 and self.zeros.shape != self.scales.shape
        if packed or self.grouped:
            found = self._turned(stored.reshape(-1, stored.shape[-1]), first, end)
        else:
            found = self._of_rows(stored, first, end)
        zeros = self._shifted(found)
        if self.format.zeros:
            return zeros
        if bool((zeros != self.format.middle).any()):
            raise self.zeros.misfit("should hold nothing but zeros: the config says that weights are symmetric")
        return None

    def _turned(self, stored: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """[n, X] of [X, N], or of words."""
        if self.format.bits == 4:
            return unpack_awq(stored, first, end, reordered=self.reordered)
        return stored[:, first:end].t()

    def _of_rows(self, values: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """[n, G] of one number, [N] or [G, N]."""
        if self.grouped:
            return values[:, first:end].t()
        return values.reshape(-1, 1).expand(self.shape[0], 1)[first:end]

    def _shifted(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8, and the middle for 0 where codes have a sign."""
        low = codes.contiguous().view(torch.uint8) if codes.dtype == torch.int8 else (codes & 255).to(torch.uint8)
        return (low if self.kind.startswith("u") else low ^ self.format.middle) & self.format.most


def read_quark(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: quantization_config."""
    _check_config(config)
    layers = _Layers(config)
    reordered = _pack_method(config) == "reorder"
    weights: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, SUFFIXES):
        for suffix, what in (("input_rotation", "rotates"), ("input_prescale", "scales"), ("bias_scale", "")):
            if module.has(suffix):
                told = f"{what} what goes into a layer" if what else "says that a bias is quantized"
                raise module.any(suffix).unsupported(told, "take a model without it")
        if module.has("weight_scale") or (module.has("weight") and module.any("weight").dtype_name not in FLOATS):
            weights[module.weight_name] = _weight(module, layers.of(module.name), reordered)
    return weights


def _check_config(config: ConfigReader) -> None:
    form = config.section("export").text("weight_format", "real_quantized")
    if form != "real_quantized":
        raise UnsupportedError(f"{config.where}: the weight_format {form[:40]!r}", "known: real_quantized")
    algorithms = config.values.get("algo_config")
    for each in algorithms if isinstance(algorithms, list) else [algorithms]:
        if isinstance(each, Mapping) and (each.get("online_r1_rotation") or each.get("r4")):
            raise UnsupportedError(
                f"{config.where}: rotations of activations ({each.get('name')!r:.40})", "take a model without them"
            )


def _pack_method(config: ConfigReader) -> str:
    method = config.section("export").text("pack_method", "reorder")
    if method not in PACK_METHODS:
        raise UnsupportedError(f"{config.where}: the pack_method {method[:40]!r}", f"known: {', '.join(PACK_METHODS)}")
    return method


class _Layers:
    """What a config says of each module."""

    def __init__(self, config: ConfigReader) -> None:
        self._where = config.where
        self._all = config.section("global_quant_config")
        layers = config.section("layer_quant_config")
        patterns = {name for name in layers.values if "*" in name or "?" in name or "[" in name or name.startswith("re:")}
        self._named = {name: layers.section(name) for name in layers.values if name not in patterns}
        if len(patterns) > MAX_GROUPS:
            told = f"{layers.where}: at most {MAX_GROUPS} patterns are believed, found {len(patterns)}"
            raise CheckpointError(told, BROKEN)
        self._patterns = [(_pattern(name, layers.where), layers.section(name)) for name in layers.values if name in patterns]
        types = config.section("layer_type_quant_config")
        self._linear = types.section("Linear") if types.has("Linear") else None

    def of(self, module: str) -> ConfigReader:
        """By its name, else the first pattern that it has, else its class, else what is said of all."""
        if len(module) > MAX_NAME_LEN:
            raise CheckpointError(f"{self._where}: a quantized module has a name of {len(module)} characters", BROKEN)
        found = self._named.get(module) or next((own for pattern, own in self._patterns if pattern.match(module)), None)
        return found or self._linear or self._all


def _pattern(name: str, where: str) -> re.Pattern[str]:
    if name.startswith("re:"):
        return bounded_pattern(name, where)
    if len(name) > MAX_NAME_LEN:
        raise CheckpointError(f"{where}: has a pattern of {len(name)} characters", BROKEN)
    return re.compile(fnmatch.translate(name))  # whose stars don't go back to one another


def _specs(layer: ConfigReader, key: str) -> list[ConfigReader]:
    """What happens to a tensor, one thing after the other."""
    value = layer.values.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if len(found) > 2 or not all(isinstance(each, Mapping) for each in found):
        raise CheckpointError(f"{layer.where}: {key!r} must be an object, or a list of one or two", BROKEN)
    return [ConfigReader(each, f"{layer.where}: {key}") for each in found]


def _weight(module: Module, layer: ConfigReader, reordered: bool) -> QuantizedWeight:
    specs = _specs(layer, "weight")
    if not specs:
        told = f"{layer.where}: says nothing of the weight of {module.name!r}, which is quantized"
        raise CheckpointError(told, "config.json and weights don't belong together")
    part = module.part("weight", (*FLOATS, *FP8_TYPES, *OTHER_FP8_TYPES, "I8", "U8", "I32"))
    if part.dtype_name in FLOATS:
        raise part.unsupported(f"holds {part.dtype_name} and has scales: it was never packed", "take a packed model")
    if _specs(layer, "output_tensors") and not _CACHED.fullmatch(module.name.rpartition(".")[2]):
        raise UnsupportedError(f"{layer.where}: quantized outputs of {module.name!r}", "known: quantized weights and inputs")
    kinds = tuple(spec.text("dtype").lower() for spec in specs)
    if len(kinds) == 1 and kinds[0] in (*EIGHT, *SIX) and specs[0].values.get("scale_format") == "e8m0":
        return _microscaled(module, specs[0])
    if kinds == ("fp8_e4m3",):
        return _fp8(module, specs[0], _specs(layer, "input_tensors"))
    if kinds == ("fp4",):
        return _mxfp4(module, specs[0])
    if kinds == ("fp4", "fp8_e4m3"):
        return _nvfp4(module, specs)
    if kinds == ("fp8_e4m3", "int4"):
        whole = module.part("weight_scale", FLOATS, (), (1,))
        return _integers(module, specs[1], [], reordered, whole)
    if len(kinds) == 1 and kinds[0] in BITS:
        return _integers(module, specs[0], _specs(layer, "input_tensors"), reordered, None)
    raise UnsupportedError(f"{layer.where}: weights in {' of '.join(kind[:40] for kind in kinds)} ({module.name})", KNOWN)


def _scheme(spec: ConfigReader, *known: str) -> str:
    scheme = spec.text("qscheme")
    if scheme not in known:
        what = f"{spec.where}: {spec.text('dtype')[:40]} with the qscheme {scheme[:40]!r}"
        raise UnsupportedError(what, f"known: {', '.join(known)}")
    return scheme


def _is_dynamic(spec: ConfigReader) -> bool:
    return spec.flag("is_dynamic", spec.values.get("dynamic") is True)  # as it was called before


def _fp8(module: Module, spec: ConfigReader, inputs: list[ConfigReader]) -> QuantizedWeight:
    blocks = _scheme(spec, "per_tensor", "per_channel", "per_block") == "per_block"
    if blocks and spec.numbers("block_size", 2) != (FP8_BLOCK, FP8_BLOCK):
        size = " x ".join(f"{each:g}" for each in spec.numbers("block_size", 2))
        raise UnsupportedError(f"{spec.where}: FP8 blocks of {size}", f"known: {FP8_BLOCK} x {FP8_BLOCK}")
    activation: Literal["none", "dynamic", "static"] = "none"
    if inputs:
        said = inputs[0]
        kind, scheme = said.text("dtype").lower(), said.text("qscheme")
        if len(inputs) > 1 or kind != "fp8_e4m3":
            told = f"{said.where}: inputs in {kind[:40]} to weights in FP8"
            raise UnsupportedError(told, "known: inputs in fp8_e4m3, or as they are")
        activation = "dynamic" if _is_dynamic(said) else "static"
        if activation == "static" and (scheme != "per_tensor" or blocks):
            told = f"{said.where}: static scales of inputs, {scheme[:40]}"
            raise UnsupportedError(told, "known: one a tensor, or dynamic ones")
    return fp8_weight(module, "weight_scale", blocks, activation)


def _mxfp4(module: Module, spec: ConfigReader) -> QuantizedWeight:
    _scheme(spec, "per_group")
    kind, group = spec.text("scale_format", "float"), spec.integer("group_size")
    if (kind, group) != ("e8m0", 32):
        told = f"{spec.where}: fp4 in groups of {group} with scales in {kind[:40]}"
        raise UnsupportedError(told, "known: groups of 32, in e8m0")
    weight = mxfp4_weight(module, "weight")
    return replace(weight, others=_others(module, "weight", "weight_scale"))


def _microscaled(module: Module, spec: ConfigReader) -> QuantizedWeight:
    kind, group = spec.text("dtype").lower(), spec.integer("group_size")
    _scheme(spec, "per_group")
    if group != BLOCK:
        raise UnsupportedError(f"{spec.where}: {kind} in groups of {group}", f"known: groups of {BLOCK}")
    stored = {"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}.get(kind, "U8")
    codes = module.matrix("weight", (stored,))
    width = codes.shape[1] if kind in EIGHT else codes.shape[1] * 8 // 6
    check_blocks(codes, width)
    scales = module.part("weight_scale", SCALE_TYPES, (codes.shape[0], width // BLOCK))
    return MicroscaledWeight((codes.shape[0], width), kind, codes, scales, _others(module, "weight", "weight_scale"))


def _nvfp4(module: Module, specs: list[ConfigReader]) -> QuantizedWeight:
    _scheme(specs[0], "per_group")
    if specs[0].integer("group_size") != 16 or not specs[1].flag("is_scale_quant", True):
        raise UnsupportedError(f"{specs[0].where}: fp4 and fp8 that are not NVFP4", "known: scales of groups of 16 in fp8_e4m3")
    weight = nvfp4_weight(module, "weight", "weight_scale_2", "input_scale_2", divides=False)
    return replace(weight, others=_others(module, "weight", "weight_scale", "weight_scale_2", "input_scale_2"))


def _others(module: Module, *read: str) -> tuple[Part, ...]:
    """Its tensors that nobody reads: scales of inputs that are kept finer."""
    return tuple(module.any(suffix) for suffix in module.suffixes if suffix not in read)


def _integers(
    module: Module, spec: ConfigReader, inputs: list[ConfigReader], reordered: bool, whole: Part | None
) -> IntegerWeight:
    """whole: a scale of all numbers, besides which the tensors of `spec` are called second."""
    kind, scheme = spec.text("dtype").lower(), _scheme(spec, "per_tensor", "per_channel", "per_group")
    symmetric = spec.does("symmetric", True) and not kind.startswith("u")
    _check_integers(spec, kind, scheme, symmetric)
    scale, zero = ("weight_scale", "weight_zero_point") if whole is None else ("weight_scale_2", "weight_zero_point_2")
    bits, grouped = BITS[kind], scheme == "per_group"
    codes = module.matrix("weight", (_STORED.get(kind, "I32"),))
    scales = module.part(scale, FLOATS, *([(None, None)] if grouped else []))
    if grouped and kind != "int3":
        num_rows, width = scales.shape[1], codes.shape[0]
        if codes.shape[1] != (-(-num_rows // 8) if bits == 4 else num_rows):
            raise codes.misfit(f"has the shape {list(codes.shape)}, which {num_rows} outputs by groups don't have")
    else:
        num_rows, stored = codes.shape
        width = {3: stored // 3 * 8, 4: stored * 8, 8: stored}[bits]
        if kind == "int3" and stored % 3:
            raise codes.misfit(f"has rows of {stored} bytes, which hold no numbers of three bits")
    shapes: dict[str, list[tuple[int | None, ...]]] = {
        "per_tensor": [(), (1,)], "per_channel": [(num_rows,), (num_rows, 1)], "per_group": [(None, num_rows)],
    }  # fmt: skip
    scales = module.part(scale, FLOATS, *shapes[scheme])
    size = checked_group(scales, scales.shape[0], width, _group(spec)) if grouped else 0
    zeros = _zero_points(module, zero, scales, bits, grouped) if kind != "int3" and (module.has(zero) or not symmetric) else None
    form = Integer(
        bits,
        size,
        zeros=not symmetric,
        activation="int8" if bits == 8 and _rounded_to_int8(inputs) else rounded_activations(bits),
        scales=scales.scale_type if whole is None else "float32",
    )
    others = _others(module, *(part.name.rpartition(".")[2] for part in those(codes, scales, zeros, whole)))
    return IntegerWeight(form, (num_rows, width), kind, codes, scales, zeros, whole, others, grouped, reordered)


def _group(spec: ConfigReader) -> int:
    """-1 for one group a row."""
    return -1 if spec.values.get("group_size") == -1 else spec.integer("group_size")


def _check_integers(spec: ConfigReader, kind: str, scheme: str, symmetric: bool) -> None:
    if spec.text("zero_point_type", "int32") == "float32":
        raise UnsupportedError(f"{spec.where}: zero points that are floats", "known: zero points that are whole numbers")
    if scheme == "per_channel" and spec.values.get("ch_axis", spec.values.get("axis", 0)) != 0:
        raise UnsupportedError(f"{spec.where}: a scale a column", "known: a scale a row (ch_axis 0)")
    if kind == "int3" and not symmetric:
        raise UnsupportedError(f"{spec.where}: int3 with zero points", "known: symmetric int3")


def _rounded_to_int8(inputs: list[ConfigReader]) -> bool:
    """With a scale a token, and no zero points."""
    if len(inputs) != 1 or inputs[0].text("dtype").lower() != "int8" or not _is_dynamic(inputs[0]):
        return False
    return inputs[0].does("symmetric", True)


def _zero_points(module: Module, suffix: str, scales: Part, bits: int, grouped: bool) -> Part:
    """As many as scales; of four bits, eight in a word where there are several."""
    if bits == 8 or scales.shape in ((), (1,)):
        return module.part(suffix, ("I32", "I8", "U8"), scales.shape, *([(), (1,)] if scales.shape in ((), (1,)) else []))
    words = -(-scales.shape[-1 if grouped else 0] // 8)
    return module.part(suffix, ("I32",), (scales.shape[0], words) if grouped else (words,))
