"""Matmuls of 8-bit activations with 8-bit weights on a GPU: the vendor's library, through torch, and scales behind it.

    e4m3, a scale a row         torch._scaled_mm with a scale a row of both on sm_90, where a product fills it: others with many
                                columns are an error of cuBLASLt's (pytorch/ao issue 4582). Else without scales, which follow:
                                before torch 2.12 sm_89 multiplies by rows on the wrong stream, newer GPUs for bfloat16 alone
    e4m3, one for 128 columns   torch._scaled_mm_v2, scales a row and 128 columns of both, which cuBLASLt has for sm_90 only
                                Both kinds of scales are cuBLASLt's from CUDA 12.9 on; with an older one torch has none for 128
                                columns, and by rows another kernel
    int8, a scale a row         torch._int_mm, which wants more than 16 rows; scales follow

A row's bits may depend on how many there are, except of int8: its sums are whole numbers. Legend: M rows, K columns (inputs), N
outputs, G groups of 128 along K, or one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType

from nanovllm_cli.kernels.kernel import Launcher, check
from nanovllm_cli.kernels.scale_sums import scale_sums

SIZES = 16
"""N and K are multiples of it."""
LEAST_INT_ROWS = 17
BLOCK = 128
TILE = 128
"""Rows and columns of a product that a block of the library's computes, about."""
SCALES_SINCE = (12, 9)
"""The CUDA whose cuBLASLt multiplies with a scale a row, or 128 columns."""
BLOCK_ROWS = 4
"""With scales for 128 columns, rows are a multiple of it."""
FAST_SUMS = False
"""Whether Hopper's tensor cores add products of e4m3 with scales a row to the end, in the few bits that they have for it, and not
only short stretches of them, whose sums are added in float32. How much faster that is has not been measured."""


class Scaled(NamedTuple):
    """A weight or activations: codes [rows, K] int8 or e4m3, times scales fp32 [G, rows]."""

    codes: torch.Tensor
    scales: torch.Tensor


def has_e4m3(capability: int, groups: int) -> bool:
    return _scales_inside(capability) if groups > 1 else capability >= 89


