"""benchmarks/gpu on a machine without a GPU: every section runs to its end, its kernels at their real sizes on memory that is not
there, its engines as far as their settings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from emulation.device import EmulatedDevice
from emulation.emulator import Emulator, needs_emulation
from gpu import cases, checks, contact, engine_runs, experts, latent, quantized, report, sections, sweeps
from gpu.sections import Output, Section
from gpu.shapes import SHAPES
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.errors import DoesNotFitError
from nanovllm_cli.kernels.device import Memory
from nanovllm_cli.kernels.kernel import Arg, Kernel

TINY = SHAPES["tiny"]
Dims = tuple[int, int, int]


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path / "results.json")


def run(name: str, output: Output) -> dict[str, Any]:
    section = next(section for section in sections.SECTIONS if section.name == name)
    file, function = section.function.split(":")
    getattr(sys.modules[f"gpu.{file}"], function)(output)
    assert output.error is None
    return output.results


# ---- kernels ----


class Nowhere:
    """A launcher on torch's device `meta`, where tensors have sizes and no memory."""

    device = torch.device("meta")
    capability, num_multiprocessors = 90, 132

    def __init__(self, device_index: int = 0, programmatic_launch: bool = False) -> None:
        self.programmatic_launch = programmatic_launch

    def launch(self, kernel: Kernel, grid: Dims, block: Dims, args: tuple[Arg, ...], shared_bytes: int = 0) -> None:
        assert all(0 < size < limit for size, limit in zip(grid, (1 << 31, 1 << 16, 1 << 16), strict=True)), (kernel, grid)
        assert 0 < block[0] * block[1] * block[2] <= 1024, (kernel, block)
        assert shared_bytes <= 227 << 10, (kernel, shared_bytes)
        for arg in args:
            assert not isinstance(arg, torch.Tensor) or arg.device == self.device, (kernel, arg.device)

    def torch_op(self, function: Callable[[], object], barrier: bool = False) -> None: ...

    def rehearse(self, step: Callable[[], object]) -> None:
        step()


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(calls: Any) -> float:
        calls[-1]()
        return 1e-5

    for module in (sweeps, quantized, latent):
        monkeypatch.setattr(module, "CudaLauncher", Nowhere)
    monkeypatch.setattr(sweeps, "seconds_in_graph", seconds)
    for module in (cases, latent, quantized):
        monkeypatch.setattr(module, "copies_for", lambda num_bytes: 1)
    monkeypatch.setattr(quantized, "ROWS", (1, 16, 32, 4096))
    monkeypatch.setattr(quantized, "PLANNED_ROWS", (96,))
    for each in (quantized, report):
        monkeypatch.setattr(each, "SIZES", report.SIZES[:1])  # blocks are packed on the host
    monkeypatch.setattr(quantized, "POOL_ROWS", 8)  # and searched for their best scales


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("name", ["attention-others", "latent", "matmul", "tuning", "plans"])
def test_sections_of_kernels_run(name: str, output: Output) -> None:
    assert run(name, output)


@pytest.mark.usefixtures("nowhere")
def test_what_has_no_bars_is_measured_too(output: Output) -> None:
    run("quantized-others", output)
    assert {len(rows) for rows in output.results.values()} == {len(quantized.SIZES)}
    run("crossover-others", output)
    assert set(output.results) == {*quantized.OTHER_FORMATS, *quantized.KINDS, "lines"} - {"int4"}


