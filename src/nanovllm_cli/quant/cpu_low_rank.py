"""A weight and what an adapter adds to its products, on a CPU."""

from __future__ import annotations

import torch

from nanovllm_cli.kernels import cpu
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.low_rank import LowRankStorage
from nanovllm_cli.quant.storage import WeightStorage


class CpuLowRank(LowRankStorage, CpuStorage):
    """A WeightStorage. dtype: what is computed in; both products are added in fp32, and rounded once. pool: where they lie
    meanwhile, one for all weights of a model."""

    def __init__(
        self, inner: WeightStorage, down: WeightStorage, up: WeightStorage, dtype: torch.dtype, pool: cpu.Pool
    ) -> None:
        LowRankStorage.__init__(self, inner, down, up)
        CpuStorage.__init__(self, self.num_rows, self.width, dtype)
        self._pool = pool

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        with cpu.kept_memory(self._pool):
            own = self._inner.matmul(x, None, torch.float32)
            added = self._up.matmul(self._down.matmul(x, None, self._dtype), None, torch.float32)
        return cpu.add(own, added, bias, out_dtype)
