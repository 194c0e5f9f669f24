"""Kernels on a GPU: compiled once, loaded once, put on torch's current stream.

CuPy loads the machine code. `cuda.core` launches it where it is installed: it takes half a microsecond of CPU time and knows
programmatic dependent launch, where a kernel starts while the one before it still runs. CuPy's own launch does without.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import compiler
from nanovllm_cli.kernels.kernel import OLDEST_CAPABILITY, Arg, Kernel

FREE_SHARED_BYTES = 48 << 10  # shared memory, static and dynamic, that a kernel has without asking
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
MAX_SHARED_OF_BLOCK = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
MAX_CONFIGS = 4096

Dims = tuple[int, int, int]


def has_driver() -> bool:
    """Whether this machine has NVIDIA's driver, and so most likely a GPU."""
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


def why_unavailable(device_index: int = 0) -> UnsupportedError | None:
    """What keeps kernels from running on this device, with what to do about it; or None. Loads CuPy only if all else is there."""
    if not has_driver():
        return UnsupportedError(
            "no NVIDIA driver on this machine (libcuda.so.1)", "install the driver, or use --device cpu"
        )
    if torch.version.cuda is None:
        return UnsupportedError(
            "this torch is built for CPUs only", "install torch for CUDA: https://pytorch.org/get-started"
        )
    count = torch.cuda.device_count()
    if count == 0:
        return UnsupportedError("torch sees no CUDA device", "see what nvidia-smi and CUDA_VISIBLE_DEVICES say")
    if device_index >= count:
        return UnsupportedError(f"no device cuda:{device_index}; there are {count}", "count from cuda:0")
    try:
        device = torch.cuda.get_device_properties(device_index)
    except RuntimeError as error:  # such as a driver older than torch's CUDA
        return UnsupportedError(
            f"CUDA does not start: {str(error).splitlines()[0]}", "update the driver, or use --device cpu"
        )
    if 10 * device.major + device.minor < OLDEST_CAPABILITY:
        found = f"{device.name} has compute capability {device.major}.{device.minor}"
        return UnsupportedError(f"{found}, kernels need 7.5", "use --device cpu")
    try:
        compiler.toolchain()
    except UnsupportedError as error:
        return error
    return None


class CudaLauncher:
    """Launches on one GPU, which it makes current on the thread that launches. `num_launches` counts.

    programmatic_launch: let kernels start before the one ahead of them ends (sm_90 on, through cuda.core; plain launches where
    that is not to be had, and then `programmatic_launch` reads False).

    Raises UnsupportedError where the device can't be used, or lacks what a kernel needs; RuntimeError where a launch fails.
    """

    def __init__(self, device_index: int = 0, programmatic_launch: bool = False) -> None:
        reason = why_unavailable(device_index)
        if reason is not None:
            raise reason
        properties = torch.cuda.get_device_properties(device_index)
        self.device = torch.device("cuda", device_index)
        self.capability = 10 * properties.major + properties.minor
        self.num_multiprocessors = properties.multi_processor_count
        self.num_launches = 0
        self._index = device_index
        self._thread = _Thread()
        self._loaded: dict[Kernel, _Loaded] = {}
        self._backend = _cuda_core(programmatic_launch and self.capability >= 90) or _Cupy()
        self.programmatic_launch = self._backend.programmatic
        self._options = ("-DPDL",) if self.programmatic_launch else ()

    def launch(self, kernel: Kernel, grid: Dims, block: Dims, args: tuple[Arg, ...], shared_bytes: int = 0) -> None:
        """See `Launcher.launch`. The first launch of a kernel loads it, and does not belong into a graph's capture."""
        if not self._thread.has_device:
            self._make_current()
        loaded = self._loaded.get(kernel) or self._load(kernel)
        if shared_bytes > loaded.shared_bytes:
            self._allow_shared(kernel, loaded, shared_bytes)
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 if arg is None else arg for arg in args]
        # Asked each time: while a graph is captured the current stream is another one.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        try:
            self._backend.put(loaded.handle, grid, block, shared_bytes, stream, values)
        except Exception as error:  # cuda.core's own is no RuntimeError; what an earlier kernel did wrong comes out here, too
            work = f"{grid} blocks of {block} threads with {shared_bytes} bytes of shared memory"
            raise RuntimeError(f"{kernel} could not be launched, {work}: {error}") from error
        self.num_launches += 1

    def torch_op(self, function: Callable[[], object]) -> None:
        """See `Launcher.torch_op`. A CUDA graph records torch's launches as it does ours."""
        function()

    def _make_current(self) -> None:
        """The driver launches into the thread's current context. A new thread has none, and torch sets one only when it must."""
        from cupy.cuda import runtime

        torch.cuda.set_device(self._index)
        runtime.setDevice(self._index)
        self._thread.has_device = True

    def _load(self, kernel: Kernel) -> _Loaded:
        from cupy.cuda import Module

        if self.capability < kernel.min_capability:
            needed = f"{kernel.min_capability // 10}.{kernel.min_capability % 10}"
            raise UnsupportedError(
                f"{kernel} needs a GPU of compute capability {needed}", "use --dtype float16, or --device cpu"
            )
        compiled = compiler.compile(kernel, compiler.architecture(self.capability), self._options)
        module = Module()
        module.load(compiled.cubin)
        function = module.get_function(kernel.entry)
        free = FREE_SHARED_BYTES - compiled.resources.shared
        loaded = self._loaded[kernel] = _Loaded(function, self._backend.handle(function), free)
        return loaded

    def _allow_shared(self, kernel: Kernel, loaded: _Loaded, shared_bytes: int) -> None:
        from cupy.cuda import driver, runtime

        most = runtime.deviceGetAttribute(MAX_SHARED_OF_BLOCK, self._index)
        if shared_bytes > most:
            reason = f"{kernel} needs {shared_bytes} bytes of shared memory, {self.device} has {most}"
            raise UnsupportedError(reason, "use --device cpu")
        driver.funcSetAttribute(loaded.function.ptr, MAX_DYNAMIC_SHARED, shared_bytes)
        loaded.shared_bytes = shared_bytes


