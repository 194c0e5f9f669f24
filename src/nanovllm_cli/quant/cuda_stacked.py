"""Several weights on a GPU that read the same input, each in a format of its own: q, k and v of a Q4_K_M file, say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.rows import QuantizedRows, num_rows
from nanovllm_cli.quant.storage import WeightStorage


class CudaStacked:
    """A WeightStorage whose rows are its parts' rows behind each other. dtype: what is computed in.

    Each part does the norm before it by itself, which costs a GPU less than a launch; the results are joined by one.
    """

    recordable = True

    def __init__(self, parts: Sequence[WeightStorage], dtype: torch.dtype, launcher: Launcher) -> None:
        self.num_rows = sum(part.num_rows for part in parts)
        self.width = parts[0].width
        self._parts = parts
        self._dtype = dtype
        self._launcher = launcher

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        for part in self._parts:
            if first_row < part.num_rows:
                assert first_row + num_rows(rows) <= part.num_rows, "rows of one part at a time"
                part.load_rows(first_row, rows)
                return
            first_row -= part.num_rows
        raise AssertionError("rows beyond the last part")

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        results = []
        first = 0
        for part in self._parts:
            own_bias = None if bias is None else bias[first : first + part.num_rows]
            results.append(part.matmul(x, own_bias, out_dtype))
            first += part.num_rows
        out = torch.empty(results[0].shape[0], self.num_rows, dtype=out_dtype, device=results[0].device)
        self._launcher.torch_op(lambda: torch.cat(results, 1, out=out))
        return out

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return activations.gated_activation(self._launcher, self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
        y = self.matmul(x, bias, self._dtype)
        self._launcher.torch_op(lambda: residual.add_(y))

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        raise AssertionError("an embedding has one part")
