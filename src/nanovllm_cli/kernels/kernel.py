"""What a GPU kernel is to the Python side: which source, which entry, which compile-time constants; and who launches it.

The wrappers (`norm.py`, … beside `norm.cu`, …) check shapes, strides, types and devices, choose constants and a grid, and launch
through a `Launcher`: `launcher.CudaLauncher` on a GPU, or the tests' emulation on a machine without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

SOURCES = Path(__file__).parent
# Names of the kernels' types in common.cuh. The 8-bit floats are e4m3.
TYPE_NAMES = {
    torch.bfloat16: "bf16", torch.float16: "half", torch.float32: "float",
    torch.float8_e4m3fn: "fp8", torch.int8: "int8_t", torch.int32: "int",
}  # fmt: skip
OLDEST_CAPABILITY = 75
NEWEST_CAPABILITY = 999
MAX_THREADS = 1024
WARP = 32
# Shared memory of a multiprocessor, by capability; of a newer one the least that is known. From 8.0 on each block takes
# RESERVED_SHARED of it beside its own.
SHARED_KIB = {75: 64, 80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 110: 228, 120: 100, 121: 100}
RESERVED_SHARED = 1 << 10

Arg = torch.Tensor | np.int32 | np.int64 | np.float32 | None
"""A tensor is passed by address, None as a null pointer, a scalar by value. Python's own numbers have no C type: wrap them."""


class Kernel(NamedTuple):
    """An entry point of `<stem>.cu`, compiled with `constants` (macro, value) in this order.

    min_capability: the oldest GPU that has its instructions, 10 * major + minor; 75 is the oldest that any kernel runs on.
    max_capability: the newest that its wrapper launches it on, where newer ones have another kernel, or lack its instructions.
    """

    stem: str
    entry: str
    constants: tuple[tuple[str, str | int], ...]
    min_capability: int = OLDEST_CAPABILITY
    max_capability: int = NEWEST_CAPABILITY

    @property
    def defines(self) -> list[str]:
        """Compiler options."""
        return [f"-D{name}={value}" for name, value in self.constants]

    def __str__(self) -> str:
        return f"{self.entry}<{', '.join(f'{name}={value}' for name, value in self.constants)}>"


class Launcher(Protocol):
    """Where kernels run. `device` is where every tensor argument must be; `capability` is 10 * major + minor."""

    device: torch.device
    capability: int
    num_multiprocessors: int

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: tuple[Arg, ...],
        shared_bytes: int = 0,
    ) -> None:
        """Compile the kernel where it isn't yet, and put it on the current stream. shared_bytes: dynamic shared memory."""

    def torch_op(self, function: Callable[[], object], barrier: bool = False) -> None:
        """Torch's own kernels, in their place among ours: in a recorded step they too run at each replay. barrier: the next of
        ours begins when all ahead of it has ended. A vendor's kernel may let it start before it has itself waited for those, so
        that is for what reads at once what one of them wrote."""

    def rehearse(self, step: Callable[[], object]) -> None:
        """Calls `step` without launching anything, and compiles what it would launch, all at once: one after another, as they
        come, kernels keep one processor busy. Nothing in `step` may depend on numbers that its kernels compute."""


def read_sources(path: Path, headers: Path) -> dict[str, str]:
    """The text of a .cu file and of the headers in `headers` that it includes, directly or not, by file name."""
    sources: dict[str, str] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file.name not in sources and file.is_file():  # CUDA's own headers are not there
            sources[file.name] = file.read_text()
            waiting += [headers / name for name in re.findall(r'^#include "(.+)"', sources[file.name], re.MULTILINE)]
    return dict(sorted(sources.items()))


def check(tensor: torch.Tensor, launcher: Launcher, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The tensor, if it is what the kernel will take it for: contiguous, of this type and shape, on the launcher's device."""
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.shape == shape, (tensor.shape, shape)
    assert tensor.device == launcher.device, (tensor.device, launcher.device)
    assert tensor.is_contiguous()
    return tensor


def type_name(dtype: torch.dtype) -> str:
    return TYPE_NAMES[dtype]


def mma_capability(dtype: torch.dtype) -> int:
    """The oldest GPU whose matrix instructions take 16-bit numbers of this type."""
    return 80 if dtype == torch.bfloat16 else OLDEST_CAPABILITY


def shared_bytes_of_multiprocessor(capability: int) -> int:
    return SHARED_KIB.get(capability, 100) << 10


def largest_shared_bytes(capability: int) -> int:
    """Shared memory that a block may have."""
    return shared_bytes_of_multiprocessor(capability) - (RESERVED_SHARED if capability >= 80 else 0)


def widest(numel: int, dtype: torch.dtype) -> int:
    """Elements of the widest load (at most 16 bytes) that divides rows of so many elements."""
    count = 16 // dtype.itemsize
    while numel % count:
        count //= 2
    return count
