"""A Launcher whose GPU is the CPU: kernels compiled by g++ (cuda_emulation.h), tensors in ordinary memory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from emulation import on_gpu
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.kernels import compiler
from nanovllm_cli.kernels.kernel import SOURCES, Arg, Kernel, read_sources

HERE = Path(__file__).parent
OVERLAP = HERE / "overlap" / "overlap.h", HERE / "overlap" / "copies.hpp"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm" / "emulation"
SANITIZE = os.environ.get("TEST_NANOVLLM_SANITIZE") == "1"  # set by sanitized.py
PTX = int(os.environ.get("TEST_NANOVLLM_PTX") or 0)
"""The capability whose PTX an `Emulator` runs instead: see ptx/device.py."""
ORDERS = (7,) if SANITIZE else (0,) if on_gpu.ENABLED else (0, 1, 7)
"""Thread orders that every kernel is tested in: as numbered, backwards, shuffled."""
FLAGS = ["-std=c++20", "-fPIC", "-fno-strict-aliasing", "-DEMULATION", "-w", "-Og"]
if SANITIZE:  # variables of shared memory get gaps too, though they have a section of their own
    FLAGS += ["-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fsanitize-sections=cuda_shared"]
    FLAGS += ["-fno-sanitize=null,pointer-overflow"]  # a fifth of compiling, and what they find ends in an access, which is found


def cuda_headers() -> list[Path]:
    """Folders of cuda_fp16.h, from the wheel nvidia-cuda-runtime, and of what it includes, which CuPy brings; or nothing."""
    found = _inside(("nvidia.cu13", "nvidia.cuda_runtime"), "include/cuda_fp16.h", "include")
    found += _inside(("cupy",), "_core/include/cupy/_cccl/libcudacxx/nv/target", "_core/include/cupy/_cccl/libcudacxx")
    return found if len(found) == 2 else []


def _inside(packages: tuple[str, ...], file: str, folder: str) -> list[Path]:
    """The folder in the first of the packages that has the file; the packages are not imported."""
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in spec.submodule_search_locations or [] if spec else []:
            if (Path(place) / file).is_file():
                return [Path(place) / folder]
    return []


def missing() -> str | None:
    """Why kernels can't be emulated here, or None."""
    if on_gpu.ENABLED:
        return on_gpu.missing()
    if PTX:
        return missing_ptx()
    if platform.machine() != "x86_64":
        return "the emulation switches stacks on x86-64 only"
    if shutil.which("g++") is None:
        return "no g++"
    if not cuda_headers():
        return "no CUDA headers: pip install '.[kernels-test]'"
    return None


def missing_ptx() -> str | None:
    """Why PTX can't be made, or not be run, here, or None."""
    if shutil.which("g++") is None:
        return "no g++"
    if os.environ.get("TEST_NANOVLLM_SANITIZE"):
        return "NVRTC finds no library of its own under the sanitizers"
    try:
        compiler.toolchain()
    except UnsupportedError as error:
        return error.message
    return None


needs_emulation = pytest.mark.skipif(missing() is not None, reason=str(missing()))
emulation_alone = [needs_emulation, pytest.mark.skipif(on_gpu.ENABLED, reason="a GPU hides no memory")]
"""Of a file that asks what only the emulation can tell."""


class KernelFailed(AssertionError):
    """The kernel did what a GPU would not survive, or would not say."""