# ---- engines ----


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Of what settings engines were loaded."""
    loaded: list[EngineConfig] = []
    answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2), text="")])

    def load(shape: Any, device: object, **settings: Any) -> SimpleNamespace:
        config = EngineConfig(**{"max_model_len": 4096} | settings)
        loaded.append(config)
        stats = SimpleNamespace(steps=3, preemptions=0)
        runner = SimpleNamespace(decode=SimpleNamespace(num_graphs=int(not config.eager)))
        worker = SimpleNamespace(num_blocks=7, runner=runner)
        return SimpleNamespace(engine=SimpleNamespace(stats=lambda: stats), worker=worker, vocab=1000, device=device)

    def measure(loaded: object, shape: object, batch: int, steps: int, rounds: int = 3) -> tuple[dict[str, float], Any]:
        return {"tok/s": 1.0, "GB/s": 1.0, "ms a step": 1.0, "CPU ms a step": 1.0}, SimpleNamespace(outputs=[answer])

    stubs: dict[str, Any] = {
        "gpu": lambda programmatic_launch=None: programmatic_launch,
        "load": load, "measure": measure, "prefill_of": lambda *_: {"tok/s": 1.0, "TFLOP/s": 1.0},
        "serve": lambda loaded, requests, temperature: (2.0, [answer for _ in requests]),
        "answered": lambda *_, **__: [(1, 2)], "judged": lambda cpu, found: {"largest gap": 0.0},
        "release": lambda: None,
    }  # fmt: skip
    for module, names in (
        (engine_runs, ("gpu", "load", "measure", "prefill_of", "serve", "release")),
        (quantized, ("gpu", "load", "measure", "prefill_of", "release")),
        (experts, ("gpu", "release")),
        (checks, ("gpu", "load", "answered", "judged", "release")),
        (contact, ("gpu", "load", "serve", "release")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, stubs[name])
    monkeypatch.setattr(experts, "measure", lambda *_: {"tok/s": 1.0})
    monkeypatch.setattr(contact, "CudaLauncher", Nowhere)
    monkeypatch.setattr(contact, "products", lambda launcher: {"bf16": lambda: 1e-3})
    monkeypatch.setattr(contact, "behind_transformers", lambda *_: [0.0])
    return loaded


@pytest.mark.parametrize(
    "name",
    [
        "contact", "batch-1", "ways", "batches", "batches-others", "prefill", "workload", "quantized-8b", "quantized-8b-others",
        "quantized-prefill", "experts", "tokens",
    ],
)  # fmt: skip
def test_sections_of_engines_run(name: str, output: Output, engines: list[EngineConfig]) -> None:
    assert run(name, output)
    assert engines


def test_every_bar_but_the_peers_is_found_by_the_sections_before_the_kernels_tests(
    tmp_path: Path, engines: list[EngineConfig], nowhere: None
) -> None:
    names = [section.name for section in sections.SECTIONS]
    results: dict[str, Any] = {"ceilings": {"status": "done", "results": {"copy GB/s": 1.0, "matmul TFLOP/s": 1.0}}}
    for name in names[names.index("batch-1") : names.index("kernels")]:
        results[name] = {"status": "done", "seconds": 1.0, "results": run(name, Output(tmp_path / name))}
    assert engines
    missing = [row["bar"] for row in report.bars(results) if row["found"] is None]
    assert all(any(word in bar for word in ("transformers", "llama.cpp", "tests", "the CPU's")) for bar in missing), missing
    first = results["attention"]["results"]["decode"][:6]
    assert [row["case"] for row in first] == [
        f"qwen3-8b, {dtype}, {batch} x 2048" for batch in (32, 128) for dtype in ("bf16", "fp8", "int8")
    ]
    assert results["attention"]["results"]["prefill"][0]["case"] == "qwen3-8b, bf16, 1 x 2048"


@needs_emulation
def test_contact_judges_the_products_that_engines_ask_for(monkeypatch: pytest.MonkeyPatch, output: Output) -> None:
    monkeypatch.setattr(contact, "NARROW", (9, 16, 384))
    monkeypatch.setattr(contact, "FULL", (4, 2064, 128))
    found = contact.products(Emulator(capability=90))
    for name, relative_error in found.items():
        contact._judge(output, name, relative_error)
    assert all(row["right"] for row in output.results.values()), output.results
    monkeypatch.setattr(contact.library, "matmul", lambda launcher, x, weight, bias, out_dtype: x @ weight.T + 1)
    with pytest.raises(RuntimeError, match="bf16: the product is wrong"):
        contact._judge(output, "bf16", found["bf16"])
    assert not output.results["bf16"]["right"]


@needs_emulation
def test_contact_runs_steps_and_says_where_none_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "SEQUENCES", 2)
    monkeypatch.setattr(contact, "PROMPT_LEN", 5)
    monkeypatch.setattr(contact, "ANSWER_LEN", 5)
    monkeypatch.setattr(contact, "ROOM", {"num_blocks": 16, "max_num_seqs": 2, "max_model_len": 64})
    found: list[list[tuple[int, ...]]] = []
    shape = replace(TINY, layers=1, tied=False)
    for settings in ({"eager": True}, {}):
        row = contact.answered(shape, EmulatedDevice(), settings, found)
        assert row["same tokens"]
        assert bool(row["graphs"]) == (not settings)
    assert len(set(found[0][0])) > 1
    assert max(contact.behind_transformers(shape, torch.device("cpu"), found[0])) <= checks.NEAR_TIE
    wrong = [tuple((token + 1) % shape.vocab for token in answer) for answer in found[0]]
    assert max(contact.behind_transformers(shape, torch.device("cpu"), wrong)) > checks.NEAR_TIE
    with pytest.raises(RuntimeError, match="no step could be recorded"):
        contact.answered(shape, EmulatedDevice(capture_fails=True), {}, found)


def test_a_model_of_random_blocks_gets_into_an_engine() -> None:
    """As far as the engine's own count of what it needs."""
    full = Memory(free=0, total=80 << 30, allocated=0, peak=0)
    device: Any = SimpleNamespace(launcher=Nowhere(), enter=lambda: None, memory=lambda: full)
    with pytest.raises(DoesNotFitError, match=r"the weights need 4\.[5-9] GiB"):  # the published file has 4.68
        quantized.load_quantized(SHAPES["qwen3-8b"], device, "q4_k_m")
    with pytest.raises(DoesNotFitError, match=r"the weights need 15\.3 GiB"):
        quantized.load_quantized(SHAPES["qwen3-8b"], device, "bf16")


