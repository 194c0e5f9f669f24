"""GGUF's IQ types: points of a codebook, 4 or 8 codes each, found by an index, and their signs.

What a block's bytes mean is llama.cpp's ggml-common.h; codebooks are read from the `gguf` package. Legend: gguf_blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants

from nanovllm_cli.quant.gguf_fields import fields, halves, little_endian, split

CODEBOOKS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


@cache
def codebook(name: str) -> npt.NDArray[np.uint8]:
    """The points of a type of CODEBOOKS as codes without signs, [points, 4 or 8]: below 4 for those of 8."""
    source = getattr(quants, name)
    source.init_grid()
    points: npt.NDArray[np.uint8] = np.searchsorted(np.array(source.grid_map), source.grid[0, 0]).astype(np.uint8)
    return points


class Points(NamedTuple):
    """Rows of a type with a codebook, n of them or blocks. chosen int16 [n, K / codes of a point]: which points; signs uint8
    [n, K / 8]: a bit a code, lowest first, or 1 where IQ1's point is shifted down; d and sub as in `gguf_blocks.Decomposed`."""

    chosen: torch.Tensor
    signs: torch.Tensor
    d: torch.Tensor
    sub: torch.Tensor


def find_points(name: str, blocks: torch.Tensor) -> Points:
    """Of blocks [b, block_bytes] of a type of CODEBOOKS."""
    return _READERS[name](blocks)


def scales(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """d of such blocks. IQ1_M has it in the top nibbles of four words, lowest first."""
    if name != "IQ1_M":
        return halves(blocks[:, :2])
    nibbles = little_endian(blocks[:, 48:], torch.int16).int() >> 12 & 15
    bits = (nibbles << nibbles.new_tensor([0, 4, 8, 12])).sum(1, keepdim=True, dtype=torch.int32)
    return bits.to(torch.int16).view(torch.float16)


def codes(name: str, points: Points) -> torch.Tensor:
    """uint8 [n, K]: a point's codes, with the sign as the bit above them."""
    known = codebook(name)
    whole = torch.from_numpy(known.view(np.int64 if known.shape[1] == 8 else np.int32)[:, 0])
    signs = points.signs * 255 if name.startswith("IQ1") else points.signs
    spread = _spread_bits(2 if known.shape[1] == 8 else 3)[signs.int()].view(whole.dtype)
    return (whole[points.chosen.int()] | spread).view(torch.uint8)


# ---- from bytes ----


@cache
def _spread_bits(shift: int) -> torch.Tensor:
    """For each byte, its 8 bits as 8 bytes, lowest first, each shifted up: int64 [256]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << np.uint8(shift)
    return torch.from_numpy(bits.view(np.int64)[:, 0])


@cache
def _even_signs() -> torch.Tensor:
    """Eight signs out of seven bits, uint8 [128]."""
    return torch.from_numpy(np.frombuffer(quants.IQ2_XXS.ksigns, dtype=np.uint8).copy())


def _odd(nibbles: torch.Tensor) -> torch.Tensor:
    """The IQ types' scales: 1, 3, 5, …"""
    return (nibbles << 1 | 1).to(torch.uint8)


def _signs_and_scale(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [b, 8]: four signs of seven bits, and a scale on top. Bytes of signs [b, 32], sub [b, 8]."""
    signs = torch.stack([words >> shift & 127 for shift in (0, 7, 14, 21)], -1).flatten(1)
    return _even_signs()[signs], _odd(words >> 28 & 15)


def _iq2_xxs(blocks: torch.Tensor) -> Points:
    d, pairs = split(blocks, 2, 64)
    pairs = pairs.reshape(pairs.shape[0], 8, 8)
    signs, sub = _signs_and_scale(little_endian(pairs[:, :, 4:], torch.int32).flatten(1))
    return Points(pairs[:, :, :4].flatten(1).short(), signs, halves(d), sub)


def _iq2_xs(blocks: torch.Tensor) -> Points:
    d, pairs, sub = split(blocks, 2, 64, 8)
    words = little_endian(pairs, torch.int16)
    return Points(words & 511, _even_signs()[words.int() >> 9 & 127], halves(d), _odd(fields(sub, 4, 1)))


def _iq2_s(blocks: torch.Tensor) -> Points:
    d, low, signs, high, sub = split(blocks, 2, 32, 32, 8, 8)
    return Points(low.short() | fields(high, 2, 1).short() << 8, signs, halves(d), _odd(fields(sub, 4, 1)))


def _iq3_xxs(blocks: torch.Tensor) -> Points:
    d, index, words = split(blocks, 2, 64, 32)
    signs, sub = _signs_and_scale(little_endian(words, torch.int32))
    return Points(index.short(), signs, halves(d), sub)


def _iq3_s(blocks: torch.Tensor) -> Points:
    d, low, high, signs, sub = split(blocks, 2, 64, 8, 32, 4)
    return Points(low.short() | fields(high, 1, 1).short() << 8, signs, halves(d), _odd(fields(sub, 4, 1)))


def _iq1_s(blocks: torch.Tensor) -> Points:
    d, low, words = split(blocks, 2, 32, 16)
    high = little_endian(words, torch.int16)
    top = torch.stack([high >> shift & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    down = (high >> 15 & 1).byte().repeat_interleave(4, 1)
    return Points(low.short() | top << 8, down, halves(d), _odd(high >> 12 & 7))


def _iq1_m(blocks: torch.Tensor) -> Points:
    """Below the nibbles of d, four scales of three bits a word."""
    low, high, words = split(blocks, 32, 16, 8)
    packed = little_endian(words, torch.int16).int()
    sub = torch.stack([packed >> shift & 7 for shift in (0, 3, 6, 9)], -1).flatten(1)
    top = fields(high, 4, 1)
    return Points(low.short() | (top & 7).short() << 8, top >> 3, scales("IQ1_M", blocks), _odd(sub))


_READERS: dict[str, Callable[[torch.Tensor], Points]] = {
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
}  # fmt: skip
