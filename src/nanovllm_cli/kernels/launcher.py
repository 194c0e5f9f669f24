"""Kernels on a GPU: compiled once, loaded once, put on torch's current stream.

CuPy loads the machine code. The driver launches it, by the call beneath all other ways to launch: it takes two microseconds of
CPU time more than compiled code would, needs no package of a certain age, and knows programmatic dependent launch, where a kernel
starts while the one before it still runs.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import compiler
from nanovllm_cli.kernels.compiler import Compiled
from nanovllm_cli.kernels.kernel import OLDEST_CAPABILITY, Arg, Kernel
from nanovllm_cli.processors import num_processors

DRIVER = "libcuda.so.1"
FREE_SHARED_BYTES = 48 << 10  # shared memory, static and dynamic, that a kernel has without asking
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
MAX_SHARED_OF_BLOCK = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
PROGRAMMATIC_CAPABILITY = 90
MOST_COMPILERS = 8
"""Kernels compiled at once: each takes memory."""
CARVEOUT = 100
"""Percent of a multiprocessor's fast memory that is shared memory, where kernels overlap: a multiprocessor divides it anew only
when it has nothing to run, so two kernels that want it divided differently can't be there at once."""

Dims = tuple[int, int, int]


def has_driver() -> bool:
    """Whether this machine has NVIDIA's driver, and so most likely a GPU."""
    try:
        ctypes.CDLL(DRIVER)
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

    programmatic_launch: let kernels start before the one ahead of them ends (sm_90 on; plain launches on older GPUs, and then
    `programmatic_launch` reads False).

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
        self._compiled: dict[Kernel, Compiled] = {}  # and not loaded yet
        self._rehearsed: dict[Kernel, None] | None = None  # kernels of a step that is only rehearsed, in their order
        self.programmatic_launch = programmatic_launch and self.capability >= PROGRAMMATIC_CAPABILITY
        self._options = ("-DPDL",) if self.programmatic_launch else ()
        self._driver = _Driver(self.programmatic_launch)

    def launch(self, kernel: Kernel, grid: Dims, block: Dims, args: tuple[Arg, ...], shared_bytes: int = 0) -> None:
        """See `Launcher.launch`. The first launch of a kernel loads it, and does not belong into a graph's capture."""
        if self._rehearsed is not None:
            self._rehearsed[kernel] = None
            return
        if not self._thread.has_device:
            self._make_current()
        loaded = self._loaded.get(kernel) or self._load(kernel)
        if shared_bytes > loaded.shared_bytes:
            self._allow_shared(kernel, loaded, shared_bytes)
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else 0 if arg is None else arg for arg in args]
        # Asked each time: while a graph is captured the current stream is another one.
        stream = torch._C._cuda_getCurrentRawStream(self._index)
        plain, self._thread.at_barrier = self._thread.at_barrier, False
        error = self._driver.launch(loaded.function.ptr, grid, block, shared_bytes, stream, values, plain)
        if error:  # what an earlier kernel did wrong comes out here, too
            work = f"{grid} blocks of {block} threads with {shared_bytes} bytes of shared memory"
            raise RuntimeError(f"{kernel} could not be launched, {work}: {error}")
        self.num_launches += 1

    def torch_op(self, function: Callable[[], object], barrier: bool = False) -> None:
        """See `Launcher.torch_op`. A CUDA graph records torch's launches as it does ours."""
        if self._rehearsed is None:
            function()
            self._thread.at_barrier |= barrier

    def rehearse(self, step: Callable[[], object]) -> None:
        """See `Launcher.rehearse`. The compiler's threads run side by side."""
        kernels = self._rehearsed = {}
        try:
            step()
        finally:
            self._rehearsed = None
        new = [kernel for kernel in kernels if kernel not in self._loaded and kernel not in self._compiled]
        pool = ThreadPoolExecutor(min(num_processors(), MOST_COMPILERS))
        try:
            self._compiled.update(zip(new, pool.map(self._compile, new), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, or Ctrl-C, only those that have begun are waited for

    def _make_current(self) -> None:
        """The driver launches into the thread's current context. A new thread has none, and torch sets one only when it must."""
        from cupy.cuda import runtime

        torch.cuda.set_device(self._index)
        runtime.setDevice(self._index)
        self._thread.has_device = True

    def _load(self, kernel: Kernel) -> _Loaded:
        from cupy.cuda import Module, driver

        compiled = self._compiled.pop(kernel, None) or self._compile(kernel)
        module = Module()
        module.load(compiled.cubin)
        function = module.get_function(kernel.entry)
        if self.programmatic_launch:
            driver.funcSetAttribute(function.ptr, SHARED_CARVEOUT, CARVEOUT)
        loaded = self._loaded[kernel] = _Loaded(function, FREE_SHARED_BYTES - compiled.resources.shared)
        return loaded

    def _compile(self, kernel: Kernel) -> Compiled:
        if self.capability < kernel.min_capability:
            needed = f"{kernel.min_capability // 10}.{kernel.min_capability % 10}"
            raise UnsupportedError(
                f"{kernel} needs a GPU of compute capability {needed}", "use --dtype float16, or --device cpu"
            )
        return compiler.compile(kernel, compiler.architecture(self.capability), self._options)

    def _allow_shared(self, kernel: Kernel, loaded: _Loaded, shared_bytes: int) -> None:
        from cupy.cuda import driver, runtime

        most = runtime.deviceGetAttribute(MAX_SHARED_OF_BLOCK, self._index)
        if shared_bytes > most:
            reason = f"{kernel} needs {shared_bytes} bytes of shared memory, {self.device} has {most}"
            raise UnsupportedError(reason, "use --device cpu")
        driver.funcSetAttribute(loaded.function.ptr, MAX_DYNAMIC_SHARED, shared_bytes)
        loaded.shared_bytes = shared_bytes


class _Thread(threading.local):
    """has_device: the launcher's device is current on the calling thread. at_barrier: the next launch is a plain one."""

    has_device = False
    at_barrier = False


class _Loaded:
    """function: CuPy's, which keeps its module loaded. shared_bytes: dynamic ones allowed."""

    __slots__ = ("function", "shared_bytes")

    def __init__(self, function: Any, shared_bytes: int) -> None:
        self.function = function
        self.shared_bytes = shared_bytes


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("gap", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    ]  # fmt: skip


class _Arguments:
    """Those of a kernel in memory, as a C struct of them, and the pointers to each. types: of values as they are launched with;
    Python's own numbers are addresses."""

    __slots__ = ("address", "memory", "pack_into", "pointers")

    def __init__(self, types: tuple[type, ...]) -> None:
        codes = "".join([_CODES[each] for each in types])
        fields = struct.Struct(f"@{codes}")
        self.memory = ctypes.create_string_buffer(fields.size or 1)
        self.pack_into = fields.pack_into
        base = ctypes.addressof(self.memory)
        offsets = [struct.calcsize(f"@{codes[:i]}0{code}") for i, code in enumerate(codes)]
        self.pointers = (ctypes.c_void_p * len(codes))(*[base + offset for offset in offsets])
        self.address = ctypes.addressof(self.pointers)


class _Call(threading.local):
    """What one thread launches with, one launch after another: the driver has copied it when it returns."""

    def __init__(self, attributes: tuple[int | None, int]) -> None:
        self.config, self.plain = _Config(attributes=attributes[0], num_attributes=attributes[1]), _Config()
        self.address, self.plain_address = ctypes.addressof(self.config), ctypes.addressof(self.plain)
        self.arguments: dict[tuple[type, ...], _Arguments] = {}


class _Driver:
    """cuLaunchKernelEx. programmatic: a kernel may start before the one ahead of it in the stream ends."""

    def __init__(self, programmatic: bool) -> None:
        library = ctypes.CDLL(DRIVER)
        self._launch, self._name_of = library.cuLaunchKernelEx, library.cuGetErrorName
        self._launch.argtypes = [ctypes.c_void_p] * 4
        self._attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._call = _Call((ctypes.addressof(self._attribute), 1) if programmatic else (None, 0))

    def launch(
        self,
        function: int,
        grid: Dims,
        block: Dims,
        shared_bytes: int,
        stream: int,
        values: Sequence[int | np.generic],
        plain: bool,
    ) -> str | None:
        """The error's name, or None. Python's own numbers are addresses. plain: not before all ahead of it has ended."""
        call, types = self._call, tuple(map(type, values))
        arguments = call.arguments.get(types)
        if arguments is None:
            arguments = call.arguments[types] = _Arguments(types)
        arguments.pack_into(arguments.memory, 0, *values)
        config, address = (call.plain, call.plain_address) if plain else (call.config, call.address)
        _CONFIG.pack_into(config, 0, *grid, *block, shared_bytes, stream)
        code = self._launch(address, function, arguments.address, None)
        return self._error(code) if code else None

    def _error(self, code: int) -> str:
        name = ctypes.c_char_p()
        self._name_of(code, ctypes.byref(name))
        return name.value.decode() if name.value else f"error {code}"


_CODES: dict[type, str] = {int: "Q", np.int32: "i", np.int64: "q", np.float32: "f"}
"""A kernel's types by `struct`'s letters."""
_CONFIG = struct.Struct("@3I3IIP")
"""What of a _Config differs between launches: up to its stream."""
