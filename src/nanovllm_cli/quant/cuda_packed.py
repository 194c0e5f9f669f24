"""Weights of 2 to 8 bits on a GPU that meet 16-bit activations: packed as kernels/packed.py says, one copy for all that reads it.

Formats that round activations on a CPU do not here: tensor cores take 16-bit rows as they are, which is the more exact. Those
that gain by it (int8 and fp8 with a scale a row, say) are cuda_scaled.py's, where the GPU has instructions for them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

import torch

from nanovllm_cli.kernels import packed, packed_gemm, packed_gemv, packed_wgmma, unpack
from nanovllm_cli.kernels.experts import Tasks
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.product import After, AfterFew
from nanovllm_cli.quant import cuda_unpacked
from nanovllm_cli.quant.cuda_choice import Way, choose
from nanovllm_cli.quant.cuda_storage import CudaStorage, count_rows
from nanovllm_cli.quant.format import SCALE_TYPES, Fp8, Integer, Nf4
from nanovllm_cli.quant.rows import AffineRows, BlockRows, IntegerRows, QuantizedRows

MIDDLE_OF_4 = 8
"""The code of zero in four bits."""


class CudaPacked(CudaStorage):
    """A WeightStorage of one format. 2 and 3 bits take the memory of 4. counters: of `packed_gemm.new_counters`, for all weights.
    UnsupportedError for groups without a kernel."""

    def __init__(
        self,
        form: Integer | Fp8 | Nf4,
        num_rows: int,
        width: int,
        dtype: torch.dtype,
        launcher: Launcher,
        deterministic: bool,
        counters: torch.Tensor,
        place: torch.device | None = None,
    ) -> None:
        super().__init__(num_rows, width, dtype, launcher, deterministic)
        form.check_width(width)
        self._form = form
        self._counters = counters
        kind, group, scales = _layout(form)
        zeros = isinstance(form, Integer) and form.zeros
        ordered = isinstance(form, Integer) and form.ordered
        self._weight: packed.Packed = packed.empty(
            kind, num_rows, width, group, scales, zeros=zeros, ordered=ordered, device=place or launcher.device
        )

    @property
    def num_bytes(self) -> int:
        return self._weight.num_bytes

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        quantized = self._form.quantize(rows.to(self._launcher.device)) if isinstance(rows, torch.Tensor) else rows
        assert not isinstance(quantized, AffineRows | BlockRows), "rows of this format"
        codes, zeros, order = quantized.codes, None, None
        if isinstance(quantized, IntegerRows):
            assert isinstance(self._form, Integer)
            zeros, order = quantized.zeros, quantized.order
            if zeros is None and self._form.bits < 4:
                codes = codes + (MIDDLE_OF_4 - self._form.middle)
        scales = self._spread(quantized.scales)
        zeros = None if zeros is None else self._spread(zeros)
        packed.pack_rows(self._weight, first_row, codes, scales, zeros, order, on=self._launcher.device)

    def _spread(self, by_group: torch.Tensor) -> torch.Tensor:
        """[n, G] of the format's groups as [n, G] of the layout's, which may be smaller."""
        form = self._form
        group = form.block if isinstance(form, Fp8) else form.group
        return by_group if not group else by_group.repeat_interleave(group // self._weight.group, 1)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return unpack.packed_rows(self._launcher, self._weight, ids, self._dtype, table)

    @property
    def task_form(self) -> Hashable:
        return None if self._weight.order is not None else self._form

    @property
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self._weight.codes, self._weight.scales, self._weight.zeros)

    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor:
        return packed_gemv.expert_gemv(self._launcher, x, self._weight, tasks, matrix, activation=activation)

    def _are_few(self, num_rows: int) -> bool:
        return self._way(num_rows) == "gemv"

    def _multiply_few(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[AfterFew]) -> torch.Tensor:
        return packed_gemv.packed_gemv(self._launcher, x, self._weight, bias, **after)

    def _multiply_many(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[After]) -> torch.Tensor:
        launcher, weight = self._launcher, self._weight
        way = self._way(count_rows(x))
        if way == "gemm":
            return packed_gemm.packed_gemm(launcher, self._normed(x), weight, bias, self._counters, **after)
        if way == "wgmma":
            return packed_wgmma.packed_wgmma(launcher, self._normed(x), weight, bias, self._counters, **after)

        def rows(first: int, count: int) -> torch.Tensor:
            return unpack.unpack(launcher, weight, first, count, self._dtype)

        return cuda_unpacked.matmul(launcher, self._normed(x), self.num_rows, rows, bias, deterministic=False, **after)

    def _way(self, num_rows: int) -> Way:
        """A deterministic GPU has one way, whose rows have the same bits at every number of them."""
        return "gemm" if self._deterministic else choose(self._weight.kind, num_rows, self._launcher.capability)


def _layout(form: Integer | Fp8 | Nf4) -> tuple[packed.Kind, int, torch.dtype]:
    """Kind, columns that share a scale in memory (0: a row), type of the scales. Groups without a kernel are cut into some that
    have one, where they can be."""
    match form:
        case Fp8():
            return "fp8", form.block, torch.float32
        case Nf4():
            kind: packed.Kind = "nf4"
            scales = torch.float32
        case Integer():
            kind = "int8" if form.bits == 8 else "int4"
            scales = SCALE_TYPES[form.scales]
    cut = [group for group in packed.GROUPS if group and form.group % group == 0]
    return kind, max(cut) if form.group and cut else form.group, scales
