"""What several GPUs have of a tensor's columns, or of a table's rows, brought together (peers.cu)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm_cli.kernels.embedding import id_args
from nanovllm_cli.kernels.kernel import Kernel, Launcher, check

THREADS, BLOCKS, LINE = 256, 16, 128
"""As in peers.cu."""
HEAD_BYTES = BLOCKS * LINE
UNITS = {16: "uint4", 8: "uint2", 4: "uint32_t", 2: "uint16_t"}
"""Bytes that are moved at once, and CUDA's name of them."""


class Peers(NamedTuple):
    """A GPU's share in a group of `size`, as number `rank`; areas of area_bytes. control int64, on the device: see peers.cu."""

    control: torch.Tensor
    rank: int
    size: int
    area_bytes: int


class Columns(NamedTuple):
    """Whose columns of a whole go where. table int64, on the device: see peers.cu; unit: bytes. widths: of each GPU, and of the
    whole, in units."""

    table: torch.Tensor
    num_pieces: int
    unit: int
    widths: Sequence[int]
    width: int


def peers(launcher: Launcher, lost: int, rank: int, regions: Sequence[int], area_bytes: int) -> Peers:
    """lost, regions: addresses, as the device has them. A region is HEAD_BYTES of flags, which begin as zeros, and two areas."""
    size = len(regions)
    words = [lost, area_bytes, rank, size, *regions, *[0] * BLOCKS]
    return Peers(torch.tensor(words, dtype=torch.int64).to(launcher.device), rank, size, area_bytes)


def columns(launcher: Launcher, pieces: Sequence[tuple[int, int, int, int]], size: int, width: int, itemsize: int) -> Columns:
    """pieces: of each whose it is, its first column there and in a whole of `width` columns of itemsize bytes, and how many it
    has."""
    widths = [sum(num for whose, _, _, num in pieces if whose == rank) for rank in range(size)]
    unit = math.gcd(16, itemsize * math.gcd(width, *widths, *(each for piece in pieces for each in piece[1:])))
    share = [[whose, *(each * itemsize // unit for each in rest)] for whose, *rest in pieces]
    in_units = [each * itemsize // unit for each in (*widths, width)]
    table = torch.tensor([*in_units[:-1], *(word for piece in share for word in piece)], dtype=torch.int64)
    return Columns(table.to(launcher.device), len(pieces), unit, in_units[:-1], in_units[-1])


def gather(
    launcher: Launcher,
    here: Peers,
    own: torch.Tensor,
    of: Columns,
    *,
    gives: bool = True,
    takes: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, width] of what each GPU has of its columns: own [T, the number that this one has]. All call it, in the same order, with
    as many rows. gives: whether others take what this one has; takes: whether this one takes theirs, or the result is anything.
    out: where it goes."""
    rows, itemsize = own.shape[0], own.itemsize
    check(own, launcher, own.dtype, rows, of.widths[here.rank] * of.unit // itemsize)
    shape = rows, of.width * of.unit // itemsize
    out = torch.empty(shape, dtype=own.dtype, device=own.device) if out is None else check(out, launcher, own.dtype, *shape)
    most = here.area_bytes // (max(of.widths) * of.unit)
    assert most, "a row of megabytes"
    for first in range(0, rows, most):
        count = min(most, rows - first)
        part = slice(first, first + count)
        args = (
            here.control, of.table, np.int32(of.num_pieces), own[part], out[part], np.int32(count), np.int32(of.width),
            np.int32(gives), np.int32(takes),
        )  # fmt: skip
        launcher.launch(variant("gather", of.unit), (BLOCKS, 1, 1), (THREADS, 1, 1), args)
    return out


def find_rows(
    launcher: Launcher, here: Peers, bounds: torch.Tensor, ids: torch.Tensor, tokens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ids [T] int64, and tokens, as `embedding` takes them: which of this GPU's rows of a table each asks for, [T] int64, -1
    for another one's and for nobody's; and whose it is, [T] int32, -1 for nobody's. bounds [size + 1] int64: where each one's
    begin."""
    check(bounds, launcher, torch.int64, here.size + 1)
    id_of = id_args(launcher, ids, tokens)
    count = ids.shape[0]
    own = torch.empty(count, dtype=torch.int64, device=ids.device)
    whose = torch.empty(count, dtype=torch.int32, device=ids.device)
    if count:
        args = (here.control, bounds, *id_of, own, whose, np.int32(count))
        launcher.launch(variant("find_rows", 2), (-(-count // THREADS), 1, 1), (THREADS, 1, 1), args)
    return own, whose


def gather_rows(launcher: Launcher, here: Peers, own: torch.Tensor, whose: torch.Tensor) -> torch.Tensor:
    """[T, width] of rows that one GPU has each, as `find_rows` says; zeros where nobody has. own: alike, right where it is this
    one's. All call it, in the same order."""
    rows, width = own.shape
    check(own, launcher, own.dtype, rows, width)
    check(whose, launcher, torch.int32, rows)
    out = torch.empty_like(own)
    row_bytes = width * own.itemsize
    unit = math.gcd(16, row_bytes)
    most = here.area_bytes // row_bytes
    assert most, "a row of megabytes"
    for first in range(0, rows, most):
        count = min(most, rows - first)
        part = slice(first, first + count)
        args = here.control, whose[part], own[part], out[part], np.int32(count), np.int32(row_bytes // unit)
        launcher.launch(variant("gather_rows", unit), (BLOCKS, 1, 1), (THREADS, 1, 1), args)
    return out


def variant(entry: str, unit: int) -> Kernel:
    return Kernel("peers", entry, (("UNIT", UNITS[unit]),))


def variants() -> list[Kernel]:
    """What the compile gate builds."""
    return [*(variant("gather", unit) for unit in UNITS), variant("find_rows", 2), variant("gather_rows", 16)]
