"""Python under AddressSanitizer and UBSan, for emulated kernels: an access outside a tensor, shared memory or a local array, a
misaligned vector, an integer overflow ends the process with a report of the line. Test files do nothing for it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from emulation.emulator import missing

LIBRARIES = ("libasan.so", "libstdc++.so")  # the second because torch throws, which the first wants to know about


def missing_sanitizers() -> str | None:
    """Why nothing can be sanitized here, or None."""
    if missing() is not None:
        return missing()
    absent = [name for name in LIBRARIES if not _library(name).is_absolute()]
    return f"g++ has no {absent[0]}" if absent else None


def environment() -> dict[str, str]:
    """Of a Python process whose emulated kernels are sanitized. Python itself leaks at its end, by design."""
    return os.environ | {
        "LD_PRELOAD": " ".join(str(_library(name)) for name in LIBRARIES),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TEST_NANOVLLM_SANITIZE": "1",
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))),
    }


def _library(name: str) -> Path:
    """Its path, or the bare name where g++ doesn't know it."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())
