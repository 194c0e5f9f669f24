"""A GPU of which only names are there: its tensors are torch's FakeTensors, with shapes, types and a device, and no numbers.

What emulation can't see, for there all lies in the same memory: a tensor of the host that meets one of the device, a number
that the host reads off the device while a step runs, and what only torch's CUDA side does (matmuls by the vendor's libraries, by
their meta functions). Launches are checked for where their arguments lie, and do nothing; what is drawn is always token 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from nanovllm_cli.kernels.device import HostPages, Memory
from nanovllm_cli.kernels.kernel import Arg, Kernel

T = TypeVar("T")
CUDA = torch.device("cuda", 0)
GIB = 1 << 30


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Within it tensors can be made on, or brought to, cuda:0."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        patch.object(FakeTensor, "data_ptr", lambda self: 1 << 40),
        patch.object(torch, "_scaled_mm", _into(torch._scaled_mm)),
        patch.object(torch, "_scaled_mm_v2", _into(torch._scaled_mm_v2)),
        _Made(mode),
    ):
        yield


def _into(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Torch knows what comes of it, but not in a place that was made before."""

    def call(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return out.copy_(function(*args, **kwargs))

    return call


class _Made(TorchFunctionMode):
    """Calls that name the device run under the fake mode; others only where an argument is fake already."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names_it = any(isinstance(each, torch.device) and each.type == "cuda" for each in (*args, *kwargs.values()))
        if not names_it:
            return func(*args, **kwargs)
        with self._mode:
            return func(*(self._without_numbers(arg) for arg in args), **kwargs)

    def _without_numbers(self, arg: Any) -> Any:
        """Else a small tensor would be taken there with them."""
        is_real = isinstance(arg, torch.Tensor) and not isinstance(arg, FakeTensor)
        return self._mode.from_tensor(arg) if is_real else arg


class FakeLauncher:
    device = CUDA
    capability = 90
    num_multiprocessors = 132

    def __init__(self) -> None:
        self.is_recording = False
        self.num_launches = 0

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: tuple[Arg, ...],
        shared_bytes: int = 0,
    ) -> None:
        self.num_launches += 1
        for arg in args:
            assert not isinstance(arg, torch.Tensor) or arg.device == CUDA, (kernel, arg.device)

    def torch_op(self, function: Callable[[], object], barrier: bool = False) -> None:
        self.num_launches += 1
        function()

    def rehearse(self, step: Callable[[], object]) -> None:
        step()


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Graph:
    def replay(self) -> None: ...


class FakeGpu:
    """A Device. graphs: how many were made."""

    def __init__(self) -> None:
        self.launcher = FakeLauncher()
        self.graphs = 0

    def enter(self) -> None: ...

    def check(self) -> None: ...

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    def host_pages(self, num_bytes: int) -> HostPages:
        return HostPages(torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8, device=CUDA))

    def event(self) -> _Event:
        return _Event()

    def capture(self, step: Callable[[], T]) -> tuple[_Graph, T]:
        self.graphs += 1
        return _Graph(), step()

    def memory(self) -> Memory:
        return Memory(GIB, GIB, 0, 0)

    def forget_peak(self) -> None: ...
