"""A Device that is as late as CUDA permits, on emulated kernels: what is put on its stream waits there until the host waits.

`EmulatedDevice` has done everything when a call returns, and what is right only because of that passes there. Here kernels,
torch's own operations, asynchronous copies, events and replays are queued, and run in their order, as far as the host waits: for
an event, a blocking copy, a number that it reads. As with CUDA

- scalars, and host memory that is not pinned, are bound when they are handed over; pinned memory is read when the copy runs, and
  what was written there meanwhile is told in `races`;
- the target of asynchronous copies to the host holds poison until the last of them is done, memory that was taken until it is
  written;
- an operation whose result's shape depends on numbers waits, and so does an index that lies on the host;
- a capture binds what it is given, and what waits, or copies memory that is not pinned, ends it. All graphs' own memory is
  poisoned before each replay, since they share it; a replay needs what else it was recorded on to be there still;
- tensors of the device meet none of the host, but for single numbers.

Not here: a device that gets halfway (`EmulatedDevice` and this are the two ends), several streams, kernels that overlap, memory
that is given out anew (what is queued holds on to its own).

A tensor of the device wraps an ordinary one. It says that it is on meta:1, meta:2, …, which every build of torch knows by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch

from emulation.device import EmulatedDevice
from emulation.emulator import Emulator
from emulation.late_stream import Graph, LateTensor, Memory, Stream
from nanovllm_cli.kernels.device import HostPages
from nanovllm_cli.kernels.kernel import Arg, Kernel

T = TypeVar("T")
Dims = tuple[int, int, int]


class LateEvent:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._behind = 0

    def record(self) -> None:
        self._stream.refuse_in_a_capture("recording an event")
        self._behind = self._stream.num_run + len(self._stream.queue)

    def synchronize(self) -> None:
        self._stream.wait(self._behind)


class LateLauncher(Emulator):
    def __init__(self, stream: Stream, **settings: Any) -> None:
        super().__init__(**settings)
        self._stream = stream
        self.device = stream.device

    def launch(
        self, kernel: Kernel, grid: Dims, block: Dims, args: tuple[Arg, ...], shared_bytes: int = 0
    ) -> None:
        tensors = [arg for arg in args if isinstance(arg, LateTensor)]
        given = tuple(arg.numbers if isinstance(arg, LateTensor) else arg for arg in args)
        assert sum(isinstance(arg, torch.Tensor) for arg in args) == len(tensors), f"{kernel} is given memory of the host"
        self._stream.put(lambda: Emulator.launch(self, kernel, grid, block, given, shared_bytes), *tensors)


class LateDevice(EmulatedDevice):
    """Within its `with`, what is made on its launcher's device, or brought there, is its. races: see the module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.stream = Stream()
        self.races = self.stream.races
        self.launcher = LateLauncher(self.stream, **settings)

    def __enter__(self) -> Self:
        self.stream.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stream.__exit__(*exception)

    def check(self) -> None:
        self.stream.wait()

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = super().host_buffer(numel, dtype)
        self.stream.pinned[buffer.data_ptr()] = buffer
        return buffer

    def host_pages(self, num_bytes: int) -> HostPages:
        pages, _ = super().host_pages(num_bytes)
        self.stream.pinned[pages.data_ptr()] = pages
        return HostPages(pages, LateTensor(pages, Memory(), self.stream))

    def event(self) -> LateEvent:
        return LateEvent(self.stream)

    def capture(self, step: Callable[[], T]) -> tuple[Graph, T]:
        graph = self.stream.recording = Graph(self.stream)
        try:
            output = step()
        finally:
            self.stream.recording = None
        self.graphs.append(graph)
        return graph, output
