"""Python under AddressSanitizer and UBSan, for emulated kernels: an access outside a tensor, shared memory or a local array, a
misaligned vector, an integer overflow ends the process with a report of the line. As a plugin of pytest (`-p
emulation.sanitized`) it keeps a few cases of each test, for a sanitized kernel takes its time. Test files do nothing for it.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from emulation.emulator import missing

CASES = 3
"""Of each test that pass before the rest is skipped."""
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
        "NANOVLLM_SANITIZE": "1",
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))),
    }


def _library(name: str) -> Path:
    """Its path, or the bare name where g++ doesn't know it."""
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


# ---- the plugin ----

_passed: Counter[str] = Counter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cases in an order that mixes sizes and types; tests stay where they are."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(_test_of(item.nodeid), []).append(item)
    for cases in tests.values():
        random.Random(1).shuffle(cases)
    items[:] = [item for cases in tests.values() for item in cases]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _passed[_test_of(item.nodeid)] >= CASES:
        pytest.skip("enough cases of this test")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed[_test_of(report.nodeid)] += 1


def _test_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]
