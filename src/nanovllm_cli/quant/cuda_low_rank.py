"""A weight and what an adapter adds to its products, on a GPU."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.low_rank import LowRankStorage
from nanovllm_cli.quant.storage import WeightStorage


class CudaLowRank(LowRankStorage):
    """A WeightStorage. dtype: what is computed in; the second product is added to the first by the kernel that makes it."""

    def __init__(
        self, inner: WeightStorage, down: WeightStorage, up: WeightStorage, dtype: torch.dtype, launcher: Launcher
    ) -> None:
        super().__init__(inner, down, up)
        self._dtype = dtype
        self._launcher = launcher

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        y = self._inner.matmul(x, bias, out_dtype)
        between = self._down.matmul(x, None, self._dtype)
        if out_dtype == self._dtype:
            self._up.add_matmul(between, None, y)
        else:  # logits: kernels add to what has the type of their inputs
            added = self._up.matmul(between, None, out_dtype)
            self._launcher.torch_op(lambda: y.add_(added))
        return y

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return activations.gated_activation(self._launcher, self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        rest = self._inner.add_matmul(x, bias, residual)
        between = self._down.matmul(x, None, self._dtype)
        self._up.add_matmul(between, None, residual if rest is None else rest)
        return rest
