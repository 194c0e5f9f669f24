"""Kernels of the CPU are compiled once, whoever else compiles at that moment, and are kept only by whom nobody disturbs."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba import carray
from numba.core import caching
from numba.core.registry import cpu_target

import forked
from nanovllm_cli.kernels import compiled, cpu, cpu_sampling_rows, entry, gates
from nanovllm_cli.kernels.entry import Kernel, fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer
from nanovllm_cli.kernels.waiting import added

assert cpu  # it sets the cache, which is another one when a source changes
NUMBERS = {"f": np.float32, "B": np.uint8}
CHILD = """
import json, sys
import numba
numba.config.CACHE_DIR = sys.argv[1]
import test_entry
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([test_entry.negated(tag) for tag in sys.argv[2]]))
"""


@kernel()
def negate(arguments, thread, team):
    tag, x, count = fields(arguments)
    values = carray(typed_pointer(x, tag), (count,))
    for i in share(count, thread, team):
        values[i] = -values[i]


@kernel()
def count_tasks(arguments, thread, team):
    """done [2, count] int64: one more for each task that is done, and by which thread."""
    done, count = fields(arguments)
    table = carray(typed_pointer(done, np.int64(0)), (2, count))
    for i in share(count, thread, team):
        table[0, i] += 1
        table[1, i] = thread


@kernel()
def wait_for_help(arguments, thread, team):
    """The first task ends when another thread has done one of the first half; so does each, after some seconds."""
    flag, count, helped = fields(arguments)
    asked = carray(typed_pointer(flag, np.int64(0)), (2,))
    for i in share(count, thread, team):
        if thread == 1 and i < count // 2:
            asked[0], asked[1] = helped, 1
        while i == 0 and thread == 0 and added(flag, 1) <= helped:
            pass


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


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_each_task_is_done_once_by_somebody(threads: int) -> None:
    """By as many threads as there are, of those asked for."""
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        for count in (0, 1, 2, 3, 7, 15, 16, 17, 100, 10007) * 5:
            done = np.zeros((2, count), np.int64)
            count_tasks.run("", (done.ctypes.data, count))
            assert (done[0] == 1).all()
            assert set(done[1].tolist()) <= set(range(numba.get_num_threads()))
    finally:
        numba.set_num_threads(before)


def test_a_thread_that_is_done_takes_what_is_left_of_anothers_part() -> None:
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one processor")
    before, helped = numba.get_num_threads(), 10**9
    numba.set_num_threads(2)
    try:
        flag = np.zeros(2, np.int64)
        wait_for_help.run("", (flag.ctypes.data, 64, helped))
        assert flag[1] == 1, "the first thread waited in vain"
    finally:
        numba.set_num_threads(before)


@kernel()
def shift(arguments, thread, team):
    """target[i] = source[i + 1] + 1, of a circle of count."""
    source, target, count = fields(arguments)
    old, new = carray(typed_pointer(source, np.int64(0)), (count,)), carray(typed_pointer(target, np.int64(0)), (count,))
    for i in share(count, thread, team):
        new[i] = old[(i + 1) % count] + 1


class Listed:
    """Kernels each of which reads all that the one before has written."""

    def __init__(self, count: int, kernels: int) -> None:
        self.kernels, self.values = kernels, np.zeros((2, count), np.int64)
        self.values[0] = np.arange(count) ** 2
        self.expected = np.roll(self.values[0], -kernels) + kernels
        places = [row.ctypes.data for row in self.values]
        steps = [shift.step("", (places[i % 2], places[1 - i % 2], count)) for i in range(kernels)]
        self._arguments = [np.frombuffer(arguments, np.int64).copy() for _, arguments in steps]
        self.table = np.array([(address, own.ctypes.data) for (address, _), own in zip(steps, self._arguments, strict=True)])

    @property
    def is_right(self) -> bool:
        return bool((self.values[self.kernels % 2] == self.expected).all())


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_kernels_of_a_list_run_one_behind_the_other(threads: int) -> None:
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    try:
        for count, kernels in ((1, 2), (3, 5), (1000, 300), (17, 2000), (64, 1), (5, 0)):
            listed = Listed(count, kernels)
            entry.replay(listed.table.ctypes.data, kernels)
            assert listed.is_right, (count, kernels)
    finally:
        numba.set_num_threads(before)


class Pool:
    """Threads of the test's own in the place of numba's, which come to a list when they are let."""

    def __init__(self, listed: Listed, wanted: int) -> None:
        entry.replay(listed.table.ctypes.data, 0)  # compiles
        self._memory = np.zeros(entry._TEAMS + 2 * entry._LINE * (1 + wanted) + entry._LINE, np.uint8)
        self._at = self._memory.ctypes.data + -self._memory.ctypes.data % entry._LINE
        words = np.frombuffer((ctypes.c_int64 * 2).from_address(self._at + entry._PROGRAM), np.int64)
        words[:] = listed.table.ctypes.data, listed.kernels
        ctypes.c_int64.from_address(self._at + entry._TEAMS).value = wanted
        self._run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(entry._replay[1])

    def come(self, number: int) -> None:
        self._run(self._at, number, self._at + entry._TEAMS)

    def come_together(self, *numbers: int) -> None:
        threads = [threading.Thread(target=self.come, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(("wanted", "come"), [(2, (0, 1)), (3, (2, 0, 1)), (2, (1,)), (4, (3, 1)), (5, (0, 4, 2))])
def test_a_list_is_run_by_those_who_come(wanted: int, come: tuple[int, ...]) -> None:
    """A pool may have fewer threads than it was asked for (OMP_THREAD_LIMIT), which then come once more for the others."""
    for count, kernels in ((100, 40), (3, 7)):
        listed = Listed(count, kernels)
        pool = Pool(listed, wanted)
        pool.come_together(*come)
        assert listed.is_right
        before = listed.values.copy()
        for late in set(range(wanted)) - set(come):
            pool.come(late)
        assert (listed.values == before).all(), "who comes when all is done does nothing"


def test_what_is_compiled_of_other_sources_or_for_another_processor_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numba takes last month's kernel for this month's where only what it calls has changed, also in a place of the user's."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "called.py").write_text("ONE = 1\n")
    monkeypatch.setattr(cpu, "__file__", str(sources / "cpu.py"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    found = []
    for change in ("", "", "source", "processor"):
        if change == "source":
            (sources / "called.py").write_text("ONE = 2\n")
        elif change == "processor":
            monkeypatch.setattr(cpu, "processor_name", lambda: "another")
        cpu._use_own_cache_folder()
        found.append(Path(numba.config.CACHE_DIR))
    assert {path.parent for path in found} == {tmp_path / "kept"}
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    """The wrong number of a file would give one type's code to another."""
    found = together(tmp_path, "fB", "fB")
    assert sum(hits for each in found for hits, _ in each) == 2
    (fresh,) = together(tmp_path, "fB")
    assert fresh == [[1, [-1, -2, -100]], [1, [255, 254, 156]]]


