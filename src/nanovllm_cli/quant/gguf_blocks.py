"""GGUF's block types as arithmetic: small unsigned codes, and scales on one or two levels.

    weight = scale * value - minimum
    value   = code - offset, or table[code] where the type has a table
    scale   = d * unit * sub          sub: an integer a group, 1 where the type has none
    minimum = dmin * sub_min          0 where the type has none; sub_min: an integer a group, 1 where there is none

The minimum is always subtracted: types that add one (Q4_1, Q5_1) have it with its sign turned. The IQ types' codebooks and
signs become codes of 3 or 4 bits with a table of 16 values. All parts are exact: multiplied in the order that `dequantize` has,
the result is that of `gguf.quants`, to the bit.

What a block's bytes mean is llama.cpp's ggml-common.h; codebooks are read from the `gguf` package. The way from floats to blocks
is `gguf_encode`. Rows are streamed by the caller: nothing here looks at more than it is given.

Legend: n rows, K columns, G groups along a row, S numbers d along a row, b blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from nanovllm_cli.errors import CheckpointError, UnsupportedError


@dataclass(frozen=True, slots=True)
class BlockType:
    """code_bits: codes are below 2**code_bits. group: columns that share a scale. d: float16, or uint8 for powers of two
    (value 2**(d - 128)); there is one a block where there are sub scales, else one a group. sub: uint8, int8 or None."""

    name: str
    code_bits: int
    group: int
    offset: int = 0
    table: tuple[int, ...] | None = None
    unit: float = 1.0
    d: torch.dtype = torch.float16
    sub: torch.dtype | None = None
    has_minimum: bool = False

    @property
    def block_len(self) -> int:
        return int(GGML_QUANT_SIZES[GGMLQuantizationType[self.name]][0])

    @property
    def block_bytes(self) -> int:
        return int(GGML_QUANT_SIZES[GGMLQuantizationType[self.name]][1])

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_len

    @property
    def d_span(self) -> int:
        """Columns that share a d."""
        return self.group if self.sub is None else self.block_len


class Decomposed(NamedTuple):
    """codes uint8 [n, K]; d [n, S] and sub [n, G] in the types that `kind` says; dmin float16 [n, S]; sub_min uint8 [n, G]."""

    kind: BlockType
    codes: torch.Tensor
    d: torch.Tensor
    sub: torch.Tensor | None = None
    dmin: torch.Tensor | None = None
    sub_min: torch.Tensor | None = None

    @property
    def offset(self) -> int:
        return self.kind.offset

    @property
    def group(self) -> int:
        return self.kind.group

    def scales(self) -> torch.Tensor:
        """float32 [n, G]."""
        if self.d.dtype == torch.uint8:
            return torch.exp2(self.d.double() - 128).float()  # float64, because exp2 of float32 may flush denormals
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


def decompose(type_name: str, data: torch.Tensor) -> Decomposed:
    """Rows of blocks, uint8 [n, bytes a row]. UnsupportedError for a type that isn't in BLOCKS; CheckpointError for rows that
    aren't whole blocks."""
    kind = block_type(type_name)
    assert data.dtype == torch.uint8
    assert data.dim() == 2
    n, row_bytes = data.shape
    if row_bytes == 0 or row_bytes % kind.block_bytes:
        raise CheckpointError(
            f"{kind.name}: rows of {row_bytes} bytes aren't whole blocks of {kind.block_bytes} bytes",
            "the file is damaged, or its tensor table is; fetch it again",
        )
    across = row_bytes // kind.block_bytes
    parts = _SPLIT[kind.name](data.reshape(n * across, kind.block_bytes))
    codes, d, *rest = (None if part is None else part.contiguous().view(n, across * part.shape[1]) for part in parts)
    assert codes is not None
    assert d is not None
    return Decomposed(kind, codes, d, *rest)


