"""The checked front of cpu_values.py: tensors in, checks, addresses to compiled kernels, tensors out (see cpu.py)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from nanovllm_cli.kernels import ahead, cpu_values, simd_values
from nanovllm_cli.kernels.cpu import address_of, launch, new_tensor, tags_of
from nanovllm_cli.kernels.integer import Packed
from nanovllm_cli.kernels.record_kinds import RecordLayout

CODE, E4M3, TABLE = cpu_values.CODE, cpu_values.E4M3, cpu_values.TABLE


class Scaled(NamedTuple):
    """Rows [T, width] that are to be multiplied by scales fp32 [T, groups], or are what they are (None)."""

    rows: torch.Tensor
    scales: torch.Tensor | None = None


def round_e4m3(x: torch.Tensor, group: int, fixed: torch.Tensor | None) -> Scaled:
    """x [T, width] / scale, rounded to e4m3. group: columns that share a scale; fixed: fp32 [1], the scale of all, or None."""
    tokens, width = x.shape
    scales = new_tensor((tokens, -(-width // group)), torch.float32)
    rounded = new_tensor((tokens, width), x.dtype)
    given = 0 if fixed is None else address_of(fixed, torch.float32, 1)
    ints = (address_of(x, x.dtype, tokens, width), tokens, width, group, given, rounded.data_ptr(), scales.data_ptr())
    launch(cpu_values.round_e4m3, 16 * tokens * width, tags_of(x.dtype), ints)
    return Scaled(rounded, scales)


def matmul(
    x: Scaled, weight: Packed, kind: int, numbers: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """out [T, num_rows] = x @ weight.T (+ bias [num_rows] of out's type). kind: what codes stand for; numbers: fp32 [16] for
    TABLE. out may be columns of a wider tensor."""
    layout, rows = weight.layout, x.rows
    tokens, width = rows.shape
    assert width == layout.width
    assert out.shape == (tokens, layout.num_rows)
    assert out.stride(1) == 1
    assert weight.data.numel() == layout.num_bytes
    groups = 0 if x.scales is None else x.scales.shape[1]
    assert groups <= 1 or groups == layout.num_groups
    if width * rows.itemsize % 4:
        rows = torch.nn.functional.pad(rows, (0, 1))
    ints = (
        address_of(rows, rows.dtype, *rows.shape), tokens, rows.shape[1] * rows.itemsize,
        0 if x.scales is None else address_of(x.scales, torch.float32, tokens, groups), groups, weight.data.data_ptr(),
        layout.num_rows, *weight.numbers, *_loops(layout, kind, rows.dtype), kind,
        0 if numbers is None else address_of(numbers, torch.float32, 16),
        0 if bias is None else address_of(bias, out.dtype, layout.num_rows), out.data_ptr(), out.stride(0) * out.itemsize,
        ahead.distance(),
    )  # fmt: skip
    launch(cpu_values.value_matmul, tokens * layout.num_rows * width, tags_of(rows.dtype, out.dtype), ints)


@cache
def _loops(layout: RecordLayout, kind: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """few, most_few, expand of `cpu_values.value_matmul`."""
    if dtype != torch.bfloat16 or not simd_values.is_known(layout, kind == E4M3):
        return 0, 0, 0
    most = simd_values.most_rows(layout, kind == E4M3)
    return simd_values.few_rows(layout) if most else 0, most, simd_values.expand(layout)


def asks_ahead(weight: Packed, kind: int, dtype: torch.dtype) -> bool:
    """True where a single row's kernel asks for codes ahead of their use."""
    return dtype == torch.bfloat16 and simd_values.most_rows(weight.layout, kind == E4M3) > 0


def rows(weight: Packed, ids: torch.Tensor, kind: int, numbers: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows ids [n] int64 of E4M3 or TABLE, dequantized: [n, width]. The caller has checked the ids."""
    n, layout = ids.shape[0], weight.layout
    out = new_tensor((n, layout.width), dtype)
    ints = (
        weight.data.data_ptr(), address_of(ids, torch.int64, n), n, layout.width, layout.step_bytes, layout.group,
        layout.scale, layout.low, kind, 0 if numbers is None else address_of(numbers, torch.float32, 16), out.data_ptr(),
    )  # fmt: skip
    launch(cpu_values.value_rows, 8 * n * layout.width, tags_of(out.dtype), ints)
    return out