# ---- what goes wrong ----


def test_a_part_that_fails_takes_no_other_with_it_and_fails_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def of_parts(output: Output) -> None:
        for number in range(4):
            output.attempt(part, output, number)

    def part(output: Output, number: int) -> None:
        if number % 2:
            raise ValueError(f"part {number}")
        output.put(str(number), number)

    monkeypatch.setitem(sys.modules, "gpu.made_up", SimpleNamespace(of_parts=of_parts))
    monkeypatch.setattr(sections, "SECTIONS", (Section("parts", "", "made_up:of_parts", 1, ()),))
    assert sections.run_inside("parts", tmp_path / "results.json") == 1
    found = sections.json.loads((tmp_path / "results.json").read_text())
    assert found["results"] == {"0": 0, "2": 2}
    assert [line for line in found["error"].splitlines() if line.startswith("ValueError")] == [
        "ValueError: part 1", "ValueError: part 3"
    ]  # fmt: skip
    assert "part 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "status", "expected"),
    [
        ({report.ONE_BY_ONE: True, report.OVERLAPPED: True}, "done", False),
        ({report.ONE_BY_ONE: True, report.OVERLAPPED: False}, "done", True),
        ({report.ONE_BY_ONE: True}, "running", False),
        ({report.ONE_BY_ONE: True}, "timed out", True),
        ({report.ONE_BY_ONE: True}, "failed", True),
        ({}, "failed", False),  # nothing is known of kernels that overlap
    ],
)
def test_kernels_that_overlap_are_judged_at_contact(found: dict[str, bool], status: str, expected: bool) -> None:
    begun = {report.LAST_BEGUN: report.OVERLAPPED} if found else {}
    record = {"status": status, "results": begun | {way: {"same tokens": same} for way, same in found.items()}}
    assert report.one_by_one_is_better({"contact": record}) == expected


def test_kernels_that_overlap_are_not_judged_where_contact_had_no_time_for_them() -> None:
    results = {report.ONE_BY_ONE: {"same tokens": True}, report.LAST_BEGUN: report.ONE_BY_ONE}
    assert not report.one_by_one_is_better({"contact": {"status": "timed out", "results": results}})


def test_nobody_waits_again_for_kernels_that_hang(
    output: Output, engines: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sections.ONE_BY_ONE, "1")
    assert f"{report.SMALLEST}, {report.OVERLAPPED}" not in run("batch-1", output)
    assert report.OVERLAPPED not in run("tokens", output)
    assert engines


def test_a_window_is_not_what_the_bar_of_attention_is_about() -> None:
    rows = [{"case": f"gemma-4-e4b {kind}, bf16, 32 x 2048", "GB/s": rate} for kind, rate in (("all", 3.0), ("window", 1.0))]
    results = {
        "ceilings": {"results": {"copy GB/s": 4.0}},
        "attention": {"results": {"decode": [{"case": f"qwen3-8b, bf16, {n} x 2048", "GB/s": 3.6} for n in (32, 128)]}},
        "attention-others": {"results": {"decode": rows}},
    }
    bar = next(row for row in report.bars(results) if row["bar"].startswith("decode attention, bf16"))
    assert bar["found"] == 0.75
