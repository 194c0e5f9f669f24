"""Files of results side by side: what matches, ratios by hand, what is refused."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forked
from bench_results import record, run
from nanovllm_cli.bench.compare import compare, read_sources
from nanovllm_cli.bench.record import Record, Summary, write_json
from nanovllm_cli.errors import UsageError


def test_a_ratio_and_its_error_are_those_worked_out_by_hand() -> None:
    [row] = compare({"a": [record(20.0, 22.0)], "b": [record(40.0, 44.0, 42.0)]}).rows
    assert (row.test, row.metric, row.before, row.after) == ("tg128", "t/s", pytest.approx(21.0), pytest.approx(42.0))
    assert row.ratio == pytest.approx(2.0)
    # Deviations are sqrt(2) and 2, so standard errors 1 and 2 / sqrt(3).
    assert row.error == pytest.approx(2.0 * math.sqrt((1 / 21) ** 2 + (2 / math.sqrt(3) / 42) ** 2), rel=1e-6)
    assert not row.fails


def test_one_repetition_has_no_error() -> None:
    [row] = compare({"a": [record(20.0)], "b": [record(10.0, 12.0)]}, fail_under=0.9).rows
    assert row.error is None
    assert row.fails


def test_the_limit_itself_does_not_fail() -> None:
    sources = {"a": [record(20.0)], "b": [record(10.0)]}
    exact = compare(sources).rows[0].ratio
    assert compare(sources, fail_under=exact).failed == []
    assert len(compare(sources, fail_under=exact * 1.000001).failed) == 1


def test_tests_match_by_what_tells_them_apart_in_a_file() -> None:
    mine = [record(10.0 * threads, n_threads=threads, type_k="bf16") for threads in (1, 2, 4)]
    theirs = [record(11.0 * threads, n_threads=threads, type_k="f16") for threads in (2, 4, 8)]
    made = compare({"mine": mine, "theirs": theirs})
    assert [row.test for row in made.rows] == ["tg128, threads 2", "tg128, threads 4"]
    assert [row.ratio for row in made.rows] == pytest.approx([1.1, 1.1])
    assert made.alone == {"mine": ("tg128, threads 1",), "theirs": ("tg128, threads 8",)}
    assert made.differing == {"n_threads": ("1, 2, 4", "2, 4, 8"), "type_k": ("bf16", "f16")}


def test_what_only_differs_between_files_is_what_is_compared() -> None:
    made = compare({"cpu": [record(10.0)], "gpu": [record(50.0, backends="CUDA", model_type="qwen3 0.6B F16")]})
    assert made.rows[0].ratio == pytest.approx(5.0)
    assert set(made.differing) == {"backends", "model_type"}


def test_settings_that_say_the_same_are_named_once_and_folders_do_not_matter() -> None:
    def both(folder: str, **more: Any) -> list[Record]:
        made = []
        for i, name in enumerate(("Q8_0", "BF16"), 1):
            named = {"model_type": f"qwen3 0.6B {name}", "formats": name, "model_filename": f"{folder}/{name}.gguf"}
            made.append(record(10.0 + i, n_batch=512 * i, **named, **more))
        return made

    made = compare({"here": both("/home/me"), "there": both("models", backends="CUDA")})
    assert [row.test for row in made.rows] == ["tg128, qwen3 0.6B Q8_0", "tg128, qwen3 0.6B BF16"]
    assert set(made.differing) == {"backends"}
    assert made.alone == {}


def test_a_test_that_was_run_twice_has_all_repetitions() -> None:
    [row] = compare({"a": [record(10.0), record(20.0)], "b": [record(15.0)]}).rows
    assert row.before == pytest.approx(15.0)
    [row] = compare({"a": [run(slower=2.0), run(slower=4.0)], "b": [run(), run()]}, metrics=["mean_ttft_ms"]).rows
    assert row.ratio == pytest.approx(3.0)
    assert row.error == pytest.approx(1.0), "of 2 and 4 the standard error is 1"


def test_a_lower_latency_is_a_ratio_above_one() -> None:
    made = compare({"a": [run(slower=2.0)], "b": [run()]})
    ratios = {row.metric: row.ratio for row in made.rows}
    assert ratios == pytest.approx(
        dict.fromkeys(
            ("request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "median_ttft_ms", "mean_itl_ms"),
            2.0,
        )
    )
    errors = {row.metric: row.error is not None for row in made.rows}
    assert [name for name, has in errors.items() if has] == ["mean_ttft_ms", "mean_itl_ms"]


def test_runs_match_by_their_rates_and_only_wanted_metrics_count() -> None:
    sources = {"a": [run(1.0), run(4.0)], "b": [run(4.0, slower=4.0), run(1.0)]}
    made = compare(sources, fail_under=0.5, metrics=["mean_ttft_ms"])
    assert {row.test: (row.metric, row.fails) for row in made.rows} == {
        "serve, request rate 1": ("mean_ttft_ms", False),
        "serve, request rate 4": ("mean_ttft_ms", True),
    }


def test_a_rate_that_fell_to_nothing_fails() -> None:
    """As of a server that refuses everybody, or where no request is in time any more. A latency of 0 is one of no request."""
    before = {"request_throughput": 10.0, "request_goodput": 5.0, "mean_ttft_ms": 3.0}
    for after in ({"request_throughput": 10.0, "request_goodput": 0.0, "mean_ttft_ms": 0.0}, dict.fromkeys(before, 0.0)):
        sources = {name: [Summary("serve", "m", {}, metrics)] for name, metrics in (("a", before), ("b", after))}
        made = compare(sources, fail_under=0.95)
        assert {row.metric: row.ratio for row in made.rows} == {
            name: after[name] / value for name, value in before.items() if not name.endswith("_ms")
        }
        assert [row.metric for row in made.failed] == [name for name, value in after.items() if not value and "ms" not in name]


def test_others_words_bring_no_control_characters(tmp_path: Path) -> None:
    for name, kind in (("a", "serve"), ("b", "\x1b[31m\x07")):
        both = [Summary(each, "m", {}, {"request_throughput": 1.0}) for each in ("latency", kind)]
        (tmp_path / f"{name}.json").write_text(write_json(both))
    told = command("a.json", "b.json", cwd=tmp_path)
    assert told.returncode == 0
    assert "only in b:" in told.stdout
    assert all(c.isprintable() for c in told.stdout.replace("\n", ""))


def test_three_files_are_each_held_against_the_first() -> None:
    made = compare({"a": [record(10.0)], "b": [record(20.0)], "c": [record(5.0), record(1.0, gen=1)]}, fail_under=1.0)
    assert [(row.file, row.ratio) for row in made.rows] == [("b", pytest.approx(2.0)), ("c", pytest.approx(0.5))]
    assert [row.file for row in made.failed] == ["c"]
    assert made.alone == {"c": ("tg1",)}


def test_nothing_in_common_is_said_with_what_there_is() -> None:
    with pytest.raises(UsageError, match="no test in common") as refused:
        compare({"a": [record(10.0)], "b": [run()]})
    assert "t/s" in (refused.value.hint or "")
    with pytest.raises(UsageError, match="of mean_nonsense in common"):
        compare({"a": [run()], "b": [run()]}, metrics=["mean_nonsense"])
    for ratio in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError):
            compare({"a": [record(1.0)], "b": [record(1.0)]}, fail_under=ratio)


# As llama-bench of llama.cpp b4600 writes it (fields of its README), with what it has and we have not.
LLAMA_BENCH = {
    "build_commit": "8cf427ff", "build_number": 5163, "cpu_info": "AMD Ryzen 7", "gpu_info": "", "backends": "CPU",
    "model_filename": "models/qwen3.gguf", "model_type": "qwen3 0.6B Q8_0", "model_size": 639446688,
    "model_n_params": 596049920, "n_batch": 2048, "n_ubatch": 512, "n_threads": 4, "cpu_mask": "0x0", "cpu_strict": False,
    "poll": 50, "type_k": "f16", "type_v": "f16", "n_gpu_layers": 0, "split_mode": "layer", "main_gpu": 0, "no_kv_offload": False,
    "flash_attn": False, "tensor_split": "0.00", "use_mmap": True, "embeddings": False, "n_prompt": 0, "n_gen": 128,
    "n_depth": 0, "test_time": "2025-04-24T11:58:50Z", "avg_ns": 6_400_000_000, "stddev_ns": 0, "avg_ts": 20.0, "stddev_ts": 0.0,
    "samples_ns": [6_400_000_000, 6_400_000_000], "samples_ts": [20.0, 20.0],
}  # fmt: skip


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_llama_bench_files_are_read(tmp_path: Path, form: str) -> None:
    theirs, ours = tmp_path / f"llama.{form}", tmp_path / "ours.json"
    theirs.write_text(json.dumps([LLAMA_BENCH]) if form == "json" else json.dumps(LLAMA_BENCH) + "\n")
    ours.write_text(write_json([record(30.0)]))
    made = compare(read_sources([str(theirs), str(ours)]))
    assert (made.baseline, made.files) == ("llama", ("ours",))
    assert made.rows[0].ratio == pytest.approx(1.5)
    assert made.differing["n_batch"] == ("2048", "0")


def test_results_of_vllm_are_read(tmp_path: Path) -> None:
    """Fields as `vllm bench serve --save-result --save-detailed` writes them (vllm/benchmarks/serve.py)."""
    theirs = {
        "date": "20260101-120000", "endpoint_type": "openai", "backend": "openai", "label": None, "model_id": "qwen3",
        "tokenizer_id": "qwen3", "num_prompts": 2, "request_rate": 1.0, "burstiness": 1.0, "max_concurrency": None,
        "duration": 2.0, "completed": 2, "failed": 0, "total_input_tokens": 20, "total_output_tokens": 6,
        "request_throughput": 1.0, "request_goodput": None, "output_throughput": 50.0, "total_token_throughput": 13.0,
        "input_lens": [10, 10], "output_lens": [3, 3], "ttfts": [0.1, 0.3], "itls": [[0.05, 0.05], [0.1, 0.2]],
        "generated_texts": ["a", "b"], "errors": ["", ""],
        "mean_ttft_ms": 200.0, "median_ttft_ms": 200.0, "std_ttft_ms": 100.0, "p99_ttft_ms": 298.0,
    }  # fmt: skip
    (tmp_path / "vllm.json").write_text(json.dumps(theirs))
    (tmp_path / "ours.json").write_text(write_json([run()]))
    sources = read_sources([str(tmp_path / "vllm.json"), str(tmp_path / "ours.json")])
    [result] = sources["vllm"]
    assert isinstance(result, Summary)
    assert result.series == {"ttft_ms": [100.0, 300.0], "itl_ms": pytest.approx([50.0, 50.0, 100.0, 200.0])}
    ratios = {row.metric: row.ratio for row in compare(sources).rows}
    ours = run().metrics
    assert ratios["output_throughput"] == pytest.approx(ours["output_throughput"] / 50.0)
    assert ratios["mean_ttft_ms"] == pytest.approx(200.0 / ours["mean_ttft_ms"])
    for broken in ({"ttfts": 5}, {"itls": [1]}, {"ttfts": ["x"]}, {"model_id": 7}):
        (tmp_path / "bad.json").write_text(json.dumps(theirs | broken))
        with pytest.raises(UsageError):
            read_sources([str(tmp_path / "bad.json"), str(tmp_path / "ours.json")])


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "nanovllm_cli", "bench", "compare", *arguments]
    return forked.run(words, light=True, cwd=cwd, capture_output=True, text=True)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(write_json([record(20.0, 22.0), record(5.0, gen=1), run()]))
    (tmp_path / "after.json").write_text(write_json([record(21.0, 23.0, type_k="int8"), run()]))
    told = command("before.json", "after.json", "--fail-under", "0.9", "--report", "out.html", "-q", cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in told.stdout.splitlines()]
    assert rows[0] == ["test", "metric", "before", "after", "ratio"]
    assert rows[2] == ["tg128", "t/s", "21", "22", "1.048 ± 0.069"]
    assert "- only in before: tg1\n" in told.stdout
    assert ["type_k", "-", "int8"] in rows or ["type_k", "", "int8"] in rows
    assert "<svg" in (tmp_path / "out.html").read_text()

    failing = command("before.json", "after.json", "--fail-under", "1.1", "--metric", "t/s", cwd=tmp_path)
    assert failing.returncode == 7
    assert "1 of 1 ratios are under 1.1; the lowest is 1.048: t/s of tg128 in after" in failing.stderr
    assert "tg128" in failing.stdout

    as_json = command("before.json", "after.json", "-o", "json", "--metric", "mean_ttft_ms", cwd=tmp_path)
    [row] = json.loads(as_json.stdout)["rows"]
    assert (row["test"], row["metric"], row["ratio"]) == ("serve", "mean_ttft_ms", 1.0)


def test_the_command_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(write_json([record(20.0)]))
    (tmp_path / "bad.json").write_text('{"samples_ns": []}')
    whole = json.loads(write_json([record(20.0)]))
    for name, sample in (("zero.json", 0), ("negative.json", -5)):
        (tmp_path / name).write_text(json.dumps([{**whole[0], "samples_ns": [10**9, sample]}]))
        told = command("a.json", name, cwd=tmp_path)
        assert (told.returncode, f"samples_ns has {sample}: times are above 0" in told.stderr) == (2, True)
    for arguments in (["a.json"], ["a.json", "bad.json"], ["a.json", "none.json"], ["a.json", "a.json"], [],
                      ["a.json", "bad.json", "--fail-under", "x"]):  # fmt: skip
        told = command(*arguments, cwd=tmp_path)
        assert told.returncode == 2, arguments
        assert told.stdout == ""
        assert told.stderr.startswith("error: ")


def test_a_side_may_come_from_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "after.json").write_text(write_json([record(44.0)]))
    before = write_json([record(22.0)])
    words = [sys.executable, "-m", "nanovllm_cli", "bench", "compare"]

    def piped(*files: str, text: str = before) -> subprocess.CompletedProcess[str]:
        return forked.run([*words, *files], light=True, cwd=tmp_path, capture_output=True, text=True, input=text)

    told = piped("-", "after.json")
    assert (told.returncode, told.stderr) == (0, "")
    assert [cell.strip() for cell in told.stdout.splitlines()[0].strip("|").split("|")][2:] == ["stdin", "after", "ratio"]
    assert "2.000" in told.stdout
    assert "0.500" in piped("after.json", "-").stdout
    assert "the same file twice" in piped("-", "-").stderr
    for wrong, says in (("", "no results in it"), ("{", "not JSON"), ("[]", "no results in it")):
        told = piped("-", "after.json", text=wrong)
        assert (told.returncode, told.stdout) == (2, "")
        assert f"standard input: {says}" in told.stderr
    closed = subprocess.run(
        ["bash", "-c", '"$@" <&-', "bash", *words, "-", "after.json"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(forked.SOURCE)},
    )  # fmt: skip
    assert (closed.returncode, closed.stderr) == (2, "error: standard input is closed\n")


def test_names_of_sources(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "x.json" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(write_json([record(1.0)]))
    assert list(read_sources([str(path) for path in paths])) == [str(path) for path in paths]
    for wrong in ([str(paths[0])], [str(paths[0])] * 2, [str(paths[0]), str(tmp_path / "none.json")]):
        with pytest.raises(UsageError):
            read_sources(wrong)
