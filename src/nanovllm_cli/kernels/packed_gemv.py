"""Matmul of one to eight rows with a packed weight on a GPU (packed_gemv.cu): what gemv.py has, for int4, int8, fp8 and nf4."""

from __future__ import annotations

import numpy as np
import torch

from nanovllm_cli.kernels import product
from nanovllm_cli.kernels.activation import ACTIVATIONS, gated_activation, has_gate
from nanovllm_cli.kernels.experts import Tasks, blocks_of, check_rows, from_tasks
from nanovllm_cli.kernels.gemv import MAX_ROWS, RESIDENT, WARPS, parts_of, rows_at_once, strips_of
from nanovllm_cli.kernels.kernel import WARP, Kernel, Launcher, mma_capability, type_name, widest
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.packed import BITS, TILE_COLUMNS, TILE_OUTPUTS, Kind, Packed, empty

LOADS = 4
"""16-byte loads of a lane that make a unit, as packed_gemv.cu has it."""
STATIC_SHARED = 20 << 10


def packed_gemv(
    launcher: Launcher,
    x: Hidden,
    weight: Packed,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] @ weight [N, K].T + bias [N] for M <= 8; residual, activation, out_dtype: see `product.AfterFew`. A weight with an
    order of columns meets x in that order. A row's bits do not depend on the others'."""
    source, gain, eps, offset = product.checked_input(launcher, x)
    (rows, width), dtype, num_rows = source.shape, source.dtype, weight.num_rows
    if has_gate(activation) and num_rows // 2 % TILE_OUTPUTS:  # gate and up share a tile
        return gated_activation(launcher, packed_gemv(launcher, x, weight, bias), activation)
    assert 0 < rows <= MAX_ROWS, rows
    assert width == weight.width, (width, weight.width)
    product.check_tensor_cores(launcher, dtype)
    weight.check(launcher)
    out = product.output_for(
        launcher, rows, num_rows, dtype, bias, residual=residual, activation=activation, out_dtype=out_dtype
    )
    outputs = out.shape[1]
    if not outputs:
        return out

    strips, parts, panels = _division(launcher, weight, outputs, has_gate(activation))
    grid = min(panels, launcher.num_multiprocessors * RESIDENT)
    has_norm = gain is not None
    kernel = variant(weight, dtype, out.dtype, strips, has_norm, activation)
    staged = has_norm or weight.order is not None
    stride = weight.codes.shape[1] * TILE_COLUMNS + 8
    at_once = rows_at_once(stride, launcher.capability, STATIC_SHARED) if staged else rows
    for first in range(0, rows, at_once):  # once, but for very wide rows
        last = min(rows, first + at_once)
        target = out[first:last]
        args = (
            None, source[first:last], gain, weight.codes, weight.scales, weight.zeros, weight.order, bias,
            None if residual is None else target, target,
            np.int32(last - first), np.int32(width), np.int32(outputs), np.int32(parts), np.float32(eps), np.float32(offset),
            np.int32(1),
        )  # fmt: skip
        shared = (last - first + has_norm) * stride * 2 if staged else 0
        launcher.launch(kernel, (grid, 1, 1), (WARPS * WARP, 1, 1), args, shared)
    return out


def expert_gemv(
    launcher: Launcher, x: torch.Tensor, weight: Packed, tasks: Tasks, matrix: int, *, activation: str | None = None
) -> torch.Tensor:
    """See `gemv.expert_gemv`. Not for weights with an order of columns."""
    width, num_rows, dtype = weight.width, weight.num_rows, x.dtype
    assert weight.order is None
    check_rows(launcher, x, tasks, matrix, width)
    if has_gate(activation) and num_rows // 2 % TILE_OUTPUTS:  # gate and up share a tile
        return gated_activation(launcher, expert_gemv(launcher, x, weight, tasks, matrix), activation)
    product.check_tensor_cores(launcher, dtype)
    weight.check(launcher)
    out = product.output_for(launcher, tasks.num_pairs, num_rows, dtype, None, activation=activation)
    outputs = out.shape[1]
    strips, parts, panels = _division(launcher, weight, outputs, has_gate(activation))
    args = (
        tasks.words, x, None, None, None, None, None, None, None, out, np.int32(0), np.int32(width), np.int32(outputs),
        np.int32(parts), np.float32(0), np.float32(0), np.int32(tasks.taken),
    )  # fmt: skip
    kernel = from_tasks(variant(weight, dtype, dtype, strips, False, activation), matrix)
    blocks = blocks_of(tasks, panels, launcher.num_multiprocessors * RESIDENT)
    launcher.launch(kernel, (tasks.words.shape[0], blocks, 1), (WARPS * WARP, 1, 1), args)
    return out


def _division(launcher: Launcher, weight: Packed, outputs: int, gated: bool) -> tuple[int, int, int]:
    """Strips of a warp, warps that share a row, and panels."""
    strips = 2 if gated else strips_of(outputs, TILE_OUTPUTS, launcher.num_multiprocessors)
    warp_outputs = TILE_OUTPUTS * (1 if gated else strips)
    parts = parts_of(outputs, weight.width, warp_outputs, unit_of(weight, strips), launcher.num_multiprocessors)
    return strips, parts, -(-outputs // (WARPS // parts * warp_outputs))


def unit_of(weight: Packed, strips: int) -> int:
    """Columns of a warp's LOADS loads a lane."""
    return TILE_COLUMNS * LOADS // (strips * BITS[weight.kind] // 4)


