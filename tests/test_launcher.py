"""The launcher on a machine without a GPU: what it hands to CuPy, the driver and torch, which are faked below the compiler.

The fakes have the signatures of CuPy 13.6 to 14.2 (`Module.load(cubin)`, `driver.funcSetAttribute(f, attribute, value)`,
`runtime.deviceGetAttribute(attrib, device)`), and the driver's cuLaunchKernelEx reads memory as cuda.h says.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import shutil
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from emulation.emulator import cuda_headers
from nanovllm_cli.errors import DoesNotFitError, UnsupportedError
from nanovllm_cli.kernels import compiler, launcher, norm
from nanovllm_cli.kernels.compiler import Compiled, Resources
from nanovllm_cli.kernels.cuda_device import CudaDevice
from nanovllm_cli.kernels.kernel import Kernel
from nanovllm_cli.kernels.launcher import CudaLauncher, why_unavailable

KERNEL = norm.variants()[0]
GRID, BLOCK = (3, 2, 1), (64, 1, 1)
SHARED_OF_BLOCK = 232448


class Launch(NamedTuple):
    """One kernel as the driver would see it."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    values: tuple[Any, ...]
    programmatic: bool = False


class Gpu:
    """A machine with GPUs; what was done with them."""

    def __init__(self, capability: int) -> None:
        self.properties = SimpleNamespace(
            name="Fake", major=capability // 10, minor=capability % 10, multi_processor_count=132
        )
        self.count = 1
        self.stream = 0
        self.launches: list[Launch] = []
        self.compiled: list[tuple[str, str, tuple[str, ...]]] = []
        self.functions: list[str] = []
        self.attributes: list[tuple[int, int, int]] = []
        self.made_current: list[tuple[str, int]] = []
        self.static_shared = 0
        self.error = 0
        self.types = ""

    def cu_launch_kernel_ex(self, config: int, function: int, arguments: int, extra: None) -> int:
        """types: of a kernel's arguments, by `struct`'s letters; the driver knows them from the machine code."""
        if self.error:
            return self.error
        *dims, shared, stream, attributes, count = struct.unpack("@7IPPI", ctypes.string_at(config, 52))
        pointers = struct.unpack(f"@{len(self.types)}P", ctypes.string_at(arguments, 8 * len(self.types)))
        sizes = [struct.calcsize(code) for code in self.types]
        memory = [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)]
        values = tuple(struct.unpack(code, held)[0] for code, held in zip(self.types, memory, strict=True))
        programmatic = False
        if count:
            kind, programmatic = struct.unpack("@i4xi", ctypes.string_at(attributes, 12))
            assert (count, kind) == (1, 6)
        launch = Launch(function, tuple(dims[:3]), tuple(dims[3:]), shared, stream, values, bool(programmatic))
        self.launches.append(launch)
        return 0

    @property
    def driver(self) -> SimpleNamespace:
        def name_of(code: int, name: Any) -> int:
            name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
            return 0

        def launch(config: int, function: int, arguments: int, extra: None) -> int:
            return self.cu_launch_kernel_ex(config, function, arguments, extra)

        return SimpleNamespace(cuLaunchKernelEx=launch, cuGetErrorName=name_of)

    def compile(self, kernel: Kernel, arch: str, extra: tuple[str, ...] = ()) -> Compiled:
        self.compiled.append((kernel.entry, arch, extra))
        return Compiled(b"\x7fELF", Resources(32, self.static_shared, 0, 0))


def fake_cupy(gpu: Gpu) -> ModuleType:
    class Module:
        def load(self, cubin: bytes) -> None:
            assert cubin == b"\x7fELF"

        def get_function(self, name: str) -> Function:
            return Function(self, name)

    class Function:
        def __init__(self, module: Module, name: str) -> None:
            gpu.functions.append(name)
            self.module, self.ptr = module, 1000 + len(gpu.functions)

    cuda = ModuleType("cupy.cuda")
    cuda.Module, cuda.Function = Module, Function
    cuda.driver = SimpleNamespace(
        funcSetAttribute=lambda f, attribute, value: gpu.attributes.append((f, attribute, value))
    )
    cuda.runtime = SimpleNamespace(
        setDevice=lambda device: gpu.made_current.append(("cupy", device)),
        deviceGetAttribute=lambda attrib, device: {97: SHARED_OF_BLOCK}[attrib],
    )
    return cuda


