"""The one layout of int4, int8, fp8 and nf4 weights on a GPU, in the order of tensor-core fragments. One copy serves GEMV, GEMM,
unpacking and embedding rows; packed.cuh turns its words into 16-bit numbers.

    weight[n, k] = value(code[n, k]) * scale[n, group of k]

    kind   value of a code
    int4   code - 8, or code - zero point             (2 and 3 bits: the caller adds what moves their middle to 8)
    int8   code - 128, or code - zero point
    fp8    the e4m3 number whose bits it is           (no NaN: 0x7f and 0xff count as 480)
    nf4    one of 16 quantiles, packed.cuh has them

**Codes.** A *tile* is 16 outputs by 64 columns, four steps of 16 columns for mma.m16n8k16. Tiles lie along the columns, then
along the outputs: [N / 16, K / 64, 128 * bits] bytes. Of a step, lane l of a warp has outputs g and g + 8 (g = l / 4) and
columns 2c, 2c + 1, 2c + 8, 2c + 9 (c = l % 4): four registers of two 16-bit numbers each,

    0: output g, columns 2c, 2c + 1      1: output g + 8, the same      2: output g, columns 2c + 8, 2c + 9      3: output g + 8

which is A of mma.m16n8k16 where weights are A (16 outputs by 16 columns); where they are B, registers 0 and 2 are it for the
tile's first eight outputs, 1 and 3 for the others.

    4 bits   512 bytes a tile: lane l has bytes 16 l …, of which word s (32 bits) is step s. int4: nibbles r and r + 4 (from the
             lowest) are register r's first and second number. nf4: nibbles 2 r and 2 r + 1 are.
    8 bits   two halves of 512 bytes, outputs 0 … 7 and 8 … 15: lane l has bytes 16 l … of each, word s is step s. Bytes 0 and 2
             are the first and the second number of register 0 (or 1), bytes 1 and 3 those of register 2 (or 3).

**Scales** float16, bfloat16 or float32, as they come, and **zero points** uint8: [N / 16, G, 16], G groups of K columns (the
last one may be short). Output n of a tile lies at place 2 * (n % 8) + n / 8, so a lane that sums outputs g and g + 8 reads two
neighbours, and one that sums outputs 2c, 2c + 1 of both halves four.

**Order** (activation order): int32 [K], or None. Column j of the layout is column order[j] of the weight and of x.

**Padding.** N is padded to 16 with scales of 0; K to 64 with code 0, where readers take x for 0.

Sums: codes without scales are exact in bfloat16 and float16. Kernels sum a group in fp32 and multiply the sum by the scale, but
for packed_wgmma.cu, which rounds their product to 16 bits as unpack.cu does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels.kernel import Launcher, check, type_name

Kind = Literal["int4", "int8", "fp8", "nf4"]
BITS: dict[Kind, int] = {"int4": 4, "int8": 8, "fp8": 8, "nf4": 4}
TILE_OUTPUTS, TILE_COLUMNS = 16, 64
GROUPS = (0, 32, 64, 128, 256, 512)
"""Columns that may share a scale; 0 for all of a row."""
# Rows [N, K] fall apart into strip S, half o of its outputs, g; tile T, step s, half p of its columns, c, even or odd e.
_PARTS, _SIZES = "SogTspce", (-1, 2, 8, -1, 4, 2, 4, 2)
_MEMORY: dict[Kind, str] = {"int4": "STgcsepo", "nf4": "STgcspoe", "int8": "STogcsep", "fp8": "STogcsep"}
"""Their order in memory, the slowest first; of four bits, two neighbours are a byte, the lower bits first."""


class Packed(NamedTuple):
    """A weight [num_rows, width]. codes uint8, scales, zeros uint8 or None, order int32 or None: see above."""

    kind: Kind
    num_rows: int
    width: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    order: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.zeros, self.order) if t is not None)

    @property
    def constants(self) -> tuple[tuple[str, str | int], ...]:
        """What packed.cuh, and kernels that use it, are compiled with."""
        kind, scale = list(BITS).index(self.kind), type_name(self.scales.dtype)
        return (("KIND", kind), ("GROUP", self.group), ("SCALE", scale), ("ZEROS", int(self.zeros is not None)))

    def check(self, launcher: Launcher) -> None:
        """As `kernel.check` does for a tensor."""
        strips, tiles = -(-self.num_rows // TILE_OUTPUTS), -(-self.width // TILE_COLUMNS)
        groups = -(-self.width // self.group) if self.group else 1
        check(self.codes, launcher, torch.uint8, strips, tiles, 128 * BITS[self.kind])
        check(self.scales, launcher, self.scales.dtype, strips, groups, TILE_OUTPUTS)
        if self.zeros is not None:
            check(self.zeros, launcher, torch.uint8, strips, groups, TILE_OUTPUTS)
        if self.order is not None:
            check(self.order, launcher, torch.int32, self.width)


def empty(
    kind: Kind,
    num_rows: int,
    width: int,
    group: int,
    scale_dtype: torch.dtype,
    *,
    zeros: bool,
    ordered: bool,
    device: torch.device | str,
) -> Packed:
    """A weight of zeros: scales of 0. group: columns that share a scale, 0 for a row. zeros: there are zero points; ordered:
    there is an order of columns, which the first rows bring. UnsupportedError for groups without a kernel."""
    if group not in GROUPS:
        known = ", ".join(map(str, GROUPS[1:]))
        raise UnsupportedError(
            f"{kind}: groups of {group} columns on a GPU; known: {known}, and whole rows", "use another group size"
        )
    assert not zeros or kind in ("int4", "int8"), kind
    assert scale_dtype in (torch.float16, torch.bfloat16, torch.float32), scale_dtype
    strips, tiles = -(-num_rows // TILE_OUTPUTS), -(-width // TILE_COLUMNS)
    groups = -(-width // group) if group else 1
    return Packed(
        kind, num_rows, width, group,
        torch.zeros(strips, tiles, 128 * BITS[kind], dtype=torch.uint8, device=device),
        torch.zeros(strips, groups, TILE_OUTPUTS, dtype=scale_dtype, device=device),
        torch.zeros(strips, groups, TILE_OUTPUTS, dtype=torch.uint8, device=device) if zeros else None,
        torch.zeros(width, dtype=torch.int32, device=device) if ordered else None,
    )  # fmt: skip


def pack_rows(
    weight: Packed,
    first_row: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    *,
    on: torch.device | None = None,
) -> None:
    """Put rows [first_row, first_row + n) where they belong, whatever multiple first_row and n are of.

    codes uint8 [n, K], columns as they are; scales [n, G] of the weight's type; zeros uint8 [n, G]; order int32 [K], the same for
    all rows of the weight: as quant/rows.py has them. On any device. on: which one packs them, if not the weight's.
    """
    n = codes.shape[0]
    assert codes.shape == (n, weight.width), codes.shape
    assert scales.shape == (n, weight.scales.shape[1]), scales.shape
    assert (zeros is None) == (weight.zeros is None), "zero points"
    assert zeros is None or zeros.shape == scales.shape, zeros.shape
    assert (order is None) == (weight.order is None), "an order of columns"
    assert 0 <= first_row <= first_row + n <= weight.num_rows, (first_row, n)
    if order is not None and weight.order is not None:
        if weight.order.any():
            assert torch.equal(weight.order, order.to(weight.order)), "one order for all rows of a weight"
        weight.order.copy_(order)
        codes = codes[:, order.to(codes.device).long()]
    on = on or weight.codes.device
    _put(weight.codes, first_row, codes.to(on), *_codes_layout(weight))
    _put(weight.scales, first_row, scales.to(on), _to_places, _from_places)
    if weight.zeros is not None and zeros is not None:
        _put(weight.zeros, first_row, zeros.to(on), _to_places, _from_places)


def unpack_rows(
    weight: Packed, first_row: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What `pack_rows` was given: codes [n, K] in the columns' own order, scales [n, G], zeros [n, G] or None."""
    strips, rows = _strips(first_row, num_rows)
    codes = _codes_layout(weight)[1](weight.codes[strips])[rows, : weight.width]
    if weight.order is not None:
        codes = codes[:, torch.argsort(weight.order)]
    zeros = None if weight.zeros is None else _from_places(weight.zeros[strips])[rows]
    return codes, _from_places(weight.scales[strips])[rows], zeros


