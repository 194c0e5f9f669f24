"""A weight and what adapters add to its products, on a GPU: one product for all of them, whose ranks stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nanovllm_cli.kernels import activation as activations
from nanovllm_cli.kernels.kernel import Launcher
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.kernels.ranks import scale_ranks
from nanovllm_cli.quant.low_rank import Beside, Chosen, LowRankStorage
from nanovllm_cli.quant.storage import WeightStorage


class CudaLowRank(LowRankStorage):
    """A WeightStorage. keep: makes a plain one of a matrix. dtype: what is computed in; the second product is added to the first
    by the kernel that makes it."""

    def __init__(
        self,
        inner: WeightStorage,
        sides: Sequence[Beside],
        keep: Callable[[torch.Tensor], WeightStorage],
        dtype: torch.dtype,
        launcher: Launcher,
        chosen: Chosen | None = None,
    ) -> None:
        super().__init__(inner, chosen)
        self._down = keep(torch.cat([side.down for side in sides]))
        self._up = keep(torch.cat([side.up for side in sides], 1))
        modules = [side.module for side in sides for _ in range(side.down.shape[0])]
        self._modules = torch.tensor(modules, dtype=torch.int32).to(launcher.device)
        self._dtype = dtype
        self._launcher = launcher

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes + self._down.num_bytes + self._up.num_bytes

    @property
    def recordable(self) -> bool:
        return self._inner.recordable and self._down.recordable and self._up.recordable

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        y = self._inner.matmul(x, bias, out_dtype)
        if self._is_idle:
            return y
        ranks = self._ranks(x)
        if out_dtype == self._dtype:
            self._up.add_matmul(ranks, None, y)
        else:  # logits: kernels add to what has the type of their inputs
            added = self._up.matmul(ranks, None, out_dtype)
            self._launcher.torch_op(lambda: y.add_(added))
        return y

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        if self._is_idle:
            return self._inner.gated_matmul(x, bias, activation)
        return activations.gated_activation(self._launcher, self.matmul(x, bias, self._dtype), activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        rest = self._inner.add_matmul(x, bias, residual)
        if not self._is_idle:
            self._up.add_matmul(self._ranks(x), None, residual if rest is None else rest)
        return rest

    def _ranks(self, x: Hidden) -> torch.Tensor:
        """down x, of each row what it takes."""
        if self._chosen is None or (scales := self._chosen.scales) is None:
            return self._down.matmul(x, None, self._dtype)
        return scale_ranks(self._launcher, self._down.matmul(x, None, torch.float32), scales, self._modules, self._dtype)
