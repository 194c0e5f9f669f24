"""What numbers were measured on, and with what: the header of every result.

Everything is read from the system or is empty; nothing is guessed. torch is asked only where it is loaded already.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanovllm_cli import system
from nanovllm_cli.processors import num_processors

_SECONDS_FOR_A_PROGRAM = 10


@dataclass(frozen=True, slots=True)
class Machine:
    """cpu, gpu: names; gpu and driver are empty without one. processors: that this process may use. memory_bytes: all there is.
    commit: of a checkout, empty for an installed package; commit_number: how many commits led to it. command: as typed."""

    cpu: str = ""
    gpu: str = ""
    driver: str = ""
    processors: int = 0
    memory_bytes: int = 0
    system: str = ""
    python: str = ""
    torch: str = ""
    version: str = ""
    commit: str = ""
    commit_number: int = 0
    command: str = ""

    def lines(self) -> list[str]:
        """The header for a person."""
        parts = [f"{self.cpu or 'unknown processor'}, {self.processors} processors, {self.memory_bytes / 2**30:.1f} GiB"]
        if self.gpu:
            parts.append(f"{self.gpu}, driver {self.driver or 'unknown'}")
        parts.append(f"{self.system}, Python {self.python}, torch {self.torch or 'not loaded'}")
        parts.append(f"nanovllm {self.version}{f' ({self.commit})' if self.commit else ''}: {self.command}")
        return parts


def this_machine(arguments: Sequence[str] | None = None) -> Machine:
    """arguments: of the command line, by default this process's own."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    commit, number = _commit()
    return Machine(
        cpu=system.processor_name() or _cpu_by_number(),
        gpu=_gpu(),
        driver=_driver(),
        processors=num_processors(),
        memory_bytes=system.memory_bytes(),
        system=platform.platform(),
        python=platform.python_version(),
        torch=_version("torch"),
        version=_version("nanovllm-cli"),
        commit=commit,
        commit_number=number,
        command=shlex.join(["nanovllm", *words]),
    )


def _cpu_by_number(board: Path = Path("/sys/firmware/devicetree/base/model")) -> str:
    """Those of ARM say numbers under Linux, to which LLVM knows names; where they stand on a board with a name, that too."""
    from llvmlite.binding import get_host_cpu_name

    name = str(get_host_cpu_name())
    with contextlib.suppress(OSError):
        name += f" ({board.read_text(errors='replace').rstrip(chr(0))})"
    return name


def _gpu() -> str:
    """Of the first GPU, where torch is loaded and sees one: only then could it have been measured."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name(0))


def _driver() -> str:
    """The second field of the kernel module's own line: NVRM version: NVIDIA UNIX … Kernel Module  575.57.08  …"""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""
    return next((word for word in line.split() if word[:1].isdigit() and "." in word), "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _commit() -> tuple[str, int]:
    """Of the repository that this file is a part of. A package that is installed inside somebody's repository is not."""
    here = Path(__file__)
    if _git("ls-files", "--error-unmatch", here.name) is None:
        return "", 0
    number = _git("rev-list", "--count", "HEAD") or ""
    return _git("rev-parse", "--short", "HEAD") or "", int(number) if number.isdigit() else 0


def _git(*words: str) -> str | None:
    """What git says, or None where it is not there, fails or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words],
            capture_output=True,
            text=True,
            timeout=_SECONDS_FOR_A_PROGRAM,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