def dequantize(type_name: str, data: torch.Tensor) -> torch.Tensor:
    """Of uint8 [n, bytes a row], float32 [n, K]. Errors as of `decompose`."""
    parts = decompose(type_name, data)
    n, width = parts.codes.shape
    weights = parts.values().view(n, width // parts.group, parts.group)
    weights *= parts.scales().unsqueeze(-1)
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
        BlockType("TQ1_0", 2, 256, offset=1),
        BlockType("TQ2_0", 2, 256, offset=1),
        BlockType("IQ4_NL", 4, 32, table=quants.IQ4_NL.kvalues),
        BlockType("IQ4_XS", 4, 32, table=quants.IQ4_NL.kvalues, sub=torch.int8),
        BlockType("MXFP4", 4, 32, table=quants.MXFP4.kvalues, d=torch.uint8),
        BlockType("NVFP4", 4, 16, table=quants.NVFP4.kvalues),
        BlockType("IQ1_S", 3, 32, table=_IQ1_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ1_M", 3, 16, table=_IQ1_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ2_XXS", 3, 32, table=_IQ2_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ2_XS", 3, 16, table=_IQ2_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ2_S", 3, 16, table=_IQ2_TABLE, unit=1 / 8, sub=torch.uint8),
        BlockType("IQ3_XXS", 4, 32, table=_IQ3_XXS_TABLE, unit=1 / 4, sub=torch.uint8),
        BlockType("IQ3_S", 4, 32, table=_IQ3_S_TABLE, sub=torch.uint8),
    )
}


# ---- from bytes: each function takes blocks [b, block_bytes], and gives codes, d, sub, dmin, sub_min [b, …] ----

Parts = tuple[torch.Tensor | None, ...]


