"""BitNet's checkpoints: weights of -1, 0 and 1 times one number, as transformers keeps them, in models of any architecture.

    packed     weight U8 [N / 4, K], whose bits 2 i and 2 i + 1 are row i N / 4 + r's, plus 1, and weight_scale [1]: by which
               products are multiplied (autobitlinear), or divided (bitlinear)
    trained    weight [N, K], which is divided by the mean of its magnitudes and rounded where the model runs ("online")

Activations meet them as 8 bits, a scale a token, as the models were trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quant.rows import IntegerRows
from nanovllm_cli.weights.checkpoint import Checkpoint, TensorInfo, as_bytes
from nanovllm_cli.weights.quantized_weight import FLOATS, Module, Part, QuantizedWeight, Unpacked, modules

FORMAT = Integer(2, 0, activation="int8", scales="float32")
PACKED = 4
"""Rows in a byte."""
_LEAST_MEAN = 1e-5
_LINEARS = ("autobitlinear", "bitlinear")
_MODES = ("offline", "online")


@dataclass(frozen=True)
class PackedWeight:
    """divides: what the number does to products."""

    codes: Part
    number: Part
    divides: bool

    format = FORMAT

    @property
    def shape(self) -> tuple[int, int]:
        return PACKED * self.codes.shape[0], self.codes.shape[1]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.codes, self.number

    @property
    def dtype_name(self) -> str:
        """In which it is exact."""
        return "F32" if self.divides else self.number.dtype_name

    def rows(self, first: int, end: int) -> IntegerRows:
        packed, height = self.codes.read(), self.codes.shape[0]
        numbers = torch.arange(first, end)
        codes = packed[numbers % height] >> (2 * (numbers // height)).to(torch.uint8).unsqueeze(1) & 3
        if bool((codes == 3).any()):
            raise self.codes.damaged("has a code that is none of -1, 0 and 1")
        number = self.number.read().float()
        scale = self.number.checked_scales(1 / number if self.divides else number)
        return IntegerRows(codes + (FORMAT.middle - 1), scale.expand(end - first).unsqueeze(1).contiguous())


@dataclass(frozen=True)
class TrainedWeight:
    weight: Part

    format = FORMAT

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.weight,)

    @property
    def dtype_name(self) -> str:
        return self.weight.dtype_name

    def rows(self, first: int, end: int) -> IntegerRows:
        values = self.weight.checkpoint.tensor(self.weight.name, (first, end)).float()
        whole = self.weight.read()
        mean = whole.float().abs().mean().clamp(min=_LEAST_MEAN)
        if not math.isfinite(float(mean)):
            raise self.weight.damaged("has values that are NaN or infinite")
        share = 1 / mean
        codes = (values * share).round().clamp(-1, 1) + FORMAT.middle
        scale = (1 / share).to(whole.dtype).float()  # as what it makes of a 1 is rounded
        return IntegerRows(codes.to(torch.uint8), scale.expand(end - first).unsqueeze(1).contiguous())


def read_bitnet(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights."""
    linear, mode = config.text("linear_class", "bitlinear"), config.text("quantization_mode", "offline")
    for name, value, known in (("linear_class", linear, _LINEARS), ("quantization_mode", mode, _MODES)):
        if value not in known:
            raise UnsupportedError(f"{config.where}: {name} {value[:40]!r}", f"known: {', '.join(known)}")
    if config.flag("use_rms_norm", False):
        raise UnsupportedError(f"{config.where}: a norm before each of its products", "take a model without use_rms_norm")
    if linear == "autobitlinear" and mode == "online":
        kept = config.values.get("modules_to_not_convert") or []
        return {
            module.weight_name: TrainedWeight(module.matrix("weight", FLOATS))
            for module in modules(checkpoint, ("weight",))
            if _is_linear(module, kept)
        }
    found: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, ("weight", "weight_scale")):
        if module.has("weight_scale") or (module.has("weight") and module.any("weight").dtype_name == "U8"):
            number = module.part("weight_scale", FLOATS, (), (1,))
            found[module.weight_name] = PackedWeight(module.matrix("weight", ("U8",)), number, linear == "bitlinear")
    return found


def _is_linear(module: Module, kept: object) -> bool:
    """Of a layer, a matrix, and not one of those that stay as they are."""
    names = [str(name) for name in kept] if isinstance(kept, list) else []
    is_kept = any(module.name == name or module.name.startswith(f"{name}.") or module.name.endswith(f".{name}") for name in names)
    return ".layers." in module.name and len(module.any("weight").shape) == 2 and not is_kept


def as_numbers(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or one of BitNet's with its weights as the numbers that they stand for, in the type of a folder."""
    settings = checkpoint.config.get("quantization_config")
    if not isinstance(settings, Mapping) or settings.get("quant_method") != "bitnet":
        return checkpoint
    return _AsNumbers(checkpoint, read_bitnet(checkpoint, ConfigReader(settings, f"{checkpoint.path}: quantization_config")))


class _AsNumbers(Unpacked):
    def info(self, name: str) -> TensorInfo:
        if name not in self._weights:
            return super().info(name)
        weight = self._weights[name]
        assert isinstance(weight, PackedWeight | TrainedWeight)
        return TensorInfo(name, weight.shape, weight.dtype_name, sum(part.num_bytes for part in weight.parts))

    def tensor(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        if name not in self._weights:
            return super().tensor(name, rows)
        weight = self._weights[name]
        assert isinstance(weight, PackedWeight | TrainedWeight)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[weight.dtype_name]
        return FORMAT.dequantize(weight.rows(*(rows or (0, weight.shape[0])))).to(dtype)

    def raw(self, name: str) -> torch.Tensor:
        return as_bytes(self.tensor(name)) if name in self._weights else super().raw(name)
