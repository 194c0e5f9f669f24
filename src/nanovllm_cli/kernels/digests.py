"""Attention with one shared key, and digests, on the CPU: tensors in, checks, addresses to compiled kernels (cpu_digests.py),
tensors out (see cpu.py).

Legend: T tokens, B sequences, N blocks of the cache, P of them in a table, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nanovllm_cli.kernels import cpu, cpu_digests, cpu_indexer
from nanovllm_cli.kernels.cpu import BLOCK, address_of, launch, new_tensor, tags_of
from nanovllm_cli.kernels.indexer import ROWS

Angles = tuple[torch.Tensor, torch.Tensor]
"""cos, sin [T, half] fp32."""


class Where(NamedTuple):
    """tiles [T, 5] int64: of one token each, see `cpu.attention_tiles`; block_tables [B, P] int32: of digests; near_tables [B, P]
    int32: of what windows need."""

    tiles: torch.Tensor
    block_tables: torch.Tensor
    near_tables: torch.Tensor


class DigestMaker(NamedTuple):
    """What digests of `dim` numbers are made by: from column `at` of a raw row on what is summed, from `gates` on what weighs it,
    parts * dim of either; bias [rate, parts * dim] fp32, gains [dim] of their norm, and its eps and offset."""

    at: int
    gates: int
    parts: int
    bias: torch.Tensor
    gains: torch.Tensor
    eps: float
    offset: float


class SharedInputs(NamedTuple):
    """What a layer with one shared key makes of a step's tokens, which may be changed in place: q [T, H * D] and key [T, D], yet
    to be normed and turned; raw [T, width]: for digests; index_q [T, heads * dim], yet to be turned, and index_weights [T, heads]
    fp32: for what chooses them. See `SharedSpec`."""

    q: torch.Tensor
    key: torch.Tensor
    raw: torch.Tensor | None
    index_q: torch.Tensor | None
    index_weights: torch.Tensor | None


class SharedWeights(NamedTuple):
    """Of such a layer, beside its projections: gains [D], eps and offset of the norm of keys, whose eps is also that of heads'
    queries; what digests are made by, and those that choose."""

    gains: torch.Tensor
    eps: float
    offset: float
    digests: DigestMaker | None
    chosen_by: DigestMaker | None


def digest_room(rate: int) -> int:
    """Digests that have their place in a block."""
    return -(-BLOCK // rate)


def turn_last(
    x: torch.Tensor, heads: int, angles: Angles, *, gains: torch.Tensor | None = None, eps: float | None = None,
    offset: float = 0.0, back: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x [T, H * dim] itself, changed in place: each head's last numbers turned, or turned back, with eps behind the norm of the
    head, with gains [dim] or without."""
    tokens, dim, half = x.shape[0], x.shape[1] // heads, angles[0].shape[1]
    assert 2 * half <= dim, (half, dim)
    ints = (
        address_of(x, x.dtype, tokens, heads * dim), tokens, heads, dim, int(eps is not None),
        0 if gains is None else address_of(gains, x.dtype, dim),
        *(address_of(each, torch.float32, tokens, half) for each in angles), half,
    )  # fmt: skip
    launch(cpu_digests.turn_last, 8 * x.numel(), tags_of(x.dtype), ints, (eps or 0.0, offset, -1.0 if back else 1.0))
    return x


def keep_rows(x: torch.Tensor, slots: torch.Tensor, kept: torch.Tensor) -> None:
    """kept [N, BLOCK, width] at slots [T] int64 = x [T, width]."""
    tokens, width = x.shape
    target = address_of(kept, x.dtype, len(kept), BLOCK, width)
    ints = address_of(x, x.dtype, tokens, width), tokens, width, address_of(slots, torch.int64, tokens), target
    launch(cpu_digests.keep_rows, x.numel(), tags_of(x.dtype), ints)


