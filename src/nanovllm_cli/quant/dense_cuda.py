"""bf16 and fp16 weights on a GPU, row-major: one copy for our kernels, the vendor's matmul and embedding look-ups."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels import embedding, gemm, gemv, library
from nanovllm_cli.kernels.experts import FEW_ROWS, MANY_ROWS, Tasks
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.product import After, AfterFew
from nanovllm_cli.quant.cuda_storage import CudaStorage
from nanovllm_cli.quant.rows import QuantizedRows


class CudaDense(CudaStorage):
    """A WeightStorage in the compute type. Up to eight rows have kernels of their own, with norm, gate and residual in them; a
    deterministic GPU multiplies any number of rows by one kernel instead."""

    task_rows = MANY_ROWS

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, launcher: Launcher, deterministic: bool,
        place: torch.device | None = None,
    ) -> None:
        super().__init__(num_rows, width, dtype, launcher, deterministic)
        self._weight: torch.Tensor = torch.empty(num_rows, width, dtype=dtype, device=place or launcher.device)

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        assert isinstance(rows, torch.Tensor), "plain weights"
        self._weight[first_row : first_row + rows.shape[0]].copy_(rows)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return embedding.embedding(self._launcher, ids, self._weight, tokens=table)

    @property
    def task_form(self) -> Hashable:
        return "dense"

    @property
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self._weight,)

    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor:
        if tasks.rows == FEW_ROWS:
            return gemv.expert_gemv(self._launcher, x, self._weight, tasks, matrix, activation=activation)
        y = gemm.expert_gemm(self._launcher, x, self._weight, tasks, matrix)
        return activations.gated_activation(self._launcher, y, activation) if activation else y

    def _are_few(self, num_rows: int) -> bool:
        return 0 < num_rows <= gemv.MAX_ROWS and not self._deterministic

    def _multiply_few(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[AfterFew]) -> torch.Tensor:
        return gemv.gemv(self._launcher, x, self._weight, bias, **after)

    def _multiply_many(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[After]) -> torch.Tensor:
        multiply = gemm.gemm if self._deterministic else library.matmul
        return multiply(self._launcher, self._normed(x), self._weight, bias, **after)
