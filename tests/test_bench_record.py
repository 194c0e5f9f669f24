"""What a result says of itself, and that it survives being written; llama-bench's own files read as results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest

from nanovllm_cli import system
from nanovllm_cli.bench.machine import Machine, _cpu_by_number, this_machine
from nanovllm_cli.bench.record import LLAMA_BENCH_FIELDS, Record, Summary, read_results, write_json
from nanovllm_cli.errors import AccessRefusedError, UsageError

SAMPLES = (2_000_000_000, 2_500_000_000, 1_600_000_000)


def record(**changes: Any) -> Record:
    given = {
        "model_filename": "m.gguf", "model_type": "qwen3 0.6B bf16", "model_size": 1_200_000_000, "model_n_params": 596_000_000,
        "n_prompt": 0, "n_gen": 128, "samples_ns": SAMPLES, "machine": Machine(cpu="a cpu", processors=3),
    }  # fmt: skip
    return Record(**(given | changes))


def test_speed_and_deviation_are_llama_benchs() -> None:
    found = record(n_parallel=2)
    speeds = 2 * 128 / (np.array(SAMPLES) / 1e9)
    assert found.num_tokens == 256
    np.testing.assert_allclose(found.samples_ts, speeds)
    assert found.avg_ts == pytest.approx(speeds.mean())
    assert found.stddev_ts == pytest.approx(speeds.std(ddof=1))
    assert found.avg_ns == round(np.mean(SAMPLES))
    assert found.stddev_ns == round(np.std(SAMPLES, ddof=1))
    assert record(samples_ns=(5,)).stddev_ts == 0.0


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "tg128"),
        ({"n_prompt": 512, "n_gen": 0}, "pp512"),
        ({"n_prompt": 17, "n_gen": 5}, "pp17+tg5"),
        ({"n_depth": 512}, "tg128 @ d512"),
        ({"n_parallel": 16}, "tg128 x16"),
        ({"n_parallel": 16, "n_depth": 32}, "tg128 x16 @ d32"),
    ],
)
def test_names_of_tests(changes: dict[str, Any], name: str) -> None:
    assert record(**changes).test == name


def test_the_roofline_says_what_limits_and_how_far_it_is() -> None:
    """1 GB and 1 GFLOP a token at 100 tokens/s: 100 GB/s and 100 GFLOP/s."""
    base = {"n_gen": 100, "samples_ns": (1_000_000_000,), "bytes_per_token": 1e9, "flops_per_token": 1e9}
    by_memory = record(**base, roofline_gb_s=200.0, roofline_gflops=1000.0)
    assert (by_memory.gb_s, by_memory.gflops) == (pytest.approx(100), pytest.approx(100))
    assert (by_memory.limit, by_memory.limit_share) == ("memory", pytest.approx(0.5))
    by_compute = record(**base, roofline_gb_s=1000.0, roofline_gflops=125.0)
    assert (by_compute.limit, by_compute.limit_share) == ("compute", pytest.approx(0.8))
    unknown = record(**base)
    assert (unknown.limit, unknown.limit_share) == ("", 0.0)


def test_results_survive_being_written(tmp_path: Path) -> None:
    results = [
        record(n_depth=64, deterministic=True, bytes_per_token=1.5, peak_memory=7, type_k="int8"),
        Summary("serve", "m\u2028", {"rate": 2}, {"mean_ttft_ms": 1.25}, {"ttft_ms": [1.0, 1.5]}, Machine(gpu="a gpu")),
    ]
    whole, lines = tmp_path / "whole.json", tmp_path / "lines.jsonl"
    whole.write_text(write_json(results))
    lines.write_text("".join(json.dumps(result.as_json(), ensure_ascii=False) + "\n" for result in results))
    assert read_results(whole) == results
    assert read_results(lines) == results
    one = tmp_path / "one.json"
    one.write_text(json.dumps(results[1].as_json()))
    assert read_results(one) == results[1:]


def test_json_has_llama_benchs_fields_and_the_machine() -> None:
    (found,) = json.loads(write_json([record()]))
    assert set(LLAMA_BENCH_FIELDS) | {"samples_ns", "samples_ts", "machine"} <= set(found)
    assert found["machine"]["cpu"] == "a cpu"
    assert found["samples_ts"] == list(record().samples_ts)


def test_a_file_of_llama_bench_is_read(tmp_path: Path) -> None:
    theirs = {
        "build_commit": "8cf427ff", "build_number": 5163, "cpu_info": "c", "gpu_info": "g", "backends": "CUDA",
        "model_filename": "q.gguf", "model_type": "qwen2 7B Q4_K - Medium", "model_size": 4677120000,
        "model_n_params": 7615616512, "n_batch": 2048, "n_ubatch": 512, "n_threads": 8, "cpu_mask": "0x0", "cpu_strict": False,
        "poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": 99, "split_mode": "layer", "flash_attn": False,
        "tensor_split": "0.00", "n_prompt": 512, "n_gen": 0, "n_depth": 0, "test_time": "2025-04-24T11:58:50Z",
        "avg_ns": 72135640, "stddev_ns": 1453752, "avg_ts": 7100.0, "stddev_ts": 140.0,
        "samples_ns": [74601900, 71632900], "samples_ts": [6863.1, 7147.55],
    }  # fmt: skip
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps([theirs]))
    (found,) = read_results(path)
    assert isinstance(found, Record)
    assert found.test == "pp512"
    assert found.samples_ts == pytest.approx(theirs["samples_ts"], rel=1e-5)
    assert found.machine == Machine()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no results"),
        ("[]", "no results"),
        ("[1]", "result 1: not an object"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ('{"a": 1}', "neither samples_ns nor metrics"),
        ('{"samples_ns": []}', "samples_ns is empty"),
        ('{"samples_ns": [1.5]}', "samples_ns is not a number"),
        ('{"samples_ns": ["x"]}', "samples_ns is not a number"),
        ('{"samples_ns": 3}', "samples_ns is not a list"),
        ('{"samples_ns": [1]}', "is missing"),
        ('{"samples_ns": [1], "model_type": 1}', "model_type is not text"),
        ('{"metrics": []}', "metrics is not an object"),
        ('{"metrics": {"a": NaN}}', "a is not a number"),
        ('{"metrics": {}, "series": {"a": [null]}}', "a is not a number"),
        ('{"metrics": {"a": 1' + 400 * "0" + "}}", "a is not a number, or a huge one"),
        ('{"metrics": {"a": -1e300}}', "a is not a number, or a huge one"),
        ('{"metrics": {"a": 5e-324}}', "a is not a number, or a huge one"),
        ('{"samples_ns": [1' + 400 * "0" + "]}", "samples_ns is not a number, or a huge one"),
        ('{"metrics": {}, "machine": 1}', "machine is not an object"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=says):
        read_results(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_results(tmp_path / "none.json")
    with pytest.raises((UsageError, AccessRefusedError)):
        read_results(tmp_path)


def test_the_machine_is_this_one() -> None:
    found = this_machine(["bench", "a model"])
    assert found.command == "nanovllm bench 'a model'"
    assert found.processors >= 1
    assert found.memory_bytes > 1 << 28
    assert found.python.startswith("3.")
    assert Machine(**dataclasses.asdict(found)) == found
    assert len(found.lines()) in (3, 4)


def test_a_processor_without_a_name_in_the_system_has_llvms_and_its_boards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ARM: a Raspberry Pi 5's."""
    board = tmp_path / "model"
    assert _cpu_by_number(board) == llvm.get_host_cpu_name()
    board.write_bytes(b"Raspberry Pi 5 Model B Rev 1.0\0")
    assert _cpu_by_number(board) == f"{llvm.get_host_cpu_name()} (Raspberry Pi 5 Model B Rev 1.0)"
    monkeypatch.setattr(system, "processor_name", lambda: "Apple M2")
    assert this_machine().cpu == "Apple M2"
    monkeypatch.setattr(system, "processor_name", lambda: "")
    assert this_machine().cpu.startswith(llvm.get_host_cpu_name())
