"""bf16 and fp16 weights on a GPU, row-major: one copy for our kernels, the vendor's matmul and embedding look-ups."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels import embedding, gemm, gemv, library, norm
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden, Normed
from nanovllm_cli.quant.rows import QuantizedRows


class CudaDense:
    """A WeightStorage in the compute type. Up to eight rows have kernels of their own, with norm, gate and residual in them; a
    deterministic GPU multiplies any number of rows by one kernel instead."""

    recordable = True

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, launcher: Launcher, deterministic: bool
    ) -> None:
        self.num_rows = num_rows
        self.width = width
        self._launcher = launcher
        self._deterministic = deterministic
        self._weight = torch.empty(num_rows, width, dtype=dtype, device=launcher.device)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        assert isinstance(rows, torch.Tensor), "plain weights"
        self._weight[first_row : first_row + rows.shape[0]].copy_(rows)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return embedding.embedding(self._launcher, ids, self._weight, tokens=table)

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        return self._matmul(x, bias, None, out_dtype)

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        if self._has_few(x):
            return gemv.gemv(self._launcher, x, self._weight, bias, activation=activation)
        y = self._matmul(x, bias, None, self._weight.dtype)
        return activations.gated_activation(self._launcher, y, activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
        self._matmul(x, bias, residual, self._weight.dtype)

    def _matmul(
        self, x: Hidden, bias: torch.Tensor | None, residual: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        if self._has_few(x):
            return gemv.gemv(self._launcher, x, self._weight, bias, residual=residual, out_dtype=out_dtype)
        if isinstance(x, Normed):
            x = norm.add_rms_norm(self._launcher, x.rows, None, x.weight, x.eps, x.offset)
        multiply = gemm.gemm if self._deterministic else library.matmul
        return multiply(self._launcher, x, self._weight, bias, residual=residual, out_dtype=out_dtype)

    def _has_few(self, x: Hidden) -> bool:
        rows = x.rows if isinstance(x, Normed) else x
        return 0 < rows.shape[0] <= gemv.MAX_ROWS and not self._deterministic
