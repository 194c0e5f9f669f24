"""Not tests: a Python under Linux that lacks what macOS' lacks, for itself and for every Python that it starts.

Python imports a module of this name by itself; a folder that holds it has to be on PYTHONPATH (`test_mac_life.py`), and this
repository's `src` and `tests`. What is taken away: /proc and /sys, os.fork (a forked child of a process that used Apple's
libraries crashes), names that Python has under Linux only, limits of addresses below what is mapped, and many open files.
`nanovllm_cli.system` takes this for a Mac, whose library is `macos.Library`.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

_MAPPED_FROM_THE_START = 418_000_000_000
_OPEN_MAX = 10240
_ONLY_LINUX = {
    os: (
        "sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "posix_fadvise", "posix_fallocate", "memfd_create",
        "eventfd", "pidfd_open", "copy_file_range", "splice", "getrandom", "pipe2", "fdatasync", "setns", "unshare", "getxattr",
        "setxattr", "O_TMPFILE", "O_DIRECT", "O_PATH", "O_NOATIME", "SCHED_BATCH", "SCHED_IDLE",
    ),
    select: ("epoll",),
    mmap: ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MADV_DODUMP", "MADV_POPULATE_READ", "MAP_POPULATE", "MAP_STACK"),
    signal: ("sigtimedwait", "sigwaitinfo", "SIGPWR", "SIGRTMIN", "SIGRTMAX", "SIGSTKFLT", "SIGPOLL", "SIGCLD"),
    resource: ("prlimit", "RUSAGE_THREAD", "RLIMIT_OFILE", "RLIMIT_NICE", "RLIMIT_RTPRIO", "RLIMIT_SIGPENDING"),
    socket: (
        "SO_PEERCRED", "SO_BINDTODEVICE", "SO_PRIORITY", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "TCP_USER_TIMEOUT", "TCP_QUICKACK",
        "TCP_DEFER_ACCEPT", "AF_NETLINK",
    ),
}  # fmt: skip


def _take_away() -> None:
    for module, names in _ONLY_LINUX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    if hasattr(os, "process_cpu_count"):  # Python 3.13's, which asks for the first of those names where it was found
        os.process_cpu_count = os.cpu_count
    sys.addaudithook(_hide)


def _hide(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and arguments:
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else ""
        if path.startswith(("/proc/", "/sys/")) and not _looks:
            raise FileNotFoundError(2, "No such file or directory", path)
    elif event in ("os.fork", "os.forkpty"):
        raise RuntimeError("a Mac's process that has used Apple's libraries is not to be forked")


_looks: list[bool] = []


def _mapped() -> int:
    _looks.append(True)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    finally:
        _looks.pop()


def _limit() -> None:
    """XNU counts hundreds of GB more, and refuses a limit below what is mapped; Python's error for it."""
    set_limit, get_limit, endless = resource.setrlimit, resource.getrlimit, resource.RLIM_INFINITY

    def setrlimit(what: int, pair: tuple[int, int]) -> None:
        most_files = what == resource.RLIMIT_NOFILE and pair[0] > _OPEN_MAX
        if most_files or (what == resource.RLIMIT_AS and pair[0] != endless and pair[0] < _MAPPED_FROM_THE_START + _mapped()):
            raise ValueError("current limit exceeds maximum limit")
        if what == resource.RLIMIT_AS:
            pair = tuple(each if each == endless else each - _MAPPED_FROM_THE_START for each in pair)
        set_limit(what, pair)

    def getrlimit(what: int) -> tuple[int, ...]:
        pair = get_limit(what)
        return tuple(each + _MAPPED_FROM_THE_START if what == resource.RLIMIT_AS and each != endless else each for each in pair)

    resource.setrlimit, resource.getrlimit = setrlimit, getrlimit


_take_away()
_limit()

import macos  # noqa: E402
from nanovllm_cli import system  # noqa: E402

system.SYSTEM = system.MACOS
_mac = macos.Library(macos.M2, pages=(100_000, 0, 400_000, 0))
system._library = lambda: _mac
