"""The kernels' tests on what a GPU is given: with TEST_NANOVLLM_PTX=90 an `Emulator` compiles for 9.0 by NVRTC, and runs the PTX.

Tensors lie in ordinary memory, and nothing but a launch's own may be touched. Skipped, with the reason: kernels that are not for
that GPU, dependent launch, which is emulated, and launches that read addresses from a table.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from emulation.emulator import CACHE, Emulator, KernelFailed, appearing, lacking
from emulation.on_gpu import reads_tasks
from nanovllm_cli.kernels import compiler
from nanovllm_cli.kernels.kernel import SOURCES, Arg, Kernel, read_sources
from ptx.code import PARAM_BYTES, RESERVED_BYTES, Code, read

HERE = Path(__file__).parent
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-shared", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing"]
ORDERS = HERE.parent / "emulation" / "orders.h"
Dims = tuple[int, int, int]
Change = Callable[[str], str]


class Traffic(NamedTuple):
    """What a kernel's warps did at an instruction: how often, and what that took in turns of shared memory's 32 banks, or in
    sectors of 32 bytes of global memory; `least` is what as many bytes need. line: of the PTX."""

    kernel: str
    line: int
    is_shared: bool
    requests: int
    actual: int
    least: int


class Program(NamedTuple):
    """An entry, ready to run for as long as the process lives."""

    code: Code
    handle: ctypes.c_void_p


class PtxMachine(Emulator):
    """change: what is done to the PTX before it runs, for tests of the tests. counts_traffic: into `traffic`."""

    def __init__(
        self,
        order: int = 0,
        capability: int = 90,
        change: Change | None = None,
        counts_traffic: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(order, capability, **settings)
        self.change = change
        self.counts_traffic = counts_traffic
        self.traffic: list[Traffic] = []

    def launch(self, kernel: Kernel, grid: Dims, block: Dims, args: tuple[Arg, ...], shared_bytes: int = 0) -> None:
        if not kernel.min_capability <= self.capability <= kernel.max_capability:
            pytest.skip(f"{kernel} is not for {self.capability}")
        if "OVERLAP" in self.bugs:
            pytest.skip("dependent launch is for the emulation")
        if kernel.stem == "blocks":
            pytest.skip("its table has addresses")
        if reads_tasks(kernel) and not self.by_address:
            pytest.skip("its tasks have addresses, and nobody says of what")
        program = _program(kernel, self.bugs, self.capability, self.change)
        self.run(f"{kernel}, as PTX for {self.capability}", program, grid, block, args, shared_bytes)

    def run(
        self, name: str, program: Program, grid: Dims, block: Dims, args: tuple[Arg, ...], shared_bytes: int = 0
    ) -> None:
        """Raises KernelFailed, with the line of the PTX, where a launch does what it must not."""
        code, machine = program.code, _machine()
        assert code.num_params == len(args), (name, code.num_params, len(args))
        assert block[0] * block[1] * block[2] <= code.max_threads, (name, block)
        params, ranges = np.zeros((len(args), PARAM_BYTES), np.uint8), []
        for place, arg in enumerate(args):
            params[place, : len(_bytes(arg))] = _bytes(arg)
        for arg in (*args, *self.by_address):
            if isinstance(arg, torch.Tensor):
                storage = arg.untyped_storage()
                ranges += [storage.data_ptr(), storage.data_ptr() + storage.nbytes()]
        end = code.dynamic_at + shared_bytes if shared_bytes else RESERVED_BYTES + code.shared_bytes
        machine.ptx_count_traffic(self.counts_traffic)
        failed = machine.ptx_launch(
            program.handle, (ctypes.c_uint32 * 6)(*grid, *block), _pointer(params), ctypes.c_long(params.nbytes),
            (ctypes.c_uint64 * len(ranges))(*ranges), ctypes.c_long(len(ranges) // 2),
            (ctypes.c_uint32 * 2)(RESERVED_BYTES, end), code.local_bytes, self.order,
            ctypes.c_long(-1 if self.only_block is None else self.only_block),
        )  # fmt: skip
        if failed:
            raise KernelFailed(f"{name}: {machine.ptx_failure().decode()}")
        rows = np.zeros((machine.ptx_traffic(None, ctypes.c_long(0)), 5), np.int64)
        machine.ptx_traffic(_pointer(rows), ctypes.c_long(len(rows)))
        self.traffic += [Traffic(name, line, bool(shared), *counts) for line, shared, *counts in rows.tolist()]


def _bytes(arg: Arg) -> np.ndarray:
    if arg is None:
        return np.zeros(8, np.uint8)
    if isinstance(arg, torch.Tensor):
        return np.array([arg.data_ptr()], np.uint64).view(np.uint8)
    return np.array([arg]).view(np.uint8)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def _program(kernel: Kernel, bugs: tuple[str, ...], capability: int, change: Change | None) -> Program:
    ptx = text(kernel, bugs, capability)
    return load(change(ptx) if change else ptx, kernel.entry)


def load(ptx: str, entry: str) -> Program:
    code = read(ptx, entry, meaning)
    handle = _machine().ptx_program(
        _pointer(code.lines), ctypes.c_long(len(code.lines)), _pointer(code.operands), ctypes.c_long(len(code.operands)),
        _pointer(code.registers), ctypes.c_long(len(code.registers)), _pointer(code.specials), ctypes.c_long(len(code.specials)),
    )  # fmt: skip
    return Program(code, ctypes.c_void_p(handle))


def text(kernel: Kernel, bugs: tuple[str, ...], capability: int) -> str:
    """The kernel's PTX, from the cache where its sources and compiler are unchanged."""
    tools = compiler.toolchain()
    source = SOURCES / f"{kernel.stem}.cu"
    options = [*compiler.OPTIONS[:-1], *kernel.defines, *(f"-DBUG_{bug}" for bug in bugs)]
    options += [*(["-DPDL"] if capability >= 90 else []), f"-arch={compiler.architecture(capability).replace('sm', 'compute')}"]
    sources = read_sources(source, SOURCES)
    digest = hashlib.sha256(repr((options, tools.nvrtc_version, tools.headers_version, sources)).encode()).hexdigest()
    target = CACHE / f"{kernel.entry}-{digest[:20]}.ptx"
    if not target.is_file():
        ptx = _compiled(sources[source.name], kernel, options, tools)
        with appearing(target) as unfinished:
            unfinished.write_text(ptx)
    return target.read_text()


