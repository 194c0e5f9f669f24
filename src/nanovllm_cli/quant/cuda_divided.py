"""A weight of which each of several GPUs has some rows."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from nanovllm_cli.distributed.cuda_group import CudaGroup
from nanovllm_cli.distributed.division import Division, Gathers
from nanovllm_cli.kernels.cuda_mixture import TaskWeight
from nanovllm_cli.kernels.experts import FEW_ROWS, Tasks
from nanovllm_cli.quant.divided import Divided
from nanovllm_cli.quant.storage import WeightStorage


class CudaDivided(Divided):
    """See Divided. A residual is added where the product is made, as without others, so that it has the same bits; and kernels
    find an expert's by its addresses, as `TaskWeight` has it."""

    _group: CudaGroup

    def __init__(self, own: WeightStorage, division: Division, group: CudaGroup, dtype: torch.dtype, gathers: Gathers) -> None:
        super().__init__(own, division, group, dtype, gathers)
        self._task = own if isinstance(own, TaskWeight) else None

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
        assert self._gathers == "all", "who adds it has all of it"
        own = self._group.own_columns(residual, self._division)
        left = self._own.add_matmul(x, self._own_part(bias), own)
        assert left is None, "a GPU's weights all can"
        self._group.gather(own, self._division, out=residual)

    @property
    def task_form(self) -> Hashable:
        return None if self._task is None else self._task.task_form

    @property
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return () if self._task is None else self._task.task_tensors

    @property
    def task_rows(self) -> int:
        return FEW_ROWS if self._task is None else self._task.task_rows

    @property
    def is_far(self) -> bool:
        return self._task is not None and self._task.is_far

    @property
    def task_bytes(self) -> int:
        return self.num_rows * self.width * self._dtype.itemsize // self._group.size

    def task_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return self._own_part(bias)

    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor:
        assert self._task is not None
        division = self._division if activation is None else self._of_values
        return self._whole(self._task.multiply_tasks(x, tasks, matrix, activation), division)
