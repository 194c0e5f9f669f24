"""The formats that weights can be kept in: their names, sizes, rounding to nearest, and the way back.

A format says what numbers mean. How they are laid out and multiplied on a device is its storage's matter; which
numbers are best is an algorithm's (GPTQ, AWQ).

    dense                the compute type
    Integer              2, 3, 4 or 8 bits and a scale a group, or a row
    Affine               2 to 6 or 8 bits, a scale a group, and a number a group that is added
    Fp8                  e4m3 and a scale a row, or a block of 128 x 128
    Nf4                  16 quantiles of the normal distribution, a scale a group (Dettmers et al. 2023, QLoRA)
    Blocks               GGUF's block types, byte for byte

Legend: n rows, K columns (inputs), G groups along a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.quant.gguf_blocks import block_type, dequantize
from nanovllm_cli.quant.gguf_encode import encode, weighs_columns
from nanovllm_cli.quant.rows import AffineRows, BlockRows, Fp8Rows, IntegerRows, Nf4Rows, QuantizedRows

E4M3_MAX = 448.0
FP8_BLOCK = 128
# The 16 values: quantiles of N(0, 1) scaled to [-1, 1], with an exact zero (QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

ScaleType = Literal["float16", "bfloat16", "float32"]
SCALE_TYPES: dict[ScaleType, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


class Format(Protocol):
    """Frozen and compared by value: weights of equal formats may share a storage."""

    @property
    def name(self) -> str:
        """As `--quant` takes it."""

    def check_width(self, width: int) -> None:
        """UnsupportedError where rows of so many columns can't be kept."""

    def row_bytes(self, width: int) -> float:
        """Bytes of a row as the format is published, without packing losses."""

    def quantize(self, rows: torch.Tensor) -> QuantizedRows:
        """Float rows [n, K], finite, rounded to nearest."""

    def dequantize(self, rows: QuantizedRows) -> torch.Tensor:
        """[n, K] float32."""


