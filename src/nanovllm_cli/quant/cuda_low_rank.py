"""A weight and what adapters add to its products, on a GPU."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.ranks import scale_ranks
from nanovllm_cli.quant.low_rank import Choice, LowRankStorage
from nanovllm_cli.quant.storage import WeightStorage


class CudaLowRank(LowRankStorage):
    """A WeightStorage. dtype: what is computed in; the second product is added to the first by the kernel that makes it."""

    def __init__(
        self,
        inner: WeightStorage,
        down: WeightStorage,
        up: WeightStorage,
        dtype: torch.dtype,
        launcher: Launcher,
        choice: Choice | None = None,
    ) -> None:
        super().__init__(inner, down, up, choice)
        self._dtype = dtype
        self._launcher = launcher

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        y = self._inner.matmul(x, bias, out_dtype)
        if self._is_idle:
            return y
        between = self._between(x)
        if out_dtype == self._dtype:
            self._up.add_matmul(between, None, y)
        else:  # logits: kernels add to what has the type of their inputs
            added = self._up.matmul(between, None, out_dtype)
            self._launcher.torch_op(lambda: y.add_(added))
        return y

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        if self._is_idle:
            return self._inner.gated_matmul(x, bias, activation)
        return activations.gated_activation(self._launcher, self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        rest = self._inner.add_matmul(x, bias, residual)
        if not self._is_idle:
            self._up.add_matmul(self._between(x), None, residual if rest is None else rest)
        return rest

    def _between(self, x: Hidden) -> torch.Tensor:
        """down x, of each row what it takes."""
        if self._choice is None or (scales := self._choice.chosen.scales) is None:
            return self._down.matmul(x, None, self._dtype)
        ranks = self._down.matmul(x, None, torch.float32)
        return scale_ranks(self._launcher, ranks, scales, self._choice.modules, self._dtype)
