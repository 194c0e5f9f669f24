"""GGUF's blocks on a GPU: packed as kernels/block_records.py says, one copy for all that reads it.

Few rows of activations are rounded to int8 by the CPU's rule and multiplied as whole numbers; more rows meet the blocks' own
numbers in 16 bits.
"""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import block_gemv, block_unpack
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant import block_layout, cuda_unpacked
from nanovllm_cli.quant.cuda_choice import choose
from nanovllm_cli.quant.cuda_storage import CudaStorage, count_rows
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.rows import BlockRows, QuantizedRows


class CudaBlocks(CudaStorage):
    """A WeightStorage of a type in `block_layout.TYPES`. rounds: few rows of activations are rounded."""

    def __init__(
        self, form: Blocks, num_rows: int, width: int, dtype: torch.dtype, launcher: Launcher, deterministic: bool, rounds: bool
    ) -> None:
        super().__init__(num_rows, width, dtype, launcher, deterministic)
        self._form = form
        self._rounds = rounds
        self._weight = block_layout.empty(form.type, num_rows, width, launcher.device)

    @property
    def num_bytes(self) -> int:
        return self._weight.data.nbytes

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        quantized = self._form.quantize(rows) if isinstance(rows, torch.Tensor) else rows
        assert isinstance(quantized, BlockRows), "rows of this format"
        block_layout.pack_rows(self._weight, first_row, quantized.data)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return block_unpack.block_rows(self._launcher, self._weight, ids, self._dtype, table)

    def _takes_gate(self, num_rows: int) -> bool:
        few = choose("blocks", num_rows, self._launcher.capability) == "gemv"
        return few and self._rounds and not self._deterministic

    def _multiply(
        self,
        x: Hidden,
        bias: torch.Tensor | None,
        *,
        residual: torch.Tensor | None = None,
        activation: str | None = None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        launcher, weight = self._launcher, self._weight
        if self._takes_gate(count_rows(x)):
            return block_gemv.block_gemv(
                launcher, x, weight, bias, residual=residual, activation=activation, out_dtype=out_dtype
            )

        def rows(first: int, count: int) -> torch.Tensor:
            return block_unpack.unpack(launcher, weight, first, count, self._dtype)

        x = self._normed(x)
        return cuda_unpacked.matmul(launcher, x, self.num_rows, rows, bias, residual, out_dtype, self._deterministic)