@dataclass(frozen=True, slots=True)
class Integer:
    """group: columns that share a scale; 0 for the whole row. zeros: a zero point a group; else codes are centred. activation:
    int8 rounds activations to int8, with a scale a token and group; none keeps them. ordered: groups follow an order of columns
    that comes with the rows. scales: the type they are kept in."""

    bits: Literal[2, 3, 4, 8]
    group: int = 0
    zeros: bool = False
    activation: Literal["int8", "none"] = "int8"
    ordered: bool = False
    scales: ScaleType = "bfloat16"

    @property
    def name(self) -> str:
        weight_only = "-weight-only" if self.activation == "none" else ""
        group = f":group={self.group}" if self.group or self.bits < 8 else ""
        return f"int{self.bits}{weight_only}{group}{':zeros' if self.zeros else ''}"

    @property
    def middle(self) -> int:
        """The code of zero where there are no zero points."""
        return 1 << (self.bits - 1)

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def num_groups(self, width: int) -> int:
        return width // self.group if self.group else 1

    def check_width(self, width: int) -> None:
        _check_divides(self, width, "groups", self.group, "take another group size, or int8")

    def row_bytes(self, width: int) -> float:
        scale = SCALE_TYPES[self.scales].itemsize + (self.bits / 8 if self.zeros else 0)
        return width * self.bits / 8 + self.num_groups(width) * scale

    def quantize(self, rows: torch.Tensor) -> IntegerRows:
        assert not self.ordered, "rounding to nearest has no reason to reorder columns"
        n, width = rows.shape
        self.check_width(width)
        grouped = rows.float().view(n, self.num_groups(width), -1)
        scales, zeros = self._scales(grouped)
        codes = (
            (grouped / scales.float().unsqueeze(-1))
            .round_()
            .add_(self.middle if zeros is None else zeros.unsqueeze(-1))
        )
        least = 1 if zeros is None and self.bits == 8 else 0  # -127 … 127: what int8 kernels everywhere agree on
        codes = codes.clamp_(least, self.most).to(torch.uint8).view(n, width)
        return IntegerRows(codes, scales, zeros)

    def _scales(self, grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of [n, G, group]: scales [n, G] that are never 0, and zero points."""
        kind = SCALE_TYPES[self.scales]
        if self.zeros:
            low, high = grouped.amin(-1).clamp_(max=0), grouped.amax(-1).clamp_(min=0)
            scales = _kept((high - low) / self.most, kind)
            return scales, (-low / scales.float()).round_().clamp_(0, self.most).to(torch.uint8)
        largest = grouped.abs().amax(-1)
        return _kept(largest / (127 if self.bits == 8 else self.most / 2), kind), None

    def dequantize(self, rows: QuantizedRows) -> torch.Tensor:
        assert isinstance(rows, IntegerRows)
        codes, scales, zeros, order = rows
        n, width = codes.shape
        values = codes.float() if order is None else codes[:, order.long()].float()
        values = values.view(n, self.num_groups(width), -1)
        values -= self.middle if zeros is None else zeros.float().unsqueeze(-1)
        values = (values * scales.float().unsqueeze(-1)).view(n, width)
        if order is None:
            return values
        result = torch.empty_like(values)
        result[:, order.long()] = values
        return result


@dataclass(frozen=True, slots=True)
class Affine:
    """As MLX has them ("affine"). group: columns that share a scale and a minimum, both of the type `scales`. Activations are
    rounded to int8, as for GGUF's blocks."""

    bits: Literal[2, 3, 4, 5, 6, 8]
    group: int
    scales: ScaleType = "bfloat16"

    @property
    def name(self) -> str:
        return f"affine{self.bits}:group={self.group}"

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def check_width(self, width: int) -> None:
        _check_divides(self, width, "groups", self.group, "take another group size, or int8")

    def row_bytes(self, width: int) -> float:
        return width * self.bits / 8 + width // self.group * 2 * SCALE_TYPES[self.scales].itemsize

    def quantize(self, rows: torch.Tensor) -> AffineRows:
        n, width = rows.shape
        self.check_width(width)
        grouped, kind = rows.float().view(n, width // self.group, self.group), SCALE_TYPES[self.scales]
        minima = grouped.amin(-1).to(kind)
        scales = _kept((grouped.amax(-1) - minima.float()) / self.most, kind)
        codes = ((grouped - minima.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round_().clamp_(0, self.most)
        return AffineRows(codes.to(torch.uint8).view(n, width), scales, minima)

    def dequantize(self, rows: QuantizedRows) -> torch.Tensor:
        assert isinstance(rows, AffineRows)
        n, width = rows.codes.shape
        values = rows.codes.float().view(n, -1, self.group) * rows.scales.float().unsqueeze(-1)
        return values.add_(rows.minima.float().unsqueeze(-1)).view(n, width)


@dataclass(frozen=True, slots=True)
class Fp8:
    """block: 0 for a scale a row, 128 for one a block of 128 x 128. activation: none keeps activations; dynamic rounds them to
    e4m3 with a scale a token (block 0) or a token and 128 columns; static with the scale that comes with the rows."""

    block: Literal[0, 128] = 0
    activation: Literal["none", "dynamic", "static"] = "dynamic"

    @property
    def name(self) -> str:
        return ("fp8-weight-only" if self.activation == "none" else "fp8") + (":block=128" if self.block else "")

    def check_width(self, width: int) -> None:
        """Any width will do; the last block may be short."""

    def num_groups(self, width: int) -> int:
        return -(-width // self.block) if self.block else 1

    def row_bytes(self, width: int) -> float:
        return width + (4 * self.num_groups(width) / self.block if self.block else 4)

    def quantize(self, rows: torch.Tensor) -> Fp8Rows:
        """With blocks, row 0 begins one: slices of a weight start at multiples of 128 rows."""
        assert self.activation != "static", "static scales come from calibration"
        scales = self._scales(rows.float())
        values = rows.float() / self._spread(scales, rows.shape[1])
        codes = values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return Fp8Rows(codes, scales)

    def dequantize(self, rows: QuantizedRows) -> torch.Tensor:
        assert isinstance(rows, Fp8Rows)
        values = rows.codes.view(torch.float8_e4m3fn).float()
        return values * self._spread(rows.scales, values.shape[1])

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        n, width = rows.shape
        if not self.block:
            return _kept(rows.abs().amax(-1, keepdim=True) / E4M3_MAX, torch.float32)
        down, across = -(-n // self.block), self.num_groups(width)
        padded = rows.new_zeros(down * self.block, across * self.block)
        padded[:n, :width] = rows
        largest = padded.abs().view(down, self.block, across, self.block).amax((1, 3))
        return _kept(largest / E4M3_MAX, torch.float32).repeat_interleave(self.block, 0)[:n].contiguous()

    def _spread(self, scales: torch.Tensor, width: int) -> torch.Tensor:
        return scales.repeat_interleave(self.block, 1)[:, :width] if self.block else scales


@dataclass(frozen=True, slots=True)
class Nf4:
    """group: columns that share a scale."""

    group: int = 64

    @property
    def name(self) -> str:
        return "nf4" + (f":group={self.group}" if self.group != 64 else "")

    def check_width(self, width: int) -> None:
        _check_divides(self, width, "groups", self.group, "take another format")

    def row_bytes(self, width: int) -> float:
        return width / 2 + 4 * (width // self.group)

    def quantize(self, rows: torch.Tensor) -> Nf4Rows:
        n, width = rows.shape
        self.check_width(width)
        grouped = rows.float().view(n, width // self.group, self.group)
        scales = _kept(grouped.abs().amax(-1), torch.float32)
        values = torch.tensor(NF4, device=rows.device)
        borders = (values[1:] + values[:-1]) / 2
        codes = torch.bucketize(grouped / scales.unsqueeze(-1), borders).to(torch.uint8)
        return Nf4Rows(codes.view(n, width), scales)

    def dequantize(self, rows: QuantizedRows) -> torch.Tensor:
        assert isinstance(rows, Nf4Rows)
        n, width = rows.codes.shape
        values = torch.tensor(NF4)[rows.codes.long()].view(n, -1, self.group)
        return (values * rows.scales.unsqueeze(-1)).view(n, width)


@dataclass(frozen=True, slots=True)
class Blocks:
    """type: GGUF's name of it, "Q4_K"."""

    type: str

    @property
    def name(self) -> str:
        return self.type.lower()

    def check_width(self, width: int) -> None:
        _check_divides(self, width, "blocks", block_type(self.type).block_len, "q8_0 has blocks of 32, int8 has none")

    def row_bytes(self, width: int) -> float:
        kind = block_type(self.type)
        return width // kind.block_len * kind.block_bytes

    def quantize(self, rows: torch.Tensor, importance: torch.Tensor | None = None) -> BlockRows:
        """importance [K]: see `gguf_encode.encode`."""
        self.check_width(rows.shape[1])
        return BlockRows(encode(self.type, rows.float(), importance))

    @property
    def weighs_columns(self) -> bool:
        """Whether an importance is of use."""
        return weighs_columns(self.type)

    def dequantize(self, rows: QuantizedRows) -> torch.Tensor:
        assert isinstance(rows, BlockRows)
        return dequantize(self.type, rows.data, rows.factors)


def _check_divides(form: Format, width: int, parts: str, size: int, hint: str) -> None:
    """size: columns of a group or a block; 0 for the whole row."""
    if size and width % size:
        raise UnsupportedError(f"{form.name}: rows of {width} don't divide into {parts} of {size}", hint)


def _kept(scales: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Scales in the type they are kept in; those that are 0 there become 1, whatever they scale is 0."""
    kept = scales.to(kind)
    return torch.where(kept == 0, torch.ones_like(kept), kept)