class Emulator:
    """order: the seed of the order in which threads and blocks get their turn. capability: what the wrappers are told.

    bugs: macros that plant a bug, for tests of the tests; OVERLAP is none, but emulates dependent launch (overlap.h).
    only_block: the one block of a launch that runs, for grids too large to emulate. `launches` counts, by entry; `launched` and
    `rehearsed` are the kernels. by_address: what kernels find by addresses in tasks of experts, for those who ask what is theirs.
    """

    by_address: Sequence[torch.Tensor] = ()

    def __init__(
        self,
        order: int = 0,
        capability: int = 90,
        num_multiprocessors: int = 4,
        bugs: tuple[str, ...] = (),
        only_block: int | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.capability = capability
        self.num_multiprocessors = num_multiprocessors
        self.order = order
        self.bugs = bugs
        self.only_block = only_block
        self.launches: dict[str, int] = {}
        self.launched: set[Kernel] = set()
        self.rehearsed: set[Kernel] = set()

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: tuple[Arg, ...],
        shared_bytes: int = 0,
    ) -> None:
        assert 0 < block[0] * block[1] * block[2] <= 1024, block
        assert all(0 < size < limit for size, limit in zip(grid, (1 << 31, 1 << 16, 1 << 16), strict=True)), grid
        assert shared_bytes <= 227 << 10, shared_bytes
        self.launches[kernel.entry] = self.launches.get(kernel.entry, 0) + 1
        self.launched.add(kernel)
        if on_gpu.ENABLED:
            on_gpu.launch(self, kernel, grid, block, args, shared_bytes)
            return
        if PTX:
            from ptx.device import PtxMachine

            machine = PtxMachine(self.order, PTX, bugs=self.bugs, only_block=self.only_block)
            machine.by_address = self.by_address
            machine.launch(kernel, grid, block, args, shared_bytes)
            return
        library = load(kernel, self.bugs)
        library.emulation_set_order(self.order)
        library.emulation_set_with_products(_has_products(kernel))
        library.emulation_set_only_block(ctypes.c_long(-1 if self.only_block is None else self.only_block))
        dims = (ctypes.c_uint * 6)(*grid, *block)
        values = [_value(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        entry = getattr(library, f"emulated_{kernel.entry}")
        if entry(dims, ctypes.c_size_t(shared_bytes), pointers):
            raise KernelFailed(f"{kernel}: {library.emulation_failure().decode()}")

    def torch_op(self, function: Callable[[], object], barrier: bool = False) -> None:
        function()

    def rehearse(self, step: Callable[[], object]) -> None:
        """Compiles nothing: the tests' models need few of the kernels that they might."""
        self.launch = lambda kernel, *_: self.rehearsed.add(kernel)
        self.torch_op = lambda *_, **__: None
        try:
            step()
        finally:
            del self.launch, self.torch_op


def _value(arg: Arg) -> np.ndarray:
    if arg is None:
        return np.array([0], np.uint64)
    if isinstance(arg, torch.Tensor):
        return np.array([arg.data_ptr()], np.uint64)
    assert isinstance(arg, np.generic), f"{arg!r} has no C type"
    return np.array([arg])


@functools.cache
def _has_products(kernel: Kernel) -> bool:
    """Of warpgroups."""
    return "wgmma.cuh" in read_sources(SOURCES / f"{kernel.stem}.cu", SOURCES)


_libraries: dict[tuple[Kernel, tuple[str, ...]], ctypes.CDLL] = {}


def load(kernel: Kernel, bugs: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The compiled kernel, from the cache where its sources are unchanged."""
    key = (kernel, bugs)
    if key not in _libraries:
        if SANITIZE:
            _skip_most_variants(kernel, bugs)
        library = ctypes.CDLL(str(build(kernel, bugs)))
        library.emulation_failure.restype = ctypes.c_char_p
        _libraries[key] = library
    return _libraries[key]


def _skip_most_variants(kernel: Kernel, bugs: tuple[str, ...]) -> None:
    """One variant of an entry is sanitized, the first that is asked for: each costs seconds to compile. No planted bugs."""
    if bugs or any((kernel.stem, kernel.entry) == (known.stem, known.entry) for known, _ in _libraries):
        pytest.skip("another variant is sanitized")


def build(kernel: Kernel, bugs: tuple[str, ...] = ()) -> Path:
    source = SOURCES / f"{kernel.stem}.cu"
    options = [*kernel.defines, *(f"-DBUG_{bug}" for bug in bugs)]
    texts = read_sources(source, SOURCES)
    if "OVERLAP" in bugs:
        options += [option for header in OVERLAP for option in ("-include", str(header))]
        texts |= {header.name: header.read_text() for header in OVERLAP}
    digest = hashlib.sha256(repr((_digest(), options, texts)).encode()).hexdigest()
    target = CACHE / f"{Path(kernel.stem).name}-{kernel.entry}-{digest[:20]}.so"
    if not target.is_file():
        _link(target, [*options, f"-I{SOURCES}", "-x", "c++", str(source), "-x", "none", str(_machine()), "-Wl,-rpath,$ORIGIN"])
    return target


@functools.cache
def _machine() -> Path:
    """The library of what does not depend on the kernel: half the time of a small one."""
    target = CACHE / f"machine-{_digest()}.so"
    with lacking(target) as lacks:
        if lacks:
            # most of the time is spent here; and without the headers that were compiled beforehand, for those want the same flags
            _compile(target, ["-shared", "-O2", *map(str, sorted(HERE.glob("*.cpp"))), f"-Wl,-soname,{target.name}"])
    return target


@functools.cache
def _headers() -> Path:
    """A header that includes what every kernel begins with, compiled beforehand: half of the rest."""
    header = CACHE / f"headers-{_digest()}" / "headers.h"
    compiled = header.with_name("headers.h.gch")
    with lacking(compiled) as lacks:
        if lacks:
            header.write_text('#include "cuda_emulation.h"\n')
            _compile(compiled, ["-x", "c++-header", str(header)])
    return header


@functools.cache
def _digest() -> str:
    """Of all that kernels have in common."""
    digest = hashlib.sha256(repr((FLAGS, cuda_headers())).encode())
    for file in sorted([*HERE.rglob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:20]


def _link(target: Path, arguments: list[str]) -> None:
    """Into a library, with the headers."""
    _compile(target, ["-shared", "-include", str(_headers()), *arguments])


def _compile(target: Path, arguments: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # of the sanitizers
    command = ["g++", *FLAGS, *arguments, *(f"-I{folder}" for folder in (HERE, *cuda_headers()))]
    with appearing(target) as unfinished:
        done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, env=environment)
        if done.returncode:
            raise KernelFailed(f"{target.name} does not compile:\n{done.stderr[:4000]}")


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A place to write what becomes `target` then: it appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    yield unfinished
    unfinished.rename(target)


@contextlib.contextmanager
def lacking(target: Path) -> Iterator[bool]:
    """Whether `target` is still to be made, of what all processes need that start together: one makes it, the others wait."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        if not target.is_file():
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back where it is closed
        yield not target.is_file()
