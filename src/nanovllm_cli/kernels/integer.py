"""The checked front of integer matmuls on the CPU: tensors in, checks, addresses to compiled kernels, tensors out (see cpu.py).

All of it can be recorded in a cpu.Program. Work of several weights on the same rows shares their rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from nanovllm_cli.kernels import ahead, cpu_blocks, cpu_integer, simd_codebook, simd_int, simd_planes
from nanovllm_cli.kernels.cpu import address_of, launch, new_tensor, tags_of, zeros
from nanovllm_cli.kernels.record_kinds import RecordLayout


class Rounding(NamedTuple):
    """How rows are rounded to int8 for a weight. group: columns that share a scale; per_row: one scale for the whole row, and
    groups only for the sums. order: int32, the columns in the weight's order, or None. Compare with `same`."""

    group: int
    per_row: bool
    order: torch.Tensor | None

    def same(self, other: Rounding) -> bool:
        return self.group == other.group and self.per_row == other.per_row and self.order is other.order


class Rounded(NamedTuple):
    """Rows [tokens, width] in int8, as cpu_integer.quantize leaves them: chunks of `tokens` rows of `stride` bytes."""

    data: torch.Tensor
    tokens: int
    width: int
    stride: int
    rounding: Rounding


class Packed(NamedTuple):
    """A weight in records: data uint8 [layout.num_bytes]; table: what the kernels read of the layout's table or codebook;
    unpacker: address of the codebook's function, or 0."""

    layout: RecordLayout
    data: torch.Tensor
    table: torch.Tensor | None
    unpacker: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """What the kernels are told of it, width … unpacker."""
        layout, table = self.layout, 0 if self.table is None else self.table.data_ptr()
        return (
            layout.width, layout.step_bytes, layout.group, layout.scale, layout.low, layout.offset, layout.unit,
            table, self.unpacker,
        )  # fmt: skip


def empty(layout: RecordLayout) -> Packed:
    """A weight of zeros, to be filled."""
    assert layout.table is None or layout.bits in (1, 4), "a CPU looks other codes of few bits up in codebooks"
    data = zeros(layout.num_bytes, torch.uint8, huge_pages=True)
    if layout.codebook is not None:
        return Packed(layout, data, simd_codebook.tables(layout.codebook), simd_codebook.unpacker(layout.codebook))
    return Packed(layout, data, None if layout.table is None else torch.tensor(layout.table, dtype=torch.uint8))


def unpack(blocks: torch.Tensor, block_len: int, places: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Codes uint8 [b, block_len] of GGUF's blocks, uint8 [b, bytes of one]. places: see `cpu_blocks.unpack_blocks`."""
    count, num_bytes = blocks.shape
    codes = torch.empty(count, block_len, dtype=torch.uint8)
    first, second, *_ = (*places, (0, 0, 1, 8, 0, 0))
    blocks = blocks.contiguous()
    ints = address_of(blocks, torch.uint8, count, num_bytes), count, num_bytes, codes.data_ptr(), block_len, *first, *second
    launch(cpu_blocks.unpack_blocks, codes.numel(), "", ints)
    return codes


def quantize(x: torch.Tensor, rounding: Rounding) -> Rounded:
    """x [T, width], rounded to int8."""
    tokens, width = x.shape
    first = RecordLayout(1, width, 8, rounding.group, 0).chunk_width(0)
    stride = 12 * -(-first // rounding.group) + first
    chunks = -(-width // 256)
    data = new_tensor((chunks * tokens * stride,), torch.uint8)
    order = 0 if rounding.order is None else address_of(rounding.order, torch.int32, width)
    ints = (
        address_of(x, x.dtype, tokens, width), tokens, width * x.itemsize, width, rounding.group,
        int(rounding.per_row), order, data.data_ptr(), stride,
    )  # fmt: skip
    launch(cpu_integer.quantize, 16 * tokens * width, tags_of(x.dtype), ints)
    return Rounded(data, tokens, width, stride, rounding)


def matmul(x: Rounded, weight: Packed, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [T, num_rows] = x @ weight.T (+ bias [num_rows] of out's type). out may be columns of a wider tensor."""
    layout = weight.layout
    assert (x.width, x.rounding.group) == (layout.width, layout.group)
    assert out.shape == (x.tokens, layout.num_rows)
    assert out.stride(1) == 1
    assert weight.data.numel() == layout.num_bytes
    added = 0 if bias is None else address_of(bias, out.dtype, layout.num_rows)
    ints = (
        x.data.data_ptr(), x.tokens, x.stride, weight.data.data_ptr(), layout.num_rows, *weight.numbers, *_loops(layout), added,
        out.data_ptr(), out.stride(0) * out.itemsize, ahead.distance(),
    )  # fmt: skip
    launch(cpu_integer.integer_matmul, x.tokens * layout.num_rows * layout.width, tags_of(out.dtype), ints)


@cache
def _loops(layout: RecordLayout) -> tuple[int, int, int]:
    """What a weight's rows are multiplied by: few, most_few, dot of `cpu_integer.integer_matmul`."""
    most = simd_planes.most_rows(layout)
    return simd_planes.few_rows(layout) if most else 0, most, simd_int.dot_rows(layout)


def asks_ahead(weight: Packed) -> bool:
    """True where a single row's kernel asks for codes ahead of their use."""
    return simd_planes.most_rows(weight.layout) > 0


def rows(weight: Packed, ids: torch.Tensor, order: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows ids [n] int64, dequantized: [n, width]. The caller has checked the ids."""
    n, layout = ids.shape[0], weight.layout
    out = new_tensor((n, layout.width), dtype)
    columns = 0 if order is None else address_of(order, torch.int32, layout.width)
    ints = (
        weight.data.data_ptr(), address_of(ids, torch.int64, n), n, *weight.numbers, columns, out.data_ptr()
    )  # fmt: skip
    launch(cpu_integer.integer_rows, 8 * n * layout.width, tags_of(out.dtype), ints)
    return out
