"""GGUF's blocks, and MLX's codes with minima, on a GPU: packed as kernels/block_records.py says, one copy for all that reads it.

Few rows of activations are rounded to int8 by the CPU's rule and multiplied as whole numbers; more rows meet the blocks' own
numbers in 16 bits. A deterministic GPU rounds any number: to unpack the weight for each token costs more than prompts lose.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Unpack

import torch

from nanovllm_cli.kernels import block_gemv, block_unpack
from nanovllm_cli.kernels.block_records import PackedBlocks
from nanovllm_cli.kernels.experts import Tasks
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.product import After, AfterFew
from nanovllm_cli.quant import block_layout, cuda_unpacked
from nanovllm_cli.quant.cuda_choice import choose
from nanovllm_cli.quant.cuda_storage import CudaStorage
from nanovllm_cli.quant.format import Affine, Blocks
from nanovllm_cli.quant.rows import AffineRows, BlockRows, QuantizedRows


class CudaBlocks(CudaStorage):
    """A WeightStorage of any type of GGUF's, or of codes with minima. rounds: few rows of activations are rounded, or all on a
    deterministic GPU."""

    def __init__(
        self, form: Blocks | Affine, num_rows: int, width: int, dtype: torch.dtype, launcher: Launcher, deterministic: bool,
        rounds: bool, place: torch.device | None = None,
    ) -> None:
        super().__init__(num_rows, width, dtype, launcher, deterministic)
        self._form = form
        self._rounds = rounds
        self._weight: PackedBlocks = block_layout.empty(form, num_rows, width, place or launcher.device)

    @property
    def num_bytes(self) -> int:
        return self._weight.data.nbytes

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        quantized = self._form.quantize(rows.cpu()) if isinstance(rows, torch.Tensor) else rows
        assert isinstance(quantized, BlockRows | AffineRows), "rows of this format"
        block_layout.pack_rows(self._weight, first_row, quantized, self._launcher.device)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return block_unpack.block_rows(self._launcher, self._weight, ids, self._dtype, table)

    @property
    def task_form(self) -> Hashable:
        return self._form if self._rounds else None

    @property
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return (self._weight.data,)

    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor:
        return block_gemv.expert_gemv(self._launcher, x, self._weight, tasks, matrix, activation=activation)

    def _are_few(self, num_rows: int) -> bool:
        few = choose("blocks", num_rows, self._launcher.capability) == "gemv"
        return few and self._rounds and not self._deterministic

    def _multiply_few(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[AfterFew]) -> torch.Tensor:
        return block_gemv.block_gemv(self._launcher, x, self._weight, bias, **after)

    def _multiply_many(self, x: Hidden, bias: torch.Tensor | None, **after: Unpack[After]) -> torch.Tensor:
        if self._deterministic and self._rounds:
            return block_gemv.block_gemv(self._launcher, x, self._weight, bias, **after)

        def rows(first: int, count: int) -> torch.Tensor:
            return block_unpack.unpack(self._launcher, self._weight, first, count, self._dtype)

        x = self._normed(x)
        return cuda_unpacked.matmul(self._launcher, x, self.num_rows, rows, bias, deterministic=self._deterministic, **after)
