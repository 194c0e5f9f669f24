"""Kernels from source to machine code: NVRTC through CuPy, which needs no driver, and a cache of the results on disk.

A cache entry is named by everything that its content depends on: sources, options, architecture, compiler, headers, driver. It
is written whole or not at all and carries a checksum: an entry that is cut short, altered or not this user's own is not used,
and built again. A folder that can't be written costs the time to compile and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.folders import cache_folder, note_use, remove_unused
from nanovllm_cli.kernels.kernel import SOURCES, Kernel, read_sources

# C++20 as in the tests' emulation. Denormal fp32 numbers are taken for zero, which makes division and square roots cheaper.
OPTIONS = ("--std=c++20", "--device-as-default-execution-space", "-ftz=true", "--ptxas-options=-v")
# NVRTC takes machine code out of the driver's cache, where there is a driver. Of such code ptxas says nothing.
NO_CACHE, FIRST_WITH_CACHE = "--no-cache", (12, 9)
HEADER = "cuda_fp8.h"  # stands for the small floats' headers, which come together
_FORMAT = b"nanovllm kernel 1\n"
_USAGE = re.compile(
    r"Compiling entry function '(?P<entry>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


class Resources(NamedTuple):
    """What a kernel takes: registers of a thread; static shared memory of a block; stack and spills of a thread, in bytes."""

    registers: int
    shared: int
    stack: int
    spills: int


class Compiled(NamedTuple):
    """Machine code of all entry points of a source, and what the kernel's own takes."""

    cubin: bytes
    resources: Resources


class Toolchain(NamedTuple):
    """nvrtc: CuPy's module of that name. versions: NVRTC's, the headers' and the driver's, as in `13.0`."""

    nvrtc: Any
    nvrtc_version: str
    headers_version: str
    driver_version: str
    folders: tuple[Path, ...]


def architecture(capability: int) -> str:
    """The compiler's name of a GPU generation; from 9.0 to 11.x with what only that generation has (wgmma, tcgen05)."""
    return f"sm_{capability}{'a' if 90 <= capability < 120 else ''}"


def compile(kernel: Kernel, arch: str, extra: tuple[str, ...] = ()) -> Compiled:
    """The kernel's machine code for `arch` (`sm_90a`), from the cache where it is there. extra: more compiler options.

    Raises UnsupportedError where CuPy, NVRTC or CUDA's headers are missing, or too old for the architecture.
    """
    tools = toolchain()
    options = (*OPTIONS, *kernel.defines, *extra, f"-arch={arch}")
    path = SOURCES / f"{kernel.stem}.cu"
    sources = read_sources(path, SOURCES)
    versions = (tools.nvrtc_version, tools.headers_version, tools.driver_version)
    key = hashlib.sha256(json.dumps([kernel.entry, options, versions, sources]).encode()).hexdigest()
    compiled = _load(key)
    if compiled is None:
        cubin, log = _compile(sources[path.name], kernel, arch, options, tools)
        compiled = Compiled(cubin, _resources(log, kernel))
        _store(key, compiled)
    return compiled


def _compile(source: str, kernel: Kernel, arch: str, options: tuple[str, ...], tools: Toolchain) -> tuple[bytes, str]:
    """Machine code, and what ptxas said. CuPy drops the last byte of the file, a zero."""
    nvrtc = tools.nvrtc
    number = int(re.findall(r"\d+", arch)[0])
    if number not in nvrtc.getSupportedArchs():
        raise UnsupportedError(
            f"NVRTC {tools.nvrtc_version} knows no {arch}", "install a newer CUDA: " + _install("13")
        )
    more = [f"-I{folder}" for folder in (SOURCES, *tools.folders)]
    if tuple(map(int, tools.nvrtc_version.split("."))) >= FIRST_WITH_CACHE:
        more.append(NO_CACHE)
    program = nvrtc.createProgram(source, f"{kernel.stem}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, *more))
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        lines = nvrtc.getProgramLog(program).splitlines() or [str(error)]
        reason = next((line for line in lines if "error" in line), lines[0])
        message = f"{kernel} does not compile for {arch} with NVRTC {tools.nvrtc_version}: {reason.strip()}"
        raise UnsupportedError(message) from error
    finally:
        nvrtc.destroyProgram(program)


def _resources(log: str, kernel: Kernel) -> Resources:
    for found in _USAGE.finditer(log):
        if found["entry"] == kernel.entry:
            spills = int(found["stores"]) + int(found["loads"])
            return Resources(int(found["registers"]), int(found["shared"] or 0), int(found["stack"]), spills)
    raise AssertionError(f"{kernel} is not in the compiler's log: {log[:2000]!r}")


# ---- what there is to compile with ----


@functools.cache
def toolchain() -> Toolchain:
    """NVRTC and CUDA's headers, of one major version. Raises UnsupportedError that says what is missing."""
    try:
        import cupy
        from cupy.cuda import nvrtc, runtime
    except ImportError as error:
        raise UnsupportedError(f"GPU kernels need CuPy: {error}", _install("13")) from error
    try:
        major, minor = _version_of(nvrtc)
    except RuntimeError as error:
        raise UnsupportedError(f"CuPy finds no NVRTC, the CUDA compiler: {error}", _install_wheels("13")) from error
    headers = next((folder for folder in _header_folders(major) if _headers_version(folder)[0] == major), None)
    if headers is None:
        raise UnsupportedError(
            f"no headers of CUDA {major} ({HEADER})", f"{_install_wheels(str(major))}, or set CUDA_PATH"
        )
    # What the small floats' headers include in turn: CuPy brings it, and so does a toolkit.
    others = [Path(cupy.__file__).parent / "_core/include/cupy/_cccl/libcudacxx", headers / "cccl", headers]
    other = next((folder for folder in others if (folder / "nv/target").is_file()), headers)
    version = ".".join(map(str, _headers_version(headers)))
    driver = runtime.driverGetVersion()  # 0 without a driver
    return Toolchain(nvrtc, f"{major}.{minor}", version, f"{driver // 1000}.{driver % 1000 // 10}", (headers, other))


def _version_of(nvrtc: Any) -> tuple[int, int]:
    """Loads the library, too. CuPy before 14 looks for it in toolkits only, but takes one that is loaded already."""
    try:
        version: tuple[int, int] = nvrtc.getVersion()
    except RuntimeError:
        places = [place for package in ("nvidia.cu13", "nvidia.cuda_nvrtc") for place in _places(package)]
        for library in (file for place in places for file in sorted(Path(place).glob("lib/libnvrtc.so.*"))):
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(library))
        version = nvrtc.getVersion()
    _load_builtins()
    return version


