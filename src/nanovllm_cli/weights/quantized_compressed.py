"""Weights as compressed-tensors stores them (llm-compressor, and what we write ourselves).

    int-quantized, naive-quantized      weight int8 [N, K]; weight_scale one, [N, 1] or [N, G]; weight_zero_point int8 likewise
    float-quantized, naive-quantized    weight e4m3 [N, K]; weight_scale one, [N, 1] or one a block; input_scale one
    pack-quantized                      weight_packed int32 [N, K * bits / 32], from the lowest bit on and across words, 0 being
                                        the lowest number; weight_scale [N, G]; weight_zero_point int32 [N * bits / 32, G];
                                        weight_shape [2]; weight_g_idx [K], the group of each column
    mxfp4-pack-quantized                see quantized_mxfp4.py
    mxfp8-quantized                     see quantized_microscaled.py
    nvfp4-pack-quantized                see quantized_nvfp4.py

Source: compressed-tensors' compressors. What a tensor is called says how it is packed, config_groups what it means
(quantized_schemes.py). weight = (code - zero point) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.rows import IntegerRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.quantized_fp8 import fp8_weight, is_fp8
from nanovllm_cli.weights.quantized_gptq import BITS, checked_group, group_order, rounded_activations
from nanovllm_cli.weights.quantized_microscaled import mxfp8_weight
from nanovllm_cli.weights.quantized_mxfp4 import BLOCK, SCALE_TYPES, mxfp4_weight
from nanovllm_cli.weights.quantized_nvfp4 import GROUP as NVFP4_GROUP
from nanovllm_cli.weights.quantized_nvfp4 import nvfp4_weight
from nanovllm_cli.weights.quantized_schemes import Scheme, Schemes
from nanovllm_cli.weights.quantized_weight import (
    FLOATS,
    Module,
    Part,
    QuantizedWeight,
    modules,
    num_words,
    those,
    unpack,
    unpack_columns,
)

SUFFIXES = (
    "weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale",
    "weight_global_scale", "input_global_scale",
)  # fmt: skip
FORMATS = (
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "nvfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip


@dataclass(frozen=True)
class IntegerWeight:
    """packed: whether codes and zero points lie in words. order: see IntegerRows."""

    format: Integer
    shape: tuple[int, int]
    packed: bool
    codes: Part
    scales: Part
    zeros: Part | None
    others: tuple[Part, ...]
    order: torch.Tensor | None

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.scales, *self.others, self.zeros)

    def rows(self, first: int, end: int) -> IntegerRows:
        if self.packed:
            words = self.codes.read()[first:end].contiguous()
            codes = unpack(words.view(torch.uint8), self.format.bits, self.shape[1]).contiguous()
        else:
            codes = self._shifted(self.codes, self.codes.read()[first:end])
        scales = self.scales.checked_scales(self._of_rows(self.scales.read(), first, end))
        return IntegerRows(codes, scales, self._zeros(first, end), self.order)

    def _zeros(self, first: int, end: int) -> torch.Tensor | None:
        if self.zeros is None:
            return None
        if self.packed:
            return unpack_columns(self.zeros.read().t(), self.format.bits, first, end)
        return self._shifted(self.zeros, self._of_rows(self.zeros.read(), first, end))

    def _of_rows(self, values: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """[n, G] of [N, G], or of a single number."""
        if values.numel() == 1:
            return values.reshape(1, 1).expand(end - first, 1).contiguous()
        return values.reshape(self.shape[0], -1)[first:end].contiguous()

    def _shifted(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """uint8 of int8, 0 becoming the middle. CheckpointError for numbers that need more bits."""
        middle = self.format.middle
        low, high = torch.aminmax(values)
        if int(low) < -middle or int(high) >= middle:
            raise part.misfit(f"has numbers from {int(low)} to {int(high)}, which {self.format.bits} bits don't hold")
        return (values.short() + middle).to(torch.uint8)


def read_compressed(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: quantization_config."""
    _check_config(config)
    schemes = Schemes(config)
    weights: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, SUFFIXES):
        if _is_quantized(module):
            weights[module.weight_name] = _weight(module, schemes.of(module.name))
    return weights


def _check_config(config: ConfigReader) -> None:
    """Refuses what would change what tensors mean. kv_cache_scheme doesn't: the cache's type is not the checkpoint's choice."""
    layout = config.text("format", "dense").lower()
    if layout not in FORMATS:
        raise UnsupportedError(f"{config.where}: the format {layout[:40]!r}", f"known: {', '.join(FORMATS)}")
    sparsity: Any = config.section("sparsity_config").values.get("format") or "dense"
    if sparsity != "dense":
        raise UnsupportedError(
            f"{config.where}: sparse weights ({sparsity!r:.40})", "take a model that is quantized only"
        )
    if config.section("transform_config").values.get("config_groups"):
        raise UnsupportedError(
            f"{config.where}: rotations of activations (transform_config)", "take a model without them"
        )


def _is_quantized(module: Module) -> bool:
    """A float weight with scales beside it, or none at all, is none that was packed."""
    if module.has("weight_packed") or not module.has("weight"):
        return True
    part = module.any("weight")
    if part.dtype_name in FLOATS and module.has("weight_scale"):
        raise part.unsupported(
            f"holds {part.dtype_name} and has scales: it was never rounded", "compress the model, or take another"
        )
    return part.dtype_name == "I8" or is_fp8(module)


