"""A weight and what adapters add to its products, on a CPU."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import adapters, cpu
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.low_rank import Choice, LowRankStorage
from nanovllm_cli.quant.storage import WeightStorage


class CpuLowRank(LowRankStorage, CpuStorage):
    """A WeightStorage. dtype: what is computed in; both products are added in fp32, and rounded once. pool: where they lie
    meanwhile, one for all weights of a model."""

    def __init__(
        self,
        inner: WeightStorage,
        down: WeightStorage,
        up: WeightStorage,
        dtype: torch.dtype,
        pool: cpu.Pool,
        choice: Choice | None = None,
    ) -> None:
        LowRankStorage.__init__(self, inner, down, up, choice)
        CpuStorage.__init__(self, self.num_rows, self.width, dtype)
        self._pool = pool

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        if self._is_idle:
            return self._inner.matmul(x, bias, out_dtype)
        with cpu.kept_memory(self._pool):
            own = self._inner.matmul(x, None, torch.float32)
            added = self._up.matmul(self._between(x), None, torch.float32)
        return adapters.add(own, added, bias, out_dtype)

    def _between(self, x: Hidden) -> torch.Tensor:
        """down x, of each row what it takes."""
        if self._choice is None or (scales := self._choice.chosen.scales) is None:
            return self._down.matmul(x, None, self._dtype)
        return adapters.scale_ranks(self._down.matmul(x, None, torch.float32), scales, self._choice.modules, self._dtype)
