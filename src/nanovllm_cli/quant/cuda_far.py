"""Weights that stay in the machine's memory, because a GPU has no room for them: it reads them across its bus.

A few rows are multiplied by kernels that read the weight where it is, once, as they read any other. For more rows it is copied to
the GPU first, as kernels for many read it several times. Either way a product has the bits that it has of a weight on the GPU.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from nanovllm_cli.kernels.device import Device, HostPages
from nanovllm_cli.kernels.experts import Tasks
from nanovllm_cli.kernels.gemv import MAX_ROWS
from nanovllm_cli.kernels.ops import Hidden
from nanovllm_cli.quant.cuda_storage import CudaStorage, count_rows
from nanovllm_cli.quant.rows import QuantizedRows

SLAB_BYTES = 64 << 20
"""Asked of the system at once: page-locked memory takes it long to find."""
ALIGNMENT = 256


class FarMemory:
    """Gives out a device's host pages. They are given back when nobody has a tensor in a slab any more."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._slab: HostPages | None = None
        self._used = 0

    def take(self, like: torch.Tensor) -> HostPages:
        """Zeros in the shape and type of a tensor."""
        size = like.numel() * like.itemsize
        whole = -(-size // ALIGNMENT) * ALIGNMENT
        if self._slab is None or self._used + whole > self._slab.host.numel():
            self._slab, self._used = self.device.host_pages(max(SLAB_BYTES, whole)), 0
        host, seen = (pages[self._used : self._used + size].view(like.dtype).view(like.shape) for pages in self._slab)
        self._used += whole
        return HostPages(host, seen)


class CudaFar:
    """A WeightStorage. outline: of its format and sizes, with its weight on torch's meta device."""

    recordable = True
    is_far = True

    def __init__(self, outline: CudaStorage, memory: FarMemory) -> None:
        self.num_rows, self.width = outline.num_rows, outline.width
        self._launcher = memory.device.launcher
        taken: list[HostPages] = []

        def take(like: torch.Tensor) -> torch.Tensor:
            taken.append(memory.take(like))
            return taken[-1].host

        self._host = outline.elsewhere(take)
        seen = iter(taken)
        self._seen = outline.elsewhere(lambda _: next(seen).seen)

    @property
    def num_bytes(self) -> int:
        return self._host.num_bytes

    def load_rows(self, first_row: int, rows: torch.Tensor | QuantizedRows) -> None:
        self._host.load_rows(first_row, rows)

    def rows(self, ids: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return self._seen.rows(ids, table)

    def matmul(self, x: Hidden, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
        return self._for(x).matmul(x, bias, out_dtype)

    def gated_matmul(self, x: Hidden, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return self._for(x).gated_matmul(x, bias, activation)

    def add_matmul(self, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> None:
        self._for(x).add_matmul(x, bias, residual)

    @property
    def task_form(self) -> Hashable:
        return self._seen.task_form

    @property
    def task_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self._seen.task_tensors

    @property
    def task_rows(self) -> int:
        return self._seen.task_rows

    @property
    def task_bytes(self) -> int:
        return self.num_bytes

    def task_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return bias

    def multiply_tasks(self, x: torch.Tensor, tasks: Tasks, matrix: int, activation: str | None) -> torch.Tensor:
        return self._seen.multiply_tasks(x, tasks, matrix, activation)

    def _for(self, x: Hidden) -> CudaStorage:
        """What multiplies so many rows."""
        return self._seen if count_rows(x) <= MAX_ROWS else self._host.elsewhere(self._copied)

    def _copied(self, host: torch.Tensor) -> torch.Tensor:
        """On the device, in its place among what is launched."""
        near = torch.empty(host.shape, dtype=host.dtype, device=self._launcher.device)
        # Kernels for many rows read a weight at once.
        self._launcher.torch_op(lambda: near.copy_(host, non_blocking=True), barrier=True)
        return near
