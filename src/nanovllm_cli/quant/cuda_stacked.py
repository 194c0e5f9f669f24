"""Several weights on a GPU that read the same input, each in a format of its own: q, k and v of a Q4_K_M file, say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.storage import Stacked, WeightStorage


class CudaStacked(Stacked):
    """A WeightStorage whose rows are its parts' rows behind each other. dtype: what is computed in.

    Each part does the norm before it by itself, which costs a GPU less than a launch; the results are joined by one.
    """

    recordable = True

    def __init__(self, parts: Sequence[WeightStorage], dtype: torch.dtype, launcher: Launcher) -> None:
        super().__init__(parts)
        self._dtype = dtype
        self._launcher = launcher

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        results = []
        for part, columns in self._columns():
            results.append(part.matmul(x, None if bias is None else bias[columns], out_dtype))
        out = torch.empty(results[0].shape[0], self.num_rows, dtype=out_dtype, device=results[0].device)
        self._launcher.torch_op(lambda: torch.cat(results, 1, out=out))
        return out

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return activations.gated_activation(self._launcher, self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
        y = self.matmul(x, bias, self._dtype)
        self._launcher.torch_op(lambda: residual.add_(y))
