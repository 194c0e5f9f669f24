"""int8 and fp8 weights on a GPU that meet activations of 8 bits: row-major codes, multiplied by a kernel of ours or the vendor's.

Activations are rounded as on a CPU (kernels/quantize_activations.py), together with the norm before them. Sizes must be such as
the library takes: see `fits`. Sums of int8 are whole numbers, so a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

import torch

from nanovllm_cli.kernels import quantize_activations, scaled_gemv, scaled_matmul
from nanovllm_cli.kernels.embedding import scaled_rows
from nanovllm_cli.kernels.experts import Tasks
from nanovllm_cli.kernels.gemv import MAX_ROWS
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.product import After, AfterFew
from nanovllm_cli.kernels.scaled_matmul import SIZES, Scaled, has_e4m3
from nanovllm_cli.quant.cuda_storage import CudaStorage
from nanovllm_cli.quant.format import Format, Fp8, Integer
from nanovllm_cli.quant.rows import Fp8Rows, IntegerRows, QuantizedRows


def fits(form: Format, num_rows: int, width: int, launcher: Launcher, deterministic: bool) -> bool:
    """Whether a weight may be kept this way: codes of 8 bits around 0, a scale a row or 128 columns, activations rounded."""
    if num_rows % SIZES or width % SIZES:
        return False
    match form:
        case Integer():
            centred = form.group == 0 and not form.zeros and not form.ordered
            return form.bits == 8 and centred and form.activation == "int8"
        case Fp8():
            groups = form.num_groups(width)
            return form.activation != "none" and not deterministic and has_e4m3(launcher.capability, groups)
    return False


class CudaScaled(CudaStorage):
    """A WeightStorage of a format that `fits`."""

    def __init__(
        self, form: Integer | Fp8, num_rows: int, width: int, dtype: torch.dtype, launcher: Launcher, deterministic: bool,
        place: torch.device | None = None,
    ) -> None:
        super().__init__(num_rows, width, dtype, launcher, deterministic)
        self._form = form
        groups = form.num_groups(width)
        code = torch.int8 if isinstance(form, Integer) else torch.float8_e4m3fn
        self._weight: Scaled = Scaled(
            torch.empty(num_rows, width, dtype=code, device=place or launcher.device),
            torch.empty(groups, num_rows, dtype=torch.float32, device=place or launcher.device),
        )
        static = isinstance(form, Fp8) and form.activation == "static"
        self._input_scale = torch.empty(1, dtype=torch.float32, device=launcher.device) if static else None

    @property
    def num_bytes(self) -> int:
        return self._weight.codes.nbytes + self._weight.scales.nbytes

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        quantized = self._form.quantize(rows.to(self._launcher.device)) if isinstance(rows, torch.Tensor) else rows
        assert isinstance(quantized, IntegerRows | Fp8Rows)
        codes, scales = quantized.codes, quantized.scales
        here = slice(first_row, first_row + codes.shape[0])
        centred = codes ^ 0x80 if isinstance(quantized, IntegerRows) else codes  # code - 128 of 8 bits
        self._weight.codes[here].copy_(centred.view(self._weight.codes.dtype))
        self._weight.scales[:, here].copy_(scales.t())
        if self._input_scale is not None:
            assert isinstance(quantized, Fp8Rows)
            assert quantized.input_scale is not None, "static activations have a scale"
            self._input_scale.copy_(quantized.input_scale.reshape(1))

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return scaled_rows(self._launcher, ids, *self._weight, self._dtype, table)

    @property
    def task_form(self) -> Hashable:
        """Experts with a scale of their own for what goes in would each need a rounding of their own."""
        there = self._launcher.capability >= scaled_gemv.CAPABILITIES[self._weight.codes.dtype]
        return self._form if there and self._input_scale is None else None

    @property
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self._weight

    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor:
        rounded = self._rounded(x)
        return scaled_gemv.expert_gemv(
            self._launcher, rounded, self._weight, tasks, matrix, dtype=self._dtype, activation=activation
        )

    def _are_few(self, num_rows: int) -> bool:
        """By our kernel, which reads the weight once for up to eight rows."""
        there = self._launcher.capability >= scaled_gemv.CAPABILITIES[self._weight.codes.dtype]
        return there and 0 < num_rows <= MAX_ROWS and not self._deterministic

    def _multiply_few(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[AfterFew]) -> torch.Tensor:
        return scaled_gemv.scaled_gemv(self._launcher, self._rounded(x), self._weight, bias, dtype=self._dtype, **after)

    def _multiply_many(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[After]) -> torch.Tensor:
        return scaled_matmul.matmul(self._launcher, self._rounded(x), self._weight, bias, dtype=self._dtype, **after)

    def _rounded(self, x: Hidden) -> Scaled:
        if isinstance(self._form, Integer):
            codes, scales = quantize_activations.to_int8(self._launcher, x)
        else:
            codes, scales = quantize_activations.to_e4m3(self._launcher, x, self._form.block, self._input_scale)
        return Scaled(codes, scales.t())
