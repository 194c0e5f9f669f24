"""benchmarks/gpu: all that can be tested of it without a GPU. What it measures is not; how it measures, keeps and shows is."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import types
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from emulation import on_gpu
from emulation.device import EmulatedDevice
from emulation.emulator import Emulator, needs_emulation
from gpu import all as command_line
from gpu import breakdown, cases, checks, engine_runs, experts, far, latent, peers, quantized, report, sections, sweeps
from gpu.engines import CountingDevice, decode, load, overlaps, release, serve
from gpu.sections import Output, Section, Skipped
from gpu.shapes import POOL, SHAPES, RandomCheckpoint, Shape
from gpu.timing import copies_for
from gpu.workload import PROMPT, Request, nano_vllm, prompt
from nanovllm_cli.kernels.device import Device
from nanovllm_cli.kernels.kernel import Kernel
from nanovllm_cli.kernels.launcher import why_unavailable
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.quant.rows import num_rows
from nanovllm_cli.weights import shapes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "benchmarks" / "gpu" / "all.py"
TINY = SHAPES["tiny"]
ROOM = {"num_blocks": 64, "max_num_seqs": 4, "max_model_len": 128}
without_gpu = pytest.mark.skipif(why_unavailable() is None, reason="this machine has a GPU")


def script(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)


# ---- the command ----


@without_gpu
def test_without_a_gpu_it_says_why_in_a_line(tmp_path: Path) -> None:
    done = script("--output", str(tmp_path / "results.json"))
    assert done.returncode == 6
    assert done.stderr.startswith("no GPU run: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_it_needs_no_more_packages_than_it_says() -> None:
    """A GPU may be on a machine where nothing can be installed: of the package's dependencies those of server and command line
    are not imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dependencies = {re.split(r"[\[>]", line)[0].replace("-", "_") for line in project["dependencies"]}
    others = dependencies - {"torch", *sections.ENGINE, "pygments"}  # pytest has that one with it
    assert "msgspec" in others
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({sorted(others)}))
sys.path[:0] = {command_line.PATHS}
for name in {sorted(file.stem for file in SCRIPT.parent.glob("*.py"))}:
    importlib.import_module("gpu." + name)
from gpu import engines
engines.tokenizer(300)
import conftest
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_sections_are_listed_and_unknown_ones_refused() -> None:
    listed = script("--list")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [section.name for section in sections.SECTIONS]
    refused = script("--only", "ceilings,nothing")
    assert refused.returncode == 2
    assert "no section 'nothing'; known: environment, contact, ceilings" in refused.stderr


def test_a_call_resumes_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run_all(names: list[str], command: list[str], budget: float, report: Any, environment: dict[str, str]) -> None:
        for name in names:
            ran.append(name)
            report(name, done(found=1) if name != "matmul" else sections.skipped("no time left"))

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "why_not", lambda: None)
    monkeypatch.setattr(sections, "run_all", run_all)
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert command_line.main(["--only", "ceilings,matmul", "--output", str(first)]) == 0
    words = ["--resume", str(first), "--output", str(second), "--table", str(tmp_path / "table.md")]
    assert command_line.main([*words, "--only", "ceilings,matmul,prefill"]) == 0
    assert ran == ["ceilings", "matmul", "prefill", "matmul"]
    assert list(json.loads(second.read_text())["sections"]) == ["ceilings", "prefill", "matmul"]
    assert "| ceilings | done, by an earlier call |" in (tmp_path / "table.md").read_text()


def test_what_no_call_came_to_runs_before_what_failed_and_results_are_kept_where_nothing_better_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = {
        "matmul": done(a=1) | {"status": "timed out", "why": "late"},
        "ceilings": done(b=1),
        "batch-1": done(c=1) | {"status": "failed", "why": "broke"},
        "attention": done(d=1) | {"status": "running"},
        "prefill": sections.skipped("no time left"),
    }
    (tmp_path / "first.json").write_text(json.dumps({"sections": records}))
    earlier = command_line.earlier(tmp_path / "first.json")
    assert earlier["attention"]["status"] == "timed out"
    names = ["matmul", "ceilings", "batch-1", "attention", "workload", "prefill"]
    assert command_line.still_to_do(names, earlier) == ["prefill", "workload", "batch-1", "attention", "matmul"]

    def run_all(names: list[str], command: list[str], budget: float, report: Any, environment: dict[str, str]) -> None:
        report("matmul", done() | {"status": "failed", "why": "broke at once"})
        report("batch-1", done(e=2) | {"status": "running"})
        report("batch-1", done(e=2))
        report("attention", sections.skipped("no time left"))

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "why_not", lambda: None)
    monkeypatch.setattr(sections, "run_all", run_all)
    words = ["--resume", str(tmp_path / "first.json"), "--output", str(tmp_path / "second.json")]
    assert command_line.main(words) == 1
    found = json.loads((tmp_path / "second.json").read_text())["sections"]
    assert {name: (record["status"], record["results"]) for name, record in found.items()} == {
        "matmul": ("failed", {"a": 1}), "ceilings": ("done", {"b": 1}), "batch-1": ("done", {"e": 2}),
        "attention": ("timed out", {"d": 1}),
    }  # fmt: skip
    assert (found["matmul"]["why"], found["matmul"]["earlier"]) == ("broke at once", True)


def test_results_of_another_card_are_not_mixed_with_this_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "why_not", lambda: None)
    monkeypatch.setattr(sections, "run_all", lambda names, *_: ran.append(names))
    first = tmp_path / "first.json"
    first.write_text(json.dumps({"sections": {"environment": done(gpu={"name": "H100"}), "ceilings": done(a=1)}}))
    for card in ("H100", "H200"):
        monkeypatch.setattr(command_line, "this_card", lambda card=card: card)
        command_line.main(["--resume", str(first), "--output", str(tmp_path / "second.json"), "--only", "ceilings,attention"])
    assert ran == [["attention"], ["ceilings", "attention"]]
    assert "another card (H100)" in capsys.readouterr().err


