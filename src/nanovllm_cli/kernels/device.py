"""Device: what a step on a GPU needs besides launches: host memory, its own and that of copies, events, and recording.

`cuda_device.CudaDevice` is a GPU; the tests' emulated device records launches in a list.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from nanovllm_cli.kernels.kernel import Launcher


class Memory(NamedTuple):
    """Bytes of a device: free now, in all, in this process's tensors, and the most that these have been at once."""

    free: int
    total: int
    allocated: int
    peak: int


class HostPages(NamedTuple):
    """The same bytes twice: as the host has them, and as a tensor of the device, whose kernels read them across the bus."""

    host: torch.Tensor
    seen: torch.Tensor


class Event(Protocol):
    """A place in the stream, at which the host can wait."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Graph(Protocol):
    """A recorded step."""

    def replay(self) -> None: ...


class Device(Protocol):
    """One GPU."""

    @property
    def launcher(self) -> Launcher: ...

    def enter(self) -> None:
        """Make it the calling thread's current device."""

    def check(self) -> None:
        """Waits until all is done. Raises LostDeviceError where the device does nothing more for this process."""

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device copies to and from without anybody waiting."""

    def host_pages(self, num_bytes: int) -> HostPages:
        """Zeroed uint8 that stay where they are. DoesNotFitError where the machine has no such memory left."""

    def shared_pages(self, memory: mmap.mmap) -> torch.Tensor:
        """uint8 as the device sees memory of the host that other processes have, too. There as long as the tensor."""

    def event(self) -> Event: ...

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Records what `step` launches instead of running it, and what it returned, which a replay writes. All graphs share their
        memory, that of this tensor too: use it before another one's replay. RuntimeError if it can't be recorded."""

    def memory(self) -> Memory: ...

    def forget_peak(self) -> None:
        """`Memory.peak` counts from now."""
