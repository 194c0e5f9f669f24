"""What the operating system tells of the machine and grants this process: the one place that knows Linux from macOS.

Linux tells in files, macOS by calls of its C library: `sysctlbyname`, whose names are those that `sysctl -a` lists and Apple's
"Determining system capabilities" explains, and Mach's `host_statistics64`. What a system does not tell is None, or empty. To be
imported on another one raises UnsupportedError.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanovllm_cli.errors import UnsupportedError

try:
    import fcntl
    import resource
except ModuleNotFoundError as missing:
    raise UnsupportedError(
        f"nanovllm runs under Linux and macOS, not under {'Windows' if sys.platform == 'win32' else sys.platform}",
        "in WSL 2 it runs on Windows: `wsl --install` in PowerShell, then install it there" if sys.platform == "win32" else None,
    ) from missing

SYSTEM: str = sys.platform
MACOS = "darwin"

ARM_FEATURES = {"asimd": "neon", "asimddp": "arm.FEAT_DotProd", "i8mm": "arm.FEAT_I8MM"}
"""Those that kernels use: Linux's names and macOS' (behind `hw.optional.`)."""

NODES = Path("/sys/devices/system/node")
_MOST_VALUE_BYTES = 256
_HOST_VM_INFO64, _HOST_VM_INFO64_WORDS = 4, 38
_MOST_ADDRESSES = 1 << 47
_ADDRESS_STEP = 1 << 26


def is_macos() -> bool:
    return SYSTEM == MACOS


# ---- memory ----


def memory_bytes() -> int:
    """All that the machine has."""
    found = sysctl_number("hw.memsize") if is_macos() else None
    return found or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Memory that can be taken without swapping; half of what there is where the system does not say."""
    found = _available_on_macos() if is_macos() else _available_on_linux()
    return memory_bytes() // 2 if found is None else found


def _available_on_linux() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _available_on_macos() -> int | None:
    """What is free, and what has not been used for a while: files' pages, and programs' that are compressed first."""
    words, count = (ctypes.c_uint32 * _HOST_VM_INFO64_WORDS)(), ctypes.c_uint32(_HOST_VM_INFO64_WORDS)
    library = _library()
    if library.host_statistics64(library.mach_host_self(), _HOST_VM_INFO64, words, ctypes.byref(count)):
        return None
    free, _active, inactive, _wired = words[:4]
    return int(free + inactive) * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if is_macos() else peak * 1024


def shared_memory(num_bytes: int) -> int:
    """A file of so many zeros in memory, for this process and those that inherit it, as a descriptor. UnsupportedError where the
    system has none."""
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("several processes for one model need Linux", "leave --tensor-parallel-size out")
    handle = os.memfd_create("nanovllm", os.MFD_CLOEXEC)
    os.ftruncate(handle, num_bytes)
    return handle


# ---- processors ----


def memory_nodes() -> list[set[int]]:
    """The processors beside each of a machine's memories (NUMA); empty where nobody says."""
    found = []
    for path in sorted(NODES.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        with contextlib.suppress(OSError, ValueError):
            found.append({i for part in path.read_text().strip().split(",") if part for i in _span(part)})
    return [node for node in found if node]


def _span(text: str) -> range:
    """Of "3" or "4-7"."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def processor_name() -> str:
    """Empty where the system has numbers, to which others know names, as Linux on ARM."""
    if is_macos():
        return (sysctl("machdep.cpu.brand_string") or b"").decode(errors="replace")
    lines = _cpuinfo().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def fast_processors() -> int | None:
    """Of a processor that has frugal cores too, the number of the others. None where all are alike, or nobody says."""
    if not is_macos():
        return None
    levels = range(sysctl_number("hw.nperflevels") or 0)
    fast = [i for i in levels if sysctl(f"hw.perflevel{i}.name") != b"Efficiency"]
    return sum(sysctl_number(f"hw.perflevel{i}.physicalcpu") or 0 for i in fast) or None


def last_cache_bytes() -> int:
    """The size of the largest cache; 0 where nobody says."""
    if is_macos():
        levels = (f"hw.perflevel{level}.l{cache}cachesize" for level in (0, 1) for cache in (2, 3))
        return max(sysctl_number(name) or 0 for name in levels)
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1:], 0))
    return max(sizes)


def arm_features() -> frozenset[str] | None:
    """Which of ARM_FEATURES all cores of a 64-bit ARM processor have, by Linux's names; None where the system does not say."""
    if is_macos():
        return frozenset(linux for linux, macos in ARM_FEATURES.items() if sysctl_number(f"hw.optional.{macos}") == 1)
    return arm_features_in(_cpuinfo())


def arm_features_in(cpuinfo: str) -> frozenset[str] | None:
    """The same of the text of /proc/cpuinfo, which has a list of them for each core: a thread may run on any."""
    lists = [line.split(":", 1)[1].split() for line in cpuinfo.splitlines() if line.startswith("Features") and ":" in line]
    return frozenset(ARM_FEATURES).intersection(*lists) if lists else None


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- files ----


def lock(handle: int) -> bool:
    """Locks an open file for as long as it is open; False where another process has it. A file system without locks, such as a
    USB drive's or a network folder's under macOS, lets everybody have it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    return True


# ---- limits ----


def mapped_bytes() -> int:
    """Address space of this process, as RLIMIT_AS counts it."""
    if not is_macos():
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return _least_accepted(_may_be_limited_to)


def limit_address_space(more: int) -> None:
    """From now on this process gets so many more bytes of addresses, and no more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped_bytes() + more
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _least_accepted(accepts: Callable[[int], bool]) -> int:
    """The least number that is accepted, as are all above it, and at most _ADDRESS_STEP more."""
    low, high = 0, _MOST_ADDRESSES
    while high - low > _ADDRESS_STEP:
        middle = (low + high) // 2
        low, high = (low, middle) if accepts(middle) else (middle, high)
    return high


def _may_be_limited_to(limit: int) -> bool:
    """macOS refuses a limit below what is mapped, which on ARM are hundreds of GB from the start and which it does not tell."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    except (ValueError, OSError):
        return False
    resource.setrlimit(resource.RLIMIT_AS, before)
    return True


def allow_open_files(wanted: int) -> None:
    """Raises how many files this process may have open, as far as it may go: macOS has a limit of its own below the hard one,
    and begins with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            wanted //= 2
        else:
            return


# ---- macOS ----


def sysctl(name: str) -> bytes | None:
    """The value of this name, a text without its NUL; None where there is none."""
    memory, size = ctypes.create_string_buffer(_MOST_VALUE_BYTES), ctypes.c_size_t(_MOST_VALUE_BYTES)
    if _library().sysctlbyname(name.encode(), memory, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    return memory.raw[: size.value].removesuffix(b"\0")


def sysctl_number(name: str) -> int | None:
    """The same of a number, which has 4 or 8 bytes."""
    memory, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    if _library().sysctlbyname(name.encode(), ctypes.byref(memory), ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    return memory.value  # little-endian: four bytes lie in the lower half


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None)
    library.mach_host_self.restype = ctypes.c_uint32
    library.host_statistics64.argtypes = [ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    return library
