"""A GPU as a Device, through torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanovllm_cli.kernels.device import Event, Graph, Memory, T
from nanovllm_cli.kernels.launcher import CudaLauncher


class CudaDevice:
    """See `device.Device`. UnsupportedError where the device can't be used."""

    def __init__(self, index: int = 0, programmatic_launch: bool = False) -> None:
        self.launcher = CudaLauncher(index, programmatic_launch)
        self._pool = torch.cuda.graph_pool_handle()
        # One of this GPU's: torch's own belongs to whichever GPU captured first in this process.
        self._stream = torch.cuda.Stream(self.launcher.device)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        torch.cuda.set_device(self.launcher.device)

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def capture(self, step: Callable[[], T]) -> tuple[Graph, T]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads may allocate meanwhile: only what this one does wrong counts.
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                output = step()
        finally:
            torch.cuda.set_stream(stream)  # where the capture fails at its end, torch stays on the one it captured on
        return graph, output

    def memory(self) -> Memory:
        device = self.launcher.device
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        idle = torch.cuda.memory_reserved(device) - allocated  # torch has taken it and not given it out
        return Memory(free + idle, total, allocated, torch.cuda.max_memory_allocated(device))

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.launcher.device)