def _split(blocks: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    """A block's fields in the order in which they lie."""
    assert sum(sizes) == blocks.shape[1]
    return torch.split(blocks, list(sizes), 1)


def _fields(data: torch.Tensor, bits: int, stride: int) -> torch.Tensor:
    """Small numbers out of bytes [b, m]. `stride` neighbouring bytes give their lowest bits first, then all of them the next:
    [b, m / stride, 8 / bits, stride], flat."""
    b, m = data.shape
    runs = data.reshape(b, m // stride, stride)
    out = runs.new_empty(b, m // stride, 8 // bits, stride)
    for i in range(8 // bits):
        torch.bitwise_and(runs >> (bits * i), (1 << bits) - 1, out=out[:, :, i])
    return out.flatten(1)


def _halves(data: torch.Tensor) -> torch.Tensor:
    return _words(data, torch.float16)


def _words(data: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Little-endian numbers; whole ones are signed, so what is shifted down has to be masked. Copied: they lie anywhere."""
    return data.clone(memory_format=torch.contiguous_format).view(kind)


def _q4_0(blocks: torch.Tensor) -> Parts:
    d, low = _split(blocks, 2, 16)
    return _fields(low, 4, 16), _halves(d)


def _q4_1(blocks: torch.Tensor) -> Parts:
    d, least, low = _split(blocks, 2, 2, 16)
    return _fields(low, 4, 16), _halves(d), None, -_halves(least)


def _q5_0(blocks: torch.Tensor) -> Parts:
    d, high, low = _split(blocks, 2, 4, 16)
    return _fields(low, 4, 16) | _fields(high, 1, 1) << 4, _halves(d)


def _q5_1(blocks: torch.Tensor) -> Parts:
    d, least, high, low = _split(blocks, 2, 2, 4, 16)
    return _fields(low, 4, 16) | _fields(high, 1, 1) << 4, _halves(d), None, -_halves(least)


def _q8_0(blocks: torch.Tensor) -> Parts:
    d, values = _split(blocks, 2, 32)
    return values ^ 128, _halves(d)


def _q2_k(blocks: torch.Tensor) -> Parts:
    sub, low, d, dmin = _split(blocks, 16, 64, 2, 2)
    return _fields(low, 2, 32), _halves(d), sub & 15, _halves(dmin), sub >> 4


def _q3_k(blocks: torch.Tensor) -> Parts:
    high, low, sub, d = _split(blocks, 32, 64, 12, 2)
    codes = _fields(low, 2, 32) | _fields(high, 1, 32) << 2
    sub = _fields(sub[:, :8], 4, 8) | _fields(sub[:, 8:], 2, 4) << 4
    return codes, _halves(d), sub.view(torch.int8) - 32


def _six_bit_scales(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 12 bytes of Q4_K and Q5_K: sub and sub_min, [b, 8] each. Groups 0 to 3 lie in the low six bits of bytes 0 … 3 and
    4 … 7; groups 4 to 7 have their low nibbles in bytes 8 … 11 and two high bits on top of the others."""
    first, second, low = _split(data, 4, 4, 4)
    sub = torch.cat([first & 63, low & 15 | (first >> 6) << 4], 1)
    sub_min = torch.cat([second & 63, low >> 4 | (second >> 6) << 4], 1)
    return sub, sub_min


def _q4_k(blocks: torch.Tensor) -> Parts:
    d, dmin, packed, low = _split(blocks, 2, 2, 12, 128)
    sub, sub_min = _six_bit_scales(packed)
    return _fields(low, 4, 32), _halves(d), sub, _halves(dmin), sub_min


def _q5_k(blocks: torch.Tensor) -> Parts:
    d, dmin, packed, high, low = _split(blocks, 2, 2, 12, 32, 128)
    sub, sub_min = _six_bit_scales(packed)
    return _fields(low, 4, 32) | _fields(high, 1, 32) << 4, _halves(d), sub, _halves(dmin), sub_min


def _q6_k(blocks: torch.Tensor) -> Parts:
    low, high, sub, d = _split(blocks, 128, 64, 16, 2)
    return _fields(low, 4, 64) | _fields(high, 2, 32) << 4, _halves(d), _words(sub, torch.int8)


def _tq1_0(blocks: torch.Tensor) -> Parts:
    """A byte holds five ternary digits as a fraction of 256; the last four bytes hold four."""
    first, second, last, d = _split(blocks, 32, 16, 4, 2)
    digits = [
        (data.unsqueeze(1) * data.new_tensor([1, 3, 9, 27, 81][:count]).view(count, 1)).flatten(1)
        for data, count in ((first, 5), (second, 5), (last, 4))
    ]  # the products wrap at 256, which drops the digits above
    return (torch.cat(digits, 1).to(torch.int16) * 3 >> 8).to(torch.uint8), _halves(d)


def _tq2_0(blocks: torch.Tensor) -> Parts:
    low, d = _split(blocks, 64, 2)
    return _fields(low, 2, 32), _halves(d)


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    d, high, low, codes = _split(blocks, 2, 2, 4, 128)
    sub = _fields(low, 4, 1) | _fields(high, 2, 1) << 4
    return _fields(codes, 4, 16), _halves(d), sub.view(torch.int8) - 32


def _mxfp4(blocks: torch.Tensor) -> Parts:
    exponent, codes = _split(blocks, 1, 16)
    return _fields(codes, 4, 16), exponent


def _nvfp4(blocks: torch.Tensor) -> Parts:
    """The scales are e4m3 without a sign, halved because the table is doubled; float16 holds all of them. 0x7F is 0 here."""
    scales, codes = _split(blocks, 4, 32)
    d = torch.from_numpy(quants.NVFP4.ue4m3_to_fp32(np.arange(256, dtype=np.uint8))).half()
    return _fields(codes, 4, 8), d[scales.int()]


# ---- the codebooks ----


@cache
def _codebook(name: str) -> torch.Tensor:
    """Points of a codebook, as codes of magnitudes: 8 codes of a byte each in an int64, or 4 in an int32."""
    source = getattr(quants, name)
    source.init_grid()
    points = np.searchsorted(np.array(source.grid_map), source.grid[0, 0]).astype(np.uint8)
    return torch.from_numpy(points.view(np.int64 if points.shape[1] == 8 else np.int32)[:, 0])


@cache
def _spread_bits(shift: int) -> torch.Tensor:
    """For each byte, its 8 bits as 8 bytes, lowest first, each shifted up: int64 [256]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << np.uint8(shift)
    return torch.from_numpy(bits.view(np.int64)[:, 0])


@cache
def _even_signs() -> torch.Tensor:
    """Eight signs out of seven bits: int32 [128], bytes for `_spread_bits`."""
    return torch.from_numpy(np.frombuffer(quants.IQ2_XXS.ksigns, dtype=np.uint8).astype(np.int32))


def _points(name: str, index: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [b, 256] of points `index` [b, 64 or 32] of a codebook, with a byte of signs for 8 codes [b, 32]."""
    points = _codebook(name)[index.int()]
    sign_shift = 2 if points.dtype == torch.int64 else 3
    return (points | _spread_bits(sign_shift)[signs.int()].view(points.dtype)).view(torch.uint8)


def _odd(nibbles: torch.Tensor) -> torch.Tensor:
    """The IQ types' scales: 1, 3, 5, …"""
    return (nibbles << 1 | 1).to(torch.uint8)


def _signs_and_scale(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [b, 8]: four signs of seven bits, and a scale on top. Bytes of signs [b, 32], sub [b, 8]."""
    signs = torch.stack([words >> shift & 127 for shift in (0, 7, 14, 21)], -1).flatten(1)
    return _even_signs()[signs], _odd(words >> 28 & 15)


def _iq2_xxs(blocks: torch.Tensor) -> Parts:
    d, pairs = _split(blocks, 2, 64)
    pairs = pairs.reshape(pairs.shape[0], 8, 8)
    signs, sub = _signs_and_scale(_words(pairs[:, :, 4:], torch.int32).flatten(1))
    return _points("IQ2_XXS", pairs[:, :, :4].flatten(1), signs), _halves(d), sub


def _iq2_xs(blocks: torch.Tensor) -> Parts:
    d, pairs, sub = _split(blocks, 2, 64, 8)
    words = _words(pairs, torch.int16).int()
    codes = _points("IQ2_XS", words & 511, _even_signs()[words >> 9 & 127])
    return codes, _halves(d), _odd(_fields(sub, 4, 1))


def _iq2_s(blocks: torch.Tensor) -> Parts:
    d, low, signs, high, sub = _split(blocks, 2, 32, 32, 8, 8)
    index = low.int() | _fields(high, 2, 1).int() << 8
    return _points("IQ2_S", index, signs), _halves(d), _odd(_fields(sub, 4, 1))


def _iq3_xxs(blocks: torch.Tensor) -> Parts:
    d, index, words = _split(blocks, 2, 64, 32)
    signs, sub = _signs_and_scale(_words(words, torch.int32))
    return _points("IQ3_XXS", index, signs), _halves(d), sub


def _iq3_s(blocks: torch.Tensor) -> Parts:
    d, low, high, signs, sub = _split(blocks, 2, 64, 8, 32, 4)
    index = low.int() | _fields(high, 1, 1).int() << 8
    return _points("IQ3_S", index, signs), _halves(d), _odd(_fields(sub, 4, 1))


def _shifted_points(name: str, index: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """IQ1's codes: `down` [b, 32] is 0 or 1 for 8 codes."""
    return _points(name, index, down * 255)


def _iq1_s(blocks: torch.Tensor) -> Parts:
    d, low, words = _split(blocks, 2, 32, 16)
    high = _words(words, torch.int16).int()
    top = torch.stack([high >> shift & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    down = (high >> 15 & 1).repeat_interleave(4, 1)
    return _shifted_points("IQ1_S", low.int() | top << 8, down), _halves(d), _odd(high >> 12 & 7)


def _iq1_m(blocks: torch.Tensor) -> Parts:
    """A float16 d lies in the top nibbles of four words, lowest first; below each, four scales of three bits."""
    low, high, words = _split(blocks, 32, 16, 8)
    packed = _words(words, torch.int16).int()
    nibbles = packed >> 12 & 15
    d = (
        (nibbles << nibbles.new_tensor([0, 4, 8, 12]))
        .sum(1, keepdim=True, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.float16)
    )
    sub = torch.stack([packed >> shift & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    top = _fields(high, 4, 1)
    index = low.int() | (top & 7).int() << 8
    return _shifted_points("IQ1_M", index, (top >> 3).int()), d, _odd(sub)


_SPLIT: dict[str, Callable[[torch.Tensor], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "IQ4_NL": _q4_0, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
}  # fmt: skip