def make_digests(
    raw: torch.Tensor, digests: torch.Tensor, maker: DigestMaker, angles: Angles, rate: int, where: Where
) -> None:
    """Those that end with a step's tokens, whose raw rows [N, BLOCK, width] are kept, into digests [N, room, dim]. angles: of the
    first tokens of what each token's digest stands for."""
    dtype, (tokens, half), dim = raw.dtype, angles[0].shape, digests.shape[2]
    assert max(maker.at, maker.gates) + maker.parts * dim <= raw.shape[2], (maker.at, maker.gates, raw.shape)
    ints = (
        address_of(raw, dtype, len(raw), BLOCK, raw.shape[2]), raw.shape[2], maker.at, maker.gates, maker.parts, dim,
        address_of(maker.bias, torch.float32, rate, maker.parts * dim), address_of(maker.gains, dtype, dim),
        *(address_of(each, torch.float32, tokens, half) for each in angles), half,
        address_of(where.tiles, torch.int64, tokens, 5), tokens, *_table(where.near_tables), *_table(where.block_tables), rate,
        digest_room(rate), address_of(digests, dtype, len(digests), digest_room(rate), dim),
    )  # fmt: skip
    launch(cpu_digests.make_digests, 16 * maker.parts * tokens * dim, tags_of(dtype), ints, (maker.eps, maker.offset))


def choose(
    q: torch.Tensor, weights: torch.Tensor, digests: torch.Tensor, rate: int, most: int, where: Where
) -> torch.Tensor:
    """q [T, H * dim], turned, weights [T, H] fp32, digests [N, room, dim] -> [T, most] int32: of the whole digests up to each
    token those that score highest, ascending; behind the last there is nothing. See `digest_rules.scores`."""
    (tokens, heads), (room, dim) = weights.shape, digests.shape[1:]
    kept = address_of(digests, q.dtype, len(digests), digest_room(rate), dim)
    columns = max(1, where.block_tables.shape[1] * BLOCK // rate)
    chosen = new_tensor((tokens, most), torch.int32)
    for first in range(0, tokens, ROWS):
        some = slice(first, min(tokens, first + ROWS))
        count = some.stop - first
        scores, (told, made) = new_tensor((count, columns), torch.float32), (new_tensor((count, 5), torch.int64) for _ in "ab")
        ints = (
            address_of(q[some], q.dtype, count, heads * dim), address_of(weights[some], torch.float32, count, heads), count,
            heads, dim, kept, room, address_of(where.tiles[some], torch.int64, count, 5), *_table(where.block_tables), rate, most,
            scores.data_ptr(), columns, told.data_ptr(),
        )  # fmt: skip
        launch(cpu_digests.digest_scores, count * columns * heads * dim, tags_of(q.dtype), ints)
        places = address_of(chosen[some], torch.int32, count, most)
        asked = count, scores.data_ptr(), columns, told.data_ptr(), most, places, made.data_ptr(), ROWS
        launch(cpu_indexer.choose, 16 * count * columns, "", asked)
    return chosen


def gather_seen(
    some: slice, keys: torch.Tensor, digests: torch.Tensor | None, chosen: torch.Tensor | None, rate: int, window: int,
    where: Where, num_digests: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of these tokens, ROWS at the most, what each sees, of num_digests digests at the most, as a cache of one head, and tiles
    [n, 5] of sequences that are made of it alone."""
    dtype, dim, count = keys.dtype, keys.shape[2], some.stop - some.start
    blocks = -(-(num_digests + min(window, where.near_tables.shape[1] * BLOCK)) // BLOCK)
    (shape, _) = cpu.cache_shapes(count * blocks, 1, dim, dtype)
    seen, made = new_tensor(shape, dtype), new_tensor((count, 5), torch.int64)
    kept = 0 if digests is None else address_of(digests, dtype, len(digests), digest_room(rate), dim)
    most = 0 if chosen is None else chosen.shape[1]
    ints = (
        shape[-1], kept, 1 if digests is None else digest_room(rate), address_of(keys, dtype, len(keys), BLOCK, dim), dim, rate,
        0 if chosen is None else address_of(chosen[some], torch.int32, count, most), most,
        address_of(where.tiles[some], torch.int64, count, 5), count, *_table(where.near_tables), *_table(where.block_tables),
        window, made.data_ptr(), seen.data_ptr(), blocks, ROWS,
    )  # fmt: skip
    launch(cpu_digests.gather_seen, seen.numel(), tags_of(dtype), ints)
    return seen, made


def _table(tables: torch.Tensor) -> tuple[int, int]:
    return address_of(tables, torch.int32, *tables.shape), tables.shape[1]
