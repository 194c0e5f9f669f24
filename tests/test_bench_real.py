"""`nanovllm bench` with the bundled model, as a process of its own. What comes out is looked at, not how fast it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forked import run
from seeing import seeing_model
from test_cli_driver import SOURCE

TINY = "tiny"


def bench(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    import os

    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NANOVLLM", "XDG_CONFIG"))}
    environment |= {"PYTHONPATH": SOURCE, "XDG_CONFIG_HOME": str(home)}
    command = [sys.executable, "-m", "nanovllm_cli", "bench", *words]
    return run(command, capture_output=True, text=True, env=environment, cwd=home, timeout=280)


def test_the_table_of_a_real_model(tmp_path: Path) -> None:
    done = bench(
        tmp_path, TINY, "-p", "40", "-n", "6", "-pg", "20,3", "-d", "0,32", "-npl", "1,3", "-r", "2", "-oe", "jsonl", "-q",
        "--roofline", "off", "-b", "32", "-t", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")][2:]
    tests = ["pp40", "tg6", "tg6 x3", "pp20+tg3", "pp20+tg3 x3"]
    assert [row[-2].strip() for row in rows] == [*tests, *(f"{test} @ d32" for test in tests)]
    assert [row[-3].strip() for row in rows] == ["32"] * 10
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(records) == 10
    for record in records:
        assert len(record["samples_ns"]) == 2
        assert min(record["samples_ns"]) > 0
        tokens = (record["n_prompt"] + record["n_gen"]) * record["n_parallel"]
        assert record["samples_ts"] == pytest.approx([1e9 * tokens / sample for sample in record["samples_ns"]])
        assert record["n_threads"] == 1
        assert record["peak_memory"] > record["model_size"] > 1 << 20
        assert record["machine"]["command"].startswith("nanovllm bench tiny -p 40")


def test_several_models_stand_between_commas_as_other_values_do(tmp_path: Path) -> None:
    """llama-bench's `-m a.gguf,b.gguf`; a file whose name has a comma is one model."""
    from importlib import resources

    for name in ("one", "two,three"):
        (tmp_path / name).symlink_to(str(resources.files("nanovllm_cli").joinpath("assets", TINY)))
    words = ["-p", "8", "-n", "0", "-r", "1", "--no-warmup", "--roofline", "off", "-o", "jsonl", "-t", "1"]
    done = bench(tmp_path, "-m", "one,./one", "-m", "two,three", *words)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["model_filename"].rpartition("/")[2] for line in done.stdout.splitlines()]
    assert found == ["one", "one", "two,three"]
    for name in ("nosuch", 300 * "x"):  # longer than a file's may be
        refused = bench(tmp_path, "-m", f"{name},one", *words)
        assert refused.returncode == 3
        assert f"no model is called {name[:99]}" in refused.stderr


def test_models_that_see_read_made_up_prompts_without_images(tmp_path: Path) -> None:
    """Of so few tokens that the one that stands for images would be drawn by each."""
    seeing_model(tmp_path / "seeing")
    for words in (
        ["./seeing", "-p", "512", "-n", "2", "-d", "0,400", "-r", "1", "--roofline", "off"],
        ["throughput", "./seeing", "--num-prompts", "4", "--input-len", "400", "--output-len", "2"],
        ["throughput", "./seeing", "--num-prompts", "4", "--dataset", "prefix", "--input-len", "400", "--output-len", "2"],
        ["latency", "./seeing", "--input-len", "400", "--output-len", "2", "-r", "1", "--warmup", "0"],
    ):
        done = bench(tmp_path, *words)
        assert done.returncode == 0, (words, done.stderr)


def test_a_context_that_the_model_does_not_have(tmp_path: Path) -> None:
    done = bench(tmp_path, TINY, "-p", "512", "-n", "1", "-d", "0,90000")
    assert (done.returncode, done.stdout) == (5, "")
    hint = "hint: pp512 @ d90000 takes 90,513 tokens of context, the last one drawn included: choose a smaller -p or -d, or"
    assert hint in done.stderr