def _load_builtins() -> None:
    """What NVRTC opens by its name alone as it compiles. It lies beside NVRTC, but the wheel of CUDA 13.0 does not say so, and it
    is found there only once it is loaded."""
    with contextlib.suppress(OSError):  # where there is no such list, as on Windows, folders are searched for it
        loaded = Path("/proc/self/maps").read_text()
        for folder in dict.fromkeys(re.findall(r"(/.*)/libnvrtc\.so\.[^/\n]*$", loaded, re.MULTILINE)):
            for library in sorted(Path(folder).glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(library))


def _header_folders(major: int) -> Iterator[Path]:
    """Where the headers may be: wheels that torch brings, a toolkit, and only then what NVIDIA's own search finds."""
    for name in (f"nvidia.cu{major}", "nvidia.cuda_runtime"):
        yield from (Path(place) / "include" for place in _places(name))
    yield from (Path(os.environ[name]) / "include" for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name))
    yield Path("/usr/local/cuda/include")
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return
    found = find_nvidia_header_directory("cudart")
    if found:
        yield Path(found)


def _places(package: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def _headers_version(folder: Path) -> tuple[int, int]:
    """(0, 0) where they are not."""
    if not (folder / HEADER).is_file():
        return 0, 0
    with contextlib.suppress(OSError):
        found = re.search(
            r"#define CUDART_VERSION\s+(\d+)", (folder / "cuda_runtime_api.h").read_text(errors="replace")
        )
        if found:
            return int(found[1]) // 1000, int(found[1]) % 1000 // 10
    return 0, 0


def _install(major: str) -> str:
    return f"pip install 'nanovllm-cli[cuda{major}]'"


def _install_wheels(major: str) -> str:
    suffix = "" if major == "13" else f"-cu{major}"
    return f"pip install nvidia-cuda-nvrtc{suffix} nvidia-cuda-runtime{suffix}"


# ---- the cache ----


def _load(key: str) -> Compiled | None:
    """A sound entry, or None; a broken one is removed."""
    path = cache_folder() / "cuda" / key
    content = _read_own(path)
    if content is None:
        return None
    body = content[len(_FORMAT) + 64 :]
    if content[: len(_FORMAT) + 64] == _FORMAT + _checksum(key, body):
        usage, _, cubin = body.partition(b"\n")
        note_use(path)
        return Compiled(cubin, Resources(*json.loads(usage)))
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def _store(key: str, compiled: Compiled) -> None:
    """Under a temporary name first, so that no reader meets half an entry. What a crash of the machine leaves of it has another
    checksum: nobody waits for the disk."""
    body = json.dumps(compiled.resources).encode() + b"\n" + compiled.cubin
    folder = cache_folder() / "cuda"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_own(folder.lstat()):
            return
        file, unfinished = tempfile.mkstemp(dir=folder)
        try:
            with open(file, "wb") as out:
                out.write(_FORMAT + _checksum(key, body) + body)
            os.replace(unfinished, folder / key)
            remove_unused(folder)
        except OSError:
            os.unlink(unfinished)


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).hexdigest().encode()


def _read_own(path: Path) -> bytes | None:
    """What others could have written is machine code of theirs, and would run as this user: it counts as not there."""
    try:
        if not _is_own(path.parent.lstat()):
            return None
        file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
        with open(file, "rb") as entry:
            return entry.read() if _is_own(os.fstat(file)) else None
    except OSError:
        return None


def _is_own(status: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):  # Windows: the profile's folder is the user's own
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
