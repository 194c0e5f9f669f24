"""GGUF's block types as arithmetic: small unsigned codes, and scales on one or two levels.

    weight = scale * value - minimum
    value   = code - offset, or table[code] where the type has a table
    scale   = d * unit * sub          sub: an integer a group, 1 where the type has none
    minimum = dmin * sub_min          0 where the type has none; sub_min: an integer a group, 1 where there is none

The minimum is always subtracted: types that add one (Q4_1, Q5_1) have it with its sign turned. Points of the IQ types' codebooks
and their signs (gguf_codebooks.py) become codes of 3 or 4 bits with a table of 16 values. All parts are exact: multiplied in the
order that `dequantize` has, the result is that of `gguf.quants`, to the bit.

What a block's bytes mean is llama.cpp's ggml-common.h; codebooks are read from the `gguf` package. The way from floats to blocks
is `gguf_encode`. Rows are streamed by the caller: nothing here looks at more than it is given.

Legend: n rows, K columns, G groups along a row, S numbers d along a row, b blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from gguf import quants

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.quant import gguf_codebooks
from nanovllm_cli.quant.gguf_codebooks import CODEBOOKS, Points
from nanovllm_cli.quant.gguf_fields import Field, Parts, fields, halves, little_endian, split
from nanovllm_cli.quant.gguf_types import TENSOR_TYPES


@dataclass(frozen=True, slots=True)
class BlockType:
    """code_bits: codes are below 2**code_bits. group: columns that share a scale. d_values: what a byte of d stands for; None: d
    is a float16. There is one a block where there are sub scales, else one a group. sub: uint8, int8 or None."""

    name: str
    code_bits: int
    group: int
    offset: int = 0
    table: tuple[int, ...] | None = None
    unit: float = 1.0
    d_values: tuple[float, ...] | None = None
    sub: torch.dtype | None = None
    has_minimum: bool = False

    @property
    def block_len(self) -> int:
        return TENSOR_TYPES[self.name].block_len

    @property
    def block_bytes(self) -> int:
        return TENSOR_TYPES[self.name].block_bytes


class Decomposed(NamedTuple):
    """codes uint8 [n, K]; d [n, S] float16, or uint8 where `kind` has values for it; sub [n, G] of the type that it says; dmin
    float16 [n, S]; sub_min uint8 [n, G]."""

    kind: BlockType
    codes: torch.Tensor
    d: torch.Tensor
    sub: torch.Tensor | None = None
    dmin: torch.Tensor | None = None
    sub_min: torch.Tensor | None = None

    def scales(self) -> torch.Tensor:
        """float32 [n, G]."""
        if self.kind.d_values is not None:
            return torch.tensor(self.kind.d_values)[self.d.int()]
        return _two_levels(self.d, self.sub) * self.kind.unit

    def minima(self) -> torch.Tensor | None:
        """float32 [n, G], to be subtracted."""
        return None if self.dmin is None else _two_levels(self.dmin, self.sub_min)

    def values(self) -> torch.Tensor:
        """Whole numbers, float32 [n, K]."""
        if self.kind.table is None:
            return self.codes.float() - self.kind.offset
        table = torch.tensor(self.kind.table, dtype=torch.float32)
        return table.index_select(0, self.codes.flatten().int()).view(self.codes.shape)


def _two_levels(d: torch.Tensor, sub: torch.Tensor | None) -> torch.Tensor:
    if sub is None:
        return d.float()
    (n, groups), num_d = sub.shape, d.shape[1]
    return (d.float().unsqueeze(-1) * sub.float().view(n, num_d, groups // num_d)).view(n, groups)


Unpack = Callable[[BlockType, torch.Tensor], torch.Tensor]
"""Codes uint8 [b, block_len] of blocks [b, block_bytes]."""


def decompose(type_name: str, data: torch.Tensor, unpack: Unpack | None = None) -> Decomposed:
    """Rows of blocks, uint8 [n, bytes a row]. unpack: what does as `unpacked` and is faster. UnsupportedError for a type that
    isn't in BLOCKS; CheckpointError for rows that aren't whole blocks."""
    kind = block_type(type_name)
    blocks = _blocks(kind, data)
    codes = _as_rows(kind, data, (unpack or unpacked)(kind, blocks))
    d, *rest = (None if part is None else _as_rows(kind, data, part) for part in _scales(kind, blocks))
    assert d is not None
    return Decomposed(kind, codes, d, *rest)


def is_finite(type_name: str, data: torch.Tensor) -> bool:
    """Whether all scales are. Whole numbers that multiply a float16 are too small to matter. Errors as of `decompose`."""
    kind = block_type(type_name)
    blocks = _blocks(kind, data)
    if kind.name in CODEBOOKS:
        return bool(gguf_codebooks.scales(kind.name, blocks).isfinite().all())
    return all(bool(halves(blocks[:, at : at + 2]).isfinite().all()) for at in _HALVES[kind.name])


def negated(type_name: str, data: torch.Tensor) -> torch.Tensor:
    """Rows of blocks, uint8 [..., bytes a row], whose numbers are those of `data` times -1, to the bit. UnsupportedError for a
    type whose scales have no sign."""
    places = _HALVES.get(type_name)
    if not places:
        raise UnsupportedError(f"{type_name} blocks cannot be negated", "take another format for these weights")
    blocks = data.reshape(-1, block_type(type_name).block_bytes).clone()
    for at in places:
        blocks[:, at + 1] ^= 128  # the sign of a little-endian float16
    return blocks.reshape(data.shape)


def _scales(kind: BlockType, blocks: torch.Tensor) -> Parts:
    """d, sub, dmin and sub_min [b, …], as many of them as there are."""
    if kind.name in CODEBOOKS:
        points = gguf_codebooks.find_points(kind.name, blocks)
        return points.d, points.sub
    return _SCALES[kind.name](blocks)


def find_points(type_name: str, data: torch.Tensor) -> Points:
    """The same of a type of CODEBOOKS, before points become codes."""
    kind = block_type(type_name)
    parts = gguf_codebooks.find_points(kind.name, _blocks(kind, data))
    return Points(*(_as_rows(kind, data, part) for part in parts))


def _blocks(kind: BlockType, data: torch.Tensor) -> torch.Tensor:
    assert data.dtype == torch.uint8
    assert data.dim() == 2
    n, row_bytes = data.shape
    if row_bytes == 0 or row_bytes % kind.block_bytes:
        raise CheckpointError(
            f"{kind.name}: rows of {row_bytes} bytes aren't whole blocks of {kind.block_bytes} bytes",
            "the file is damaged, or its tensor table is; fetch it again",
        )
    return data.reshape(n * (row_bytes // kind.block_bytes), kind.block_bytes)


def _as_rows(kind: BlockType, data: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Numbers of blocks [b, m] as those of rows [n, …]."""
    n, row_bytes = data.shape
    return part.contiguous().view(n, row_bytes // kind.block_bytes * part.shape[1])


def dequantize(type_name: str, data: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Of uint8 [n, bytes a row], float32 [n, K]. factors: see `BlockRows`. Errors as of `decompose`."""
    parts = decompose(type_name, data)
    n, width = parts.codes.shape
    weights = parts.values().view(n, width // parts.kind.group, parts.kind.group)
    scales = parts.scales() if factors is None else parts.scales() * factors.unsqueeze(-1)
    weights *= scales.unsqueeze(-1)
    minima = parts.minima()
    if minima is not None:
        weights -= minima.unsqueeze(-1)
    return weights.view(n, width)


def block_type(name: str) -> BlockType:
    if name not in BLOCKS:
        raise UnsupportedError(
            f"unknown block type {name!r}; known: {', '.join(BLOCKS)}", "take a file of another type"
        )
    return BLOCKS[name]


# ---- the table ----


def _signed(*magnitudes: int) -> tuple[int, ...]:
    """The table of codes whose top bit is the sign."""
    half = 4 if len(magnitudes) <= 4 else 8
    padded = magnitudes + (0,) * (half - len(magnitudes))
    return (*padded, *(-value for value in padded), *(0,) * (16 - 2 * half))


E8M0 = tuple(2.0 ** (exponent - 128) for exponent in range(256))
"""Of MXFP4: half of what the byte says elsewhere, because the table is doubled."""
UE4M3 = tuple(float(value) for value in quants.NVFP4.ue4m3_to_fp32(np.arange(128, 256, dtype=np.uint8)))
"""Of NVFP4, halved for the same reason; the bit above the seven means nothing, but that 0x7F alone is 0."""

# Codebook points -1, 0, 1 shifted by an eighth up or down, times 8; the code's bit 2 says down.
_IQ1_TABLE = (-7, 1, 9, 0, -9, -1, 7, 0, *(0,) * 8)
_IQ2_TABLE = _signed(*quants.IQ2_XXS.grid_map)
_IQ3_XXS_TABLE = _signed(*quants.IQ3_XXS.grid_map)
_IQ3_S_TABLE = _signed(*quants.IQ3_S.grid_map)

BLOCKS: dict[str, BlockType] = {
    kind.name: kind
    for kind in (
        BlockType("Q4_0", 4, 32, offset=8),
        BlockType("Q4_1", 4, 32, has_minimum=True),
        BlockType("Q5_0", 5, 32, offset=16),
        BlockType("Q5_1", 5, 32, has_minimum=True),
        BlockType("Q8_0", 8, 32, offset=128),
        BlockType("Q2_K", 2, 16, sub=torch.uint8, has_minimum=True),
        BlockType("Q3_K", 3, 16, offset=4, sub=torch.int8),
        BlockType("Q4_K", 4, 32, sub=torch.uint8, has_minimum=True),
        BlockType("Q5_K", 5, 32, sub=torch.uint8, has_minimum=True),
        BlockType("Q6_K", 6, 16, offset=32, sub=torch.int8),
        BlockType("Q1_0", 1, 128, table=(-1, 1, *(0,) * 14)),
        BlockType("Q2_0", 2, 64, offset=1),
        BlockType("TQ1_0", 2, 256, offset=1),
        BlockType("TQ2_0", 2, 256, offset=1),
        BlockType("IQ4_NL", 4, 32, table=quants.IQ4_NL.kvalues),
        BlockType("IQ4_XS", 4, 32, table=quants.IQ4_NL.kvalues, sub=torch.int8),
        BlockType("MXFP4", 4, 32, table=quants.MXFP4.kvalues, d_values=E8M0),
        BlockType("NVFP4", 4, 16, table=quants.NVFP4.kvalues, d_values=UE4M3),
        BlockType("IQ1_S", 3, 32, table=_IQ1_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ1_M", 3, 16, table=_IQ1_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ2_XXS", 3, 32, table=_IQ2_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ2_XS", 3, 16, table=_IQ2_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ2_S", 3, 16, table=_IQ2_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ3_XXS", 4, 32, table=_IQ3_XXS_TABLE, unit=1 / 4, sub=torch.uint8),
        BlockType("IQ3_S", 4, 32, table=_IQ3_S_TABLE, sub=torch.uint8),
    )
}


# ---- from bytes ----

_FOURS, _HIGH = Field(2, 16, 4, 16), Field(2, 4, 1, 1, 4)
CODES: dict[str, tuple[Field, ...]] = {
    "Q4_0": (_FOURS,), "Q4_1": (_FOURS._replace(at=4),), "Q5_0": (_FOURS._replace(at=6), _HIGH),
    "Q5_1": (_FOURS._replace(at=8), _HIGH._replace(at=4)), "Q8_0": (Field(2, 32, 8, 32, flip=128),),
    "Q2_K": (Field(16, 64, 2, 32),), "Q3_K": (Field(32, 64, 2, 32), Field(0, 32, 1, 32, 2)), "Q4_K": (Field(16, 128, 4, 32),),
    "Q5_K": (Field(48, 128, 4, 32), Field(16, 32, 1, 32, 4)), "Q6_K": (Field(0, 128, 4, 64), Field(128, 64, 2, 32, 4)),
    "Q1_0": (Field(2, 16, 1, 1),), "Q2_0": (Field(2, 16, 2, 1),), "TQ2_0": (Field(0, 64, 2, 32),), "IQ4_NL": (_FOURS,),
    "IQ4_XS": (Field(8, 128, 4, 16),), "MXFP4": (Field(1, 16, 4, 16),), "NVFP4": (Field(4, 32, 4, 8),),
}  # fmt: skip
"""Of types whose codes are bits of a block's bytes: where."""


def unpacked(kind: BlockType, blocks: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [b, block_len] of blocks [b, block_bytes]."""
    if kind.name in CODEBOOKS:
        return gguf_codebooks.codes(kind.name, gguf_codebooks.find_points(kind.name, blocks))
    if kind.name == "TQ1_0":
        return _ternary(blocks)
    first, *more = (field.of(blocks) for field in CODES[kind.name])
    for each in more:
        first |= each
    return first


def _ternary(blocks: torch.Tensor) -> torch.Tensor:
    """Of TQ1_0, whose byte holds five digits as a fraction of 256; the last four bytes hold four."""
    powers = torch.tensor([[1], [3], [9], [27], [81]], dtype=torch.uint8).to(blocks.device)
    digits = [
        (data.unsqueeze(1) * powers[:count]).flatten(1)
        for data, count in zip(split(blocks[:, :52], 32, 16, 4), (5, 5, 4), strict=True)
    ]  # the products wrap at 256, which drops the digits above
    return (torch.cat(digits, 1).to(torch.int16) * 3 >> 8).to(torch.uint8)


_HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q1_0", "Q2_0", "IQ4_NL", "IQ4_XS"), (0,)), "MXFP4": (), "NVFP4": (),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
    "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where the float16 numbers of a block are: d, and dmin or a minimum."""


# each function takes blocks [b, block_bytes], and gives d, sub, dmin, sub_min [b, …]


def _first(blocks: torch.Tensor) -> Parts:
    return (halves(blocks[:, :2]),)


def _first_two(blocks: torch.Tensor) -> Parts:
    return halves(blocks[:, :2]), None, -halves(blocks[:, 2:4])


def _last(blocks: torch.Tensor) -> Parts:
    return (halves(blocks[:, -2:]),)


def _q2_k(blocks: torch.Tensor) -> Parts:
    sub = blocks[:, :16]
    return halves(blocks[:, 80:82]), sub & 15, halves(blocks[:, 82:]), sub >> 4


def _q3_k(blocks: torch.Tensor) -> Parts:
    low, high = split(blocks[:, 96:108], 8, 4)
    return halves(blocks[:, 108:]), (fields(low, 4, 8) | fields(high, 2, 4) << 4).view(torch.int8) - 32


def _q45_k(blocks: torch.Tensor) -> Parts:
    """Sub scales and sub mins in 12 bytes: groups 0 to 3 lie in the low six bits of bytes 0 … 3 and 4 … 7; groups 4 to 7 have
    their low nibbles in bytes 8 … 11 and two high bits on top of the others."""
    first, second, low = split(blocks[:, 4:16], 4, 4, 4)
    sub = torch.cat([first & 63, low & 15 | (first >> 6) << 4], 1)
    sub_min = torch.cat([second & 63, low >> 4 | (second >> 6) << 4], 1)
    return halves(blocks[:, :2]), sub, halves(blocks[:, 2:4]), sub_min


def _q6_k(blocks: torch.Tensor) -> Parts:
    return halves(blocks[:, 208:]), little_endian(blocks[:, 192:208], torch.int8)


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    high, low = split(blocks[:, 2:8], 2, 4)
    sub = fields(low, 4, 1) | fields(high, 2, 1) << 4
    return halves(blocks[:, :2]), sub.view(torch.int8) - 32


def _mxfp4(blocks: torch.Tensor) -> Parts:
    return (blocks[:, :1],)


def _nvfp4(blocks: torch.Tensor) -> Parts:
    scales = blocks[:, :4]
    return ((scales & 127) * (scales != 127),)


_SCALES: dict[str, Callable[[torch.Tensor], Parts]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q1_0", "Q2_0", "IQ4_NL"), _first), **dict.fromkeys(("Q4_1", "Q5_1"), _first_two),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), _last), "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q45_k, "Q5_K": _q45_k, "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}  # fmt: skip
