"""Kernels of the CPU are compiled once, whoever else compiles at that moment, and are kept only by whom nobody disturbs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import carray
from numba.core.dispatcher import Dispatcher

import forked
from nanovllm_cli.kernels import entry, simd, simd_compact, simd_int
from nanovllm_cli.kernels.entry import Kernel, fields, kernel, share
from nanovllm_cli.kernels.simd import typed_pointer

NUMBERS = {"f": np.float32, "B": np.uint8}
CHILD = """
import json, sys
import numba
numba.config.CACHE_DIR = sys.argv[1]
import test_kernel_entry
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([test_kernel_entry.negated(tag) for tag in sys.argv[2]]))
"""


@kernel()
def negate(arguments, thread, threads):
    tag, x, count = fields(arguments)
    values = carray(typed_pointer(x, tag), (count,))
    for i in share(count, thread, threads):
        values[i] = -values[i]


def negated(tag: str, negate: Kernel = negate) -> tuple[int, list[float]]:
    """How often it came from the cache, and what it does."""
    values = np.array([1, 2, 100], NUMBERS[tag])
    negate.run(tag, (values.ctypes.data, 3))
    return negate._compiled[tag, 2, 0][0].cache_hits, values.tolist()


def together(folder: Path, *tags: str) -> list[Any]:
    """What processes find that begin at the same time."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parent}
    children = [forked.Forked([sys.executable, "-c", CHILD, str(folder), each], **pipes) for each in tags]
    assert all(child.stdout.readline() == "ready\n" for child in children)
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    return [json.loads(child.communicate(timeout=120)[0]) for child in children]


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    """The wrong number of a file would give one type's code to another."""
    found = together(tmp_path, "fB", "fB")
    assert sum(hits for each in found for hits, _ in each) == 2
    (fresh,) = together(tmp_path, "fB")
    assert fresh == [[1, [-1, -2, -100]], [1, [255, 254, 156]]]


def test_who_has_waited_too_long_compiles_for_himself_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(entry, "LOCK_SECONDS", 0.05)
    lock = tmp_path / f"{__name__}.negate.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert negated("f", Kernel(negate._function)) == (0, [-1, -2, -100])
        assert not list(tmp_path.rglob("*negate*.nb?"))
    assert negated("f", Kernel(negate._function))[0] == 0
    assert negated("f", Kernel(negate._function))[0] == 1


def test_a_process_that_is_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    code = """
import sys, time, numba
numba.config.CACHE_DIR = sys.argv[1]
import test_kernel_entry
from nanovllm_cli.kernels import entry
with entry._alone_with(test_kernel_entry.negate._function) as ours:
    print(ours, flush=True)
    time.sleep(60)
"""
    with forked.Forked(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "True\n"
        child.kill()
    began = time.monotonic()
    assert negated("f", Kernel(negate._function)) == (0, [-1, -2, -100])
    assert time.monotonic() - began < entry.LOCK_SECONDS / 4


def test_without_a_folder_numba_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/dev/null/nowhere")
    with entry._alone_with(negate._function) as ours:
        assert ours


THREADS = """
import sys, threading
import numba
numba.config.CACHE_DIR = sys.argv[1]
import numpy as np
from test_kernel_entry import negate
def work():
    for _ in range(300):
        negate.run("f", (values.ctypes.data, len(values)))
values = np.ones(1 << 16, np.float32)
threads = [threading.Thread(target=work) for _ in range(3)]
negate.run("f", (values.ctypes.data, len(values)))
for thread in threads: thread.start()
for thread in threads: thread.join()
print(numba.threading_layer(), values.min(), values.max())
"""


def test_threads_that_start_kernels_at_once_take_turns(tmp_path: Path) -> None:
    """Two models in one process. Numba's own pool, which is all that there is without OpenMP, ends the process otherwise."""
    environment = os.environ | {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", THREADS, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("workqueue -1.0 -1.0\n", 0), done.stderr


def test_no_two_compiled_functions_of_a_module_have_one_name() -> None:
    """The cache hands on what several processes compiled, numbered by each: a name is all that is left to tell them apart."""
    for module in (simd, simd_compact, simd_int):
        made = {id(value): value for value in vars(module).values() if isinstance(value, Dispatcher)}.values()
        closures = [cell.cell_contents for value in made for cell in value.py_func.__closure__ or ()]
        made = [*made, *(value for value in closures if isinstance(value, Dispatcher))]
        names = [value.py_func.__qualname__ for value in {id(value): value for value in made}.values()]
        assert names
        assert len(set(names)) == len(names), names