Layout = Callable[[torch.Tensor], torch.Tensor]


def _strips(first_row: int, num_rows: int) -> tuple[slice, slice]:
    """The strips that hold so many rows, and which rows of these strips they are."""
    first, last = first_row // TILE_OUTPUTS, -(-(first_row + num_rows) // TILE_OUTPUTS)
    start = first_row - first * TILE_OUTPUTS
    return slice(first, last), slice(start, start + num_rows)


def _put(packed: torch.Tensor, first_row: int, rows: torch.Tensor, pack: Layout, unpack: Layout) -> None:
    """Rows into the strips that hold them; strips that other rows share are taken apart first."""
    assert rows.dtype == packed.dtype, (rows.dtype, packed.dtype)
    strips, own = _strips(first_row, rows.shape[0])
    if rows.shape[0] != (strips.stop - strips.start) * TILE_OUTPUTS:
        everybody = unpack(packed[strips].to(rows.device))
        everybody[own, : rows.shape[1]] = rows
        rows = everybody
    packed[strips].copy_(pack(rows))


def _codes_layout(weight: Packed) -> tuple[Layout, Layout]:
    """Rows of codes to tiles and back; columns are padded to whole tiles."""
    order = [_PARTS.index(part) for part in _MEMORY[weight.kind]]
    back = [order.index(place) for place in range(len(order))]
    tiles, bits = weight.codes.shape[1], BITS[weight.kind]
    sizes = [tiles if part == "T" else size for part, size in zip(_PARTS, _SIZES, strict=True)]

    def pack(rows: torch.Tensor) -> torch.Tensor:
        rows = torch.nn.functional.pad(rows, (0, tiles * TILE_COLUMNS - rows.shape[1]))
        parts = rows.reshape(sizes).permute(order)
        if bits == 4:
            parts = parts[..., 0] | parts[..., 1] << 4
        return parts.reshape(-1, tiles, 128 * bits)

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        if bits == 4:
            packed = torch.stack((packed & 15, packed >> 4), -1)
        strips = packed.shape[0]
        parts = packed.reshape([strips if sizes[i] == -1 else sizes[i] for i in order])
        return parts.permute(back).reshape(strips * TILE_OUTPUTS, tiles * TILE_COLUMNS)

    return pack, unpack


def _to_places(rows: torch.Tensor) -> torch.Tensor:
    """[n, G] to [n / 16, G, 16]."""
    n, groups = rows.shape
    return rows.view(n // TILE_OUTPUTS, 2, 8, groups).permute(0, 3, 2, 1).reshape(-1, groups, TILE_OUTPUTS)


def _from_places(packed: torch.Tensor) -> torch.Tensor:
    """And back."""
    strips, groups, _ = packed.shape
    return packed.view(strips, groups, 8, 2).permute(0, 3, 2, 1).reshape(strips * TILE_OUTPUTS, groups)
