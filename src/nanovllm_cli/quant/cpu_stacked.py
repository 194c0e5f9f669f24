"""Several weights that read the same input, each in a format of its own: q, k and v of a Q4_K_M file, say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nanovllm_cli.kernels import cpu, integer
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.cpu_integer import CpuInteger
from nanovllm_cli.quant.cpu_storage import CpuStorage
from nanovllm_cli.quant.cpu_values import CpuValues
from nanovllm_cli.quant.storage import Stacked, WeightStorage


class CpuStacked(Stacked, CpuStorage):
    """A WeightStorage on a CPU whose rows are its parts' rows behind each other. dtype: what is computed in.

    Parts that round activations alike share the rounding, and write their columns of the result in place.
    """

    def __init__(self, parts: Sequence[WeightStorage], dtype: torch.dtype) -> None:
        Stacked.__init__(self, parts)
        CpuStorage.__init__(self, self.num_rows, self.width, dtype)

    @property
    def recordable(self) -> bool:
        return all(part.recordable and isinstance(part, CpuInteger | CpuValues) for part in self._parts)

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "norms are kernels of their own on a CPU"
        out = cpu.new_tensor((x.shape[0], self.num_rows), out_dtype)
        rounded: list[integer.Rounded] = []
        for part, columns in self._columns():
            own_bias = None if bias is None else bias[columns]
            if isinstance(part, CpuInteger):
                fitting = [r for r in rounded if r.rounding.same(part.rounding)]
                if not fitting:
                    fitting = [integer.quantize(x, part.rounding)]
                    rounded += fitting
                part.multiply(fitting[0], own_bias, out[:, columns])
            elif isinstance(part, CpuValues):
                part.multiply(x, own_bias, out[:, columns])
            else:
                out[:, columns] = part.matmul(x, own_bias, out_dtype)
        return out