class _Thread(threading.local):
    """has_device: the launcher's device is current on the calling thread."""

    has_device = False


class _Loaded:
    """function: CuPy's, which keeps its module loaded; handle: the same for the backend. shared_bytes: dynamic ones allowed."""

    __slots__ = ("function", "handle", "shared_bytes")

    def __init__(self, function: Any, handle: Any, shared_bytes: int) -> None:
        self.function = function
        self.handle = handle
        self.shared_bytes = shared_bytes


class _Backend(Protocol):
    programmatic: bool

    def handle(self, function: Any) -> Any: ...

    def put(
        self, handle: Any, grid: Dims, block: Dims, shared_bytes: int, stream: int, values: Sequence[int | np.generic]
    ) -> None: ...


class _Stream(NamedTuple):
    """A stream as CuPy's launch reads it."""

    ptr: int


class _Cupy:
    """cupy.cuda.Function.__call__(grid, block, args, shared_mem, stream); a Python int passes as 64 bits, which addresses are."""

    programmatic = False

    def handle(self, function: Any) -> Any:
        return function

    def put(
        self, handle: Any, grid: Dims, block: Dims, shared_bytes: int, stream: int, values: Sequence[int | np.generic]
    ) -> None:
        handle(grid, block, values, shared_bytes, _Stream(stream))


class _CudaCore:
    """cuda.core.launch(stream, config, kernel, *args); a Python int passes as an address."""

    def __init__(self, core: Any, programmatic: bool) -> None:
        self.programmatic = programmatic
        self._core = core
        self._launch = core.launch
        self._attributes = {"programmatic_stream_serialization": True} if programmatic else {}
        self._streams: dict[int, Any] = {}
        self._configs: dict[tuple[Dims, Dims, int], Any] = {}

    def handle(self, function: Any) -> Any:
        return self._core.Kernel.from_handle(function.ptr)

    def put(
        self, handle: Any, grid: Dims, block: Dims, shared_bytes: int, stream: int, values: Sequence[int | np.generic]
    ) -> None:
        shape = (grid, block, shared_bytes)
        config = self._configs.get(shape) or self._config(shape)
        self._launch(self._streams.get(stream) or self._stream(stream), config, handle, *values)

    def _config(self, shape: tuple[Dims, Dims, int]) -> Any:
        if len(self._configs) >= MAX_CONFIGS:  # prompts of every length come with grids of their own
            self._configs.clear()
        grid, block, shared_bytes = shape
        config = self._core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes, **self._attributes)
        self._configs[shape] = config
        return config

    def _stream(self, pointer: int) -> Any:
        stream = self._streams[pointer] = self._core.Stream.from_handle(pointer)
        return stream


def _cuda_core(programmatic: bool) -> _CudaCore | None:
    """None where cuda.core is not installed, not fit for this driver, or older than 1.2: before 1.0 `Kernel.from_handle` asks the
    driver about the handle, as if it weren't CuPy's function, and before 1.2 there is no dependent launch."""
    try:
        from cuda import core

        config = core.LaunchConfig(grid=1, block=1)
    except Exception:  # its loaders raise errors of their own; CuPy launches as well
        return None
    return _CudaCore(core, programmatic) if hasattr(config, "programmatic_stream_serialization") else None