def install(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> Gpu:
    cuda = fake_cupy(gpu)
    cupy = ModuleType("cupy")
    cupy.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(compiler, "toolchain", lambda: None)
    monkeypatch.setattr(compiler, "compile", gpu.compile)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: gpu.driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpu.count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu.properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: gpu.made_current.append(("torch", index)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: gpu.stream, raising=False)
    return gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return install(monkeypatch, Gpu(90))


def test_launch_passes_addresses_and_scalars_on_the_current_stream(gpu: Gpu) -> None:
    gpu.stream = 77
    cuda = CudaLauncher()
    assert (cuda.device, cuda.capability, cuda.num_multiprocessors) == (torch.device("cuda", 0), 90, 132)
    tensor, parameter, gpu.types = torch.zeros(4), torch.nn.Parameter(torch.zeros(3)), "PPPiqfi"
    numbers = np.int32(-5), np.int64(1 << 40), np.float32(0.5), np.int32(7)
    cuda.launch(KERNEL, GRID, BLOCK, (tensor, None, parameter, *numbers), 1024)
    values = (tensor.data_ptr(), 0, parameter.data_ptr(), -5, 1 << 40, 0.5, 7)
    assert gpu.launches == [Launch(1001, GRID, BLOCK, 1024, 77, values)]


def test_the_drivers_structs_are_as_cuda_h_has_them(tmp_path: Path) -> None:
    folders = cuda_headers()
    if shutil.which("g++") is None or not folders or not (folders[0] / "cuda.h").is_file():
        pytest.skip("no g++, or no cuda.h")
    config, attribute = launcher._Config, launcher._Attribute
    facts = {
        "sizeof(CUlaunchConfig)": ctypes.sizeof(config),
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(attribute),
        **{
            f"offsetof(CUlaunchConfig, {theirs})": getattr(config, ours).offset
            for theirs, ours in (
                ("gridDimX", "grid"), ("blockDimX", "block"), ("sharedMemBytes", "shared_bytes"), ("hStream", "stream"),
                ("attrs", "attributes"), ("numAttrs", "num_attributes"),
            )
        },
        "offsetof(CUlaunchAttribute, id)": attribute.id.offset,
        "offsetof(CUlaunchAttribute, value.programmaticStreamSerializationAllowed)": attribute.value.offset,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": launcher.PROGRAMMATIC_STREAM_SERIALIZATION,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": launcher.MAX_DYNAMIC_SHARED,
        "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT": launcher.SHARED_CARVEOUT,
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": launcher.MAX_SHARED_OF_BLOCK,
    }  # fmt: skip
    source = tmp_path / "facts.cpp"
    lines = [f'static_assert({fact} == {number}, "{fact}");' for fact, number in facts.items()]
    lines.append("CUresult (*launch)(const CUlaunchConfig*, CUfunction, void**, void**) = cuLaunchKernelEx;")
    source.write_text("#include <cstddef>\n#include <cuda.h>\n" + "\n".join(lines) + "\n")
    command = ["g++", "-fsyntax-only", "-w", f"-I{folders[0]}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernel_is_compiled_and_loaded_once(gpu: Gpu) -> None:
    cuda = CudaLauncher()
    for kernel in (KERNEL, KERNEL._replace(), norm.variants()[1], KERNEL):
        cuda.launch(kernel, GRID, BLOCK, ())
    assert gpu.compiled == [("add_rms_norm", "sm_90a", ())] * 2
    assert [launch.function for launch in gpu.launches] == [1001, 1001, 1002, 1001]
    assert cuda.num_launches == 4


def test_what_a_rehearsal_would_launch_is_compiled_side_by_side_and_loaded_when_it_is_launched(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, both_here = CudaLauncher(), threading.Barrier(2, timeout=60)
    monkeypatch.setattr(launcher, "num_processors", lambda: 2)
    monkeypatch.setattr(compiler, "compile", lambda *args: both_here.wait() >= 0 and gpu.compile(*args))
    kernels, ran = norm.variants()[:2], []

    def step() -> None:
        for kernel in (*kernels, kernels[0]):
            cuda.launch(kernel, GRID, BLOCK, ())
        cuda.torch_op(lambda: ran.append("torch's"))

    for _ in range(2):
        cuda.rehearse(step)
    assert (len(gpu.compiled), gpu.launches, gpu.functions, ran, cuda.num_launches) == (2, [], [], [], 0)
    step()
    cuda.rehearse(step)
    assert (len(gpu.compiled), len(gpu.launches), len(gpu.functions), ran) == (2, 3, 2, ["torch's"])


def test_a_rehearsal_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, Gpu(75))
    cuda = CudaLauncher()
    with pytest.raises(UnsupportedError, match=r"capability 8\.0"):
        cuda.rehearse(lambda: cuda.launch(KERNEL._replace(min_capability=80), GRID, BLOCK, ()))
    with pytest.raises(ZeroDivisionError):
        cuda.rehearse(lambda: 1 // 0)
    cuda.launch(KERNEL, GRID, BLOCK, ())
    assert len(gpu.launches) == 1


def test_a_launch_that_fails_is_a_runtime_error_that_names_it(gpu: Gpu) -> None:
    """A step that is recorded falls back on this."""
    cuda = CudaLauncher()
    gpu.error = 1
    with pytest.raises(RuntimeError, match=r"add_rms_norm<.*> could not be launched, \(3, 2, 1\) blocks .*: CUDA_ERROR_INVALID"):
        cuda.launch(KERNEL, GRID, BLOCK, ())
    assert cuda.num_launches == 0


def test_current_stream_is_read_at_every_launch(gpu: Gpu) -> None:
    cuda = CudaLauncher()
    for stream in (0, 5, 6, 5, 0):
        gpu.stream = stream
        cuda.launch(KERNEL, GRID, BLOCK, ())
    assert [launch.stream for launch in gpu.launches] == [0, 5, 6, 5, 0]


def test_more_shared_memory_than_granted_is_asked_for_once(gpu: Gpu) -> None:
    cuda = CudaLauncher()
    for shared in (0, 48 << 10, 100 << 10, 64 << 10, 100 << 10, SHARED_OF_BLOCK):
        cuda.launch(KERNEL, GRID, BLOCK, (), shared)
    assert gpu.attributes == [(1001, 8, 100 << 10), (1001, 8, SHARED_OF_BLOCK)]
    assert [launch.shared for launch in gpu.launches][:3] == [0, 48 << 10, 100 << 10]
    with pytest.raises(UnsupportedError, match="232449 bytes of shared memory"):
        cuda.launch(KERNEL, GRID, BLOCK, (), SHARED_OF_BLOCK + 1)


def test_static_shared_memory_counts_too(gpu: Gpu) -> None:
    gpu.static_shared = 8 << 10
    cuda = CudaLauncher()
    for shared in (40 << 10, (40 << 10) + 16, 48 << 10):
        cuda.launch(KERNEL, GRID, BLOCK, (), shared)
    assert gpu.attributes == [(1001, 8, (40 << 10) + 16), (1001, 8, 48 << 10)]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Capture:  # what torch.cuda.graph does: the stream is set back only where ending the capture succeeds
        def __init__(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> None:
            streams.append(stream)

        def __enter__(self) -> None:
            gpu.stream = 9

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("a stream of", device))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(gpu, "stream", stream))
    gpu.stream = 5
    with pytest.raises(RuntimeError, match="previous error"):
        CudaDevice().capture(lambda: None)
    assert gpu.stream == 5
    assert streams == [("a stream of", torch.device("cuda", 0))]


@pytest.mark.parametrize("infers", [False, True])
def test_what_torch_keeps_for_all_graphs_is_not_made_in_inference_mode(
    infers: bool, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`capture_begin` makes the first graph's seed and offset and fills those that are there: outside of inference mode torch
    refuses to fill what was made in it."""

    class Capture(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            seed.append(torch.zeros(1))

    seed: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *args: Capture())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch, "as_tensor", as_the_host_sees)
    made = torch.randn(2, 3).to(torch.bfloat16)
    with torch.inference_mode(infers):
        _, output = CudaDevice().capture(lambda: made)
    assert not seed[0].is_inference()
    assert output.is_inference() == infers
    assert torch.equal(output, made), "of any type"
    assert output.data_ptr() == made.data_ptr()


def as_the_host_sees(memory: Any, device: torch.device) -> torch.Tensor:
    """What torch makes of the device's interface, of memory that is the host's here."""
    assert memory.__cuda_array_interface__ == memory.__array_interface__
    assert device.type in ("cpu", "cuda")
    return torch.from_numpy(np.asarray(memory))


def test_host_pages_are_one_memory_for_both(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeroed, of the device's own context, there as long as either tensor is, and refused as what does not fit."""

    there: weakref.WeakSet[Any] = weakref.WeakSet()

    class Pinned:
        def __init__(self, num_bytes: int) -> None:
            if num_bytes > 100:
                raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
            self._bytes = ctypes.create_string_buffer(b"x" * num_bytes, num_bytes)
            self.ptr = ctypes.addressof(self._bytes)
            there.add(self)

    gpu.count = 2
    cuda = sys.modules["cupy.cuda"]
    monkeypatch.setattr(cuda, "PinnedMemory", Pinned, raising=False)
    cuda.runtime.CUDARuntimeError = RuntimeError  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "as_tensor", as_the_host_sees)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    device = CudaDevice(1)
    host, seen = device.host_pages(100)
    assert gpu.made_current == [("cupy", 1)]
    assert not host.any()
    host.copy_(torch.arange(100, dtype=torch.uint8))
    assert seen.tolist() == list(range(100))
    part = seen[:4]
    del host, seen
    gc.collect()
    assert len(there) == 1
    del part
    gc.collect()
    assert len(there) == 0
    with pytest.raises(DoesNotFitError, match=r"could not be locked for the GPU \(cudaErrorMemoryAllocation"):
        device.host_pages(101)


def test_memory_that_processes_share_is_locked_as_long_as_a_gpu_sees_it(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.count, can = 2, [1]
    locked: dict[int, tuple[int, int]] = {}

    def register(address: int, num_bytes: int, flags: int) -> None:
        if num_bytes > 4096:
            raise RuntimeError("cudaErrorMemoryAllocation: out of memory")
        locked[address] = num_bytes, flags

    runtime = sys.modules["cupy.cuda"].runtime
    runtime.CUDARuntimeError, runtime.cudaDevAttrCanUseHostPointerForRegisteredMem = RuntimeError, 91
    runtime.deviceGetAttribute = lambda attribute, device: can[0] if (attribute, device) == (91, 1) else None
    runtime.hostRegister, runtime.hostUnregister = register, locked.pop
    monkeypatch.setattr(torch, "as_tensor", as_the_host_sees)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    device, memory = CudaDevice(1), mmap.mmap(-1, 4096)
    seen = device.shared_pages(memory)
    assert gpu.made_current == [("cupy", 1)]
    assert locked == {seen.data_ptr(): (4096, 3)}, "for all contexts, and mapped"
    memory[7] = 5
    assert seen[7] == 5
    del seen
    gc.collect()
    assert not locked
    memory.close()  # nobody has it any more
    with pytest.raises(DoesNotFitError, match=r"could not be locked for the GPUs \(cudaErrorMemoryAllocation"):
        device.shared_pages(mmap.mmap(-1, 8192))
    can[0] = 0
    with pytest.raises(UnsupportedError, match="at other addresses"):
        device.shared_pages(mmap.mmap(-1, 4096))


def test_device_is_made_current_on_each_thread_that_launches(gpu: Gpu) -> None:
    gpu.count = 2
    cuda = CudaLauncher(1)
    for _ in range(2):
        cuda.launch(KERNEL, GRID, BLOCK, ())
    assert gpu.made_current == [("torch", 1), ("cupy", 1)]
    for _ in range(2):
        thread = threading.Thread(target=cuda.launch, args=(KERNEL, GRID, BLOCK, ()))
        thread.start()
        thread.join()
    assert gpu.made_current == [("torch", 1), ("cupy", 1)] * 3
    assert len(gpu.launches) == 4


def test_threads_that_launch_at_once_have_each_their_own_arguments(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, both_here = CudaLauncher(), threading.Barrier(2, timeout=60)
    gpu.types = "i"

    def late(*args: Any) -> int:
        both_here.wait()
        return gpu.cu_launch_kernel_ex(*args)

    monkeypatch.setattr(cuda._driver, "_launch", late)

    def launch(number: int) -> None:
        cuda.launch(KERNEL, (number, 1, 1), BLOCK, (np.int32(number),))

    threads = [threading.Thread(target=launch, args=(number,)) for number in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(launch.grid[0], launch.values) for launch in gpu.launches} == {(3, (3,)), (5, (5,))}


def test_wrapper_runs_on_the_launcher(gpu: Gpu) -> None:
    cuda = CudaLauncher()
    cuda.device, gpu.types = torch.device("cpu"), "PPPPPiiff"  # where this machine can have tensors
    x, weight = torch.zeros(3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    out = norm.add_rms_norm(cuda, x, None, weight, 1e-6, 0.0)
    (launch,) = gpu.launches
    assert launch.grid == (3, 1, 1)
    assert launch.values == (x.data_ptr(), 0, weight.data_ptr(), 0, out.data_ptr(), 64, 64, np.float32(1e-6), 0.0)


def test_programmatic_launch_compiles_and_launches_so(gpu: Gpu) -> None:
    """And all kernels want their multiprocessor's memory divided alike, or none would start beside another."""
    cuda = CudaLauncher(0, programmatic_launch=True)
    for kernel in norm.variants()[:2]:
        cuda.launch(kernel, GRID, BLOCK, ())
    assert cuda.programmatic_launch
    assert all(launch.programmatic for launch in gpu.launches)
    assert gpu.compiled == [("add_rms_norm", "sm_90a", ("-DPDL",))] * 2
    assert gpu.attributes == [(1001, 9, 100), (1002, 9, 100)]


def test_behind_a_barrier_a_kernel_starts_when_all_ahead_has_ended(gpu: Gpu) -> None:
    """One, on the thread that asked for it; a rehearsal asks for nothing."""
    cuda = CudaLauncher(0, programmatic_launch=True)

    def step() -> None:
        for barrier in (False, True):
            cuda.torch_op(lambda: None, barrier=barrier)
            for _ in range(2):
                cuda.launch(KERNEL, GRID, BLOCK, (np.int32(7),), 640)

    cuda.rehearse(lambda: cuda.torch_op(lambda: None, barrier=True))
    step()
    assert [launch.programmatic for launch in gpu.launches] == [True, True, False, True]
    assert len({launch._replace(programmatic=True) for launch in gpu.launches}) == 1
    for barrier in (True, False):
        cuda.torch_op(lambda: None, barrier=barrier)
    other = threading.Thread(target=cuda.launch, args=(KERNEL, GRID, BLOCK, ()))
    other.start()
    other.join()
    cuda.launch(KERNEL, GRID, BLOCK, ())
    assert [launch.programmatic for launch in gpu.launches[4:]] == [True, False]


@pytest.mark.parametrize(("capability", "asked"), [(89, True), (90, False), (120, False)])
def test_kernels_wait_for_each_other_elsewhere(capability: int, asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, Gpu(capability))
    cuda = CudaLauncher(0, programmatic_launch=asked)
    cuda.launch(KERNEL, GRID, BLOCK, ())
    assert not cuda.programmatic_launch
    assert not gpu.launches[0].programmatic
    assert gpu.compiled[0][2] == ()
    assert gpu.attributes == []


def test_kernel_for_newer_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = install(monkeypatch, Gpu(75))
    with pytest.raises(UnsupportedError, match=r"capability 8\.0"):
        CudaLauncher().launch(KERNEL._replace(min_capability=80), GRID, BLOCK, ())
    assert not gpu.compiled


def no_driver(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)


def torch_for_cpus(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)


def no_device(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.count = 0


def old_driver(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore lines")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)


def old_device(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.properties.major, gpu.properties.minor = 7, 0


def no_cupy(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError("GPU kernels need CuPy", "pip install 'nanovllm-cli[cuda13]'")

    monkeypatch.setattr(compiler, "toolchain", missing)


@pytest.mark.parametrize(
    ("lack", "message", "hint"),
    [
        (no_driver, "no NVIDIA driver", "install the driver"),
        (torch_for_cpus, "built for CPUs", "pytorch.org"),
        (no_device, "no CUDA device", "CUDA_VISIBLE_DEVICES"),
        (old_driver, "driver on your system is too old", "update the driver"),
        (old_device, "Fake has compute capability 7.0", "--device cpu"),
        (no_cupy, "CuPy", "pip install 'nanovllm-cli[cuda13]'"),
    ],
)
def test_what_is_missing_is_told(lack, message: str, hint: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_unavailable() is None
    lack(gpu, monkeypatch)
    reason = why_unavailable()
    assert reason is not None
    assert message in reason.message
    assert "\n" not in reason.message
    assert hint in str(reason.hint)
    assert reason.exit_code == 6
    with pytest.raises(UnsupportedError, match=message):
        CudaLauncher()


def test_device_that_is_not_there(gpu: Gpu) -> None:
    gpu.count = 2
    with pytest.raises(UnsupportedError, match="no device cuda:2; there are 2"):
        CudaLauncher(2)


def test_without_a_gpu_there_is_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert why_unavailable() is not None


def test_launch_takes_little_time(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaLauncher()
    monkeypatch.setattr(cuda._driver, "_launch", lambda *args: 0)
    tensors = tuple(torch.zeros(1) for _ in range(6))
    args = (*tensors, np.int32(1), np.int32(2), np.float32(3))
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        for _ in range(200):
            cuda.launch(KERNEL, GRID, BLOCK, args)
        best = min(best, (time.thread_time() - start) / 200)
    assert best < 20e-6  # 2 to 3 microseconds; a slow machine is none of its business
