"""The machine's limits: measured once, kept, and never taken from a broken file. No test asks how fast this machine is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nanovllm_cli import system
from nanovllm_cli.bench import roofline as module
from nanovllm_cli.bench.roofline import Roofline, RooflineError, _best_seconds, _sum, measure_roofline, roofline
from nanovllm_cli.bench.sweep import Setup, Trial
from nanovllm_cli.cli import bench
from nanovllm_cli.cli.bench_options import BenchEngineOptions, BenchModelOptions


class Clock:
    """Each reading is later by what was put into `steps`, then by 1."""

    def __init__(self, *steps: float) -> None:
        self.now = 0.0
        self.steps = list(steps)

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += self.steps.pop(0) if self.steps else 1.0


def test_the_shortest_pass_counts_and_there_are_enough() -> None:
    clock = Clock(5.0, 2.0, 3.0)
    assert _best_seconds(0.0, clock.work, clock) == 2.0
    assert clock.now == 10.0  # three passes, though no time was given
    clock = Clock(5.0, 2.0, 3.0, 1.5)
    assert _best_seconds(12.0, clock.work, clock) == 1.0
    assert clock.now == pytest.approx(12.5)


def test_the_reading_loop_reads_everything() -> None:
    words = np.arange(1001, dtype=np.int64)
    assert _sum(words) == 1001 * 500


def test_a_measurement_has_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_BYTES", 1 << 20)
    monkeypatch.setattr(system, "last_cache_bytes", lambda: 0)
    for name, size in (("_ROWS", 3), ("_WIDTH", 256), ("_OUTPUTS", 192)):
        monkeypatch.setattr(module, name, size)
    found = measure_roofline(0.01, 1)
    assert set(found.gflops) == {"fp32", "bf16", "int8"}
    assert min(found.read_gb_s, *found.gflops.values()) > 0


def test_a_child_process_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels that are compiled already, and a cache of its own."""
    monkeypatch.setattr(module, "_cache_path", lambda: tmp_path / "roofline.json")
    found = roofline(threads=1, seconds=0.001)
    assert set(found.gflops) == {"fp32", "bf16", "int8"}
    assert roofline(threads=1) == found


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the child process was asked; it answers with the number of the call as the bandwidth."""
    asked: list[list[str]] = []

    class Done:
        def __init__(self) -> None:
            self.stdout = json.dumps({"read_gb_s": len(asked), "gflops": {"bf16": 2.0}})

    def run(words: list[str], **_: object) -> Done:
        if words[0] != module.sys.executable:
            raise OSError
        asked.append(words[-3:])
        return Done()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module.subprocess, "run", run)
    return asked


def test_a_machine_is_measured_once(measurements: list[list[str]]) -> None:
    assert roofline(threads=2) == Roofline(1.0, {"bf16": 2.0})
    assert roofline(threads=2).read_gb_s == 1.0
    assert roofline(threads=1).read_gb_s == 2.0  # another number of threads is another measurement
    assert roofline(threads=2, fresh=True, seconds=0.5).read_gb_s == 3.0
    assert roofline(threads=2).read_gb_s == 3.0
    assert roofline(threads=1).read_gb_s == 2.0
    assert measurements == [["cpu", "2", "1.0"], ["cpu", "1", "1.0"], ["cpu", "2", "0.5"]]


def test_other_kernels_are_measured_anew(measurements: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    roofline(threads=2)
    monkeypatch.setattr(module.hashlib, "sha256", module.hashlib.sha1)
    roofline(threads=2)
    assert len(measurements) == 2


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "\xff", '{"x": 1}', '{"KEY": {"read_gb_s": -1, "gflops": {}}}',
        '{"KEY": {"read_gb_s": 1, "gflops": {"a": "b"}}}',
    ],
)  # fmt: skip
def test_a_broken_cache_is_no_cache(measurements: list[list[str]], tmp_path: Path, text: str) -> None:
    path = tmp_path / "nanovllm" / "roofline.json"
    path.parent.mkdir()
    path.write_text(text.replace("KEY", module._key("cpu", 2)), encoding="latin-1")
    assert roofline(threads=2).read_gb_s == 1.0
    assert json.loads(path.read_text())[module._key("cpu", 2)]["read_gb_s"] == 1.0


def test_a_failed_measurement_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module.sys, "executable", "/bin/true")
    with pytest.raises(RooflineError, match="could not be measured"):
        roofline(threads=1)


@pytest.mark.parametrize(
    ("device", "threads", "asked", "times"),
    [("cpu", 1, [("cpu", 3)], 1), ("cuda:1", None, [("cuda:1", None)], 2), ("auto", None, [("cpu", 3), ("cuda", None)], 2)],
)
def test_limits_of_several_processes_are_those_of_what_computes(
    device: str, threads: int | None, asked: list[Any], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU is measured before processes divide it, of GPUs one: fp16 is nothing that a CPU has a limit of."""
    found: list[Any] = []

    def limits(of: str, num_threads: int | None) -> Roofline:
        found.append((of, num_threads))
        return Roofline(10.0, {"bf16": 1.0} if of == "cpu" else {"bf16": 4.0, "fp16": 5.0})

    llm = SimpleNamespace(llm=SimpleNamespace(threads=threads))
    monkeypatch.setattr(bench, "load", lambda *given: llm)
    monkeypatch.setattr("nanovllm_cli.bench.table.check_room", lambda *given: None)
    setup, model = Setup("tiny", threads=3, tensor_parallel_size=2), BenchModelOptions(device=device)
    screen: Any = None
    loaded = bench._open(setup, [Trial(8, 4)], model, BenchEngineOptions(), limits, screen)
    assert found == asked
    assert loaded.roofline == limits(*asked[-1]).times(times)
    assert bench._open(setup, [Trial(8, 4)], model, BenchEngineOptions(), None, screen).roofline is None