def scales_rows(launcher: Launcher, rows: int, outputs: int) -> bool:
    """Whether a product [rows, outputs] of e4m3 may have its scales of rows in it."""
    tiles = -(-rows // TILE) * -(-outputs // TILE)
    return _scales_inside(launcher.capability) and tiles >= launcher.num_multiprocessors


def _scales_inside(capability: int) -> bool:
    """Whether the library's products of e4m3 have scales a row; without CUDA it is not the library that multiplies."""
    version = torch.version.cuda
    return 90 <= capability < 100 and (version is None or tuple(map(int, version.split("."))) >= SCALES_SINCE)


def matmul(
    launcher: Launcher,
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias: [M, N] in out_dtype, dtype or float32. dtype: of bias and residual.

    residual [M, N]: the product is added to it in place, and it is what is returned.
    """
    (rows, width), outputs = x.codes.shape, weight.codes.shape[0]
    kind, groups = weight.codes.dtype, weight.scales.shape[0]
    out_dtype = out_dtype or dtype
    assert width % SIZES == 0, width
    assert outputs % SIZES == 0, outputs
    assert residual is None or out_dtype == dtype
    check(x.codes, launcher, kind, rows, width)
    check(x.scales, launcher, torch.float32, groups, rows)
    check(weight.codes, launcher, kind, outputs, width)
    check(weight.scales, launcher, torch.float32, groups, outputs)
    if bias is not None:
        check(bias, launcher, dtype, outputs)
    if kind == torch.int8:
        sums = _whole_sums(launcher, x.codes, weight.codes)
    elif groups == 1 and not (out_dtype == dtype and scales_rows(launcher, rows, outputs)):
        sums = torch.empty(rows, outputs, dtype=torch.float32, device=x.codes.device)
        one = torch.empty(1, dtype=torch.float32, device=x.codes.device)
        launcher.torch_op(lambda: _plain_sums(x.codes, weight.codes, one, sums))
    else:
        return _scaled(launcher, x, weight, bias, residual, out_dtype)
    return scale_sums(launcher, sums, x.scales, weight.scales, bias, residual, dtype, out_dtype)


def _whole_sums(launcher: Launcher, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int32 [M, N]."""
    rows, width = x.shape
    most = max(rows, LEAST_INT_ROWS)
    padded = x if most == rows else torch.empty(most, width, dtype=torch.int8, device=x.device)
    sums = torch.empty(most, weight.shape[0], dtype=torch.int32, device=x.device)

    def compute() -> None:
        if most > rows:
            padded[:rows].copy_(x)  # what the other rows hold goes into sums that nobody reads
        torch._int_mm(padded, weight.t(), out=sums)

    launcher.torch_op(compute)
    return sums[:rows]


def _plain_sums(x: torch.Tensor, weight: torch.Tensor, one: torch.Tensor, sums: torch.Tensor) -> None:
    one.fill_(1.0)
    torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32, out=sums)


def _scaled(
    launcher: Launcher,
    x: Scaled,
    weight: Scaled,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Scales go into the product; what is added to the residual is rounded before, where the library rounds to its type."""
    rows, groups = x.codes.shape[0], x.scales.shape[0]
    padded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS if groups > 1 else rows
    made = torch.float32 if groups > 1 and out_dtype == torch.float16 else out_dtype  # torch tests blocks to it and bfloat16
    out = torch.empty(padded, weight.codes.shape[0], dtype=made, device=x.codes.device)
    found = out[:rows] if residual is None else residual
    if made != out_dtype and residual is None:
        found = torch.empty(rows, out.shape[1], dtype=out_dtype, device=out.device)

    def compute() -> None:
        if not x.codes.is_cuda:
            _on_host(_padded(x, padded), weight, bias, out)
        elif groups == 1:
            args = (x.codes, weight.codes.t(), x.scales.view(-1, 1), weight.scales)
            torch._scaled_mm(*args, bias=bias, out_dtype=out_dtype, use_fast_accum=FAST_SUMS, out=out)
        else:
            _blocks_on_gpu(_padded(x, padded), weight, out)
            if bias is not None:
                out.add_(bias)
        if residual is not None:
            residual.add_(out[:rows])
        elif made != out_dtype:
            found.copy_(out[:rows])

    launcher.torch_op(compute)
    return found


def _padded(x: Scaled, rows: int) -> Scaled:
    """With rows of zeros behind the last."""
    more = rows - x.codes.shape[0]
    if not more:
        return x
    codes = torch.nn.functional.pad(x.codes.view(torch.uint8), (0, 0, 0, more)).view(x.codes.dtype)
    return Scaled(codes, torch.nn.functional.pad(x.scales, (0, more)))


def _blocks_on_gpu(x: Scaled, weight: Scaled, out: torch.Tensor) -> None:
    recipe = [ScalingType.BlockWise1x128.value]
    torch._scaled_mm_v2(
        x.codes, weight.codes.t(), [x.scales.t()], recipe, [], [weight.scales.t()], recipe, [], None, out.dtype, out=out
    )


def _on_host(x: Scaled, weight: Scaled, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """The same in float32 and rounded once, for kernels that run without a GPU: torch's own take scales of rows from 2.12 on."""
    total = x.codes.float() * _by_column(x) @ (weight.codes.float() * _by_column(weight)).t()
    out.copy_(total if bias is None else total + bias.float())


def _by_column(side: Scaled) -> torch.Tensor:
    """Its scales [rows, K], or [rows, 1] where a row has one."""
    scales = side.scales.t()
    return scales if scales.shape[1] == 1 else scales.repeat_interleave(BLOCK, 1)[:, : side.codes.shape[1]]