def variant(
    weight: Packed, dtype: torch.dtype, out_dtype: torch.dtype, strips: int, norm: bool, activation: str | None
) -> Kernel:
    """Of the weight only what its kernels are compiled for counts: see `Packed.constants`."""
    ordered = weight.order is not None
    constants = (
        ("DTYPE", type_name(dtype)), ("OUT", type_name(out_dtype)), *weight.constants, ("ORDERED", int(ordered)),
        ("TAIL", int(weight.width % unit_of(weight, strips) != 0)), ("VECTOR", 1 if ordered else widest(weight.width, dtype)),
        ("STRIPS", strips), ("NORM", int(norm)), ("ACTIVATION", ACTIVATIONS[activation]),
    )  # fmt: skip
    return Kernel("packed_gemv", "packed_gemv", constants, mma_capability(dtype))


def variants() -> list[Kernel]:
    """What the compile gate builds: each kind as it is met most, and what takes more registers than that."""
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32

    def of(kind: Kind, group: int, scale: torch.dtype, zeros: bool = False, ordered: bool = False, width: int = 1024) -> Packed:
        return empty(kind, TILE_OUTPUTS, width, group, scale, zeros=zeros, ordered=ordered, device="meta")

    int4, int8, fp8, nf4 = of("int4", 128, bf16), of("int8", 0, bf16), of("fp8", 128, single), of("nf4", 64, single)
    kernels = [variant(weight, bf16, bf16, 1, False, None) for weight in (int4, int8, fp8, nf4)]
    kernels += [variant(weight, bf16, bf16, 2, True, None) for weight in (int4, int8, fp8, nf4)]
    kernels += [variant(weight, half, half, 2, True, None) for weight in (of("int4", 128, half, True), int8, fp8, nf4)]
    kernels += [variant(weight, bf16, bf16, 2, True, activation) for weight in (int4, nf4) for activation in ("silu", "relu2")]
    wide = of("int8", 32, half, True)
    kernels += [variant(wide, bf16, bf16, 2, True, activation) for activation in (None, "silu", "relu2")]
    kernels += [variant(weight, bf16, bf16, strips, False, "lone_gelu") for weight in (int4, nf4, wide) for strips in (1, 2)]
    kernels += [variant(int4, bf16, single, 2, True, None)]
    kernels += [variant(of("int4", 32, single, True, True), half, half, 2, True, None)]
    kernels += [from_tasks(variant(weight, bf16, bf16, 2, False, "silu"), 0) for weight in (int4, int8, fp8, nf4)]
    kernels += [from_tasks(variant(weight, bf16, bf16, 2, False, "relu2"), 0) for weight in (int4, fp8)]
    kernels += [from_tasks(variant(weight, bf16, bf16, strips, False, None), 1) for weight in (int4, fp8) for strips in (1, 2)]
    kernels += [variant(of("int8", 0, bf16, width=1001), half, half, 1, False, None)]
    return kernels
