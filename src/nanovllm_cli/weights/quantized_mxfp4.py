"""Weights in MXFP4: blocks of 32 numbers of four bits (e2m1) that share a power of two (e8m0).

    gpt-oss                     NAME_blocks [..., K / 32, 16] and NAME_scales [..., K / 32]
    compressed-tensors          weight_packed [N, K / 2] and weight_scale [N, K / 32]
    Quark                       weight [N, K / 2] and weight_scale [N, K / 32]

All put number 2 i into the low and 2 i + 1 into the high nibble of byte i. GGUF's block has the scale first, and number i beside
number i + 16; that is the form that rows have here. Format: OCP Microscaling Formats 1.0, section 5; ggml's block_mxfp4.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch

from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.rows import BlockRows
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.quantized_weight import BYTES, Module, Part, QuantizedWeight, ggml_nibbles

BLOCK = 32
NAN_SCALE = 255
SCALE_TYPES = ("U8", "F8_E8M0")


def mxfp4_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [n, K / 32 * 17], GGUF's blocks, of codes uint8 [n, K / 2] and scales uint8 [n, K / 32]."""
    return torch.cat([scales.unsqueeze(-1), ggml_nibbles(codes.reshape(len(codes), -1, BLOCK // 2))], -1).flatten(-2)


@dataclass(frozen=True)
class MXFP4Weight:
    """others: tensors that are not read."""

    shape: tuple[int, ...]
    codes: Part
    scales: Part
    others: tuple[Part, ...] = ()

    @property
    def format(self) -> Blocks:
        return Blocks("MXFP4")

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.codes, self.scales, *self.others)

    def rows(self, first: int, end: int) -> BlockRows:
        width = self.shape[-1]
        codes = self.codes.read_bytes().view(-1, width // 2)[first:end]
        scales = self.scales.read_bytes().view(-1, width // BLOCK)[first:end]
        if bool((scales == NAN_SCALE).any()):
            raise self.scales.damaged("has scales that are NaN")
        return BlockRows(mxfp4_blocks(codes, scales))


def mxfp4_weight(module: Module, suffix: str) -> MXFP4Weight:
    """Of a module that has its codes under this suffix, and weight_scale."""
    codes = module.matrix(suffix, BYTES)
    num_rows, width = codes.shape[0], codes.shape[1] * 2
    codes.check_width(Blocks("MXFP4"), width)
    return MXFP4Weight((num_rows, width), codes, module.part("weight_scale", SCALE_TYPES, (num_rows, width // BLOCK)))


def read_mxfp4(checkpoint: Checkpoint, config: ConfigReader) -> dict[str, QuantizedWeight]:
    """By the names of the weights, which have as many dimensions as in the file: [experts, N, K] for gpt-oss."""
    weights: dict[str, QuantizedWeight] = {}
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name in checkpoint.names():
        if name.endswith(("_blocks", "_scales")):
            found[name[: -len("_blocks")]][name.rpartition(".")[2]] = name
    for base, suffixes in found.items():
        prefix, _, own = base.rpartition(".")
        module = Module(checkpoint, prefix, suffixes)
        codes = module.part(f"{own}_blocks", BYTES)
        if len(codes.shape) < 3 or codes.shape[-1] != BLOCK // 2 or math.prod(codes.shape) == 0:
            raise codes.misfit(f"has the shape {list(codes.shape)}, expected [..., columns / {BLOCK}, {BLOCK // 2}]")
        scales = module.part(f"{own}_scales", SCALE_TYPES, codes.shape[:-1])
        weights[base] = MXFP4Weight((*codes.shape[:-2], codes.shape[-2] * BLOCK), codes, scales)
    return weights
