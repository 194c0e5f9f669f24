"""A weight and what adapters add to its products, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm_cli.kernels.adapters import Side, Sides
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.low_rank import Beside, Chosen, LowRankStorage
from nanovllm_cli.quant.storage import WeightStorage


class CpuLowRank(LowRankStorage, CpuStorage):
    """A WeightStorage. dtype: what is computed in."""

    def __init__(
        self, inner: WeightStorage, sides: Sequence[Beside], dtype: torch.dtype, chosen: Chosen | None = None
    ) -> None:
        LowRankStorage.__init__(self, inner, chosen)
        CpuStorage.__init__(self, self.num_rows, self.width, dtype)
        self._sides = Sides([Side(each.down.to(dtype), each.up.to(dtype), each.module) for each in sides], self.width, dtype)

    @property
    def num_bytes(self) -> int:
        return self._inner.num_bytes + self._sides.num_bytes

    @property
    def recordable(self) -> bool:
        return self._inner.recordable and self._sides.recordable

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        y = self._inner.matmul(x, bias, out_dtype)
        if not self._is_idle:
            assert isinstance(x, torch.Tensor), "norms are kernels of their own"
            scales = None if self._chosen is None else self._chosen.scales
            self._sides.onto(y, self._sides.ranks(x, scales), scales)
        return y