def _compiled(source: str, kernel: Kernel, options: list[str], tools: compiler.Toolchain) -> str:
    program = tools.nvrtc.createProgram(source, f"{kernel.stem}.cu", (), ())
    try:
        tools.nvrtc.compileProgram(program, (*options, *(f"-I{folder}" for folder in (SOURCES, *tools.folders))))
        ptx = tools.nvrtc.getPTX(program)
    except tools.nvrtc.NVRTCError as error:
        raise AssertionError(f"{kernel} does not compile:\n{tools.nvrtc.getProgramLog(program)}") from error
    finally:
        tools.nvrtc.destroyProgram(program)
    return ptx.decode() if isinstance(ptx, bytes) else ptx


@functools.cache
def meaning(name: str) -> int:
    """The number of an instruction in the machine, or -1."""
    return int(_machine().ptx_meaning(name.encode()))


@functools.cache
def _machine() -> Any:
    sources = sorted(HERE.glob("*.cpp"))
    digest = hashlib.sha256(repr(FLAGS).encode() + b"".join(file.read_bytes() for file in [*sources, *HERE.glob("*.h"), ORDERS]))
    target = CACHE / f"ptx-{digest.hexdigest()[:20]}.so"
    with lacking(target) as lacks:
        if lacks:
            with appearing(target) as unfinished:
                subprocess.run(["g++", *FLAGS, *map(str, sources), "-o", str(unfinished)], check=True)
    library = ctypes.CDLL(str(target))
    library.ptx_traffic.restype = ctypes.c_long
    library.ptx_program.restype = ctypes.c_void_p
    library.ptx_failure.restype = ctypes.c_char_p
    return library
