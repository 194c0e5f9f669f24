"""The fields of GGUF's blocks: what readers of block types are made of. Legend: b blocks, m bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

Parts = tuple[torch.Tensor | None, ...]


class Field(NamedTuple):
    """Where bits of codes lie in a block: in `size` bytes from `at` on, in the order of `fields`, to be shifted up. flip: what
    they are XORed with, so that numbers with a sign begin at 0."""

    at: int
    size: int
    bits: int
    stride: int
    shift: int = 0
    flip: int = 0

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Their part of codes [b, block_len] of blocks [b, block_bytes]."""
        return fields(blocks[:, self.at : self.at + self.size], self.bits, self.stride) << self.shift ^ self.flip


def split(blocks: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
    """A block's fields in the order in which they lie."""
    assert sum(sizes) == blocks.shape[1]
    return torch.split(blocks, list(sizes), 1)


def fields(data: torch.Tensor, bits: int, stride: int) -> torch.Tensor:
    """Small numbers out of bytes [b, m]. `stride` neighbouring bytes give their lowest bits first, then all of them the next:
    [b, m / stride, 8 / bits, stride], flat."""
    b, m = data.shape
    runs = data.reshape(b, m // stride, stride)
    out = runs.new_empty(b, m // stride, 8 // bits, stride)
    for i in range(8 // bits):
        torch.bitwise_and(runs >> (bits * i), (1 << bits) - 1, out=out[:, :, i])
    return out.flatten(1)


def halves(data: torch.Tensor) -> torch.Tensor:
    return little_endian(data, torch.float16)


def little_endian(data: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Little-endian numbers; whole ones are signed, so what is shifted down has to be masked. Copied: they lie anywhere."""
    return data.clone(memory_format=torch.contiguous_format).view(kind)