def test_a_second_call_that_comes_less_far_takes_nothing_of_the_first() -> None:
    before = done(a={"passed": 1}, b={"passed": 2}, rows=[1, 2, 3], other=[1])
    cut = done(b={"passed": 7}, rows=[9], other=[8, 9]) | {"status": "timed out"}
    found = command_line.known_better(before, cut)
    assert found["results"] == {"a": {"passed": 1}, "b": {"passed": 7}, "rows": [1, 2, 3], "other": [8, 9]}
    assert found["status"] == "timed out"
    assert command_line.known_better(before, cut | {"status": "done"}) == cut | {"status": "done"}
    assert command_line.known_better(before, done() | {"status": "running"}) == before
    assert command_line.known_better(None, cut) == cut


ALONE, TOGETHER = f"{report.SMALLEST}, {report.ONE_BY_ONE}", f"{report.SMALLEST}, {report.OVERLAPPED}"


@pytest.mark.parametrize(
    ("found", "status", "expected"),
    [
        ({}, "running", False),
        ({}, "skipped", False),
        ({}, "timed out", True),  # kernels that wait for each other for ever
        ({}, "failed", True),
        ({report.SMALLEST: {"tok/s": 1600}}, "timed out", False),
        ({ALONE: {"tok/s": 1200, "same tokens": True}, TOGETHER: {"tok/s": 1600, "same tokens": True}}, "done", False),
        ({ALONE: {"tok/s": 1700, "same tokens": True}, TOGETHER: {"tok/s": 1600, "same tokens": True}}, "done", True),
        ({ALONE: {"tok/s": 1200, "same tokens": False}, TOGETHER: {"tok/s": 1600, "same tokens": True}}, "done", True),
        ({ALONE: {"tok/s": 1200, "same tokens": True}, TOGETHER: {"tok/s": 1600, "same tokens": False}}, "done", True),
    ],
)
def test_kernels_run_one_after_the_other_where_overlapping_ones_hang_err_or_are_slower(
    found: dict[str, Any], status: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the next section on, and in a call that resumes this one."""
    seen: list[bool] = []

    def run_all(names: list[str], command: list[str], budget: float, report: Any, environment: dict[str, str]) -> None:
        if "batch-1" in names:
            report("batch-1", done(**found) | {"status": status})
        seen.append(sections.ONE_BY_ONE in environment)

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "why_not", lambda: None)
    monkeypatch.setattr(sections, "run_all", run_all)
    output = str(tmp_path / "gpu.json")
    command_line.main(["--output", output])
    assert seen == [expected]
    if status not in ("running", "skipped"):
        command_line.main(["--resume", output, "--output", output, "--only", "ceilings"])
        assert seen == [expected] * 2


def test_a_section_is_told_how_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert overlaps()
    monkeypatch.setenv(sections.ONE_BY_ONE, "1")
    assert not overlaps()


@pytest.mark.parametrize("content", [None, "{", "[]", '{"sections": 3}', '{"sections": {"kernels": {}}}'])
def test_results_that_cannot_be_resumed_are_said_at_once(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit) as raised:
        command_line.main(["--resume", str(file), "--wheels", str(tmp_path)])
    assert raised.value.code == 2


def test_folders_of_what_is_written_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there would end the call behind its first section."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "why_not", lambda: None)
    monkeypatch.setattr(sections, "run_all", lambda names, command, budget, report, environment: report("ceilings", done(b=1)))
    files = [tmp_path / "results" / "gpu.json", tmp_path / "tables" / "gpu.md"]
    assert command_line.main(["--output", str(files[0]), "--table", str(files[1])]) == 0
    assert all(file.exists() for file in files)


def test_what_was_measured_outlives_a_report_that_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_all(names: list[str], command: list[str], budget: float, report: Any, environment: dict[str, str]) -> None:
        report("kernels", done(test_a="what no report expects"))
        report("ceilings", done(b=1))

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "why_not", lambda: None)
    monkeypatch.setattr(sections, "run_all", run_all)
    assert command_line.main(["--output", str(tmp_path / "gpu.json"), "--table", str(tmp_path / "gpu.md")]) == 0
    assert list(json.loads((tmp_path / "gpu.json").read_text())["sections"]) == ["kernels", "ceilings"]
    assert "TypeError" in capsys.readouterr().err


ENDED = """
import sys
from pathlib import Path
from gpu import all as command_line, sections
child, output = sys.argv[1:]
run_all = sections.run_all
sections.SECTIONS, sections.GLANCE_SECONDS = (sections.Section("hang", "", "", 60, ()),), 0.05
sections.run_all = lambda names, command, *rest: run_all(names, [sys.executable, "-c", child], *rest)
command_line.why_not = lambda: None
command_line.end_whole()
command_line.main(["--output", output])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_ended_keeps_what_it_found(number: signal.Signals, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    call = subprocess.Popen([sys.executable, "-c", ENDED, CHILD, str(output)], env=environment)
    deadline = time.monotonic() + 20
    while not output.exists() or "child" not in json.loads(output.read_text())["sections"]["hang"]["results"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    call.send_signal(number)
    assert call.wait(10) == (143 if number == signal.SIGTERM else -number)
    record = json.loads(output.read_text())["sections"]["hang"]
    assert (record["status"], record["results"]["first"]) == ("running", 1)
    child = record["results"]["child"]
    if number == signal.SIGTERM:
        assert not running(child)
    else:  # nobody could see to it; whoever ends a command ends its session
        assert os.getsid(child) == os.getsid(0)
        os.killpg(os.getpgid(child), signal.SIGKILL)


def test_a_wheel_that_does_not_fit_keeps_no_other_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "broken", "c"):
        (tmp_path / f"{name}.whl").touch()
    installed: list[str] = []

    def run(command: list[str]) -> types.SimpleNamespace:
        files = [Path(word).stem for word in command if word.endswith(".whl")]
        if "broken" not in files:
            installed.extend(files)
        return types.SimpleNamespace(returncode=int("broken" in files))

    monkeypatch.setattr(subprocess, "run", run)
    command_line.install(tmp_path, "site")
    assert installed == ["a", "c"]
    (tmp_path / "broken.whl").unlink()
    command_line.install(tmp_path, "site")
    assert installed == ["a", "c", "a", "c"]
    with pytest.raises(SystemExit, match="no wheels"):
        command_line.install(tmp_path / "nothing", "site")


def test_the_device_that_counts_does_all_that_a_device_does() -> None:
    """A step that failed asks it whether the GPU is lost: else that is what is said of the step."""
    assert not {name for name in vars(Device) if not name.startswith("_")} - set(dir(CountingDevice))


def test_every_section_has_its_function() -> None:
    for section in sections.SECTIONS:
        file, name = section.function.split(":")
        source = (ROOT / "benchmarks" / "gpu" / f"{file}.py").read_text()
        assert f"\ndef {name}(output: Output) -> None:" in source


IMPORTED = """
import sys
from gpu import sections
for section in sections.SECTIONS:
    __import__("gpu." + section.function.partition(":")[0])
from nanovllm_cli.engine import worker
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_sections_need_all_that_they_import() -> None:
    """A GPU's machine has what its image has, and else what is carried there: what is missing is to be said before."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = {re.split(r"[^\w-]", wanted)[0].replace("-", "_") for wanted in ours}
    assert packages & set(done.stdout.split()) <= {*sections.ENGINE, "torch"}


# ---- sections in processes ----

CHILD = """
import json, os, subprocess, sys, time
name, path = sys.argv[1:]
def put(results, error=None):
    open(path + ".part", "w").write(json.dumps({"results": results, "error": error}))
    os.replace(path + ".part", path)
put({"first": 1})
if name == "crash": put({"first": 1}, "Traceback\\nValueError: it broke"); sys.exit(1)
if name == "killed": print("last words", flush=True); os.kill(os.getpid(), 9)
if name == "warns": print("a warning", flush=True)
if name == "skip": put({}, "nothing here"); sys.exit(77)
if name == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    put({"first": 1, "child": child.pid}); time.sleep(60)
put({"first": 1, "second": 2})
"""


def run_section(name: str, limit: float = 20, left: float = 100, needs: tuple[str, ...] = ()) -> sections.Record:
    return sections.run(Section(name, "", "", limit, needs), [sys.executable, "-c", CHILD], left, dict(os.environ))


def test_a_section_gives_its_results() -> None:
    record = run_section("fine")
    assert (record["status"], record["results"]) == ("done", {"first": 1, "second": 2})
    assert "log" not in record


def test_what_a_section_that_is_done_has_warned_of_is_kept() -> None:
    assert run_section("warns")["log"] == "a warning\n"


@pytest.mark.parametrize(
    ("name", "status", "why"), [("crash", "failed", "ValueError: it broke"), ("killed", "failed", "ended with -9")]
)
def test_a_section_that_fails_leaves_what_it_had(name: str, status: str, why: str) -> None:
    record = run_section(name)
    assert (record["status"], record["results"]) == (status, {"first": 1})
    assert why in record["why"]
    assert record["log"] == ("last words\n" if name == "killed" else "")


def test_a_section_that_hangs_is_ended_with_all_it_started() -> None:
    begin = time.monotonic()
    record = run_section("hang", limit=2)
    assert time.monotonic() - begin < 15
    assert (record["status"], record["results"]["first"]) == ("timed out", 1)
    deadline = time.monotonic() + 5
    while running(record["results"]["child"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_a_section_is_skipped_with_a_reason() -> None:
    assert run_section("skip")["why"] == "nothing here"
    assert run_section("fine", left=5)["why"] == "no time left"
    assert "not installed: no_such_package;" in run_section("fine", needs=("json", "no_such_package"))["why"]


def test_what_is_left_of_the_budget_limits_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "LEAST_SECONDS", 1)
    record = run_section("hang", limit=30, left=2)
    assert (record["status"], record["why"]) == ("timed out", "not done after 2 s")


def test_inside_a_section_results_and_the_traceback_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(output: Output) -> None:
        output.put("kept", 3)
        raise ValueError("inside")

    def idle(output: Output) -> None:
        raise Skipped("not here")

    monkeypatch.setitem(sys.modules, "gpu.made_up", types.SimpleNamespace(broken=broken, idle=idle))
    made_up = tuple(Section(name, "", f"made_up:{name}", 1, ()) for name in ("broken", "idle"))
    monkeypatch.setattr(sections, "SECTIONS", made_up)
    path = tmp_path / "results.json"
    assert sections.run_inside("broken", path) == 1
    found = json.loads(path.read_text())
    assert found["results"] == {"kept": 3}
    assert found["error"].endswith("ValueError: inside\n")
    assert sections.run_inside("idle", path) == sections.SKIPPED_STATUS
    assert json.loads(path.read_text())["error"] == "not here"


def test_sections_run_in_the_order_asked_for_and_report_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "SECTIONS", tuple(Section(name, "", "", 20, ()) for name in ("crash", "fine", "skip")))
    seen: list[tuple[str, str]] = []
    sections.run_all(
        ["skip", "crash"], [sys.executable, "-c", CHILD], 100, lambda n, r: seen.append((n, r["status"])), dict(os.environ)
    )
    assert seen == [("skip", "skipped"), ("crash", "failed")]


# ---- the report ----


def done(**results: Any) -> sections.Record:
    return {"status": "done", "seconds": 1.0, "results": results}


RESULTS = {
    "kernels": done(test_a={"passed": 5, "failed": 0, "skipped": 1, "failures": [], "reasons": {"planted bugs": 1}}),
    "ceilings": done(**{"copy GB/s": 4000.0, "matmul TFLOP/s": 800.0}),
    "batch-1": done(
        **{
            "qwen3-0.6b": {"tok/s": 1600.0, "CPU ms a step": 0.31, "GB/s": 2000.0},
            "qwen3-0.6b, eager": {"tok/s": 400.0, "CPU ms a step": 2.0, "GB/s": 500.0},
            "qwen3-8b": {"tok/s": 249.0, "CPU ms a step": 0.2, "GB/s": 3800.0},
        }
    ),
    "step": done(**{"qwen3-0.6b, batch 1": {"rows": [{"kernel": "gemv", "grid": "264x1x1", "us each": 0.1}], "step us": 400}}),
    "attention": done(
        decode=[
            {"case": "qwen3-8b, bf16, 32 x 2048", "us": 80.0, "GB/s": 3300.0},
            {"case": "qwen3-8b, bf16, 128 x 2048", "us": 300.0, "GB/s": 3500.0},
            {"case": "qwen3-8b, bf16, 256 x 1024", "us": 300.0, "GB/s": 3000.0},
        ]
    ),
    "prefill": {"status": "failed", "seconds": 3.0, "results": {}, "why": "Traceback\nKeyError: 'x'\n"},
}


def test_bars_are_met_missed_or_not_measured() -> None:
    rows = {row["bar"]: (row["found"], row["met"]) for row in report.bars(RESULTS)}
    assert rows["kernel tests that fail on the device"] == (0, True)
    assert rows["decode, batch 1, Qwen3-0.6B"] == (1600, True)
    assert rows["decode, batch 1, Qwen3-8B"] == (249, False)
    assert rows["decode, batch 1, Qwen3-8B, share of the copy ceiling"] == (0.95, True)
    assert rows["decode attention, bf16, worst from 32 x 2048 up, share of the copy ceiling"] == (0.825, False)
    assert rows["decode attention, fp8, worst from 32 x 2048 up, share of the copy ceiling"] == (None, None)
    assert rows["graphs against eager, batch 1, Qwen3-0.6B"] == (4, True)
    assert rows["CPU time of a step, batch 1, Qwen3-0.6B"] == (0.31, False)
    assert rows["nano-vllm's workload"] == (None, None)
    assert all(row["met"] is None for row in report.bars({}))


def test_bars_of_quantized_weights() -> None:
    rates = {"nanovllm, batch 1": 120.0, "nanovllm, batch 32": 80.0, "llama.cpp, batch 1": 100.0, "llama.cpp, batch 32": 40.0}
    gains = {1: 3.5, 16: 3.1, 32: 2.2, 4096: 0.7}
    results = {
        "ceilings": done(**{"copy GB/s": 4000.0}),
        "quantized": done(int4=[{"case": case, "GB/s": rate} for case, rate in (("a", 3000.0), ("b", 2000.0), ("c", 2500.0))]),
        "crossover": done(int4=[{"rows": rows, "gain": gain} for rows, gain in gains.items()]),
        "quantized-8b": done(**{"int4, 1": {"tok/s": 630.0}}),
        "quantized-prefill": done(bf16={"tok/s": 100.0}, fp8={"tok/s": 150.0}),
        "llama.cpp": done(**{test: {"tok/s": rate} for test, rate in rates.items()}),
    }
    rows = {row["bar"]: (row["found"], row["met"]) for row in report.bars(results)}
    assert rows["a row by weights in int4, worst size, share of the copy ceiling"] == (0.5, False)
    assert rows["a row by weights in q4_k, worst size, share of the copy ceiling"] == (None, None)
    assert rows["int4 against bf16, worst of 1 to 16 rows"] == (3.1, True)
    assert rows["int4 against bf16, worst of all rows"] == (0.7, False)
    assert rows["decode, batch 1, Qwen3-8B in int4"] == (630, True)
    assert rows["prefill of Qwen3-8B in fp8 against bf16"] == (1.5, True)
    assert rows["against llama.cpp, batch 1"] == (1.2, True)
    assert rows["against llama.cpp, batch 32"] == (2, False)


def test_the_worst_of_what_was_not_all_measured_is_not_known() -> None:
    """The one that is missing may be the one that misses the bar."""
    decode = [{"case": f"qwen3-8b, {kind}, 32 x 2048", "GB/s": 3900.0} for kind in ("bf16", "fp8", "int8")]
    some = {"status": "timed out", "seconds": 60.0}
    results = {
        "ceilings": done(**{"copy GB/s": 4000.0}),
        "attention": some | {"results": {"decode": decode}},
        "quantized": some | {"results": {"int4": [{"case": f"int4, {i}", "GB/s": 3900.0} for i in range(2)]}},
        "crossover": some | {"results": {"int4": [{"rows": rows, "gain": 3.5} for rows in (1, 2, 4, 8, 16, 24)]}},
        "tokens": some | {"results": {"bf16": {"largest gap": 0.01}}},
    }
    found = {row["bar"]: row["met"] for row in report.bars(results) if row["found"] is not None}
    assert found == {"int4 against bf16, worst of 1 to 16 rows": True}


@pytest.mark.parametrize(
    ("file", "status", "wrong"),
    [
        ({"passed": 5, "failed": 1, "skipped": 0}, "done", 1),
        ({"passed": 5, "failed": 1, "skipped": 0, "lost": "the GPU is lost"}, "done", 2),
        ({"passed": 0, "failed": 0, "skipped": 9}, "done", 1),
        ({"passed": 9, "failed": 0, "skipped": 0}, "timed out", 1),
    ],
)
def test_kernels_that_were_not_tested_are_not_right(file: dict[str, Any], status: str, wrong: int) -> None:
    right = {"passed": 3, "failed": 0, "skipped": 2}
    results = {"kernels": done(test_a=file, test_b=right) | {"status": status}}
    assert report.bars(results)[0]["found"] == wrong


def test_the_report_reads_without_being_rendered() -> None:
    text = report.markdown(json.loads(json.dumps(RESULTS)))
    lines = text.splitlines()
    for expected in (
        "| prefill   | failed | 3       | KeyError: 'x' |",
        "| qwen3-8b, bf16, 32 x 2048  | 80  | 3,300 | 82.5%   |",
        "failed: KeyError: 'x'",
        "### qwen3-0.6b, batch 1",
        "step us 400",
        "- test_a, reasons: 1 (planted bugs)",
    ):
        assert expected in lines, text
    blocks = text.split("\n\n")
    for block in (block for block in blocks if block.startswith("|")):
        assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) == 1
    assert blocks[-2] == "## Bars"
    assert "MISSED" in blocks[-1]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""), (True, "True"), (3, "3"), (1500.0, "1,500"), (0.3456789, "0.3457"), (12345.6, "12,346"), (1e-5, "1e-05"),
        ("a", "a"), (99.95, "99.95"), (math.nan, "nan"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers_as_a_person_reads_them(value: Any, shown: str) -> None:
    assert report.number(value) == shown


# CUgraphEdgeData of cuda.h: from_port, to_port, type, five bytes of nothing.
FULL, PROGRAMMATIC = bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("recorded", [[], [FULL], [PROGRAMMATIC, FULL, PROGRAMMATIC]])
def test_edges_of_a_graph(recorded: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def get_edges(graph: ctypes.c_void_p, first: Any, second: Any, edges: Any, count: Any) -> int:
        """As cuda.h says: without room it tells how many there are."""
        assert graph.value == 1 << 40
        if edges is None:
            assert first is second is None
            count._obj.value = len(recorded)
        else:
            assert count._obj.value == len(first) == len(second) == len(edges) == len(recorded)
            ctypes.memmove(edges, b"".join(recorded), 8 * len(recorded))
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(cuGraphGetEdges_v2=get_edges))
    found = [edge.type == checks.PROGRAMMATIC for edge in checks.edges(1 << 40)]
    assert found == [edge == PROGRAMMATIC for edge in recorded]


def test_a_driver_that_knows_no_edges_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(cuGraphGetEdges_v2=lambda *args: 801))
    with pytest.raises(RuntimeError, match="error 801"):
        checks.edges(1)


