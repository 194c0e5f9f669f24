"""How often Python's garbage collector goes through what a process has imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGINNINGS = {
    "a command": "import nanovllm_cli.__main__",
    "an engine": """
import runpy
try:
    runpy.run_module("nanovllm_cli.server.engine_process", run_name="__main__")
except IndexError:  # of its argument
    pass
""",
}


@pytest.mark.parametrize("begins", BEGINNINGS)
def test_it_seldom_comes_while_modules_load(begins: str) -> None:
    """By default it comes some 550 times, 4 of them through everything, which is a sixth of a command's time."""
    counts = "import gc, nanovllm_cli.llm; print(*(each['collections'] for each in gc.get_stats()))"
    code = f"{BEGINNINGS[begins]}\n{counts}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    young, middle, full = map(int, done.stdout.split())
    assert young + middle < 60
    assert full == 0