def _weight(module: Module, scheme: Scheme) -> QuantizedWeight:
    if scheme.kind == "float":
        if not module.has("weight_packed"):
            return _fp8(module, scheme)
        part = module.part("weight_packed", ("U8", "I32"))
        kind = (scheme.bits, scheme.group, module.has("weight_global_scale"))
        if kind == (4, NVFP4_GROUP, True):
            return nvfp4_weight(module, "weight_packed", "weight_global_scale", "input_global_scale", divides=True)
        if kind != (4, BLOCK, False):
            raise part.unsupported(
                f"holds floats of {scheme.bits} bits in groups of {scheme.group}", "known: MXFP4, NVFP4, FP8"
            )
        return mxfp4_weight(module, "weight_packed")
    return (
        _packed(module, scheme) if module.has("weight_packed") or module.has("weight_shape") else _int8(module, scheme)
    )


def _fp8(module: Module, scheme: Scheme) -> QuantizedWeight:
    codes = module.matrix("weight", ("F8_E4M3",))
    is_mx = (scheme.bits, scheme.group) == (8, BLOCK) and module.has("weight_scale")
    if is_mx and scheme.symmetric and module.any("weight_scale").dtype_name in SCALE_TYPES:
        return mxfp8_weight(module)
    if scheme.bits != 8 or scheme.strategy == "group" or not scheme.symmetric:
        raise codes.unsupported(
            f"is FP8 as {scheme.bits} bits a number, a scale a {scheme.strategy}",
            "known: a scale a tensor, channel or block, and MXFP8",
        )
    assert scheme.activation != "int8"
    return fp8_weight(module, "weight_scale", scheme.strategy == "block", scheme.activation)


def _int8(module: Module, scheme: Scheme) -> IntegerWeight:
    """Codes one a byte, whatever the bits."""
    codes = module.matrix("weight", ("I8",))
    num_rows, width = codes.shape
    weight = _integers(module, scheme, codes, num_rows, width, packed=False)
    if scheme.symmetric:
        return weight
    return replace(weight, zeros=module.part("weight_zero_point", ("I8",), weight.scales.shape))


def _packed(module: Module, scheme: Scheme) -> IntegerWeight:
    codes = module.matrix("weight_packed", ("I32",))
    num_rows, width = _shape(module.part("weight_shape", ("I64", "I32"), (2,)), codes)
    weight = _integers(module, scheme, codes, num_rows, width, packed=True)
    if codes.shape[1] != num_words(width, scheme.bits):
        raise codes.misfit(
            f"has {codes.shape[1]} words a row, expected {num_words(width, scheme.bits)} for {width} columns"
        )
    if not scheme.symmetric:
        if scheme.strategy == "tensor":
            raise codes.unsupported("has one zero point a tensor", "known: one a channel or group")
        words = num_words(num_rows, scheme.bits)
        weight = replace(weight, zeros=module.part("weight_zero_point", ("I32",), (words, weight.scales.shape[1])))
    if not (scheme.ordered or module.has("weight_g_idx")):
        return weight
    groups = module.part("weight_g_idx", ("I32", "I64"), (width,))
    weight = replace(weight, others=(*weight.others, groups))
    if bool((groups.read() == -1).all()):  # written, and never set
        return weight
    order = group_order(groups, width // scheme.group if scheme.group else 1)
    return replace(weight, format=replace(weight.format, ordered=order is not None), order=order)


def _integers(module: Module, scheme: Scheme, codes: Part, num_rows: int, width: int, packed: bool) -> IntegerWeight:
    """Without zero points and order of columns."""
    if scheme.bits not in BITS:
        raise codes.unsupported(f"holds numbers of {scheme.bits} bits", f"known: {', '.join(map(str, BITS))}")
    if scheme.strategy == "block":
        raise codes.unsupported("holds integers with a scale a block", "known: a scale a tensor, channel or group")
    size = 0
    if scheme.strategy == "tensor":
        scales = module.part("weight_scale", FLOATS, (), (1,), (1, 1))
    elif scheme.strategy == "channel":
        scales = module.part("weight_scale", FLOATS, (num_rows, 1), (num_rows,))
    else:
        scales = module.part("weight_scale", FLOATS, (num_rows, None))
        size = checked_group(scales, scales.shape[1], width, scheme.group)
    form = Integer(
        scheme.bits,  # type: ignore[arg-type]
        size,
        zeros=not scheme.symmetric,
        activation="int8" if scheme.activation == "int8" else rounded_activations(scheme.bits),
        scales=scales.scale_type,
    )
    others = (module.part("weight_shape", ("I64", "I32")),) if packed else ()
    return IntegerWeight(form, (num_rows, width), packed, codes, scales, None, others, None)


def _shape(part: Part, codes: Part) -> tuple[int, int]:
    num_rows, width = part.read().tolist()
    if num_rows != codes.shape[0] or not 0 < width < 1 << 31:
        raise part.misfit(f"says {num_rows} x {width}, but {codes.name!r} has {codes.shape[0]} rows")
    return num_rows, width
