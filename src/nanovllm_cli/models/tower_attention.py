"""Attention of a vision tower: every patch sees all of its window, or of the image. No mask and no matrix of scores is made.

On a CPU it is the decoder's, for whose kernels a window is a sequence that sees itself both ways: in bfloat16 two to three times
as fast as torch's, and as accurate. Elsewhere it is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from nanovllm_cli.kernels import cpu


class HeadNorms(NamedTuple):
    """RMS norms of each head: of queries and keys with gains [2, dim] in float32. of_all: of values, too, without; scores are not
    scaled then."""

    gains: torch.Tensor
    eps: float
    of_all: bool


Attend = Callable[[torch.Tensor, HeadNorms | None], torch.Tensor]
"""[n, (heads + 2 * key_heads) * dim], queries, keys and values of patches, windows behind each other -> [n, heads * dim]."""


class Windows(NamedTuple):
    """Of n patches. sizes: (how many windows, patches in each), in order. turns: cosines and sines of rotary positions, float32
    [n, dim / 2], by which pairs turn that lie half a head apart; dim / 2 is 0 where there are none. aside: of
    the only window, the last patches, which don't see each other."""

    sizes: tuple[tuple[int, int], ...]
    turns: tuple[torch.Tensor, torch.Tensor]
    aside: int = 0


def attention(windows: Windows, heads: int, dim: int, like: torch.Tensor, key_heads: int = 0) -> Attend:
    """like: what is computed with, by type and device. key_heads: of keys and values, 0: as many as of queries."""
    if like.device.type == "cpu" and like.dtype in (torch.bfloat16, torch.float32):
        return PagedAttention(windows, heads, dim, like.dtype, key_heads or heads)
    return TorchAttention(windows, heads, dim, key_heads or heads)


class TorchAttention:
    def __init__(self, windows: Windows, heads: int, dim: int, key_heads: int) -> None:
        self._sizes, self._heads, self._dim, self._key_heads = windows.sizes, heads, dim, key_heads
        self._turns = [each[:, None] for each in windows.turns] if windows.turns[0].shape[1] else None
        self._aside = windows.aside

    def __call__(self, qkv: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        heads, dim = self._heads, self._dim
        q, k, v = qkv.view(-1, heads + 2 * self._key_heads, dim).tensor_split([heads, heads + self._key_heads], dim=1)
        if norms is not None:
            q, k = (
                functional.rms_norm(part.to(torch.float32), (dim,), eps=norms.eps) * gain
                for part, gain in zip((q, k), norms.gains, strict=True)
            )
            v = functional.rms_norm(v.to(torch.float32), (dim,), eps=norms.eps) if norms.of_all else v
        if self._turns is not None:
            q, k = _turned(q, *self._turns), _turned(k, *self._turns)
        parts = [each.to(qkv.dtype) for each in (q, k, v)]
        found, start = [], 0
        for count, length in self._sizes:
            q, k, v = (
                each[start : start + count * length].reshape(count, length, -1, dim).transpose(1, 2) for each in parts
            )
            shared = self._key_heads != heads
            inner = length - self._aside
            parts_of = [(q, k, v), (q[..., inner:, :], k[..., :inner, :], v[..., :inner, :])] if self._aside else [(q, k, v)]
            seen = [functional.scaled_dot_product_attention(*each, scale=_scale(norms, dim), enable_gqa=shared)
                    for each in parts_of]  # fmt: skip
            both = torch.cat([seen[0][..., :inner, :], *seen[1:]], dim=2)
            found.append(both.transpose(1, 2).reshape(-1, heads * dim))
            start += count * length
        return found[0] if len(found) == 1 else torch.cat(found)


def _scale(norms: HeadNorms | None, dim: int) -> float:
    return 1.0 if norms is not None and norms.of_all else dim**-0.5


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class PagedAttention:
    """Keys and values lie in blocks of a cache, which all layers of an image use in turn."""

    def __init__(self, windows: Windows, heads: int, dim: int, dtype: torch.dtype, key_heads: int) -> None:
        lengths = torch.tensor([length for count, length in windows.sizes for _ in range(count)], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
        blocks = -(-lengths // cpu.BLOCK)
        firsts = blocks.cumsum(0, dtype=torch.int32) - blocks
        most = int(blocks.max())
        self._tables = (firsts[:, None] + torch.arange(most, dtype=torch.int32)).clamp(max=int(blocks.sum()) - 1)
        place = torch.arange(int(starts[-1])) + torch.repeat_interleave(firsts * cpu.BLOCK - starts[:-1], lengths)
        self._slots = place.to(torch.int64)
        self._run = torch.repeat_interleave(starts[1:], lengths) - torch.arange(int(starts[-1]), dtype=torch.int32)
        if windows.aside:
            assert len(lengths) == 1, "no tower has these in windows"
            inner = lengths - windows.aside
            self._tables = self._tables.repeat(2, 1)
            lengths = torch.cat([lengths, inner])
            starts = torch.cat([starts[:1], inner, starts[1:]])
        self._tiles = cpu.attention_tiles(starts, lengths, heads // key_heads)
        shapes = cpu.cache_shapes(int(blocks.sum()), key_heads, dim, dtype)
        self._keys, self._values = (torch.zeros(shape, dtype=dtype) for shape in shapes)  # what is behind a window counts 0 times
        self._cos, self._sin = windows.turns
        self._heads, self._dim, self._key_heads = heads, dim, key_heads
        self._ones = torch.ones(dim, dtype=dtype)

    def __call__(self, qkv: torch.Tensor, norms: HeadNorms | None = None) -> torch.Tensor:
        of_q, of_k = (None, None) if norms is None else norms.gains.to(qkv.dtype)
        eps, of_v = (0.0, None) if norms is None else (norms.eps, self._ones if norms.of_all else None)
        q = cpu.rope_and_cache(
            qkv, self._heads, self._key_heads, self._dim, of_q, of_k, of_v, eps, 0.0, self._cos, self._sin, False, self._slots,
            self._run, self._keys, self._values,
        )  # fmt: skip
        return cpu.paged_attention(
            q, self._keys, self._values, self._tiles, self._tables, _scale(norms, self._dim), 0, 0.0, None, both_ways=True
        )
