"""Emulated kernels under AddressSanitizer and UBSan: see emulation/sanitized.py; few_cases.py beside it chooses the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TURN
from emulation import few_cases, sanitized
from emulation.planted import KINDS

pytestmark = pytest.mark.skipif(sanitized.missing_sanitizers() is not None, reason=str(sanitized.missing_sanitizers()))
HERE = Path(__file__).parent
FOUND = {
    "global store": ("heap-buffer-overflow", "WRITE", "data[numel] = sum"),
    "global load": ("heap-buffer-overflow", "READ", "data[numel + 3]"),
    "dynamic shared": ("heap-buffer-overflow", "WRITE", "dynamic[next] = sum"),
    "static shared": ("insufficient space", "store", "*(row + 64"),
    "stack": ("out of bounds", "float [4]", "own[next % 4 + 4]"),
    "misaligned": ("misaligned address", "16 byte alignment", "common.cuh"),
    "overflow": ("signed integer overflow", "128", "numel * 0x7fffffff"),
}


@pytest.fixture(scope="module")
def reports() -> dict[str, tuple[int, str]]:
    command = [sys.executable, "-m", "emulation.planted"]
    done = subprocess.run(command, env=sanitized.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_sound_kernel_passes(reports: dict[str, tuple[int, str]]) -> None:
    assert reports["sound"] == [0, ""]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sound"])
def test_planted_error_is_reported_with_its_line(kind: str, reports: dict[str, tuple[int, str]]) -> None:
    status, report = reports[kind]
    what, how, where = FOUND[kind]
    assert status != 0
    assert what in report
    assert how in report
    if kind == "misaligned":  # the load is in the header
        assert where in report
    else:
        lines = (HERE / "emulation" / "planted.cu").read_text().splitlines()
        (number,) = (number for number, line in enumerate(lines, 1) if where in line)
        assert f"planted.cu:{number}" in report


@pytest.mark.timeout(600)
def test_kernels_run_clean() -> None:
    """Where CI is set one case of each test (less than half the time), and of every third file, as commits take turns."""
    files, environment = [str(file) for file in sorted(HERE.glob("test_kernel_*.py"))], sanitized.environment()
    if os.environ.get("CI"):
        files, environment[few_cases.NAME] = files[int(os.environ[TURN]) % 3 :: 3], "1"
    few_cases.run(files, environment)
