"""Weights in NVFP4: numbers of four bits (e2m1), an e4m3 scale for 16 of them, and a float32 for the whole weight.

    compressed-tensors          weight_packed [N, K / 2], weight_scale [N, K / 16] and weight_global_scale, which divides
    modelopt, Quark             weight [N, K / 2], weight_scale [N, K / 16] and weight_scale_2, which multiplies
    MLX                         weight [N, K / 8] uint32, scales [N, K / 16] and perhaps global_scale, which multiplies,
                                divided by what the largest number and scale make

All put number 2 i into the low and 2 i + 1 into the high nibble of byte i. GGUF's block has four scales and then, for each,
number i beside number i + 8; that is the form that rows have here. What inputs are divided by before they become four bits, too,
is left aside: they are kept finer. Source: what compressed-tensors and TensorRT Model Optimizer export; ggml's block_nvfp4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.rows import BlockRows
from nanovllm_cli.weights.quantized_weight import BYTES, Module, Part, ggml_nibbles, those
from nanovllm_cli.weights.weight_reader import LARGEST_FACTOR

GROUP = 16
_BLOCK_GROUPS = 4
SCALE_TYPES = ("F8_E4M3",)


def nvfp4_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [n, K / 64 * 36], GGUF's blocks, of codes uint8 [n, K / 2] and scales uint8 [n, K / 16]."""
    halves = ggml_nibbles(codes.reshape(len(codes), -1, _BLOCK_GROUPS, GROUP // 2))
    return torch.cat([scales.reshape(len(codes), -1, _BLOCK_GROUPS), halves.flatten(-2)], -1).flatten(-2)


@dataclass(frozen=True)
class NVFP4Weight:
    """divides: whether the whole weight is divided by `factor`, and not multiplied. input_scale, others: not used. unit: what the
    factor is divided by before."""

    shape: tuple[int, int]
    codes: Part
    scales: Part
    factor: Part | None
    divides: bool
    input_scale: Part | None
    unit: float = 1.0
    others: tuple[Part, ...] = ()

    @property
    def format(self) -> Blocks:
        return Blocks("NVFP4")

    @property
    def parts(self) -> tuple[Part, ...]:
        return those(self.codes, self.scales, self.factor, self.input_scale, *self.others)

    def rows(self, first: int, end: int) -> BlockRows:
        scales = self.scales.read().view(torch.uint8)[first:end]
        if bool(((scales & 0x7F) == 0x7F).any()):
            raise self.scales.damaged("has scales that are NaN")
        if bool((scales > 0x80).any()):  # a zero may have a sign
            raise self.scales.damaged("has scales below 0")
        codes = self.codes.read().view(torch.uint8)[first:end]
        return BlockRows(nvfp4_blocks(codes, scales & 0x7F), None if self.factor is None else self._factors(end - first))

    def _factors(self, count: int) -> torch.Tensor:
        assert self.factor is not None
        factor = self.factor.checked_scales(self.factor.read().float().reshape(1)) / self.unit
        factor = factor.reciprocal() if self.divides else factor
        if not 0 < float(factor) < LARGEST_FACTOR:
            raise self.factor.damaged(f"is {float(self.factor.read().float()):.1e}, with which weights are infinite, or 0")
        return factor.expand(count).contiguous()


def nvfp4_weight(module: Module, codes_suffix: str, factor_suffix: str, input_suffix: str, *, divides: bool) -> NVFP4Weight:
    codes = module.matrix(codes_suffix, BYTES)
    num_rows, width = codes.shape[0], codes.shape[1] * 2
    codes.check_width(Blocks("NVFP4"), width)
    scales = module.part("weight_scale", SCALE_TYPES, (num_rows, width // GROUP))
    factor = module.part(factor_suffix, ("F32",), (), (1,))
    inputs = module.part(input_suffix, ("F32",), (), (1,)) if module.has(input_suffix) else None
    return NVFP4Weight((num_rows, width), codes, scales, factor, divides, inputs)
