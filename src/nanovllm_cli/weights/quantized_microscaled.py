"""Weights in MXFP8 and MXFP6: numbers of eight or six bits, and a power of two (e8m0) for 32 of them.

    MLX                         weight uint32 [N, K / 4], e4m3 byte by byte, and scales uint8 [N, K / 32]
    Quark                       weight e4m3 or e5m2 [N, K], or bytes [N, K * 6 / 8] of e2m3 or e3m2 from the lowest bit on;
                                weight_scale alike
    compressed-tensors,         weight e4m3 [N, K], weight_scale uint8 [N, K / 32]
        modelopt

No kernel here multiplies with these; they are read as the numbers that they stand for, which bfloat16 holds exactly. Format: OCP
Microscaling Formats 1.0, section 5; OCP 8-bit Floating Point 1.0.

Legend: n rows, N rows of the whole weight, K columns (inputs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm_cli.weights.quantized_mxfp4 import BLOCK, NAN_SCALE, SCALE_TYPES
from nanovllm_cli.weights.quantized_weight import Module, Part, unpack

EIGHT = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SIX = {"fp6_e2m3": (2, 3), "fp6_e3m2": (3, 2)}
"""Bits of exponent and mantissa."""


@dataclass(frozen=True)
class MicroscaledWeight:
    """kind: one of EIGHT or SIX. others: tensors that are not read."""

    shape: tuple[int, int]
    kind: str
    codes: Part
    scales: Part
    others: tuple[Part, ...] = ()

    @property
    def format(self) -> None:
        return None

    @property
    def stored_as(self) -> str:
        return f"mx{self.kind.replace('_', ':')}"

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.codes, self.scales, *self.others

    def rows(self, first: int, end: int) -> torch.Tensor:
        data = self.codes.read_bytes().view(self.shape[0], -1)[first:end]
        if self.kind in EIGHT:
            numbers = data.view(EIGHT[self.kind]).float()
        else:
            numbers = six_bits(unpack(data, 6, self.shape[1]), *SIX[self.kind])
        scales = self.scales.read_bytes().view(self.shape[0], -1)[first:end]
        if not bool(numbers.isfinite().all()):
            raise self.codes.damaged("has values that are NaN or infinite")
        if bool((scales == NAN_SCALE).any()):
            raise self.scales.damaged("has scales that are NaN")
        powers = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        values = (numbers.view(len(data), -1, BLOCK) * powers.unsqueeze(-1)).view(len(data), -1)
        if not bool(values.isfinite().all()):
            raise self.scales.damaged("has scales with which weights are infinite")
        return values


def six_bits(codes: torch.Tensor, exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """float32 of codes uint8: a sign, an exponent and a mantissa; neither infinities nor NaN."""
    exponents = (codes >> mantissa_bits & ((1 << exponent_bits) - 1)).int()
    fraction = (codes & ((1 << mantissa_bits) - 1)).float() / (1 << mantissa_bits)
    bias = (1 << exponent_bits - 1) - 1
    sizes = torch.ldexp(fraction + (exponents > 0), exponents.clamp(min=1) - bias)
    return torch.where(codes >> 5 == 1, -sizes, sizes)


def check_blocks(codes: Part, width: int) -> None:
    """UnsupportedError for rows that don't divide into blocks."""
    if width % BLOCK:
        raise codes.unsupported(f"has rows of {width} numbers, which don't divide into blocks of {BLOCK}")


def mxfp8_weight(module: Module) -> MicroscaledWeight:
    """Of a module whose weight is e4m3."""
    codes = module.matrix("weight", ("F8_E4M3",))
    num_rows, width = codes.shape
    check_blocks(codes, width)
    scales = module.part("weight_scale", SCALE_TYPES, (num_rows, width // BLOCK))
    return MicroscaledWeight((num_rows, width), "fp8_e4m3", codes, scales)