def test_tests_are_counted_from_pytests_own_report() -> None:
    found = checks.counted(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="assert 1 == 2&#10;more"/></testcase>'
        '<testcase name="c"><skipped message="planted bugs"/></testcase><testcase name="d"><error message="boom"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 1)
    assert found["failures"] == ["b: assert 1 == 2", "d: boom"]
    assert found["reasons"] == {"planted bugs": 1}


def test_files_that_ask_the_emulation_alone_are_not_run_on_a_gpu() -> None:
    """Each test of them would be skipped, and a file of which no test passed counts as wrong."""
    names = {file.stem for file in checks.test_files()}
    assert {"test_kernel_gemv", "test_kernel_packed_wgmma", "test_gpu", "test_cuda_engine"} <= names
    assert not {"test_kernel_overlap", "test_kernels_cpu"} & names


def test_files_for_a_gpu_need_no_new_classes_of_transformers() -> None:
    """A machine with a GPU has the transformers that it has, and a file that can't be imported counts as wrong: what these files
    and what they import take is in transformers 5.0."""
    waiting, seen, taken = list(checks.test_files()), set[Path](), set[str]()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for node in ast.parse(file.read_text()).body:  # what a function imports is a test's own affair
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "transformers":
                taken |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                waiting.append(file.parent / f"{str(node.module).replace('.', '/')}.py")
            elif isinstance(node, ast.Import):
                waiting += [file.parent / f"{each.name}.py" for each in node.names]
    assert {"test_cuda_engine.py", "test_cuda_encoders.py", "engines.py"} <= {file.name for file in seen}
    assert taken <= {"AutoModel", "BertConfig", "Gemma3TextConfig", "ModernBertConfig", "MPNetConfig", "Qwen3Config"}


def test_what_fails_in_the_library_takes_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(calls: Any) -> float:
        calls[0]()
        return 1e-6

    def broken() -> None:
        raise RuntimeError("no engine\nat all")

    monkeypatch.setattr(sweeps, "seconds_in_graph", seconds)
    output = Output(tmp_path / "results.json")
    for name, library in (("a", broken), ("b", lambda: None)):
        sweeps.put(output, "kind", cases.Case(name, 1e3, 0.0, [lambda: None], [library]))
    first, second = json.loads((tmp_path / "results.json").read_text())["results"]["kind"]
    assert first == {"case": "a", "us": 1.0, "GB/s": 1.0, "torch fails": "no engine"}
    assert second["torch us"] == 1.0
    with pytest.raises(RuntimeError, match="no engine"):
        sweeps.put(output, "kind", cases.Case("ours", 1e3, 0.0, [broken]))
    sweeps.attempt(output, "kind", lambda: [cases.Case("ours", 1e3, 0.0, [broken]), cases.Case("c", 1e3, 0.0, [lambda: None])])
    sweeps.attempt(output, "kind", broken)
    assert [row["case"] for row in output.results["kind"]] == ["a", "b", "c"]
    assert (output.error or "").count("RuntimeError: no engine") == 2


def test_a_tracer_that_sees_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breakdown, "_Trace", contextlib.nullcontext)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: None)
    for name, result in (("gpu", None), ("load", None), ("measure", ({"ms a step": 1.0}, None)), ("release", None)):
        monkeypatch.setattr(breakdown, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(breakdown, "kernels_of_a_step", lambda *_: {"rows": []})
    output = Output(tmp_path / "results.json")
    breakdown.section(output)
    assert output.results == {
        f"{name}, batch {batch}": "the tracer saw nothing of the device" for name, batch in breakdown.CASES
    }


def test_a_trace_becomes_a_table_of_a_step() -> None:
    def event(name: str, us: float, grid: list[int], cat: str = "kernel") -> dict[str, Any]:
        return {"cat": cat, "name": name, "dur": us, "args": {"grid": grid}}

    step = [event("gemv", 5.0, [264, 1, 1])] * 3 + [event("gemv", 50.0, [132, 1, 1]), event("largest_logits", 7.0, [74, 1, 1])]
    other = [event("void at::add<float, 3>(int)", 2.0, [1, 1, 1]), event("python", 1e6, [], "cpu_op")]
    found = breakdown.summary(step * 4 + other, 0.1)
    assert [(row["kernel"], row["grid"], row["a step"]) for row in found["rows"]] == [
        ("gemv", "132x1x1", 1), ("gemv", "264x1x1", 3), ("largest_logits", "74x1x1", 1), ("at::add", "1x1x1", 0.25)
    ]  # fmt: skip
    assert found["rows"][1]["us a step"] == pytest.approx(15)
    assert found["busy us a step"] == pytest.approx(72.5)
    assert found["step us"] == pytest.approx(100)


# ---- models and requests ----


def test_warming_up_sees_every_size_of_a_step_three_times() -> None:
    lengths = [request.answer_len for request in engine_runs.warming(256)]
    alive = [sum(length > step for length in lengths) for step in range(1, max(lengths))]
    buckets = [1 << (count - 1).bit_length() for count in alive]
    assert {bucket: buckets.count(bucket) for bucket in buckets} == dict.fromkeys([256, 128, 64, 32, 16, 8, 4, 2, 1], 4)


def test_nano_vllms_workload_has_the_tokens_it_is_known_by() -> None:
    requests = nano_vllm()
    assert sum(request.answer_len for request in requests) == 133_966
    assert {len(requests), len({tuple(request.prompt) for request in requests})} == {256}
    assert all(100 <= len(request.prompt) <= 1024 and max(request.prompt) <= 10000 for request in requests)


@pytest.mark.parametrize(
    ("name", "parameters"), [("qwen3-0.6b", 596_049_920), ("qwen3-8b", 8_190_735_360), ("llama-3.2-1b", 1_235_814_400)]
)
def test_shapes_are_those_of_the_published_models(name: str, parameters: int) -> None:
    assert sum(math.prod(shape) for shape in SHAPES[name].tensors().values()) == parameters


def test_bytes_and_operations_of_a_step() -> None:
    shape = SHAPES["qwen3-8b"]
    assert shape.decode_bytes(0) == pytest.approx(15.1e9, rel=0.01)
    assert shape.decode_bytes(1000, batch=3) - shape.decode_bytes(0) == 3 * 1000 * 144 * 1024
    assert shape.prefill_flops(2048) == pytest.approx(2 * 6.95e9 * 2048 + 36 * 4 * 4096 * 2048**2 / 2, rel=0.01)
    assert shape.prefill_flops(512, 4) == 4 * shape.prefill_flops(512)


def test_random_tensors_are_the_same_however_they_are_sliced() -> None:
    shape = replace(TINY, vocab=POOL // 32)  # an embedding of twice the pool
    checkpoint = RandomCheckpoint(shape)
    whole = checkpoint.tensor("model.embed_tokens.weight")
    assert whole.shape == (shape.vocab, 64)
    for rows in ((0, 5), (POOL // 64 - 3, POOL // 64 + 3), (shape.vocab - 2, shape.vocab)):
        assert torch.equal(checkpoint.tensor("model.embed_tokens.weight", rows=rows), whole[rows[0] : rows[1]])
    matrix = checkpoint.tensor("model.layers.1.mlp.up_proj.weight").float()
    assert matrix.std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(matrix, checkpoint.tensor("model.layers.1.mlp.gate_proj.weight").float())
    assert checkpoint.tensor("model.norm.weight").float().mean() == pytest.approx(1, abs=0.1)


@pytest.fixture(scope="module")
def untied() -> Shape:
    return replace(TINY, tied=False)


@needs_emulation
def test_the_gpus_engine_is_measured_and_judged_by_the_cpus(untied: Shape) -> None:
    cpu, emulated = load(untied, None, **ROOM), load(untied, EmulatedDevice(), **ROOM)
    run = decode(emulated, 2, 20, 3)
    assert (run.steps, run.tokens) == (3, 6)
    assert 0 < run.waited < run.seconds
    assert [len(output.outputs[0].token_ids) for output in run.outputs] == [36, 36]
    assert run.outputs[0].outputs[0].text.startswith("t")
    requests = [Request(prompt(checks.PROMPT_LEN, i, untied.vocab), 6) for i in range(3)]
    seconds, outputs = serve(emulated, requests, 0.0)
    answers = [output.outputs[0].token_ids for output in outputs]
    assert seconds > 0
    assert len({token for answer in answers for token in answer}) > 6, "not one token over and over"
    found = checks.judged(cpu, answers)
    assert found["tokens"] == 18
    assert found["the CPU's first"] >= 0.9
    assert found["near-ties only"]
    wrong = [tuple((token + 1) % untied.vocab for token in answer) for answer in answers]
    found = checks.judged(cpu, wrong)
    assert found["the CPU's first"] < 0.2
    assert not found["near-ties only"]


@needs_emulation
def test_a_request_that_fails_ends_the_measuring(untied: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would: the engine lives on, and no token would ever come."""
    loaded = load(untied, EmulatedDevice(), **ROOM)

    def broken(*args: object, **named: object) -> None:
        raise TypeError("a kernel's argument")

    monkeypatch.setattr(loaded.worker.model, "run", broken)
    with pytest.raises(RuntimeError, match="request 0-0 failed: an internal error"):
        decode(loaded, 1, 20, 3)


def test_what_is_loaded_is_not_collected_at_and_its_memory_goes() -> None:
    gc.unfreeze()
    loaded = load(TINY, None, **ROOM)
    frozen = gc.get_freeze_count()
    assert frozen
    model = weakref.ref(loaded.worker.model)
    del loaded
    release()
    assert model() is None
    assert gc.get_freeze_count() < frozen / 10  # none but what Python 3.12 keeps there that lives for ever
    gc.freeze()  # as conftest.py has it


@needs_emulation
def test_rows_of_the_engines_sections() -> None:
    loaded = load(TINY, EmulatedDevice(), num_blocks=64, max_num_seqs=1, max_model_len=256, max_num_batched_tokens=256)
    result, last = engine_runs.measure(loaded, TINY, 1, 2, rounds=1)
    assert set(result) == {"tok/s", "spread", "ms a step", "CPU ms a step", "GB/s"}
    assert 0 < result["CPU ms a step"] <= result["ms a step"]
    assert result["tok/s"] == pytest.approx(1e3 / result["ms a step"])
    assert last.tokens == 2
    filled = engine_runs.prefill_of(loaded, TINY, 40, 1, rounds=3)
    assert filled["TFLOP/s"] == pytest.approx(TINY.prefill_flops(40) / filled["ms"] / 1e9)


@needs_emulation
def test_mixtures_of_experts_are_measured_by_the_bytes_of_those_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name, _ in experts.MODELS} <= set(shapes.SHAPES)
    small = TINY.config | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True,
    }  # fmt: skip
    monkeypatch.setitem(shapes.SHAPES, "small", small)  # type: ignore[arg-type]
    loaded = load(experts.Cut("small", 1), EmulatedDevice(), num_blocks=64, max_num_seqs=2, max_model_len=256)
    result = experts.measure(loaded, 2, 2)
    attention, head, router, each = 8 * 64 * 64 + 64 * 4 * 64, 320 * 64, 6 * 64, 3 * 32 * 64
    matrices = attention + head + router + 6 * each * (1 - (4 / 6) ** 2)
    cache = 2 * 2 * (2 * 64) * (PROMPT + 17)
    assert result["GB/s"] * result["ms a step"] * 1e6 == pytest.approx(2 * (matrices + cache), rel=1e-6)
    assert 0 < result["CPU ms a step"] <= result["ms a step"]


@needs_emulation
@pytest.mark.parametrize("name", far.NAMES)
def test_far_weights_are_measured_by_their_bytes(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(far, "seconds_in_graph", lambda calls, **_: [call() for call in calls] and 2.0)
    monkeypatch.setattr(far, "seconds_of", lambda call: call() is None or 2.0)
    output = sections.Output(tmp_path / "results.json")
    far.copies(output, EmulatedDevice(), 1000)
    far.products(output, EmulatedDevice(), name, 32, 256)
    bits = {"bf16": 16.0, "int4": 4.0 + 16 / 128, "q4_k": 4.625}[name]  # Q4_K with scales of whole bytes
    found = output.results
    assert found.pop("copy") == {"GB/s": 1000 / 2 / 1e9, "seen alike": True}
    assert found == {f"{name}, {count}": {"GB/s": pytest.approx(32 * 256 * bits / 8 / 2 / 1e9, rel=0.02), "same bits": True}
                     for count in far.COUNTS}  # fmt: skip


def test_transformers_is_measured_between_two_lengths() -> None:
    model = peers.make_model(TINY, "cpu")
    assert model.dtype == torch.bfloat16
    for cache in ("dynamic", "static"):
        assert peers.decode_rate(model, TINY, 2, 1, 3, cache)["warm-up s"] > 0


# ---- kernels ----


@needs_emulation
@pytest.mark.parametrize(
    "kind", ["decode", "decode int8", "prefill", "prefill after a prefix", "prefill int8", "gemma 4", "gemv", "delta", "small"]
)
def test_cases_call_the_kernels_as_they_are(kind: str) -> None:
    launcher = Emulator()
    if kind.startswith("decode"):
        made = [cases.decode_case(launcher, "tiny", TINY, 2, 40, cases.INT8 if "int8" in kind else cases.BF16)]
        assert made[0].num_bytes > 2 * 2 * 40 * 2 * 64
    elif kind.startswith("prefill"):
        dtype, prefix = (cases.INT8 if "int8" in kind else cases.BF16), (20 if "prefix" in kind else 0)
        made = [cases.prefill_case(launcher, "tiny", TINY, 2, 18, prefix, dtype)]
        assert made[0].flops == 4 * 2 * (18 * prefix + 18 * 19 / 2) * 4 * 64
    elif kind == "gemma 4":
        made = [cases.decode_case(launcher, name, heads, 2, 40, cases.BF16) for name, heads in cases.GEMMA_4_E4B.items()]
        made += [
            cases.prefill_case(launcher, name, cases.GEMMA_4_E4B[name], 1, 18, 0, cases.BF16, fixed)
            for name, fixed in (("all", False), ("all", True), ("window", False))
        ]
    elif kind == "gemv":
        made = cases.gemv_cases(launcher, "tiny", TINY, 2)
    elif kind == "delta":
        made = [cases.delta_case(launcher, 2, 3, keys=1, values=2, dim=16)]
        assert made[0].num_bytes > 2 * 2 * 2 * 16 * 16 * 4
        made.append(cases.state_space_case(launcher, 2, 3, keys=1, values=2, dim=16))
    else:
        made = cases.small_cases(launcher, "tiny", TINY, 3)
    for case in made:
        result = case.calls[0]()
        assert result is None or result.isfinite().all(), case.name
        if case.library:
            assert case.library[0]().isfinite().all()
    assert launcher.launches


@needs_emulation
@pytest.mark.parametrize("dtype", [cases.BF16, cases.FP8])
def test_cases_of_latent_attention_count_what_is_read_once(dtype: torch.dtype) -> None:
    launcher, shape = Emulator(), (16, 48)
    made = [latent.decode_case(launcher, 3, 2, 40, dtype, shape)]
    assert made[0].num_bytes == 2 * 40 * 64 * dtype.itemsize + 2 * 2 * 3 * (64 + 48)
    assert made[0].flops == 2 * 2 * 40 * 3 * (64 + 48)
    made += [latent.prompt_case(launcher, 3, 18, fixed, shape) for fixed in (False, True)]
    for case in made:
        assert case.calls[0]().isfinite().all(), case.name
    assert launcher.launches == {"latent_attention": 3}
    products = latent.products_cases(launcher, 2, 3, 48)
    assert products[0].num_bytes == 2 * 2 * 48 * 128 + 2 * 3 * 2 * (48 + 128)
    for case in (*products, latent.rows_case(launcher, 2, 3, 48)):
        case.calls[0]()
    for case in products:
        assert case.library[0]().shape[:2] == (2, 3)
    assert (launcher.launches["head_matmul"], launcher.launches["latent_rows"]) == (2, 1)


@needs_emulation
@pytest.mark.parametrize("name", ["int4:group=32", "fp8", "q8_0"])
def test_products_of_quantized_weights_are_cases(name: str) -> None:
    launcher = Emulator()
    case = quantized.product_case(launcher, name, 48, 128, 1)
    assert case.calls[0]().isfinite().all()
    assert launcher.launches
    assert case.num_bytes == pytest.approx(48 * parse_format(name).row_bytes(128), rel=0.1)


@needs_emulation
def test_ways_to_multiply_by_a_packed_weight_are_one_product() -> None:
    launcher = Emulator()
    weights = [quantized.packed_weight(launcher, "int4", parse_format("int4:group=32"), 40, 64)]
    made = quantized.way_cases(launcher, weights, [torch.ones(40, 64, dtype=torch.bfloat16)], 3)
    results = {way: case.calls[0]() for way, case in made.items()}
    for way in ("gemv", "gemm", "wgmma"):
        assert (results[way].float() - results["library"].float()).norm() <= 0.01 * results["library"].float().norm()
    assert "wgmma" not in quantized.way_cases(Emulator(capability=80), weights, [], 3)
    assert "gemv" not in quantized.way_cases(launcher, weights, [], 9)
    assert results["bf16"].shape == (3, 40)


@pytest.mark.parametrize(
    ("gemm", "wgmma", "expected"),
    [
        ((9, 9, 9, 9, 9, 9), (9, 9, 9, 9, 9, 9), (8, 0)),
        ((1, 2, 2, 4, 9, 9), (9, 9, 9, 9, 9, 9), (64, 0)),
        ((1, 2, 2, 4, 9, 9), (2, 3, 3, 3, 4, 9), (32, 128)),
        ((1, 2, 2, 4, 9, 4.9), (2, 3, 3, 3, 4, 9), (32, 128)),  # one disturbed number
        ((3, 3, 3, 4, 9, 9), (1, 1, 1, 1, 1, 1), (8, 256)),
        ((1, 2, 2, 4, 9, 9), None, (64, 0)),
    ],
)
def test_limits_of_ways_are_those_of_the_least_time(
    gemm: tuple[float, ...], wgmma: tuple[float, ...] | None, expected: tuple[int, int]
) -> None:
    counts = (1, 16, 32, 64, 128, 256)
    rows = [{"rows": n, "gemm us": gemm[i], "library us": 5.0, "best": "gemv"} for i, n in enumerate(counts)]
    for i, row in enumerate(rows):
        row |= {} if wgmma is None else {"wgmma us": wgmma[i]}
    assert quantized.best_limits(rows) == expected


@needs_emulation
def test_plans_are_measured_beside_the_one_that_is_chosen() -> None:
    launcher = Emulator(num_multiprocessors=6)
    weights = [quantized.packed_weight(launcher, "int4", parse_format("int4:group=128"), 70, 512) for _ in range(2)]
    seen: dict[str, cases.Case] = {}

    def microseconds(case: cases.Case) -> float:
        assert case.name not in seen
        seen[case.name] = case
        return 100.0 + len(seen) if len(seen) != 3 else 7.0

    found = quantized.best_plan(launcher, weights, 65, microseconds)
    assert list(found["every"]) == list(seen)
    assert found["best"] == list(seen)[2]
    assert found["best us"] == 7.0
    assert found["us"] == found["every"][found["chosen"]]
    assert "64 x 256 x 64 / 2" not in seen, "two waves"
    chosen = seen[found["chosen"]]
    assert len(chosen.calls) == len(weights)
    assert chosen.calls[1]().shape == (65, 70)
    assert launcher.launches == {"packed_wgmma": 1}


def test_a_model_of_random_blocks_is_read_like_a_file_of_them() -> None:
    shape = replace(TINY, layers=1, hidden=256, inner=5000 // 256 * 256, tied=False)
    reader = quantized.RandomBlocks(RandomCheckpoint(shape))
    types = {name: form.name for name in reader.names() if (form := reader.format(name)) is not None}
    assert set(types.values()) == {"q4_k", "q6_k"}
    assert types["lm_head.weight"] == types["model.layers.0.mlp.down_proj.weight"] == "q6_k"
    for name, first in (("model.layers.0.mlp.gate_proj.weight", [0, 4096]), ("model.layers.0.input_layernorm.weight", [0])):
        slices = list(reader.slices(name))
        assert [start for _, start in slices] == first
        assert sum(num_rows(rows) for rows, _ in slices) == reader.shape(name)[0]


def test_sets_of_inputs_pass_the_l2() -> None:
    assert copies_for(8e6) * 8e6 > 200e6
    assert [copies_for(1e9), copies_for(10)] == [2, 64]


def test_a_launch_elsewhere_takes_memory_there_and_back_once() -> None:
    memory = torch.arange(10, dtype=torch.int32)
    other = torch.zeros(4, dtype=torch.float32)
    seen: list[torch.Tensor] = []

    class Elsewhere:
        device, capability, num_multiprocessors = torch.device("cpu"), 90, 1

        def launch(self, kernel: Kernel, grid: object, block: object, args: tuple, shared_bytes: int = 0) -> None:
            seen.extend(args[:3])
            assert args[3:] == (None, np.int32(7))
            args[1][0] = -1
            args[2].fill_(2)

    column = memory.view(2, 5)[:, 3]
    on_gpu.launch_there(
        Elsewhere(), Kernel("x", "x", ()), (1, 1, 1), (1, 1, 1), (column, memory[8:], other, None, np.int32(7)), 0
    )
    assert seen[0].untyped_storage().data_ptr() == seen[1].untyped_storage().data_ptr() != memory.data_ptr()
    assert (seen[0].tolist(), seen[0].stride()) == ([3, -1], (5,))
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1, 9]
    assert other.tolist() == [2, 2, 2, 2]


def test_addresses_in_tasks_become_those_of_copies_elsewhere() -> None:
    weight, bias, unknown = torch.arange(4.0), torch.ones(2), 77
    tasks = torch.tensor([[weight.data_ptr(), 0, unknown, bias.data_ptr()]])
    before = tasks.clone()

    class Elsewhere:
        device, capability, num_multiprocessors = torch.device("cpu"), 90, 1

        def launch(self, kernel: Kernel, grid: object, block: object, args: tuple, shared_bytes: int = 0) -> None:
            first, nothing, same, second = args[0].flatten().tolist()
            assert (nothing, same) == (0, unknown)
            assert weight.data_ptr() != first
            assert (ctypes.c_float * 4).from_address(first)[:] == weight.tolist()
            assert (ctypes.c_float * 2).from_address(second)[:] == bias.tolist()

    kernel = Kernel("x", "x", (("EXPERTS", 1),))
    on_gpu.launch_there(Elsewhere(), kernel, (1, 1, 1), (1, 1, 1), (tasks, None), 0, [weight, bias])
    assert torch.equal(tasks, before)


def test_only_what_reads_tasks_has_addresses_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in front of it, which round its rows, say, have numbers for their first argument."""
    seen: list[torch.Tensor] = []

    class Elsewhere:
        device, capability, num_multiprocessors = torch.device("cpu"), 90, 1

        def launch(self, kernel: Kernel, grid: object, block: object, args: tuple, shared_bytes: int = 0) -> None:
            seen.append(args[0].clone())

    monkeypatch.setattr(on_gpu, "_launcher", Elsewhere)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    emulator, rows = Emulator(), torch.tensor([0.5, 1.5])
    emulator.by_address = [torch.zeros(3)]
    on_gpu.launch(emulator, Kernel("x", "x", ()), (1, 1, 1), (1, 1, 1), (rows,), 0)
    assert torch.equal(seen[0], rows)