def test_who_has_waited_too_long_compiles_for_himself_and_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "LOCK_SECONDS", 0.05)
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
import test_entry
from nanovllm_cli.kernels import compiled
with compiled._alone_with(test_entry.negate._function) as ours:
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
    assert time.monotonic() - began < compiled.LOCK_SECONDS / 4


def test_without_a_folder_there_is_nobody_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/dev/null/nowhere")
    with compiled._alone_with(negate._function) as ours:
        assert ours


@pytest.mark.parametrize("reason", ["no place", "full disk"])
def test_where_nothing_can_be_kept_it_is_compiled_all_the_same_and_said_once(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container whose file systems may only be read; a disk without room, which shows when a file is written."""
    monkeypatch.setattr(compiled, "_keeps", True)
    if reason == "no place":
        monkeypatch.setattr(numba.config, "CACHE_DIR", "/dev/null/nowhere")
    else:
        monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

        def save(self: object, key: object, data: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(caching.IndexDataCacheFile, "save", save)
    kernels = [Kernel(negate._function), Kernel(negate._function)]
    assert [negated("f", each) for each in kernels] == [(0, [-1, -2, -100])] * 2
    assert not compiled.keeps()
    [said] = caplog.messages
    assert said.startswith(f"compiled kernels can't be kept in {numba.config.CACHE_DIR}")
    assert ("No space left on device" in said) is (reason == "full disk")


def test_a_cache_that_may_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An image with a cache in it, on a read-only file system. What it lacks is compiled, each time, and that is said once."""
    monkeypatch.setattr(compiled, "_keeps", True)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert negated("f", Kernel(negate._function)) == (0, [-1, -2, -100])
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def only_read(self: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", only_read)
    assert negated("f", Kernel(negate._function)) == (1, [-1, -2, -100])
    assert compiled.keeps()
    assert not caplog.messages
    for _ in range(2):
        assert negated("B", Kernel(negate._function)) == (0, [255, 254, 156])
    assert negated("f", Kernel(negate._function)) == (1, [-1, -2, -100])
    [said] = caplog.messages
    assert said.startswith(f"compiled kernels can't be kept in {tmp_path}: Read-only file system; ")
    assert not compiled.keeps()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files


def test_without_a_folder_nothing_is_read_from_where_somebody_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is code. Numba's name for a function's files is known, and the working folder may be anybody's."""
    monkeypatch.setattr(compiled, "_keeps", True)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert negated("f", Kernel(negate._function))[0] == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert negated("f", Kernel(negate._function)) == (0, [-1, -2, -100])


@pytest.mark.parametrize("kept", ["index", "data"])
@pytest.mark.parametrize("rest", [0, 20])
def test_half_a_file_of_the_cache_is_compiled_anew(kept: str, rest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a machine leaves it that lost its power."""
    monkeypatch.setattr(compiled, "_keeps", True)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert negated("f", Kernel(negate._function))[0] == 0
    [path] = tmp_path.rglob("*negate*.nbi" if kept == "index" else "*negate*.nbc")
    path.write_bytes(path.read_bytes()[:rest])
    assert [negated("f", Kernel(negate._function)) for _ in range(2)] == [(0, [-1, -2, -100]), (1, [-1, -2, -100])]
    assert compiled.keeps()


def test_a_fault_of_the_compiler_is_none_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_keeps", True)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(compiled, "CFunc", broken)
    with pytest.raises(RuntimeError, match="of ours"):
        negated("f", Kernel(negate._function))
    assert compiled.keeps()


THREADS = """
import sys, threading
import numba
numba.config.CACHE_DIR = sys.argv[1]
import numpy as np
from test_entry import negate
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


FORKS = """
import faulthandler, os, sys
import numba, torch
numba.config.CACHE_DIR = sys.argv[1]
from nanovllm_cli.errors import UsageError
from test_entry import negated
torch.set_num_threads(2)
torch.randn(1 << 20).exp_()  # has OpenMP's threads from here on
for _ in range(2):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            print(negated("f")[1], flush=True)
        except UsageError as error:
            print(error, flush=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
    negated("f")
"""


def test_a_forked_process_computes_or_is_refused_and_never_waits_for_threads_that_it_lacks(tmp_path: Path) -> None:
    """A worker of multiprocessing's whose parent had used torch, or a model: OpenMP would wait for ever, or end the process."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_THREADING_LAYER"}
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)]
    environment["NUMBA_NUM_THREADS"] = "2"
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120)
    refused = "this process was forked from one that has loaded a model, whose threads it lacks"
    assert done.stdout.splitlines() == ["[-1.0, -2.0, -100.0]", "0", refused, "0"], done.stderr


def test_what_another_thread_computes_meanwhile_is_not_recorded() -> None:
    """Two models in one process: one records a step while the other takes one."""
    found = []
    with cpu.Program(cpu.MemoryPool()):
        other = threading.Thread(target=lambda: found.append(gates.gated_activation(torch.ones(3, 16), "silu")))
        other.start()
        other.join()
        mine = gates.gated_activation(torch.ones(1, 16), "silu").fill_(0)
    expected = 1 / (1 + np.exp(-1))
    assert torch.allclose(found[0], torch.full((3, 8), expected))
    assert not mine.any(), "it is the one that is recorded, and has not run"


def test_what_breaks_a_recording_off_comes_out_as_it_is() -> None:
    with pytest.raises(MemoryError), cpu.Program(cpu.MemoryPool()):
        raise MemoryError
    assert gates.gated_activation(torch.zeros(1, 2), "silu").tolist() == [[0.0]], "nothing is recorded any more"


KERNEL = """
@kernel()
def NAME(arguments, thread, team):
    x, count = fields(arguments)
    values = carray(typed_pointer(x, 0.0), (count,))
    for i in share(count, thread, team):
        CALLED(values, i)
        CALLED(values, i)
"""
CLOSURES = """
import sys
import numba
import numpy as np
from numba import carray
numba.config.CACHE_DIR = sys.argv[1]
from nanovllm_cli.kernels.entry import fields, kernel, share
from nanovllm_cli.kernels.inner import inner
from nanovllm_cli.kernels.simd import typed_pointer


def closure(number):
    @inner
    def added(values, i):  # more than is written into what calls it
        for k in range(1, i):
            MUCH
        values[i] += number

    return added


ADD_1, ADD_2 = closure(1.0), closure(2.0)


KERNELS
for name in sys.argv[2:]:
    values = np.zeros(3)
    globals()[name].run("", (values.ctypes.data, 1))
    print(values[0])
""".replace("MUCH", "; ".join(["values[k] = np.tan(values[k]) / np.exp(values[k])"] * 40)).replace(
    "KERNELS",
    KERNEL.replace("NAME", "first").replace("CALLED", "ADD_1") + KERNEL.replace("NAME", "second").replace("CALLED", "ADD_2"),
)


def test_each_closure_has_its_own_code_whichever_process_compiled_it(tmp_path: Path) -> None:
    """Two of one name and type, the only functions that either process compiles, so both get the same number from numba."""
    (tmp_path / "closures.py").write_text(CLOSURES)
    found = [
        forked.run([sys.executable, str(tmp_path / "closures.py"), str(tmp_path), *names], capture_output=True, text=True)
        for names in (["first"], ["second"], ["first", "second"])
    ]
    assert [done.stdout.split() for done in found] == [["2.0"], ["4.0"], ["2.0", "4.0"]], [done.stderr for done in found]


def test_what_only_kernels_call_says_so_to_python() -> None:
    """Numba's own answer would be a jump to address 0, which ends the process."""
    with pytest.raises(TypeError, match="weight can be called by compiled functions alone"):
        cpu_sampling_rows.weight(1.0)


@inner
def _twice_the(x):
    return x + x


@inner
def _four_times_the(x):
    return _twice_the(_twice_the(x))


@kernel()
def fourfold(arguments, thread, team):
    tag, x = fields(arguments)
    values = carray(typed_pointer(x, tag), (1,))
    for i in share(1, thread, team):
        values[i] = _four_times_the(values[i])


def test_machine_code_is_made_of_a_kernel_as_a_whole_and_what_it_calls_can_be_called_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an ordinary function of numba's, too, which has what it always has."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    made, engine = [], cpu_target.target_context.codegen()._engine
    add = type(engine).add_module
    monkeypatch.setattr(type(engine), "add_module", lambda self, module: (made.append(module.name), add(self, module)))
    values = np.array([3.0], np.float32)
    fourfold.step("f", (values.ctypes.data,))
    assert made == ["fourfold"]
    fourfold.run("f", (values.ctypes.data,))
    assert values[0] == 12.0

    @numba.njit
    def ordinary(x):
        return _four_times_the(x) + 1

    assert ordinary(np.float32(3.0)) == 13.0
    assert made[-1] == ordinary.__qualname__
