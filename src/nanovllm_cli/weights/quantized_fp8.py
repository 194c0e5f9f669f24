"""Weights in FP8 (e4m3) with scales beside them.

    fp8             `weight_scale_inv`, a scale a block of 128 x 128 (DeepSeek V3, Qwen3-FP8), or `weight_scale`, one a tensor or
                    a row; activations are scaled as they come, or by `input_scale`
                    beside them experts of DeepSeek-V4: bytes of two numbers of four bits (e2m1) with `weight_scale_inv`, a power
                    of two (e8m0) for 32 numbers, which is MXFP4
    fbgemm_fp8      `weight_scale`, one a row; activations are scaled a token

`weight_scale_inv` multiplies as `weight_scale` does; its name has another history. Which modules were left alone shows in the
dtype of their weights, so the config's lists of them are not needed. fbgemm's bound on the scales of activations
(`activation_scale_ub`) is not applied: it clips activations above 1200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import FP8_BLOCK, Blocks, Fp8
from nanovllm_cli.quant.rows import Fp8Rows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.quantized_mxfp4 import BLOCK, MXFP4Weight
from nanovllm_cli.weights.quantized_mxfp4 import SCALE_TYPES as POWERS
from nanovllm_cli.weights.quantized_weight import FLOATS, Module, Part, QuantizedWeight, modules, those

FP8_TYPES = ("F8_E4M3",)
FP4_TYPES = ("I8", "U8")
OTHER_FP8_TYPES = ("F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
SCALE_TYPES = (*FLOATS, "F8_E8M0")
SUFFIXES = ("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "input_scale_ub")


@dataclass(frozen=True)
class Fp8Weight:
    """scales: one, [N], [N, 1], or with blocks [ceil(N / 128), ceil(K / 128)]."""

    format: Fp8
    codes: Part
    scales: Part
    input_scale: Part | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.scales, self.input_scale)

    def rows(self, first: int, end: int) -> Fp8Rows:
        codes = self.codes.read().view(torch.uint8)[first:end]
        if bool(((codes & 0x7F) == 0x7F).any()):
            raise self.codes.damaged("has values that are NaN")
        scales = self.scales.read().float()
        if self.format.block:
            scales = scales[torch.arange(first, end) // self.format.block]
        elif scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(end - first, 1)
        else:
            scales = scales.reshape(-1, 1)[first:end]
        input_scale = self.input_scale
        return Fp8Rows(
            codes,
            self.scales.checked_scales(scales).contiguous(),
            None if input_scale is None else input_scale.checked_scales(input_scale.read().float().reshape(())),
        )


def read_fp8(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights. config: quantization_config."""
    activation = _activation(config)
    blocks = _has_blocks(config)
    weights: dict[str, QuantizedWeight] = {}
    for module in modules(checkpoint, SUFFIXES):
        if is_fp8(module):
            suffix = "weight_scale_inv" if module.has("weight_scale_inv") or blocks else "weight_scale"
            weights[module.weight_name] = fp8_weight(module, suffix, blocks, activation)
        elif module.has("weight_scale_inv") and module.has("weight") and module.any("weight").dtype_name in FP4_TYPES:
            weights[module.weight_name] = _fp4_weight(module)
    return weights


def _fp4_weight(module: Module) -> MXFP4Weight:
    codes = module.matrix("weight", FP4_TYPES)
    num_rows, width = codes.shape[0], 2 * codes.shape[1]
    codes.check_width(Blocks("MXFP4"), width)
    return MXFP4Weight((num_rows, width), codes, module.part("weight_scale_inv", POWERS, (num_rows, width // BLOCK)))


def read_fbgemm(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights."""
    return {
        module.weight_name: fp8_weight(module, "weight_scale", False, "dynamic")
        for module in modules(checkpoint, SUFFIXES)
        if is_fp8(module)
    }


def is_fp8(module: Module) -> bool:
    """Whether its weight is e4m3. UnsupportedError for other kinds of FP8."""
    if not module.has("weight"):
        return False
    part = module.any("weight")
    if part.dtype_name in OTHER_FP8_TYPES:
        raise part.unsupported(f"holds {part.dtype_name}; of FP8 only e4m3 is known")
    return part.dtype_name in FP8_TYPES


def fp8_weight(
    module: Module, scale_suffix: str, blocks: bool, activation: Literal["none", "dynamic", "static"]
) -> Fp8Weight:
    codes = module.matrix("weight", FP8_TYPES)
    num_rows, width = codes.shape
    if blocks:
        shapes: list[tuple[int | None, ...]] = [(-(-num_rows // FP8_BLOCK), -(-width // FP8_BLOCK))]
    else:
        shapes = [(), (1,), (1, 1), (num_rows,), (num_rows, 1)]
    scales = module.part(scale_suffix, SCALE_TYPES, *shapes)
    input_scale = None
    if activation == "static":
        suffix = "activation_scale" if module.has("activation_scale") else "input_scale"
        input_scale = module.part(suffix, FLOATS, (), (1,))
    return Fp8Weight(Fp8(128 if blocks else 0, activation), codes, scales, input_scale)


def _activation(config: ConfigReader) -> Literal["none", "dynamic", "static"]:
    if config.values.get("activation_scheme", "") is None:  # as Quark writes it of weights alone
        return "none"
    scheme = config.text("activation_scheme", "dynamic").lower()
    if scheme == "static":
        return "static"
    if scheme != "dynamic":
        raise UnsupportedError(
            f"{config.where}: activation_scheme {scheme[:40]!r} is not known", "known: dynamic, static"
        )
    return "dynamic"


def _has_blocks(config: ConfigReader) -> bool:
    if not config.has("weight_block_size"):
        return False
    size = config.numbers("weight_block_size", 2)
    if size != (FP8_BLOCK, FP8_BLOCK):
        raise UnsupportedError(
            f"{config.where}: FP8 blocks of {size[0]:g} x {size[1]:g}",
            f"known: blocks of {FP8_BLOCK} x {FP8_BLOCK}, and a scale a row or tensor",
        )
    if _activation(config) == "static":
        raise UnsupportedError(f"{config.where}: FP8 blocks with static activation scales", "take another quantization")
    return True
