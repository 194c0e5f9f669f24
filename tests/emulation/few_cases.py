"""A plugin of pytest (`-p emulation.few_cases`): a few cases of each test, where each takes long. run() runs tests with it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NAME = "TEST_NANOVLLM_CASES"
CASES = int(os.environ.get(NAME) or 3)
"""Of each test that pass before the rest is skipped."""


def run(tests: list[str], environment: dict[str, str]) -> None:
    """In two processes, for a kernel's variant takes seconds to compile. Raises AssertionError with what they said."""
    with ThreadPoolExecutor(2) as pool:
        parts = [part for part in (tests[::2], tests[1::2]) if part]
        for done in pool.map(lambda part: _run(part, environment), parts):
            assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
            assert " passed" in done.stdout


def _run(tests: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    plugins = ["-p", "emulation.few_cases", "-p", "pytest_timeout", "-p", "no:logging"]
    command = [sys.executable, "-m", "pytest", "-s", "-vv", "--tb=short", *plugins, *tests]
    here = Path(__file__).parents[1]
    paths = os.pathsep.join((str(here), environment.get("PYTHONPATH", "")))
    env = environment | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": paths}
    env.pop("PYTEST_ADDOPTS", None)  # a report of ours
    return subprocess.run(command, env=env, capture_output=True, text=True, cwd=here.parent)


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
