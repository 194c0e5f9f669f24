"""A GPU as a Device, through torch."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable

import numpy as np
import torch

from nanovllm_cli.errors import DoesNotFitError, LostDeviceError, UnsupportedError
from nanovllm_cli.kernels.device import Event, Graph, HostPages, Memory
from nanovllm_cli.kernels.launcher import CudaLauncher

HOST_REGISTER_PORTABLE, HOST_REGISTER_MAPPED = 1, 2


class CudaDevice:
    """See `device.Device`. UnsupportedError where the device can't be used."""

    def __init__(self, index: int = 0, programmatic_launch: bool = False) -> None:
        self.launcher = CudaLauncher(index, programmatic_launch)
        self._pool = torch.cuda.graph_pool_handle()
        # One of this GPU's: torch's own belongs to whichever GPU captured first in this process.
        self._stream = torch.cuda.Stream(self.launcher.device)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        torch.cuda.set_device(self.launcher.device)

    def check(self) -> None:
        try:
            torch.cuda.synchronize(self.launcher.device)
        except RuntimeError as error:  # of a kernel that went wrong, which every call tells from then on
            reason = str(error).strip().partition("\n")[0]
            raise LostDeviceError(f"the GPU does nothing more for this process: {reason}", "start again") from error

    def host_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, pin_memory=True)

    def host_pages(self, num_bytes: int) -> HostPages:
        """Not torch's own page-locked memory, of which each piece becomes as large as a power of two."""
        from cupy.cuda import PinnedMemory, runtime

        runtime.setDevice(self.launcher.device.index)
        try:
            memory = PinnedMemory(num_bytes)
        except runtime.CUDARuntimeError as error:
            raise DoesNotFitError(
                f"{num_bytes >> 20} MiB of the machine's memory could not be locked for the GPU ({error})",
                "try a smaller model, or leave more of it on the GPU (--n-gpu-layers)",
            ) from error
        pages = _Bytes(memory.ptr, num_bytes, memory)  # such memory has one address for host and GPU
        host = torch.from_numpy(np.asarray(pages))
        return HostPages(host.zero_(), torch.as_tensor(pages, device=self.launcher.device))

    def shared_pages(self, memory: mmap.mmap) -> torch.Tensor:
        from cupy.cuda import runtime

        runtime.setDevice(self.launcher.device.index)
        start = ctypes.c_byte.from_buffer(memory)
        address = ctypes.addressof(start)
        if not runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, self.launcher.device.index):
            raise UnsupportedError("a GPU that sees the machine's memory at other addresses can't compute together with others")
        try:
            runtime.hostRegister(address, len(memory), HOST_REGISTER_PORTABLE | HOST_REGISTER_MAPPED)
        except runtime.CUDARuntimeError as error:
            raise DoesNotFitError(
                f"{len(memory) >> 20} MiB of the machine's memory could not be locked for the GPUs ({error})",
                "see what `ulimit -l` says",
            ) from error
        pages = _Bytes(address, len(memory), start)
        weakref.finalize(pages, runtime.hostUnregister, address).atexit = False
        return torch.as_tensor(pages, device=self.launcher.device)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        infers = torch.is_inference_mode_enabled()
        try:
            # Other threads may allocate meanwhile: only what this one does wrong counts. Torch begins by making tensors for its
            # random numbers, which all graphs share: of inference mode nobody outside of it could record anything any more.
            with (
                torch.inference_mode(False),
                torch.cuda.graph(graph, self._pool, self._stream, "thread_local"),
                torch.inference_mode(infers),
            ):
                output = step()
        finally:
            torch.cuda.set_stream(stream)  # where the capture fails at its end, torch stays on the one it captured on
        assert output.is_contiguous()
        place = torch.as_tensor(_Bytes(output.data_ptr(), output.nbytes), device=output.device)
        return graph, place.view(output.dtype).view(output.shape)

    def memory(self) -> Memory:
        device = self.launcher.device
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        idle = torch.cuda.memory_reserved(device) - allocated  # torch has taken it and not given it out
        return Memory(free + idle, total, allocated, torch.cuda.max_memory_allocated(device))

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.launcher.device)


class _Bytes:
    """Memory as numpy and torch take it from other libraries, version 3 of both array interfaces. owner: what they hold on to
    with it. Of a graph's output nobody: its memory is there as long as the graph, and what is recorded later may take it."""

    def __init__(self, address: int, num_bytes: int, owner: object = None) -> None:
        self._owner = owner
        interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        self.__array_interface__ = self.__cuda_array_interface__ = interface
