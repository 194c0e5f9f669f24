"""A Device that is the CPU: launches are recorded in a list and replayed, and what a CUDA graph would not record is refused."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emulation.emulator import Emulator
from nanovllm_cli.kernels.device import HostPages, Memory
from nanovllm_cli.kernels.kernel import Arg, Kernel

T = TypeVar("T")
GIB = 1 << 30
# What a capture may do with torch besides `Launcher.torch_op`: take memory, and look at it in another shape.
HARMLESS = {
    "empty", "empty_like", "empty_strided", "new_empty", "view", "_unsafe_view", "slice", "select", "as_strided", "detach",
    "expand", "split", "split_with_sizes", "t", "transpose", "alias", "unsqueeze", "squeeze", "narrow",
}  # fmt: skip


class RecordingEmulator(Emulator):
    """While `recording` is a list, launches are written into it instead of run. num_launches counts those that run, replayed
    ones and torch's own included."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.recording: list[Callable[[], None]] | None = None
        self.num_launches = 0

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: tuple[Arg, ...],
        shared_bytes: int = 0,
    ) -> None:
        def run() -> None:
            self.num_launches += 1
            Emulator.launch(self, kernel, grid, block, args, shared_bytes)

        run() if self.recording is None else self.recording.append(run)

    def torch_op(self, function: Callable[[], object], barrier: bool = False) -> None:
        def run() -> None:
            self.num_launches += 1
            function()

        run() if self.recording is None else self.recording.append(run)


class _NothingElse(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in HARMLESS:
            raise RuntimeError(f"torch's {name} in a step that is recorded")
        return func(*args, **(kwargs or {}))


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Graph:
    def __init__(self, launches: list[Callable[[], None]]) -> None:
        self.launches = launches

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class EmulatedDevice:
    """capture_fails: every capture raises, as on a GPU that has no room for one. free: what `memory` says. num_pages: bytes of
    `host_pages`."""

    def __init__(self, capture_fails: bool = False, free: int = GIB, **settings: Any) -> None:
        self.launcher = RecordingEmulator(**settings)
        self.capture_fails = capture_fails
        self.free = free
        self.graphs: list[_Graph] = []
        self.num_pages = 0

    def enter(self) -> None: ...

    def check(self) -> None: ...

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def host_pages(self, num_bytes: int) -> HostPages:
        self.num_pages += num_bytes
        pages = torch.zeros(num_bytes, dtype=torch.uint8)
        return HostPages(pages, pages)

    def shared_pages(self, memory: mmap.mmap) -> torch.Tensor:
        return torch.frombuffer(memory, dtype=torch.uint8)

    def event(self) -> _Event:
        return _Event()

    def capture(self, step: Callable[[], T]) -> tuple[_Graph, T]:
        if self.capture_fails:
            raise RuntimeError("no memory for a graph")
        self.launcher.recording = []
        try:
            with _NothingElse():
                output = step()
            graph = _Graph(self.launcher.recording)
        finally:
            self.launcher.recording = None
        self.graphs.append(graph)
        return graph, output

    def memory(self) -> Memory:
        return Memory(self.free, self.free, 0, 0)

    def forget_peak(self) -> None: ...
